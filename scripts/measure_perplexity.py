"""The command `jaxspec measure-perplexity`."""

import sys

from jaxspec.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["measure-perplexity", *sys.argv[1:]]))
