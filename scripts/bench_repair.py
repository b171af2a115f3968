"""The command `jaxspec bench repair`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "repair", *sys.argv[1:]]))
