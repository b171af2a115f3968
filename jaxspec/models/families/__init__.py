"""Model families: one file a group, each family from its ``config.json`` to a ModelConfig.

A family is a mapping of keys. The tensors' names are those of the mixers, MLPs and layers that its
ModelConfig describes (see their ``mapped``).
"""

from collections.abc import Mapping
from types import MappingProxyType

from jaxspec.models.families import (
    apertus,
    cohere,
    dense,
    dense_aliases,
    falcon_h1,
    gemma,
    gemma4,
    hunyuan,
    indexed,
    lfm2,
    llama4,
    mamba_hybrid,
    qwen_hybrid,
    routed,
    routed_aliases,
    step,
    text_of_images,
)
from jaxspec.models.families.family import Family
from jaxspec.models.families.with_images import WithImages

# By model_type. A config is written by the first family that describes the model.
FAMILIES: Mapping[str, Family | WithImages] = MappingProxyType(
    {
        "llama": dense.LLAMA,
        "mistral": dense.MISTRAL,
        "qwen2": dense.QWEN2,
        "qwen3": dense.QWEN3,
        "gemma": gemma.GEMMA,
        "gemma2": gemma.GEMMA2,
        "gemma3": gemma.GEMMA3_IMAGES,
        "gemma3_text": gemma.GEMMA3,
        "gemma4": gemma4.GEMMA4,
        "gemma4_text": gemma4.GEMMA4_TEXT,
        "gemma4_unified": gemma4.GEMMA4_UNIFIED,
        "gemma4_unified_text": gemma4.GEMMA4_UNIFIED_TEXT,
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
        "hunyuan_v1_dense": hunyuan.HUNYUAN,
        "apertus": apertus.APERTUS,
        "cohere2": cohere.COHERE2,
        "llama4": text_of_images.LLAMA4,
        "llama4_text": llama4.LLAMA4_TEXT,
        "seed_oss": dense_aliases.SEED_OSS,
        "ministral3": dense_aliases.MINISTRAL3,
        "granitemoehybrid": mamba_hybrid.GRANITE4,
        "ernie4_5": dense_aliases.ERNIE4_5,
        "exaone4": dense_aliases.EXAONE4,
        "kimi_k2": routed_aliases.KIMI_K2,
        "glm4_moe_lite": routed_aliases.GLM4_MOE_LITE,
        "deepseek_v32": indexed.DEEPSEEK_V32,
        "glm_moe_dsa": indexed.GLM_MOE_DSA,
        "mistral4": routed_aliases.MISTRAL4,
        "dots1": routed_aliases.DOTS1,
        "minimax_m2": routed_aliases.MINIMAX_M2,
        "hy_v3": routed_aliases.HY_V3,
        "ernie4_5_moe": routed_aliases.ERNIE4_5_MOE,
        "qwen2_moe": routed_aliases.QWEN2_MOE,
        "bamba": mamba_hybrid.BAMBA,
        "falcon_h1": falcon_h1.FALCON_H1,
        "lfm2": lfm2.LFM2,
        "lfm2_moe": lfm2.LFM2_MOE,
        "step3p5": step.STEP3P5,
        "step3p7": step.STEP3P7,
        "qwen2_vl": text_of_images.QWEN2_VL,
        "qwen2_5_vl": text_of_images.QWEN2_5_VL,
        "qwen3_vl": text_of_images.QWEN3_VL,
        "qwen3_vl_moe": text_of_images.QWEN3_VL_MOE,
        "mistral3": text_of_images.MISTRAL3,
        "kimi_k25": text_of_images.KIMI_K25,
    }
)
