"""The command `jaxspec check-exactness`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["check-exactness", *sys.argv[1:]]))
