"""Makes the copies of an LM head that draft heads read (see models/heads/lm_head.py)."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import BlockHead, DraftHead
from jaxspec.models.heads.lm_head import LMHeadCopy
from jaxspec.models.linear import AnyLinear, Linear
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
    found = jax.tree.leaves(weights, is_leaf=_is_head)
    if lm_head is None or not any(map(_reads_target, found)):
        return weights
    linear = rounding(lm_head)
    if target.lm_head is None:
        linear = only_eight_bits(linear)  # keeps no transposed table beside the table
    copy = LMHeadCopy(linear=linear, layout=target.layout)
    if mesh is not None:
        copy = jax.device_put(copy, named_shardings(mesh, copy))

    def replaced(node: Any) -> Any:
        return node.replace(lm_head_copy=copy) if _reads_target(node) else node

    return jax.tree.map(replaced, weights, is_leaf=_is_head)


def _lm_head(target: Decoder) -> Linear | None:
    """None: it is quantized."""
    if target.lm_head is not None:
        return target.lm_head if isinstance(target.lm_head, Linear) else None
    is_real = isinstance(target.embed, jax.Array)
    table = target.embed.T if is_real else jax.eval_shape(lambda table: table.T, target.embed)
    return Linear(weight=table, axes=("whole_hidden", "vocab"))


def _is_head(node: Any) -> bool:
    return isinstance(node, BlockHead | DraftHead)


def _reads_target(node: Any) -> bool:
    return isinstance(node, BlockHead) or (isinstance(node, DraftHead) and node.lm_head is None)
