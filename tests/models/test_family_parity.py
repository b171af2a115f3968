"""Families beyond Llama, Qwen and Mistral, and kinds of rope: transformers' logits in float32."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.json.values import read_json
from tests.helpers.checkpoints import TINY, hf_logits, save_random_model
from tests.helpers.marks import slow
from tests.helpers.parity import assert_close, load, paged_logits

LENGTH = 24
SMALL = TINY | {"num_hidden_layers": 3}
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 7}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, tuple[type, dict[str, Any]]] = {
    "gemma": (transformers.GemmaConfig, {"head_dim": 24}),
    "gemma2": (
        transformers.Gemma2Config,
        GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        GEMMA
        | {
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3-cap": (
        transformers.Gemma3TextConfig,
        GEMMA | {"final_logit_softcapping": 2.0, "attention_bias": True},
    ),
    "phi3": (transformers.Phi3Config, {"sliding_window": 9}),
    "phi4-mini": (
        transformers.Phi3Config,
        {
            "rope_parameters": LONGROPE | {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 64,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": (transformers.Olmo2Config, {}),
    "olmo2-mqa": (transformers.Olmo2Config, {"num_key_value_heads": 1, "attention_bias": True}),
    "olmo3": (
        transformers.Olmo3Config,
        {"sliding_window": 7, "num_hidden_layers": 4, "rope_scaling": YARN},
    ),
    "smollm3": (transformers.SmolLM3Config, {"no_rope_layer_interval": 2}),
    "smollm3-windows": (
        transformers.SmolLM3Config,
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 7},
    ),
    "granite": (
        transformers.GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.4,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "linear": (transformers.LlamaConfig, {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    # Up to the longest text: longer ones would be rotated otherwise, and are refused.
    "dynamic": (
        transformers.LlamaConfig,
        {
            "rope_scaling": {"type": "dynamic", "factor": 3.0},
            "max_position_embeddings": LENGTH,
        },
    ),
    "yarn": (transformers.LlamaConfig, {"rope_scaling": YARN}),
    "yarn-mscale": (
        transformers.LlamaConfig,
        {
            "rope_scaling": YARN
            | {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False, "beta_fast": 8.0}
        },
    ),
    "longrope": (
        transformers.LlamaConfig,
        {
            "head_dim": 8,
            "rope_scaling": LONGROPE | {"original_max_position_embeddings": 64},
        },
    ),
}
# Every kind of norm, rope, scale and cap, and both ways in which tensors are named.
FAST = ("gemma2", "phi4-mini", "olmo3", "smollm3-windows", "granite")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """name of a variant -> (its directory, tokens [2, T], transformers' logits [2, T, V])"""
    made: dict[str, tuple[Path, np.ndarray, np.ndarray]] = {}

    def make(name: str) -> tuple[Path, np.ndarray, np.ndarray]:
        if name not in made:
            kind, overrides = VARIANTS[name]
            config = kind(**SMALL | {"eos_token_id": 2, "pad_token_id": 0} | overrides)
            directory = save_random_model(tmp_path_factory.mktemp(name), config)
            tokens = np.random.default_rng(1).integers(0, 320, (2, LENGTH))
            made[name] = directory, tokens, hf_logits(directory, tokens)
        return made[name]

    return make


@pytest.mark.parametrize("name", ["gemma2", *(slow(name) for name in VARIANTS if name != "gemma2")])
def test_prefill_has_the_logits_of_transformers(checkpoint, name: str):
    directory, tokens, expected = checkpoint(name)
    model = load(directory)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)

    @jax.jit
    def run(model, tokens):
        hidden, _, _ = decoder.run(model, tokens, positions, model.no_states(), dense_causal_attend)
        return decoder.logits(model, hidden)

    assert_close(run(model, jnp.asarray(tokens)), expected)


@pytest.mark.parametrize(
    ("name", "page_size", "step"),
    [
        *((name, 5, 1) for name in FAST),
        *(slow(name, 5, 1) for name in VARIANTS if name not in FAST),
        *(slow(name, *how) for name in VARIANTS for how in ((3, LENGTH), (16, 8))),
    ],
)
def test_pages_have_the_logits_of_transformers(checkpoint, name: str, page_size: int, step: int):
    directory, tokens, expected = checkpoint(name)
    assert_close(paged_logits(load(directory), tokens, page_size, step), expected)


ORIGINAL = 16  # below LENGTH


def test_longrope_on_both_sides_of_the_original_length(tmp_path: Path):
    """Texts up to the original length have the short factors. Longer ones have the long factors at
    all positions, where config.json has these in place of the short ones (docs/models.md)."""
    kind, own = VARIANTS["phi4-mini"]
    own = SMALL | {"eos_token_id": 2, "pad_token_id": 0} | own
    own |= {"original_max_position_embeddings": ORIGINAL}
    directory = save_random_model(tmp_path, kind(**own))
    tokens = np.random.default_rng(1).integers(0, 320, (2, LENGTH))
    expected = [hf_logits(directory, tokens[:, :length]) for length in (ORIGINAL, LENGTH)]

    short = load(directory)
    assert short.config.max_position == ORIGINAL
    assert_close(paged_logits(short, tokens[:, :ORIGINAL], 5, 8), expected[0])

    raw = read_json(directory / "config.json")
    factors = raw["rope_parameters"]
    factors["short_factor"] = factors["long_factor"]
    (directory / "config.json").write_text(json.dumps(raw))
    long = load(directory)
    assert long.config.max_position == SMALL["max_position_embeddings"]
    found = paged_logits(long, tokens, 5, 8)
    assert_close(found, expected[1])
    assert np.abs(found[:, :ORIGINAL] - expected[0]).max() > 0.01  # else the factors say nothing
