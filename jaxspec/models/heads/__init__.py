"""Draft heads: one shape for all of them, a front for each kind."""

from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp

from jaxspec.config import ModelConfig
from jaxspec.models.decoder import FINAL_NORM
from jaxspec.models.heads.eagle1 import Eagle1Front
from jaxspec.models.heads.eagle3 import Eagle3Front
from jaxspec.models.heads.head import DraftHead, Front, FrontOutput, HeadOutput
from jaxspec.models.layer import layer_shape
from jaxspec.models.linear import linear_shape
from jaxspec.models.shapes import array_shape, vector
from jaxspec.sharding import ONE_SHARD, Shards

__all__ = [
    "DraftHead",
    "Eagle1Front",
    "Eagle3Front",
    "EagleMethod",
    "Front",
    "FrontOutput",
    "HeadOutput",
    "check_capture",
    "default_capture",
    "head_shapes",
]

EagleMethod = Literal["eagle3", "eagle1"]


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
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    norm_output: bool = False,
    norm_before_residual: bool = False,
    own_embed: bool = False,
    shards: Shards = ONE_SHARD,
) -> DraftHead:
    """A head of ShapeDtypeStructs, laid out for ``shards``.

    ``draft_vocab_size`` None: the target's whole vocabulary.

    ``fc_norm``, ``norm_before_fc``, ``norm_output``, ``norm_before_residual``: EAGLE-3.1's options
    (see Eagle3Front and DraftHead).
    """
    hidden, eagle3 = config.hidden_size, method == "eagle3"
    capture = capture or default_capture(method, target.num_layers)
    features = target.hidden_size * len(capture)
    layers = tuple(
        layer_shape(
            layer,
            hidden,
            dtype,
            shards,
            input_size=2 * hidden if eagle3 and index == 0 else hidden,
            input_norm=eagle3 or index > 0,
        )
        for index, layer in enumerate(config.layers)
    )
    if eagle3:
        norms = [vector(target.hidden_size, dtype) for _ in capture]
        front: Any = Eagle3Front(
            fc=linear_shape(("features", "hidden"), (features, hidden), dtype, bias=fc_bias),
            hidden_norm=vector(hidden, dtype),
            fc_norms=tuple(norms) if fc_norm else (),
            input_norm=vector(features, dtype, when=norm_before_fc),
            norm_before_residual=norm_before_residual,
        )
    else:
        fc = linear_shape(("features", "hidden"), (2 * hidden, hidden), dtype, bias=fc_bias)
        front = Eagle1Front(fc=fc)
    vocab, reduced = draft_vocab_size or target.vocab_size, draft_vocab_size is not None
    return DraftHead(
        front=front,
        layers=layers,
        norm=vector(hidden, dtype, when=eagle3),
        lm_head=linear_shape(("hidden", "vocab"), (hidden, vocab), dtype) if eagle3 else None,
        token_ids=array_shape(vocab, dtype=jnp.int32, when=reduced),
        embed=array_shape(target.vocab_size, hidden, dtype=dtype, when=own_embed),
        config=config,
        capture=capture,
        recycle_normed=norm_output,
        layout=shards.layout,
    )
