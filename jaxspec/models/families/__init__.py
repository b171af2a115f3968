"""Model families: one file a group, each from its ``config.json`` to a ModelConfig.

A family is a mapping of keys. The tensors' names are those of the mixers, MLPs and layers that its
ModelConfig describes (see their ``mapped``).
"""

from collections.abc import Mapping
from types import MappingProxyType

from jaxspec.models.families.deepseek import DEEPSEEK_V3
from jaxspec.models.families.family import Family
from jaxspec.models.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_IMAGES
from jaxspec.models.families.glm4_moe import GLM4_MOE
from jaxspec.models.families.gpt_oss import GPT_OSS
from jaxspec.models.families.granite import GRANITE
from jaxspec.models.families.llama import LLAMA
from jaxspec.models.families.mistral import MISTRAL
from jaxspec.models.families.mixtral import MIXTRAL
from jaxspec.models.families.olmo import OLMO2, OLMO3
from jaxspec.models.families.phi import PHI3
from jaxspec.models.families.qwen import MIMO, QWEN2, QWEN3
from jaxspec.models.families.qwen3_moe import QWEN3_MOE
from jaxspec.models.families.qwen_hybrid import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
    QWEN3_NEXT,
)
from jaxspec.models.families.smollm import SMOLLM3

__all__ = ["FAMILIES", "Family"]

# By model_type. A config is written by the first family that describes the model.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": LLAMA,
        "mistral": MISTRAL,
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "gemma": GEMMA,
        "gemma2": GEMMA2,
        "gemma3": GEMMA3_IMAGES,
        "gemma3_text": GEMMA3,
        "phi3": PHI3,
        "olmo2": OLMO2,
        "olmo3": OLMO3,
        "smollm3": SMOLLM3,
        "granite": GRANITE,
        "deepseek_v3": DEEPSEEK_V3,
        "mixtral": MIXTRAL,
        "qwen3_moe": QWEN3_MOE,
        "glm4_moe": GLM4_MOE,
        "gpt_oss": GPT_OSS,
        "mimo": MIMO,
        "qwen3_next": QWEN3_NEXT,
        "qwen3_5": QWEN3_5,
        "qwen3_5_text": QWEN3_5_TEXT,
        "qwen3_5_moe": QWEN3_5_MOE,
        "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
    }
)
