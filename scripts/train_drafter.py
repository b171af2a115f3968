"""The command `jaxspec train-drafter`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train-drafter", *sys.argv[1:]]))
