"""Checks options of the draft head in benchmarks with random weights."""

import argparse
from collections.abc import Sequence

from jaxspec.commands.shared.shell import given_option
from jaxspec.evaluation.benchmarks.modes import EIGHT_BITS, Mode


def check_head_options(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    modes: Sequence[Mode],
    names: Sequence[str] = ("draft_head", "drafter_quantization"),
) -> None:
    """Raise ValueError for an option of the head, by these names of their values, that would do
    nothing in ``modes``, and for a head that is to be quantized twice."""
    option = given_option(parser, args, names)
    if option is not None and not any(mode.speculation for mode in modes):
        raise ValueError(
            f"{option} would do nothing, as plain decoding has no draft head: leave it out, or "
            "give a mode that drafts, such as chain:5"
        )
    if args.drafter_quantization and any(mode.in_eight_bits for mode in modes):
        raise ValueError(
            f"--drafter-quantization and modes with {EIGHT_BITS} exclude each other: take one"
        )
