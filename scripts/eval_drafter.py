"""The command `jaxspec eval-drafter`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["eval-drafter", *sys.argv[1:]]))
