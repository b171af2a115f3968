"""How a model's publisher wants it sampled: generation_config.json, as the server's defaults."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.models.json.values import read_json

FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(model: Path) -> Mapping[str, Any]:
    """The fields of SamplingParams that the file beside a model's weights sets; like vLLM, those of
    NAMES, whatever ``do_sample`` says.

    Raises ValueError for values that are out of range. A model without the file, such as a GGUF
    one, has none.
    """
    path = model / FILE
    if not path.is_file():
        return {}
    content = read_json(path)
    found = {name: content[name] for name in NAMES if content.get(name) is not None}
    if found.get("top_k") == -1:  # vLLM's for all tokens
        found["top_k"] = 0
    try:
        SamplingParams(**found)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error} (--generation-config none ignores the file)") from error
    return found


def as_text(defaults: Mapping[str, Any]) -> str:
    """``temperature 0.6, top_p 0.95``"""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items())
