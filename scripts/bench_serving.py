"""The command `jaxspec bench serving`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "serving", *sys.argv[1:]]))
