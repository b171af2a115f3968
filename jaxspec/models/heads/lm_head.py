"""A copy of the target's LM head in fewer bits, for draft heads that have none of their own.

Block heads, MTP layers and EAGLE-1 heads read the target's LM head: of a large vocabulary, as many
bytes as several layers. Drafts do not decide the text, so they may read a rounded copy. The target
itself goes on reading its own. quantized/lm_head_copy.py makes copies.
"""

from jax import Array

from jaxspec.models import decoder
from jaxspec.models.decoder import Decoder
from jaxspec.models.linear import AnyLinear
from jaxspec.parallel import Layout
from jaxspec.parallel.pytree import Pytree, pytree, static
from pallas_kernels.selection import Kernels


@pytree
class LMHeadCopy(Pytree):
    """The copy, split over devices as the target is, however its head is split."""

    linear: AnyLinear  # [H, V]
    layout: Layout = static()


def target_logits(
    target: Decoder, copy: LMHeadCopy | None, normed: Array, kernels: Kernels
) -> Array:
    """This shard's float32 logits [..., H] -> [..., V / shards]: by the copy, if there is one."""
    lm_head = None if copy is None else copy.linear
    return decoder.logits(target, normed, kernels, lm_head=lm_head)
