"""Options of benchmarks of a model's shape, with random weights."""

import argparse
from collections.abc import Sequence

from jaxspec.commands.shared.engine_options import (
    KERNELS_HELP,
    add_drafter_quantization_option,
    add_kv_dtype,
    add_sequence_parallel_option,
    add_target_quantization_options,
    add_tensor_parallel_option,
)
from jaxspec.commands.shared.option_types import number, numbers
from jaxspec.commands.shared.shell import given_option
from jaxspec.config.quantization import EXPERT_FORMATS
from jaxspec.evaluation.benchmarks.draft_heads import HEAD_HELP, HEAD_KINDS
from jaxspec.evaluation.benchmarks.modes import EIGHT_BITS, Mode, check_trees
from jaxspec.evaluation.benchmarks.shapes import SHAPES, model_shape


def add_shape_options(parser: argparse.ArgumentParser, *, contexts: bool = False) -> None:
    """The model's shape, its weights and cache, its draft head, the devices that share it, and the
    context. ``contexts``: there may be several, separated by commas."""
    add = parser.add_argument
    add_target_options(parser)
    if contexts:
        add("--context", type=numbers, default=(512,), help="prompt tokens of each sequence, "
            "several separated by commas")  # fmt: skip
    else:
        add("--context", type=number, default=512, help="prompt tokens of each sequence")
    add_drafter_quantization_option(parser)
    add("--draft-head", choices=HEAD_KINDS, default="auto", help=HEAD_HELP)


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """The model's shape, its weights and cache, and the devices that share it."""
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="llama-3.1-8b", help="shape of the model")
    add("--layers", type=number, help="layers of the target; fewer compile faster and need less "
        "memory (default: the shape's)")  # fmt: skip
    add("--page-size", type=number, default=64, help="tokens of a page of the KV cache")
    add_kv_dtype(parser)
    add_tensor_parallel_option(parser)
    add_sequence_parallel_option(parser)
    add_target_quantization_options(parser)
    add("--expert-format", choices=EXPERT_FORMATS, help="experts, also of the MTP layer, as they "
        "are published: FP8 in blocks of 128, MXFP8, MXFP4, NVFP4, INT4 in groups of 32, or in "
        "groups of 128 with zeros")  # fmt: skip
    add("--kernels", default="auto", help=KERNELS_HELP)


def check_head_options(
    parser: argparse.ArgumentParser, args: argparse.Namespace, modes: Sequence[Mode]
) -> None:
    """Raise ValueError for an option of the head that would do nothing in ``modes``, for a head
    that is to be quantized twice, and for trees that it does not draft."""
    option = given_option(parser, args, ("draft_head", "drafter_quantization"))
    if option is not None and not any(mode.speculation for mode in modes):
        raise ValueError(
            f"{option} would do nothing, as plain decoding has no draft head: leave it out, or "
            "give a mode that drafts, such as chain:5"
        )
    if args.drafter_quantization and any(mode.in_eight_bits for mode in modes):
        raise ValueError(
            f"--drafter-quantization and modes with {EIGHT_BITS} exclude each other: take one"
        )
    if any(mode.speculation for mode in modes):
        check_trees(modes, args.draft_head, model_shape(args.shape, args.layers))
