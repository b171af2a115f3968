"""Hugging Face ``config.json`` to ModelConfig and back. Draft heads are in hf_heads.py.

What each family reads and writes is in families/. transformers' own config classes are not used, as
they import torch where it is installed.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.config.model import ModelConfig
from jaxspec.models.families import FAMILIES
from jaxspec.models.families.family import stop_token_ids
from jaxspec.models.families.writing import common_fields
from jaxspec.models.hf_values import naming, read_json, shown


def load_model_config(directory: str | Path, whose: str = "target") -> ModelConfig:
    """The ModelConfig of a Hugging Face model directory.

    ``whose`` names the model in errors, all ValueErrors that say file and field.
    """
    path, generation = (
        Path(directory) / name for name in ("config.json", "generation_config.json")
    )
    raw = read_json(path)
    with naming(f"{whose}'s {path}"):
        config = parse_model_config(raw)
    if not generation.exists():
        return config
    more = read_json(generation).get("eos_token_id")
    with naming(f"{whose}'s {generation}"):
        stop = config.stop_token_ids + stop_token_ids(more, config.vocab_size)
    return dataclasses.replace(config, stop_token_ids=tuple(dict.fromkeys(stop)))


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of the contents of ``config.json``.

    Raises ValueError for a model that the decoder would not compute exactly.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(FAMILIES)
        given = shown(model_type)
        raise ValueError(f"model_type {given} is not supported; supported are {supported}")
    family = FAMILIES[model_type]
    if (raw.get("architectures") or [family.architecture]) != [family.architecture]:
        raise ValueError(
            f"architectures {shown(raw['architectures'])} is not supported for model_type "
            f"{model_type!r}; it must be ['{family.architecture}']"
        )
    return family.model(raw)


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
