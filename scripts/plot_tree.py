"""The command `jaxspec plot-tree`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["plot-tree", *sys.argv[1:]]))
