"""Hugging Face ``config.json`` to ModelConfig and back. Those of draft heads are read in
eagle_head.py and block_head.py.

What each family reads and writes is in families/. transformers' own config classes are not used, as
they import torch where it is installed.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import ModelConfig
from jaxspec.config.mtp import MtpStates
from jaxspec.models.families import FAMILIES
from jaxspec.models.families.family import Family, stop_token_ids
from jaxspec.models.families.gemma4 import ASSISTANTS
from jaxspec.models.families.rope import written_rope
from jaxspec.models.families.windows import FULL, SLIDING
from jaxspec.models.families.with_images import WithImages
from jaxspec.models.json.values import is_integer, naming, read_json, shown

_MTP_KEYS = (
    *("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules"),
)


def load_model_config(directory: str | Path, whose: str = "target") -> ModelConfig:
    """The ModelConfig of a Hugging Face model directory.

    Its texts end at the tokens that config.json, generation_config.json or the tokenizer name:
    fine-tunes often change one of them alone. ``whose`` names the model in errors, all ValueErrors
    that say file and field.
    """
    directory = Path(directory)
    path, generation = directory / "config.json", directory / "generation_config.json"
    raw = read_json(path)
    with naming(f"{whose}'s {path}"):
        config = parse_model_config(raw)
    stops = config.stop_token_ids
    if generation.exists():
        more = read_json(generation).get("eos_token_id")
        with naming(f"{whose}'s {generation}"):
            stops += stop_token_ids(more, config.vocab_size)
    stops += _tokenizer_stop_ids(directory, config.vocab_size)
    return dataclasses.replace(config, stop_token_ids=tuple(dict.fromkeys(stops)))


def _tokenizer_stop_ids(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """The id of the tokenizer's ``eos_token``. None: it has none, or none of this vocabulary.

    Fine-tunes often change it in tokenizer_config.json alone, such as to ``<|im_end|>``. What it
    says about the tokens is checked where the tokenizer is loaded. Raises ValueError for a file
    that is no JSON.
    """
    text = _eos_token(directory)
    if text is None:
        return ()
    found = next((id_ for id_ in _ids(directory, text) if is_integer(id_)), -1)
    return (found,) if 0 <= found < vocab_size else ()


def _eos_token(directory: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _object(directory / name).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text:
            return text
    return None


def _ids(directory: Path, text: str) -> Iterator[Any]:
    """What each file has as the token's id, those that are small first."""
    decoder = _part(_object(directory / "tokenizer_config.json"), "added_tokens_decoder", dict)
    yield from (int(id_) for id_, token in decoder.items() if _is(token, text) and id_.isdecimal())
    yield _object(directory / "added_tokens.json").get(text)
    tokenizer = _object(directory / "tokenizer.json")
    added = _part(tokenizer, "added_tokens", list)
    yield from (token.get("id") for token in added if _is(token, text))
    vocab = _part(tokenizer, "model", dict).get("vocab")
    if isinstance(vocab, dict):
        yield vocab.get(text)
    elif isinstance(vocab, list):  # of a Unigram model: tokens and their scores
        yield from (i for i, token in enumerate(vocab) if token and token[0] == text)
    yield _object(directory / "vocab.json").get(text)


def _is(token: Any, text: str) -> bool:
    return isinstance(token, dict) and token.get("content") == text


def _part[T](content: dict[str, Any], name: str, kind: type[T]) -> T:
    """Its value, empty unless it is of this kind."""
    value = content.get(name)
    return value if isinstance(value, kind) else kind()


def _object(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of the contents of ``config.json``.

    Raises ValueError for a model that the decoder would not compute exactly.
    """
    family = _family_of(raw)
    named = raw.get("architectures") or [family.architecture]
    if named not in [[name] for name in family.architectures]:
        raise ValueError(
            f"architectures {shown(named)} is not supported for model_type "
            f"{raw['model_type']!r}; it must be ['{family.architecture}']"
        )
    model = family.model(raw)
    bare = family.architecture.replace("ForCausalLM", "Model")
    without_head = named == [bare] != [family.architecture]
    if without_head and not model.tie_word_embeddings:
        raise ValueError(
            f"architectures {shown(named)} is a model without an LM head, and tie_word_embeddings "
            f"is false: it writes no text. Take the checkpoint of {family.architecture}"
        )
    return model


def with_mtp_layer(raw: Mapping[str, Any], states: MtpStates | None = None) -> dict[str, Any]:
    """The contents of ``config.json``, of a model that has one MTP layer beside it, which reads
    these states; None: those that the config says, or else the family's.

    Raises ValueError for a ``model_type`` that is not supported.
    """
    family = _family_of(raw)
    inside = family.inside(raw)
    text = raw if inside is None else raw.get(inside, {})
    has_key = "mtp_num_hidden_layers" in family.text_family(raw).defaults
    key = "mtp_num_hidden_layers" if has_key else "num_nextn_predict_layers"
    told = {name: value for name, value in text.items() if name not in _MTP_KEYS} | {key: 1}
    if states is not None:
        told["mtp_states"] = states.name
    if inside is None:
        return told
    return {name: value for name, value in raw.items() if name not in _MTP_KEYS} | {inside: told}


def text_family(raw: Mapping[str, Any]) -> Family | None:
    """The family of the text model that a ``config.json`` describes; None: it is not supported, or
    the file is not of a model."""
    family = FAMILIES.get(str(raw.get("model_type")))
    return None if family is None else family.text_family(raw)


def _family_of(raw: Mapping[str, Any]) -> Family | WithImages:
    """Raises ValueError for a ``model_type`` that is not supported."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported, given = ", ".join(FAMILIES), shown(model_type)
        if isinstance(model_type, str) and model_type in ASSISTANTS:
            raise ValueError(f"model_type {given} is a drafter, and no model: give it as drafter")
        raise ValueError(f"model_type {given} is not supported; supported are {supported}")
    return FAMILIES[model_type]


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """A ``config.json`` that describes ``config``, in keys that every transformers version reads.

    Raises ValueError if none of the families that are written has this combination of features.
    """
    config = dataclasses.replace(config, mtp=None)  # decoders are written without their MTP layers
    common, others = _written_fields(config)
    for model_type, family in FAMILIES.items():
        if not isinstance(family, Family) or family.writes is None:
            continue
        named = {"architectures": [family.architecture], "model_type": model_type}
        hf = named | common | {key: others[key] for key in family.writes}
        if parse_model_config(hf) == config:
            return hf
    raise ValueError(
        "no supported Hugging Face family has this combination of biases, qk_norm and sliding "
        f"windows, or configs of the family that has it are not written: {config}"
    )


def _written_fields(config: ModelConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys that all families write, and those that only some have.

    Raises ValueError for layers that differ in more than their windows, or are of kinds that no
    family which is written has.
    """
    stop, (attention, mlp) = list(config.stop_token_ids), _alike(config)
    windows = [layer.attention.window for layer in config.layers]
    window = next(filter(None, windows), None)
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        **written_rope(attention.rope),
        "bos_token_id": None,
        "eos_token_id": stop[0] if len(stop) == 1 else stop or None,
    }
    return common, {
        "attention_bias": attention.qkv_bias,
        "mlp_bias": mlp.bias,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [SLIDING if size else FULL for size in windows],
    }


def _alike(config: ModelConfig) -> tuple[AttentionConfig, DenseConfig]:
    """The configs that all layers share, except for the windows. Raises ValueError for others."""
    layers = config.layers
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionConfig)]
    mlps = [layer.mlp for layer in layers if isinstance(layer.mlp, DenseConfig)]
    if not len(mixers) == len(mlps) == len(layers):
        raise ValueError("no config.json is written for models with layers of such kinds")
    windowless = (dataclasses.replace(mixer, window=None) for mixer in mixers)
    kinds = set(zip(windowless, mlps, strict=True))
    if len(kinds) != 1:
        raise ValueError("no supported Hugging Face family has layers that differ in this way")
    return kinds.pop()
