"""The command `jaxspec generate`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
