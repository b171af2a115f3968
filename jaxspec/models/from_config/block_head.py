"""``config.json`` of block heads, read and written. block_layouts.py has what publishers call
things; DFlash's (z-lab/dflash) and DeepSpec's layouts are written.

An unknown key is an error.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxspec.config.checks import Problems
from jaxspec.config.model import ModelConfig
from jaxspec.models.from_config.block_bodies import block_layers
from jaxspec.models.from_config.block_corrections import (
    confidence_config,
    convolution_config,
    correction_config,
    dflash2_options,
    domino_options,
    dspark_options,
    lilicorr_options,
    logit_options,
    xpress_options,
)
from jaxspec.models.from_config.block_layouts import (
    DFLASH,
    DFLASH2,
    DOMINO,
    DSPARK,
    LILICORR,
    XPRESS,
    BlockLayout,
    block_layout,
)
from jaxspec.models.from_config.block_windows import said_causal, with_windows
from jaxspec.models.from_config.head_keys import check_head_keys
from jaxspec.models.from_config.model import to_hf_config
from jaxspec.models.heads import BlockConfig, BlockHead, MarkovConfig, default_capture
from jaxspec.models.heads.corrections import Domino, LiLiCorr, Selector, XPress
from jaxspec.models.json.values import (
    is_integer,
    is_positive_integer,
    shown,
)

# How heads with a correction are written: their architecture, and options in ``dflash_config``.
_WRITTEN: Mapping[type, tuple[str, Callable[[BlockHead], dict[str, Any]]]] = MappingProxyType(
    {
        Selector: (DFLASH2, dflash2_options),
        LiLiCorr: (LILICORR, lilicorr_options),
        Domino: (DOMINO, domino_options),
    }
)


def block_config(raw: Mapping[str, Any], target: ModelConfig) -> BlockConfig:
    """The BlockConfig of a block head's ``config.json``.

    Raises ValueError for a head that does not fit the target or has unsupported features.
    """
    problems = Problems()
    layout = block_layout(raw, problems)
    options, predicts_next = layout.options, layout.predicts_next
    with problems.caught():
        check_head_keys(layout.layers)
    with problems.caught():
        model, causal = with_windows(block_layers(layout.layers, options), layout.layers, options)
        _check_fit(model, layout, target)
    with problems.caught():
        eps = layout.layers.get("rms_norm_eps")
        correction = correction_config(layout.kind, options, target, eps)
    with problems.caught():
        convolution = convolution_config(options, target.hidden_size)
    with problems.caught():
        logit_scale, logit_softcap = logit_options(options, target)
    with problems.caught():
        confidence = confidence_config(options)
    with problems.caught():
        _check_block(options, target, 1 if predicts_next else 2)
    with problems.caught():
        capture = _captured(layout, target)
    with problems.caught():
        width = _draft_vocab_size(options, target)
    problems.raise_all()
    if not predicts_next and (isinstance(correction, MarkovConfig) or confidence):
        raise ValueError(
            "sample_from_anchor = False is not supported for a head with a Markov or a confidence "
            "head, only True"
        )
    return BlockConfig(
        model=model,
        capture=capture,
        block_size=options["block_size"],
        mask_token=options["mask_token_id"],
        predicts_next=predicts_next,
        causal=causal,
        draft_vocab_size=width,
        correction=correction,
        convolution=convolution,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        confidence=confidence,
    )


def _check_block(options: Mapping[str, Any], target: ModelConfig, smallest: int) -> None:
    """Raise ValueError for a size below ``smallest``, and a mask that is no token."""
    problems = Problems()
    size: Any = options.get("block_size")
    mask: Any = options.get("mask_token_id")
    if not is_positive_integer(size) or size < smallest:
        problems.add(f"block_size must be an integer from {smallest}, got {shown(size)}")
    if not is_integer(mask) or not 0 <= mask < target.vocab_size:
        problems.add(
            f"mask_token_id {shown(mask)} is no id of the target's {target.vocab_size} tokens"
        )
    problems.raise_all()


def _check_fit(model: ModelConfig, layout: BlockLayout, target: ModelConfig) -> None:
    options, cap, problems = layout.options, "final_logit_softcapping", Problems()
    checks = (
        ("vocab_size", model.vocab_size, target.vocab_size),
        ("hidden_size", model.hidden_size, target.hidden_size),
        ("target_hidden_size", options.get("target_hidden_size"), target.hidden_size),
        ("num_target_layers", options.get("num_target_layers"), target.num_layers),
        (cap, layout.layers.get(cap), target.logit_softcap),
    )
    for name, value, expected in checks:
        if value is not None and value != expected:
            problems.add(
                f"the block drafter does not fit the target: its {name} is {shown(value)}, not "
                f"{expected}"
            )
    scaled = target.embed_scale != 1 or target.logit_divisor != 1
    if not layout.scaled and (scaled or target.logit_softcap is not None):
        problems.add(
            "block drafters of this layout need a target whose embeddings and logits are not "
            f"scaled or capped; only those of {DFLASH} and DFlash2DraftModel were trained so"
        )
    problems.raise_all()


def _draft_vocab_size(options: Mapping[str, Any], target: ModelConfig) -> int | None:
    """Size of a reduced draft vocabulary; None: draft ids are the target's."""
    size, most = options.get("draft_vocab_size"), target.vocab_size
    if size in (None, 0, most):
        return None
    if not is_positive_integer(size) or size > most:
        raise ValueError(
            f"draft_vocab_size must be an integer from 1 to the target's vocabulary of {most}, got "
            f"{shown(size)}"
        )
    return size


def _captured(layout: BlockLayout, target: ModelConfig) -> tuple[int, ...]:
    """Hidden states that the head reads; ids of ``capture`` count the layers before them. Most
    configs have the index of the layer whose output is read, -1 for the embeddings; those of
    speculators count as here, and without ids mean its default.

    The last layer's output is the one before the final norm, as in vLLM and SGLang.
    """
    name, first = layout.captured, layout.counts_from
    default = None if first else [*default_capture("eagle3", target.num_layers)]
    ids: Any = layout.options.get(name, default)
    smallest, largest = -first, target.num_layers - first
    good = isinstance(ids, list) and len(ids) > 0 and all(map(is_integer, ids))
    if not good or sorted(set(ids)) != ids or ids[0] < smallest or ids[-1] > largest:
        raise ValueError(
            f"{name} must be increasing layers from {smallest} to {largest}, got {shown(ids)}"
        )
    return tuple(index + first for index in ids)


def to_hf_block(head: BlockHead, target: ModelConfig) -> dict[str, Any]:
    """A ``config.json`` that describes a head, in the layout that it was published in."""
    options = {
        "target_layer_ids": [index - 1 for index in head.capture],
        "mask_token_id": head.mask_token,
    }
    config = to_hf_config(head.config) | {
        "torch_dtype": jnp.dtype(head.dtype).name,
        "block_size": head.block_size,
        "num_target_layers": target.num_layers,
    }
    if head.lm_head is not None:
        config["draft_vocab_size"] = head.lm_head.out_shape[0]
    if (causal := said_causal(head)) is not None:
        config["is_causal"] = causal
    for kind, (name, options_of) in _WRITTEN.items():
        if isinstance(head.correction, kind):
            return config | {"architectures": [name], "dflash_config": options | options_of(head)}
    if isinstance(head.correction, XPress):
        xpress = xpress_options(head)
        return config | xpress | {"architectures": [XPRESS], "dflash_config": options}
    if not head.predicts_next:
        return config | {"architectures": [DFLASH], "dflash_config": options}
    return config | {"architectures": [DSPARK]} | options | dspark_options(head)
