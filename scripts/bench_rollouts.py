"""The command `jaxspec bench rollouts`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "rollouts", *sys.argv[1:]]))
