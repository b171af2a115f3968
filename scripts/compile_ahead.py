"""The command `jaxspec compile-ahead`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["compile-ahead", *sys.argv[1:]]))
