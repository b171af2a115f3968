"""The command `jaxspec check-deterministic`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["check-deterministic", *sys.argv[1:]]))
