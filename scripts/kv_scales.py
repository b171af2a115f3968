"""The command `jaxspec kv-scales`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["kv-scales", *sys.argv[1:]]))
