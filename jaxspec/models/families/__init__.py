"""Model families: one file a group, each from its ``config.json`` to a ModelConfig.

A family is a mapping of keys. The tensors' names are those of the mixers, MLPs and layers that its
ModelConfig describes (see their ``filled``).
"""

from collections.abc import Mapping
from types import MappingProxyType

from jaxspec.models.families.family import Family
from jaxspec.models.families.llama import LLAMA
from jaxspec.models.families.mistral import MISTRAL
from jaxspec.models.families.qwen import MIMO, QWEN2, QWEN3

__all__ = ["FAMILIES", "Family"]

# By model_type. A config is written by the first family that describes the model.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": LLAMA,
        "mistral": MISTRAL,
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "mimo": MIMO,
    }
)
