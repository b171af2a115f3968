"""Makes the copies of an LM head that draft heads read (see models/heads/lm_head.py)."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import BlockHead, DraftHead
from jaxspec.models.heads.lm_head import LMHeadCopy
from jaxspec.models.linear import AnyLinear, Linear
from jaxspec.models.nodes import map_nodes, nodes_of
from jaxspec.models.quantized.scaled import only_eight_bits
from jaxspec.parallel import named_shardings


def with_lm_head_copy[T](
    weights: T,
    target: Decoder,
    rounding: Callable[[Linear], AnyLinear],
    mesh: Mesh | None = None,
) -> T:
    """Weights in which every draft head that reads the target's LM head reads one copy of it, made
    by ``rounding``. A quantized LM head is read as it is.

    Args:
      weights, target: arrays, or ShapeDtypeStructs.
      mesh: the target's, if these are arrays: the copy is split over it as the target is.
    """
    lm_head = _lm_head(target)
    if lm_head is None or not any(map(_reads_target, nodes_of(weights, BlockHead, DraftHead))):
        return weights
    linear = rounding(lm_head)
    if target.lm_head is None:
        linear = only_eight_bits(linear)  # keeps no transposed table beside the table
    copy = LMHeadCopy(linear=linear, layout=target.layout)
    if mesh is not None:
        copy = jax.device_put(copy, named_shardings(mesh, copy))

    def replaced(node: BlockHead | DraftHead) -> BlockHead | DraftHead:
        return node.replace(lm_head_copy=copy) if _reads_target(node) else node

    return map_nodes(weights, replaced, BlockHead, DraftHead)


def _lm_head(target: Decoder) -> Linear | None:
    """None: it is quantized."""
    if target.lm_head is not None:
        return target.lm_head if isinstance(target.lm_head, Linear) else None
    is_real = isinstance(target.embed, jax.Array)
    table = target.embed.T if is_real else jax.eval_shape(lambda table: table.T, target.embed)
    return Linear(weight=table, axes=("whole_hidden", "vocab"))


def _reads_target(node: BlockHead | DraftHead) -> bool:
    return node.lm_head is None
