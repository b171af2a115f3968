"""The command `jaxspec bench adaptive`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "adaptive", *sys.argv[1:]]))
