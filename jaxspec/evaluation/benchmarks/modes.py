"""The modes to time (plain decoding, chains and trees) and their command-line notation."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.config.checks import Problems
from jaxspec.config.model import ModelConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.acceptance import Synthetic
from jaxspec.decoding.all_reduce_buffers import with_exchanges
from jaxspec.decoding.drafters import (
    BlockDrafter,
    Drafter,
    EagleDrafter,
    NoDrafter,
    ParallelEagleDrafter,
)
from jaxspec.decoding.functional import EngineParams
from jaxspec.decoding.trees.grow import check_top_k
from jaxspec.evaluation.benchmarks.draft_heads import (
    HeadKind,
    head_shapes_for,
    rounded_but_correction,
)
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import BlockHead, DraftHead
from jaxspec.models.heads.corrections import PairCorrection
from jaxspec.models.quantized.lm_head_copy import with_lm_head_copy
from jaxspec.models.quantized.scaled import in_eight_bits
from pallas_kernels.o_gate_up_down.meeting import make_meeting, meeting_shape
from pallas_kernels.reduce_add_rms_norm.exchange import exchange_shape, make_exchange
from pallas_kernels.selection import Kernels

CHAIN_LENGTHS = ((3, 3.0), (5, 3.5))  # drafted tokens -> default acceptance length
TREE_LENGTH = 4.0
EIGHT_BITS = "+int8"


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way of decoding.

    Attributes:
      speculation: the shape of the draft trees and their synthetic acceptance; None: plain
        decoding.
      acceptance_length: mean number of tokens that a round commits.
      in_eight_bits: whether the head's matrices are 8-bit integers.
    """

    name: str
    speculation: SpeculationConfig | None = None
    acceptance_length: float = 1.0
    in_eight_bits: bool = False

    @property
    def most_tokens(self) -> int:
        """Most tokens that a round can commit."""
        if self.speculation is None:
            return 1
        return min(math.floor(self.acceptance_length) + 1, self.speculation.max_depth + 1)

    def rounds(self, num_tokens: int) -> int:
        """Number of rounds that commit about ``num_tokens`` tokens of a sequence."""
        return max(1, round(num_tokens / self.acceptance_length))


def parse_mode(text: str) -> Mode:
    """A tree as SpeculationConfig.parse reads it; all but ``plain`` may end in ``@LENGTH``, and in
    ``+int8`` for a head of 8-bit integers.

    Raises ValueError for anything else.
    """
    shape, at, length = text.removesuffix(EIGHT_BITS).partition("@")
    try:
        tree = SpeculationConfig.parse(shape)
        if tree.is_plain:
            if at or text.endswith(EIGHT_BITS):
                raise ValueError("plain decoding has no acceptance length and no head")
            return Mode("plain")
        mode = _mode(shape, tree, float(length) if at else _default_length(tree))
        if not text.endswith(EIGHT_BITS):
            return mode
        return dataclasses.replace(mode, name=mode.name + EIGHT_BITS, in_eight_bits=True)
    except ValueError as error:
        raise ValueError(f"mode {text!r}: {error}") from None


def parse_modes(text: str) -> list[Mode]:
    """The modes of a list with commas: see parse_mode. Raises ValueError for those that are none,
    all of them in one."""
    problems, modes = Problems(), []
    for part in text.split(","):
        with problems.caught():
            modes.append(parse_mode(part))
    problems.raise_all()
    return modes


def _default_length(tree: SpeculationConfig) -> float:
    if not tree.is_chain:
        return TREE_LENGTH
    length = dict(CHAIN_LENGTHS).get(tree.max_depth)
    if length is None:
        raise ValueError("say which acceptance length, as in chain:4@3.2")
    return length


def _mode(shape: str, tree: SpeculationConfig, length: float) -> Mode:
    if not 1 <= length <= tree.max_depth + 1:
        raise ValueError(
            f"the acceptance length must lie in 1 .. {tree.max_depth + 1}, not {length:g}"
        )
    speculation = dataclasses.replace(tree, acceptance=Synthetic(length))
    return Mode(f"{shape}@{length:g}", speculation, length)


def check_trees(modes: Sequence[Mode], kind: HeadKind, target: ModelConfig) -> None:
    """Raise ValueError for trees that a target's heads of a kind do not draft, all of them in
    one."""
    problems, head = Problems(), head_shapes_for(target, jnp.dtype("bfloat16"), None, kind=kind)
    for mode in modes:
        try:
            if mode.speculation is not None:
                _check_tree(mode.speculation, head, target)
        except ValueError as error:
            problems.add(f"mode {mode.name!r}: {error}")
    problems.raise_all()


def _check_tree(tree: SpeculationConfig, head: DraftHead | BlockHead, target: ModelConfig) -> None:
    if isinstance(head, BlockHead):
        head.check_depth(tree.max_depth)
        if isinstance(head.correction, PairCorrection):
            check_top_k(tree, head.correction.candidates, "candidates")
    check_top_k(tree, target.vocab_size if head.token_ids is None else head.token_ids.size)


def make_params(
    mode: Mode,
    target: Decoder,
    head: DraftHead | BlockHead | None,
    mesh: Mesh | None,
    kernels: Kernels,
) -> EngineParams:
    """The engine's parameters for a mode.

    Raises ValueError for a mode with drafting but no head, and for a tree deeper than a block.
    """
    drafter: Drafter = NoDrafter()
    speculation = SpeculationConfig.chain(0)
    if mode.speculation is not None:
        if head is None:
            raise ValueError(f"mode {mode.name} needs a draft head")
        head = _in_eight_bits(head, target) if mode.in_eight_bits else head
        speculation = mode.speculation
        if isinstance(head, BlockHead):
            head.check_depth(speculation.max_depth)
            drafter = BlockDrafter(head=head)
        else:
            kind = EagleDrafter if head.mask is None else ParallelEagleDrafter
            drafter = kind(head=head)
    params = EngineParams(
        target=target, drafter=drafter, speculation=speculation, kernels=kernels, mesh=mesh
    )
    real = isinstance(target.embed, jax.Array)  # or a ShapeDtypeStruct
    how = (make_exchange, make_meeting) if real else (exchange_shape, meeting_shape)
    return with_exchanges(params, *how)


def _in_eight_bits[T: DraftHead | BlockHead](head: T, target: Decoder) -> T:
    """With a copy of the target's LM head, if it reads that. Also of ShapeDtypeStructs."""
    is_real = isinstance(target.embed, jax.Array)

    def rounded(weights: Any) -> Any:
        return in_eight_bits(weights) if is_real else jax.eval_shape(in_eight_bits, weights)

    return with_lm_head_copy(rounded_but_correction(head, rounded), target, rounded)
