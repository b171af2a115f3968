"""The command `jaxspec profile`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["profile", *sys.argv[1:]]))
