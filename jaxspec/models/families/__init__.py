"""Model families: one file a group, each family from its ``config.json`` to a ModelConfig.

A family is a mapping of keys. The tensors' names are those of the mixers, MLPs and layers that its
ModelConfig describes (see their ``mapped``).
"""

from collections.abc import Mapping
from types import MappingProxyType

from jaxspec.models.families import dense, gemma, qwen_hybrid, routed
from jaxspec.models.families.family import Family

# By model_type. A config is written by the first family that describes the model.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": dense.LLAMA,
        "mistral": dense.MISTRAL,
        "qwen2": dense.QWEN2,
        "qwen3": dense.QWEN3,
        "gemma": gemma.GEMMA,
        "gemma2": gemma.GEMMA2,
        "gemma3": gemma.GEMMA3_IMAGES,
        "gemma3_text": gemma.GEMMA3,
        "phi3": dense.PHI3,
        "olmo2": dense.OLMO2,
        "olmo3": dense.OLMO3,
        "smollm3": dense.SMOLLM3,
        "granite": dense.GRANITE,
        "deepseek_v3": routed.DEEPSEEK_V3,
        "mixtral": routed.MIXTRAL,
        "qwen3_moe": routed.QWEN3_MOE,
        "glm4_moe": routed.GLM4_MOE,
        "gpt_oss": routed.GPT_OSS,
        "mimo": dense.MIMO,
        "qwen3_next": qwen_hybrid.QWEN3_NEXT,
        "qwen3_5": qwen_hybrid.QWEN3_5,
        "qwen3_5_text": qwen_hybrid.QWEN3_5_TEXT,
        "qwen3_5_moe": qwen_hybrid.QWEN3_5_MOE,
        "qwen3_5_moe_text": qwen_hybrid.QWEN3_5_MOE_TEXT,
    }
)
