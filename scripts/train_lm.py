"""The command `jaxspec train-lm`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train-lm", *sys.argv[1:]]))
