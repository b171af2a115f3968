"""The command `jaxspec bench swap`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "swap", *sys.argv[1:]]))
