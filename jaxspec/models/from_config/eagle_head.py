"""Reading ``config.json`` of an EAGLE draft head, and checking it against the target.

EAGLE-3.1 (arXiv 2605.09992) is EAGLE-3 with options. Three formats are published: flat, by EAGLE,
SpecForge and TorchSpec; with options in ``eagle_config``, by ModelOpt; and with the layer's config
in ``transformer_layer_config``, by vLLM's speculators library. Keys of models that a head's layers
do not have were copied from the target, and are ignored. An unknown key is an error.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.config.checks import Problems
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.family import check_keys
from jaxspec.models.families.windows import windows_by_kind
from jaxspec.models.from_config.head_keys import check_head_keys, layer_keys
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.heads import EagleMethod, HeadConfig, check_capture, default_capture
from jaxspec.models.json import keys as hf_keys
from jaxspec.models.json.values import check_flag, is_integer, is_positive_integer, shown


def says_eagle3(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is an EAGLE-3 head's, whatever the weights are."""
    return (
        raw.get("speculators_model_type") in hf_keys.SPECULATORS_EAGLE
        or says_parallel(raw)
        or raw.get("draft_vocab_size") is not None
        or any("Eagle3" in name for name in _architectures(raw))
    )


def says_parallel(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 head that drafts several tokens at once."""
    named = any("PEagle" in name for name in _architectures(raw))
    return named or raw.get("speculators_model_type") == "peagle"


def says_head(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is a draft head's, of any kind, whatever the weights are."""
    named = any("eagle" in name.lower() for name in _architectures(raw))
    return named or "eagle_config" in raw or "speculators_model_type" in raw or says_eagle3(raw)


def _architectures(raw: Mapping[str, Any]) -> list[str]:
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"architectures must be a list of names, got {shown(names)}")
    return names


def eagle_head_config(
    raw: Mapping[str, Any], target: ModelConfig, method: EagleMethod | None = None
) -> HeadConfig:
    """The HeadConfig of an EAGLE head's ``config.json``.

    ``method``: the kind of the weights. None: EAGLE-3 if the config says so, else EAGLE-1.
    ``fc_bias``, ``has_embeddings`` and ``has_lm_head`` of the result, biases and norms of the
    layers, their number and ``mask_token`` are defaults or what the target has, as files are copied
    from it; the caller corrects them from the weights.

    Raises ValueError for a head that does not fit the target or has unsupported features.
    """
    if method is None:
        method = "eagle3" if says_eagle3(raw) else "eagle1"
    if method == "eagle1" and says_eagle3(raw):
        raise ValueError("the config says EAGLE-3, but the weights are those of an EAGLE-1 head")
    speculators, problems = "speculators_model_type" in raw, Problems()
    if speculators:
        raw = _flattened(raw, problems)
    architectures = _architectures(raw)
    if not hf_keys.HEAD_ARCHITECTURES.issuperset(architectures):
        raise ValueError(f"architectures {shown(architectures)} is not a supported EAGLE head")
    extra = {key: raw[key] for key in hf_keys.HEAD_KEYS if key in raw}
    nested = extra.pop("eagle_config", None) or {}
    if not isinstance(nested, dict):
        raise ValueError(f"eagle_config must be an object, got {shown(nested)}")
    nested_keys = hf_keys.NESTED_HEAD_KEYS
    with problems.caught():
        check_keys(extra, hf_keys.HEAD_KEYS, hf_keys.HEAD_FIXED_VALUES)
    with problems.caught():
        check_keys(nested, nested_keys, hf_keys.EAGLE_CONFIG_FIXED_VALUES, "eagle_config")
    with problems.caught():
        _check_sizes(extra, nested)
        capture = _captured_layers(extra, nested, method, target)
    with problems.caught():
        width = _draft_vocab_size(extra)
    with problems.caught():
        mask = _mask_token(extra, target)
    with problems.caught():
        options = _options(extra, nested)
        if method == "eagle1" and any(options.values()):
            on = ", ".join(name for name, value in options.items() if value)
            raise ValueError(f"{on}: for EAGLE-3 heads, and this is an EAGLE-1 head")
    layers = {key: value for key, value in raw.items() if key not in hf_keys.HEAD_KEYS}
    with problems.caught():
        check_head_keys(layers)
    with problems.caught():
        model = _within_positions(_head_model(layers), layers, target)
    problems.raise_all()
    bias = extra.get("qkv_bias")
    if bias is not None:
        model = model.map_layers(lambda layer: with_qkv_bias(layer, bias))
    if speculators and raw.get("model_type") == "qwen3":
        model = model.map_layers(with_qk_norm)
    config = HeadConfig(
        model=model,
        method=method,
        draft_vocab_size=width,
        capture=capture,
        fc_bias=method == "eagle1" if extra.get("bias") is None else extra["bias"],
        has_embeddings=method == "eagle1",
        mask_token=mask,
        **options,
    )
    _check_fit(config, extra, nested, target)
    return config


def _check_sizes(extra: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    """Raise ValueError for values of a wrong type under the keys that only heads have."""
    for key in ("bias", "qkv_bias"):
        if extra.get(key) is not None:
            check_flag(key, extra[key])
    ids = "eagle_aux_hidden_state_layer_ids"
    for given in (extra.get(ids), nested.get(ids)):
        if given and not (isinstance(given, list) and all(map(is_integer, given))):
            raise ValueError(f"{ids} must be a list of layers, got {shown(given)}")


def _draft_vocab_size(extra: Mapping[str, Any]) -> int | None:
    """Size of a reduced draft vocabulary; None, also for 0: draft ids are the target's."""
    names = "draft_vocab_size", "truncated_vocab_size"
    sizes = {name: extra[name] for name in names if extra.get(name) not in (None, 0)}
    for name, size in sizes.items():
        if not is_positive_integer(size):
            raise ValueError(f"{name} must be a positive integer, got {shown(size)}")
    if len({*sizes.values()}) > 1:
        given = " and ".join(f"{name} = {size}" for name, size in sizes.items())
        raise ValueError(f"{given} contradict each other; remove the one that is wrong")
    return next(iter(sizes.values()), None)


def _flattened(raw: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """A config of vLLM's speculators in the flat format; norm_before_residual is on by default, but
    off for P-EAGLE. Unknown keys become ``problems``."""
    where = "a config of the speculators library"
    known = hf_keys.HARMLESS_KEYS | hf_keys.SPECULATORS_HARMLESS_KEYS | hf_keys.HEAD_KEYS
    known |= {"architectures", "transformer_layer_config"}
    with problems.caught():
        check_keys(raw, known, hf_keys.SPECULATORS_FIXED_VALUES, where)
    architectures, layer = _architectures(raw), raw.get("transformer_layer_config")
    if not hf_keys.SPECULATORS_ARCHITECTURES.issuperset(architectures):
        raise ValueError(f"architectures {shown(architectures)} is not a supported EAGLE head")
    if not isinstance(layer, dict):
        given = shown(layer)
        raise ValueError(f"{where}: transformer_layer_config must be an object, got {given}")
    kind = layer.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in hf_keys.SPECULATORS_MODEL_TYPES:
        known = ", ".join(sorted(hf_keys.SPECULATORS_MODEL_TYPES))
        raise ValueError(
            f"model_type {shown(kind)} is not supported for a draft head, only {known}"
        )
    head_keys = {key: raw[key] for key in hf_keys.HEAD_KEYS if key in raw}
    before_residual = head_keys.get("norm_before_residual")
    return {
        **layer,
        **head_keys,
        "architectures": None,
        "norm_before_residual": not says_parallel(raw)
        if before_residual is None
        else before_residual,
    }


def _mask_token(extra: Mapping[str, Any], target: ModelConfig) -> int | None:
    """The token that stands for one that is not known; None: the file names none."""
    names = "mask_token_id", "pard_token", "ptd_token_id"
    given = {name: extra[name] for name in names if extra.get(name) is not None}
    for name, token in given.items():
        if not is_integer(token) or not 0 <= token < target.vocab_size:
            raise ValueError(
                f"{name} {shown(token)} is no id of the target's {target.vocab_size} tokens"
            )
    if len({*given.values()}) > 1:
        both = " and ".join(f"{name} = {token}" for name, token in given.items())
        raise ValueError(f"{both} contradict each other; remove the one that is wrong")
    return next(iter(given.values()), None)


def _options(extra: Mapping[str, Any], nested: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of EAGLE-3.1, from ``eagle_config`` or else the top level; absent ones are off."""

    def flag(names: tuple[str, ...]) -> bool:
        values = [where.get(name) for where in (nested, extra) for name in names]
        value = next((value for value in values if value is not None), False)
        return check_flag(names[0], value)

    options = {key: flag(names) for key, names in hf_keys.HEAD_FLAGS.items()}
    if options["fc_norm"] and options["norm_before_fc"]:
        raise ValueError("fc_norm and norm_before_fc are both on: a head has one of them at most")
    before_residual = extra.get("norm_before_residual")
    if before_residual is not None:
        check_flag("norm_before_residual", before_residual)
    return options | {"norm_before_residual": bool(before_residual)}


def with_qkv_bias(layer: LayerConfig, bias: bool) -> LayerConfig:
    """The layer with or without a bias on queries, keys and values."""
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, qkv_bias=bias))


def with_qk_norm(layer: LayerConfig) -> LayerConfig:
    """The layer with norms of queries and keys."""
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, qk_norm=True))


def _head_model(raw: Mapping[str, Any]) -> ModelConfig:
    """The config of a head's layers: Llama's, whatever ``model_type`` says, which is the target's.

    ``layer_types`` are the head's if they are as many as its layers.
    """
    llama = {"model_type": "llama", **layer_keys(raw), "eos_token_id": None}
    model = parse_model_config(llama)
    types, window = raw.get("layer_types"), raw.get("sliding_window")
    if not isinstance(types, list) or len(types) != model.num_layers:
        return model
    of_windows = {"num_hidden_layers": len(types), "layer_types": types, "sliding_window": window}
    pairs = zip(model.layers, windows_by_kind(of_windows, []), strict=True)
    return dataclasses.replace(model, layers=tuple(_with_window(*pair) for pair in pairs))


def _within_positions(
    model: ModelConfig, raw: Mapping[str, Any], target: ModelConfig
) -> ModelConfig:
    """The head's layers for texts that are longer than those it was trained on.

    If the file gives the head fewer positions than the target has, a layer without a window gets
    one of as many: then no two tokens that attend to each other are at a distance that the head has
    not seen. Rotary embeddings know distances alone, so positions may run on.
    """
    positions = model.max_position
    if "max_position_embeddings" not in raw or positions >= target.max_position:
        return model
    return model.map_layers(
        lambda layer: layer if layer.attention.window else _with_window(layer, positions)
    )


def _with_window(layer: LayerConfig, window: int | None) -> LayerConfig:
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, window=window))


def _captured_layers(
    extra: Mapping[str, Any],
    nested: Mapping[str, Any],
    method: EagleMethod,
    target: ModelConfig,
) -> tuple[int, ...]:
    """Hidden states the head reads; id ``i`` is the target's residual stream after ``i`` layers.

    ``eagle_aux_hidden_state_layer_ids`` at the top level (speculators, vLLM) counts the same way.
    Inside ``eagle_config`` two conventions are in use. Some exporters give the index of the layer
    whose output is read; their lists start at layer 1, and one is added to each id. The others
    count as here. This is SGLang's rule (pull request 25454). All engines concatenate in the order
    of the layers.
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
    count, problems = "num_aux_hidden_states", Problems()
    checks = (
        ("vocab_size", head.model.vocab_size, target.vocab_size),
        ("target_hidden_size", extra.get("target_hidden_size"), target.hidden_size),
        (count, nested.get(count) or extra.get(count), len(head.capture)),
    )
    for name, value, expected in checks:
        if value is not None and value != expected:
            problems.add(
                f"the draft head does not fit the target: its {name} is {shown(value)}, not "
                f"{expected}"
            )
    if head.method == "eagle1" and head.model.hidden_size != target.hidden_size:
        problems.add(
            f"the draft head does not fit the target: its hidden_size is {head.model.hidden_size}, "
            f"the target's is {target.hidden_size}"
        )
    width = head.draft_vocab_size
    if width is not None and width > target.vocab_size:
        problems.add(
            f"draft_vocab_size {width} is more than the target's vocabulary of {target.vocab_size}"
        )
    problems.raise_all()
