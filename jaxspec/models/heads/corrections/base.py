"""What a correction is: it says more of a draft token when the tokens before it are known.

A block head computes the logits of all depths at once, so those of a depth cannot depend on the
tokens drafted before it. A Correction changes them by these tokens, path by path and depth by
depth. A PairCorrection chooses among a few candidates of each depth, by the candidate before alone:
so it scores all pairs of them at once.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array

from jaxspec.models.decoder import Decoder
from jaxspec.models.tensors import TensorMap
from jaxspec.parallel import Layout
from jaxspec.parallel.collectives import log_sum_exp, take, top_log_probs, top_logits
from pallas_kernels.selection import Kernels
from pallas_kernels.top_k.reference import best_with


class Block(NamedTuple):
    """What a head has computed of one block of T drafted positions.

    Attributes:
      outputs: [B, T, H] normed outputs, which the LM head reads.
      logits: float32 [B, T, V / shards] without a correction.
      context: [B, H] what the layers read of the context's last token; None: see
        BlockHead.reads_context.
      root_output: [B, H] the output at the root, which drafts nothing there, and ``before``: int32
        [B] the token before the root; None: see BlockHead.reads_root.
    """

    outputs: Array
    logits: Array
    context: Array | None = None
    root_output: Array | None = None
    before: Array | None = None


class Correction(Protocol):
    """A frozen pytree of weights that corrects the logits of one depth after the other.

    A *carry* is what it keeps of each path: a pytree of arrays [B, k, ...] for k paths.
    """

    def start(self, block: Block) -> Any:
        """The carry of the paths that have no drafted token yet, one for each row: [B, 1, ...]."""
        ...

    def step(
        self, target: Decoder, block: Block, tokens: Array, depth: int | Array, carry: Any
    ) -> tuple[Array, Any]:
        """This shard's logits after k paths, float32 [B, k, V / shards], and their carry.

        ``tokens`` int32 [B, k] are the last ones of the paths, which have ``depth`` drafted tokens
        each (0: the token is the root). ``carry`` is that of the paths without these tokens.
        """
        ...

    def bytes_read(self, steps: int) -> int:
        """Bytes of its weights that so many draft steps read on a device."""
        ...

    def mapped(self, tensor_map: TensorMap) -> Any:
        """The same, with every array replaced by ``tensor_map``'s result."""
        ...


class Lattice(NamedTuple):
    """K candidates of each of T depths of a block, and what a head has computed of them.

    Attributes:
      outputs: [B, T, H] normed outputs, which the LM head reads.
      tokens: int32 [B, T, K], different ones at each depth, the likeliest first.
      log_probs: float32 [B, T, K] without a correction; with a constant of each depth added for a
        correction that does not read it (see PairCorrection.reads_sums).
      context: see Block.
    """

    outputs: Array
    tokens: Array
    log_probs: Array
    context: Array | None = None


class PairScores(NamedTuple):
    """Scores of K candidates of each of T depths. Behind a token, each candidate is as likely as
    the softmax of its scores there says; other tokens are not drafted.

    Attributes:
      tokens: int32 [B, T, K], different ones at each depth.
      first: float32 [B, K] of the first depth, behind the root.
      pairs: float32 [B, T - 1, K, K] of the later depths, behind each candidate of the one before.
    """

    tokens: Array
    first: Array
    pairs: Array


@runtime_checkable
class PairCorrection(Protocol):
    """A frozen pytree of weights that scores candidates by the candidate before."""

    @property
    def candidates(self) -> int:
        """How many tokens of each depth it chooses among."""
        ...

    @property
    def reads_sums(self) -> bool:
        """Whether its scores depend on the sums of probabilities: those of some do not change with
        a constant of each depth."""
        ...

    def scores(self, target: Decoder, lattice: Lattice, roots: Array) -> PairScores:
        """Scores of a lattice of ``candidates`` tokens behind the tokens ``roots``, int32 [B]."""
        ...

    def bytes_read(self, steps: int) -> int:
        """Bytes of its weights that so many draft steps read on a device."""
        ...

    def mapped(self, tensor_map: TensorMap) -> Any:
        """The same, with every array replaced by ``tensor_map``'s result."""
        ...


class CorrectionConfig(Protocol):
    """A frozen description of a correction of either kind."""

    def shape(self, hidden: int, vocab: int, dtype: jnp.dtype) -> Any:
        """The correction of ShapeDtypeStructs, for a head of these sizes."""
        ...


def lattice_of(
    block: Block,
    correction: PairCorrection,
    layout: Layout,
    kernels: Kernels,
    ranked: Array | None = None,
) -> Lattice:
    """The lattice of a correction's candidates, the same on all devices.

    Args:
      layout: of the logits.
      ranked: [B, T, V / shards] what candidates are the largest of; None: the logits.
    """
    count, logits = correction.candidates, block.logits
    if ranked is None:
        largest = top_log_probs if correction.reads_sums else top_logits
        log_probs, tokens = largest(logits, count, layout, kernels)
        return Lattice(block.outputs, tokens, log_probs, block.context)
    _, tokens = top_logits(ranked, count, layout, kernels)
    log_probs = take(logits[:, :, None], tokens, layout)
    log_probs, tokens = best_with(log_probs, count, (tokens,))  # their ranks are those of training
    if correction.reads_sums:
        log_probs = log_probs - log_sum_exp(logits, layout)[..., None]
    return Lattice(block.outputs, tokens, log_probs, block.context)
