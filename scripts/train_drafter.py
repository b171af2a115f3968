"""The command `jaxspec train-head`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train-head", *sys.argv[1:]]))
