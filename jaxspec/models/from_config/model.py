"""Hugging Face ``config.json`` to ModelConfig and back. Those of draft heads are read in
eagle_head.py and block_head.py.

What each family reads and writes is in families/. transformers' own config classes are not used, as
they import torch where it is installed.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.config.model import ModelConfig
from jaxspec.config.mtp import MtpStates
from jaxspec.models.families import FAMILIES
from jaxspec.models.families.family import Family, stop_token_ids
from jaxspec.models.families.writing import common_fields
from jaxspec.models.from_config.tokenizer_stops import tokenizer_stop_ids
from jaxspec.models.json.values import naming, read_json, shown

_MTP_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")


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
    stops += tokenizer_stop_ids(directory, config.vocab_size)
    return dataclasses.replace(config, stop_token_ids=tuple(dict.fromkeys(stops)))


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of the contents of ``config.json``.

    Raises ValueError for a model that the decoder would not compute exactly.
    """
    family = _family_of(raw)
    named = raw.get("architectures") or [family.architecture]
    without_head = family.architecture.replace("ForCausalLM", "Model")
    if named not in ([family.architecture], [without_head]):
        raise ValueError(
            f"architectures {shown(named)} is not supported for model_type "
            f"{raw['model_type']!r}; it must be ['{family.architecture}']"
        )
    model = family.model(raw)
    if named != [family.architecture] and not model.tie_word_embeddings:
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
    text = raw if family.inside is None else raw.get(family.inside, {})
    has_key = "mtp_num_hidden_layers" in family.keys
    key = "mtp_num_hidden_layers" if has_key else "num_nextn_predict_layers"
    told = {name: value for name, value in text.items() if name not in _MTP_KEYS} | {key: 1}
    if states is not None:
        told["mtp_states"] = states.name
    return told if family.inside is None else {**raw, family.inside: told}


def _family_of(raw: Mapping[str, Any]) -> Family:
    """Raises ValueError for a ``model_type`` that is not supported."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(FAMILIES)
        given = shown(model_type)
        raise ValueError(f"model_type {given} is not supported; supported are {supported}")
    return FAMILIES[model_type]


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """A ``config.json`` that describes ``config``, in keys that every transformers version reads.

    Raises ValueError if none of the families that are written has this combination of features.
    """
    config = dataclasses.replace(config, mtp=None)  # decoders are written without their MTP layers
    common = common_fields(config)
    for model_type, family in FAMILIES.items():
        if family.write is None:
            continue
        named = {"architectures": [family.architecture], "model_type": model_type}
        hf = named | common | family.write(config)
        if parse_model_config(hf) == config:
            return hf
    raise ValueError(
        "no supported Hugging Face family has this combination of biases, qk_norm and sliding "
        f"windows, or configs of the family that has it are not written: {config}"
    )
