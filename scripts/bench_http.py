"""The command `jaxspec bench http`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "http", *sys.argv[1:]]))
