"""The command `jaxspec bench exchange`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "exchange", *sys.argv[1:]]))
