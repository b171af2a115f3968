"""The options of the commands that read text files."""

import argparse

from jaxspec.training import data


def add_suffixes_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--suffixes",
        nargs="+",
        default=list(data.DEFAULT_SUFFIXES),
        help="suffixes of the files to read in folders",
    )
