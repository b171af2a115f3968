"""The command `jaxspec adapt`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["adapt", *sys.argv[1:]]))
