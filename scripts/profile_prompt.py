"""The command `jaxspec profile-prompt`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["profile-prompt", *sys.argv[1:]]))
