"""The command `jaxspec compare-runs`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["compare-runs", *sys.argv[1:]]))
