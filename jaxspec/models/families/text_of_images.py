"""Models of text and images of which the text model is read.

They are Qwen2-VL to Qwen3-VL, Mistral Small 3.x and 4, Ministral 3, Llama 4, EXAONE 4.5, GLM-4.5V
and 4.6V, and Kimi K2.5. Gemma 3 and Qwen 3.5 stand beside their text models.
"""

import dataclasses

from jaxspec.models.families.dense import MISTRAL
from jaxspec.models.families.dense_aliases import (
    MINISTRAL3,
    QWEN2_5_VL_TEXT,
    QWEN2_VL_TEXT,
    QWEN3_VL_TEXT,
)
from jaxspec.models.families.exaone import EXAONE4_5_TEXT
from jaxspec.models.families.family import sizes
from jaxspec.models.families.llama4 import LLAMA4_TEXT
from jaxspec.models.families.routed import DEEPSEEK_V3
from jaxspec.models.families.routed_aliases import GLM4V_MOE_TEXT, KIMI_K2, MISTRAL4
from jaxspec.models.families.softmax_routed import QWEN3_VL_MOE_TEXT
from jaxspec.models.families.with_images import SHARED, TEXT, WithImages

QWEN2_VL = WithImages(
    "Qwen2VLForConditionalGeneration", {"qwen2_vl_text": QWEN2_VL_TEXT}, flat=True
)
QWEN2_5_VL = WithImages(
    "Qwen2_5_VLForConditionalGeneration", {"qwen2_5_vl_text": QWEN2_5_VL_TEXT}, flat=True
)
QWEN3_VL = WithImages("Qwen3VLForConditionalGeneration", {"qwen3_vl_text": QWEN3_VL_TEXT})
QWEN3_VL_MOE = WithImages(
    "Qwen3VLMoeForConditionalGeneration",
    {"qwen3_vl_moe_text": QWEN3_VL_MOE_TEXT},
    defaults={"tie_word_embeddings": False},
)
_MISTRAL_SMALL = {
    **sizes(131072, 5120, 32768, 40, 32, 8, 131072),
    **{"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None},
}
MISTRAL3 = WithImages(
    "Mistral3ForConditionalGeneration",
    {"mistral": MISTRAL, "ministral3": MINISTRAL3, "mistral4": MISTRAL4},
    defaults={"tie_word_embeddings": True, TEXT: _MISTRAL_SMALL},
)
LLAMA4 = WithImages("Llama4ForConditionalGeneration", {"llama4_text": LLAMA4_TEXT})
GLM4V_MOE = WithImages("Glm4vMoeForConditionalGeneration", {"glm4v_moe_text": GLM4V_MOE_TEXT})
EXAONE4_5 = WithImages(
    "Exaone4_5_ForConditionalGeneration",
    {
        "exaone4": EXAONE4_5_TEXT,
        "exaone4_5_text": dataclasses.replace(EXAONE4_5_TEXT, class_of="exaone4"),
    },
    shared=(*SHARED, "num_nextn_predict_layers"),  # where vLLM looks for it
    agreeing=("num_nextn_predict_layers",),
)
KIMI_K25 = WithImages(
    "Kimi_K25ForConditionalGeneration",
    {"deepseek_v3": DEEPSEEK_V3, "kimi_k2": KIMI_K2},
    published_as="KimiK25ForConditionalGeneration",
    defaults={"tie_word_embeddings": True},
)
