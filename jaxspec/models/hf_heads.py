"""``config.json`` of an EAGLE draft head, checked against the target that it is to draft for.

EAGLE-3.1 (arXiv 2605.09992) is EAGLE-3 with options. Heads are published in three styles: flat,
as EAGLE, SpecForge and TorchSpec write them; with options in ``eagle_config``, as ModelOpt writes
them; and as vLLM's speculators write them, with the layer's config inside. As everywhere, a key
that is not understood is an error.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.config import LayerConfig, ModelConfig
from jaxspec.models import hf_keys
from jaxspec.models.heads import EagleMethod, HeadConfig, check_capture, default_capture
from jaxspec.models.hf_config import check_keys, parse_model_config


def says_eagle3(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is an EAGLE-3 head's, whatever the weights are."""
    names = raw.get("architectures") or []
    return (
        raw.get("speculators_model_type") == "eagle3"
        or raw.get("draft_vocab_size") is not None
        or any("Eagle3" in str(name) for name in names)
    )


def eagle_head_config(
    raw: Mapping[str, Any], target: ModelConfig, method: EagleMethod | None = None
) -> HeadConfig:
    """What ``config.json`` of an EAGLE head says.

    ``method``: what the weights are. None: EAGLE-3 if the config says so, else EAGLE-1.
    ``fc_bias`` and ``own_embed`` are the method's defaults where only the weights can tell.

    Raises ValueError for a head that does not fit the target or that is not computed exactly.
    """
    if method is None:
        method = "eagle3" if says_eagle3(raw) else "eagle1"
    if method == "eagle1" and says_eagle3(raw):
        raise ValueError("the config says EAGLE-3, but the weights are those of an EAGLE-1 head")
    if "speculators_model_type" in raw:
        raw = _flattened(raw)
    architectures = list(raw.get("architectures") or [])
    if not hf_keys.HEAD_ARCHITECTURES.issuperset(architectures):
        raise ValueError(f"architectures {architectures} is not a supported EAGLE head")
    extra = {key: raw[key] for key in hf_keys.HEAD_KEYS if key in raw}
    nested = dict(extra.pop("eagle_config", None) or {})
    check_keys(extra, hf_keys.HEAD_KEYS, hf_keys.HEAD_FIXED_VALUES, "config.json of the draft head")
    nested_fixed = hf_keys.EAGLE_CONFIG_FIXED_VALUES
    check_keys(nested, hf_keys.NESTED_HEAD_KEYS, nested_fixed, "eagle_config")
    model = _head_model(raw)
    if "qkv_bias" in extra:
        bias = bool(extra["qkv_bias"])
        model = model.map_layers(lambda layer: with_qkv_bias(layer, bias))
    options = _options(extra, nested)
    if method == "eagle1" and any(options.values()):
        on = ", ".join(name for name, value in options.items() if value)
        raise ValueError(f"{on}: for EAGLE-3 heads, and this is an EAGLE-1 head")
    config = HeadConfig(
        model=model,
        method=method,
        draft_vocab_size=extra.get("draft_vocab_size"),
        capture=_captured_layers(extra, nested, method, target),
        fc_bias=bool(extra.get("bias", method == "eagle1")),
        own_embed=method == "eagle1",
        **options,
    )
    _check_fit(config, extra, nested, target)
    return config


def _flattened(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config of vLLM's speculators as a flat one. There norm_before_residual is the default."""
    where = "config.json of the speculators library"
    known = hf_keys.HARMLESS_KEYS | hf_keys.SPECULATORS_HARMLESS_KEYS | hf_keys.HEAD_KEYS
    known |= {"architectures", "transformer_layer_config"}
    check_keys(raw, known, hf_keys.SPECULATORS_FIXED_VALUES, where)
    architectures, layer = raw.get("architectures") or [], raw.get("transformer_layer_config")
    if not hf_keys.SPECULATORS_ARCHITECTURES.issuperset(architectures):
        raise ValueError(f"architectures {architectures} is not a supported EAGLE head")
    if not isinstance(layer, dict):
        raise ValueError(f"{where}: transformer_layer_config must be an object, got {layer!r}")
    own = {key: raw[key] for key in hf_keys.HEAD_KEYS if key in raw}
    before_residual = own.get("norm_before_residual")
    return {
        **layer,
        **own,
        "architectures": None,
        "norm_before_residual": True if before_residual is None else before_residual,
    }


def _options(extra: Mapping[str, Any], nested: Mapping[str, Any]) -> dict[str, bool]:
    """The flags of EAGLE-3.1: inside ``eagle_config``, else outside; absent ones are off."""

    def flag(names: tuple[str, ...]) -> bool:
        values = [where.get(name) for where in (nested, extra) for name in names]
        value = next((value for value in values if value is not None), False)
        if not isinstance(value, bool):
            raise ValueError(f"{names[0]} must be true or false, got {value!r}")
        return value

    options = {key: flag(names) for key, names in hf_keys.HEAD_FLAGS.items()}
    if options["fc_norm"] and options["norm_before_fc"]:
        raise ValueError("fc_norm and norm_before_fc are both on: a head has one of them at most")
    before_residual = extra.get("norm_before_residual") or False
    if not isinstance(before_residual, bool):
        raise ValueError(f"norm_before_residual must be true or false, got {before_residual!r}")
    return options | {"norm_before_residual": before_residual}


def with_qkv_bias(layer: LayerConfig, bias: bool) -> LayerConfig:
    """The layer with or without a bias on queries, keys and values."""
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, qkv_bias=bias))


def _head_model(raw: Mapping[str, Any]) -> ModelConfig:
    """Official heads are Llama layers, whatever ``model_type`` (llama or qwen2) they carry."""
    llama = {key: value for key, value in raw.items() if key not in hf_keys.HEAD_KEYS}
    if llama.get("model_type") == "qwen2" and not llama.get("use_sliding_window"):
        llama = {key: value for key, value in llama.items() if key not in hf_keys.WINDOW_KEYS}
        llama["model_type"] = "llama"
    model = parse_model_config(llama | {"architectures": None})
    return dataclasses.replace(model, tie_word_embeddings=False, stop_token_ids=())


def _captured_layers(
    extra: Mapping[str, Any],
    nested: Mapping[str, Any],
    method: EagleMethod,
    target: ModelConfig,
) -> tuple[int, ...]:
    """Hidden states the head reads; id ``i`` is the target's residual stream after ``i`` layers.

    ``eagle_aux_hidden_state_layer_ids`` at the top level (speculators, vLLM) counts the same way.
    Inside ``eagle_config`` two conventions are in use: exporters that name the layer whose output
    is taken start at layer 1 (so one is added), the others count as here. This is SGLang's rule
    (pull request 25454). All engines concatenate in the order of the layers.
    """
    nested_ids = nested.get("eagle_aux_hidden_state_layer_ids") or []
    ids = extra.get("eagle_aux_hidden_state_layer_ids") or [
        layer + (min(nested_ids) == 1) for layer in nested_ids
    ]
    if not ids:
        return default_capture(method, target.num_layers)
    if method == "eagle1":
        raise ValueError("eagle_aux_hidden_state_layer_ids is for EAGLE-3, this is an EAGLE-1 head")
    try:
        return check_capture(ids, target.num_layers)
    except ValueError as error:
        raise ValueError(f"eagle_aux_hidden_state_layer_ids: {error}") from None


def _check_fit(
    head: HeadConfig, extra: Mapping[str, Any], nested: Mapping[str, Any], target: ModelConfig
) -> None:
    count = "num_aux_hidden_states"
    checks = (
        ("vocab_size", head.model.vocab_size, target.vocab_size),
        ("target_hidden_size", extra.get("target_hidden_size"), target.hidden_size),
        (count, nested.get(count) or extra.get(count), len(head.capture)),
    )
    for name, value, expected in checks:
        if value is not None and value != expected:
            raise ValueError(
                f"the draft head does not fit the target: its {name} is {value}, not {expected}"
            )
    if head.method == "eagle1" and head.model.hidden_size != target.hidden_size:
        raise ValueError(
            f"the draft head does not fit the target: its hidden_size is {head.model.hidden_size}, "
            f"the target's is {target.hidden_size}"
        )
    width = head.draft_vocab_size
    if width is not None and not 0 < width <= target.vocab_size:
        raise ValueError(f"draft_vocab_size {width} is not within 1 .. {target.vocab_size}")
