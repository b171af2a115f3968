"""The command `jaxspec bench drafters`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "drafters", *sys.argv[1:]]))
