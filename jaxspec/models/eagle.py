"""EAGLE draft heads: one transformer layer that predicts the target's next hidden state.

EAGLE-3 (arXiv 2503.01840) reads three of the target's hidden states fused by ``fc`` and has its
own LM head over a reduced vocabulary; EAGLE-1/2 (arXiv 2401.15077, 2406.16858) read the last
hidden state and share the target's LM head. The entry for token ``i`` pairs its embedding with the
hidden state of token ``i - 1`` and rotates as position ``i - 1``.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config import ModelConfig
from jaxspec.models import decoder
from jaxspec.models.decoder import FINAL_NORM, Attend, Decoder, Layer, layer_shapes
from jaxspec.models.layers import add_rms_norm, linear, rms_norm, rope_angles
from jaxspec.pytree import array, pytree, static
from jaxspec.sharding import DATA_PARALLEL
from pallas_kernels.products import einsum_f32

EagleMethod = Literal["eagle3", "eagle1"]


@pytree
class EagleHead:
    """Weights of an EAGLE-3 or EAGLE-1/2 head; C is the width of the captured target features."""

    fc: Array = array("features", "hidden")  # eagle3 [C, H]; eagle1 [2 * H, H], embedding first
    fc_bias: Array | None = array("hidden")
    layers: tuple[Layer, ...]
    hidden_norm: Array | None = array("hidden")  # eagle3 only
    norm: Array | None = array("hidden")  # eagle3 only: before lm_head
    lm_head: Array | None = array("hidden", "vocab")  # [H, W]; None: the target's
    token_ids: Array | None = array("draft_ids")  # [W] target id of each draft id; None: the same
    embed: Array | None = array("embed_rows", "hidden")  # None: the target's
    config: ModelConfig = static()
    method: EagleMethod = static()
    capture: tuple[int, ...] = static()
    axis: str | None = static(default=None)

    @property
    def partition_rules(self) -> dict[str, str] | None:
        """Replicated over the model axis unless the head itself is sharded."""
        return DATA_PARALLEL if self.axis is None else None


def default_capture(method: EagleMethod, target_layers: int) -> tuple[int, ...]:
    """The target's hidden states that a head reads unless its config names others.

    EAGLE-3's are in the order of the layers; small test models have the nearest layers there are.
    """
    if method == "eagle1":
        return (FINAL_NORM,)
    early, middle, late = min(2, target_layers), target_layers // 2, max(target_layers - 3, 0)
    return tuple(sorted((early, middle, late)))


def check_capture(ids: Sequence[int], target_layers: int) -> tuple[int, ...]:
    """The layers in order. Raises ValueError unless they are distinct layers of the target."""
    if not ids or len(set(ids)) != len(ids) or not set(ids) <= set(range(target_layers + 1)):
        raise ValueError(
            f"a head cannot read layers {list(ids)}: they must be distinct, of 0 to {target_layers}"
        )
    return tuple(sorted(ids))


def head_shapes(
    config: ModelConfig,
    method: EagleMethod,
    target: ModelConfig,
    dtype: jnp.dtype,
    *,
    draft_vocab_size: int | None = None,
    capture: tuple[int, ...] | None = None,
    fc_bias: bool = False,
    own_embed: bool = False,
    tensor_parallel: int = 1,
) -> EagleHead:
    """A head of ShapeDtypeStructs. ``draft_vocab_size`` None: the target's whole vocabulary."""
    hidden, eagle3 = config.hidden_size, method == "eagle3"
    capture = capture or default_capture(method, target.num_layers)
    kv_heads = decoder.parallel_kv_heads(config, tensor_parallel)
    width = 2 * hidden if eagle3 else hidden

    def shape(*dims: int, when: bool = True, kind: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(dims, kind) if when else None

    layers = tuple(
        layer_shapes(
            config, kv_heads, dtype, input_size=width if i == 0 else hidden,
            input_norm=eagle3 or i > 0,
        )
        for i in range(config.num_layers)
    )  # fmt: skip
    reduced = draft_vocab_size is not None
    return EagleHead(
        fc=shape(target.hidden_size * len(capture) if eagle3 else 2 * hidden, hidden),
        fc_bias=shape(hidden, when=fc_bias),
        layers=layers,
        hidden_norm=shape(hidden, when=eagle3),
        norm=shape(hidden, when=eagle3),
        lm_head=shape(hidden, draft_vocab_size or target.vocab_size, when=eagle3),
        token_ids=shape(draft_vocab_size or 0, when=reduced, kind=jnp.int32),
        embed=shape(target.vocab_size, hidden, when=own_embed),
        config=config,
        method=method,
        capture=capture,
    )


def run(
    head: EagleHead,
    target: Decoder,
    tokens: Array,  # [B, T]
    hidden: Array,  # [B, T, C] captured features, or [B, T, H] the head's own outputs
    positions: Array,  # [B, T] rotary positions
    caches: tuple[Any, ...],
    attend: Attend,
) -> tuple[Array, Array, tuple[Any, ...]]:
    """The head's layers; returns (outputs [B, T, H], the same as ``logits`` reads them, caches).

    EAGLE-3 fuses captured features first; its own outputs are recognized by their width H and go
    in as they are.
    """
    config, eps = head.config, head.config.rms_norm_eps
    embedded = decoder.embed(target, tokens) if head.embed is None else head.embed[tokens]
    embedded = embedded.astype(head.fc.dtype)
    rope = rope_angles(config, positions)
    if head.method == "eagle3":
        if hidden.shape[-1] != config.hidden_size:
            hidden = _fuse(head, hidden)
        first = head.layers[0]
        block_input = jnp.concatenate(
            [rms_norm(embedded, first.input_norm, eps), rms_norm(hidden, head.hidden_norm, eps)],
            axis=-1,
        )
        x = hidden
    else:
        x = _fuse(head, jnp.concatenate([embedded, hidden], axis=-1))
        block_input = x
    # Each block's input is made with the addition before it, and so is the LM head's.
    following_norms = [layer.input_norm for layer in head.layers[1:]] + [head.norm]
    new_caches = []
    for index, (layer, cache) in enumerate(zip(head.layers, caches, strict=True)):
        window = config.sliding_windows[index]
        y, cache = decoder.attention_block(
            layer, config, block_input, rope, cache, attend, window, head.axis
        )
        x, normed = add_rms_norm(x, y, layer.post_norm, eps)
        y = decoder.mlp_block(layer, normed, head.axis)
        x, block_input = add_rms_norm(x, y, following_norms[index], eps)
        new_caches.append(cache)
    return x, block_input, tuple(new_caches)


@jax.named_scope("fc")
def _fuse(head: EagleHead, features: Array) -> Array:
    return linear(features, head.fc, head.fc_bias)


def vocab_axis(head: EagleHead, target: Decoder) -> str | None:
    """Mesh axis that the last dimension of ``logits`` is sharded over."""
    return target.axis if head.lm_head is None else head.axis


def logits(head: EagleHead, target: Decoder, normed: Array) -> Array:
    """Float32 draft logits, this shard's part: [..., H] -> [..., W] (or V) / shards.

    ``normed`` is the second result of ``run``: EAGLE-1, which has no norm, reads its outputs.
    """
    if head.lm_head is None:
        return decoder.logits(target, normed)
    with jax.named_scope("lm_head"):
        return einsum_f32("...h,hw->...w", normed, head.lm_head)
