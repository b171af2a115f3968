"""The command `jaxspec eval`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
