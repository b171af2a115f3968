"""The command `jaxspec quantize`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["quantize", *sys.argv[1:]]))
