"""The command `jaxspec bench prompts`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "prompts", *sys.argv[1:]]))
