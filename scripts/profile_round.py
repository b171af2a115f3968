"""The command `jaxspec profile-round`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["profile-round", *sys.argv[1:]]))
