"""Families beyond Llama's, sharded or in stages: speculation does not change their text.

On one device it is test_families_under_load.py that drafts for them. By default that drafts for one
with windows, test_batch_expansion.py verifies trees with windows, and tests/models/test_parity.py
compares paged logits of all.
"""

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import NGramDrafter, NoDrafter
from jaxspec.engine.engine import Engine
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder, decoder_shapes
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.tensors import splitting
from jaxspec.parallel import make_mesh
from tests.helpers import alias_checkpoints
from tests.helpers.marks import slow
from tests.helpers.random_models import make_params, random_arrays, random_prompts

VOCAB = 96
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
WINDOW = {"sliding_window": 12}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": WINDOW | {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0},
    "gemma3_text": WINDOW | {"sliding_window_pattern": 2},
    "phi3": WINDOW
    | {
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 256,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.5, 2.0],
            "long_factor": [2.0] * 4,
        },
    },
    "olmo2": {"num_key_value_heads": 1},
    "olmo3": WINDOW | {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True} | WINDOW,
    "qwen2": {},  # biases of queries, keys and values
    "mimo": {},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.5},
}
# Tensors and factors that other families do not have, on meshes.
ALIASES = (
    ("ernie4_5", "tp4"),
    ("ernie4_5_moe", "tp2"),
    ("minimax_m2", "tp2"),
    ("seed_oss", "tp2"),
    ("qwen2_moe", "tp2"),
    ("dots1", "tp2"),
    ("hy_v3", "tp2"),
    ("glm4_moe_lite", "tp2"),
    ("granite4", "tp2"),
    ("exaone4", "tp2"),
    ("exaone4", "pp2"),
    ("exaone_moe", "tp2"),
    ("axk1", "tp2"),
    ("axk1", "pp2"),
    ("mellum", "tp2"),
    ("arcee", "tp2"),
    ("solar_open", "tp2"),
    ("youtu", "tp2"),
    ("olmoe", "tp2"),
    ("granitemoe", "tp2"),
    ("ministral", "tp2"),
    ("kimi_k25", "tp2"),
    ("step3p7", "tp2"),
    ("step3p7", "tp2x2"),
    ("hunyuan", "tp2"),
    ("apertus", "tp2"),
    ("cohere2", "tp2"),
    ("cohere2", "tp2x2"),
    ("cohere2", "pp2"),
    ("ministral3", "tp2"),
    ("ministral3", "sp2"),
    ("ministral3", "pp2"),
    ("mistral4", "tp2"),
    *(("gemma4", mesh) for mesh in ("tp2", "tp4", "tp2x2", "sp2", "pp2")),
    *(("gemma4-small", mesh) for mesh in ("tp2", "tp4", "tp2x2", "sp2")),
    *(("gemma4-experts", mesh) for mesh in ("tp2", "tp2x2", "sp2", "pp2")),
    ("deepseek_v32", "tp2"),
    ("glm_moe_dsa-shared", "tp2"),
    *(("minimax_m3", mesh) for mesh in ("tp2", "tp4", "tp2x2", "pp2")),
    ("minimax_m3-local", "tp2"),
    ("hy_v4", "tp2"),
    ("hy_v4", "tp2x2"),
    ("deepseek_v4", "tp2"),
    ("deepseek_v4-yarn", "tp2x2"),
    ("qwen4_exp", "tp2"),
    ("qwen4_exp_text", "tp2x2"),
    ("glm_moe_dsa-shared", "tp2x2"),
    ("glm_moe_dsa-shared", "pp2"),
    ("llama4_text", "tp2"),
    ("llama4_text", "sp2"),
    ("llama4_text", "pp2"),
)
PROMPTS = [p.tolist() for p in random_prompts((5, 21, 1, 40), vocab=VOCAB)]
SAMPLING = [
    SamplingParams(max_tokens=40, temperature=0.7 * (index % 2), seed=index)
    for index in range(len(PROMPTS))
]


MESHES: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel": 2},
    "tp4": {"tensor_parallel": 4},
    "tp2x2": {"tensor_parallel": (2, 2)},
    "sp2": {"sequence_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
}


def raw_config(family: str) -> dict[str, Any]:
    if family in alias_checkpoints.VARIANTS:
        return alias_checkpoints.raw_config(family)
    return SMALL | {"model_type": family} | CONFIGS[family]


@functools.cache
def target(family: str) -> Decoder:
    if family in alias_checkpoints.VARIANTS:
        return alias_checkpoints.random_alias(family)
    config = parse_model_config(raw_config(family))
    model = random_arrays(decoder_shapes(config, jnp.dtype(jnp.float32)), 0)
    assert model.lm_head is not None
    return model.replace(lm_head=model.lm_head.replace(weight=4 * model.lm_head.weight))


def run(params: EngineParams) -> list[list[int]]:
    """Texts over pages of an odd size, rows joining while others decode."""
    cache = CacheConfig(page_size=6, max_length=128)
    engine = Engine(params, cache, EngineConfig(max_rows=2, rounds_per_call=4))
    generations = engine.add_all(PROMPTS, SAMPLING)
    engine.finish(generations)
    assert not any(one.error for one in generations)
    if not isinstance(params.drafter, NoDrafter):
        accepting = sum(one.statistics.accepted[1] for one in generations)
        assert accepting > 4, "hardly a draft was accepted: this run tested little"
    return [one.token_ids for one in generations]


@functools.cache
def plain(family: str) -> list[list[int]]:
    return run(make_params("none", SpeculationConfig.chain(0), target(family)))


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        # On tp4 KV heads are repeated.
        *(slow(family, mesh) for family in CONFIGS for mesh in MESHES),
        *(slow(family, mesh) for family, mesh in ALIASES),
    ],
)
def test_a_checkpoint_on_a_mesh_has_the_same_text(family: str, mesh: str, tmp_path: Path):
    model = target(family)
    save_tree(tmp_path, model, model.mapped(splitting()), raw_config(family))
    params = load(
        tmp_path,
        NGramDrafter(min_match=1),
        speculation=SpeculationConfig.chain(4),
        mesh=make_mesh(**MESHES[mesh]),
    )
    assert run(params) == plain(family)
