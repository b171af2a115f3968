"""The command `jaxspec bench pipeline`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "pipeline", *sys.argv[1:]]))
