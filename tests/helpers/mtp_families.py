"""Tiny random models of DeepSeek-V3, GLM and MiMo, and checkpoints whose MTP layer guesses well."""

from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.mtp import AFTER, MtpConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.json.mtp_names import mtp_names
from jaxspec.models.tensors import splitting
from tests.helpers.random_experts import random_expert_target
from tests.helpers.random_models import mtp_head

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "num_nextn_predict_layers": 1,
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 40,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
        **EXPERTS,
    },
    "glm4_moe": EXPERTS,
    "mimo": {},
    "llama": {},  # with a layer named as DeepSeek's
}


def raw_config(family: str, **changes: Any) -> dict[str, Any]:
    return SIZES | {"model_type": family} | CONFIGS[family] | changes


def random_family(family: str, context: float = 0.3, **changes: Any) -> Decoder:
    """Nearly a bigram model (see random_target); ``changes`` go to its config."""
    config = parse_model_config(raw_config(family, **changes))
    return random_expert_target(config, context=context)


def save_with_mtp(
    directory: Path, family: str, context: float = 0.3, count: int = 1, **changes: Any
) -> Path:
    """A checkpoint of such a model, with ``count`` MTP layers in its family's layout."""
    changes |= {"num_nextn_predict_layers": count}
    model, extra = random_family(family, context, **changes), {}
    mtp = model.config.mtp or MtpConfig("deepseek", count, AFTER)
    for index in range(count):
        head = mtp_head(model, seed=4 + index, layout=mtp.layout, states=mtp.states, index=index)
        first = mtp_names(mtp, model.config.num_layers, index).layer.removesuffix(".")
        own = directory / f"head-{index}"
        save_tree(own, head, head.mapped(first, splitting()), {})
        extra |= load_file(own / "model.safetensors")
    save_tree(directory, model, model.mapped(splitting()), raw_config(family, **changes), extra)
    return directory
