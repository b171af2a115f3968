"""The command `jaxspec bench together`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "together", *sys.argv[1:]]))
