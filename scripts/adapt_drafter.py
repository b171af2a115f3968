"""The command `jaxspec adapt-drafter`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["adapt-drafter", *sys.argv[1:]]))
