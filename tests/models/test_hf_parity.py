"""Our decoder on transformers' checkpoints gives transformers' logits, dense and paged."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import decoder, linear
from jaxspec.models import forward_pass as forward
from jaxspec.models.attention import dense_causal_attend
from jaxspec.training.precision import cast_weights
from pallas_kernels.selection import Implementation, Kernels
from tests.helpers.checkpoints import hf_logits, tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3
from tests.helpers.marks import slow
from tests.helpers.parity import assert_close, load, paged_logits

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama-mha": (tiny_llama, {"num_key_value_heads": 4}),
    "llama-gqa": (tiny_llama, {}),
    "llama-mqa": (tiny_llama, {"num_key_value_heads": 1}),
    "llama-tied": (tiny_llama, {"tie_word_embeddings": True}),
    "llama-biases": (tiny_llama, {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (tiny_llama, {"rope_parameters": LLAMA3}),
    "llama-head-dim": (tiny_llama, {"head_dim": 24}),
    "qwen2": (tiny_qwen2, {}),
    "qwen2-tied": (tiny_qwen2, {"tie_word_embeddings": True}),
    "qwen2-windows": (tiny_qwen2, WINDOWS),
    "qwen3": (tiny_qwen3, {}),
    "qwen3-biases-windows": (tiny_qwen3, WINDOWS | {"attention_bias": True}),
    "mistral": (tiny_mistral, {"sliding_window": None}),
    "mistral-window": (tiny_mistral, {"sliding_window": 8}),
}
LENGTH = 40


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """name of a variant -> (its directory, tokens [2, T], transformers' logits [2, T, V])"""
    made: dict[str, tuple[Path, np.ndarray, np.ndarray]] = {}

    def make(name: str) -> tuple[Path, np.ndarray, np.ndarray]:
        if name not in made:
            build, overrides = VARIANTS[name]
            directory = build(tmp_path_factory.mktemp(name), num_hidden_layers=2, **overrides)
            tokens = np.random.default_rng(1).integers(0, 320, (2, LENGTH))
            made[name] = directory, tokens, hf_logits(directory, tokens)
        return made[name]

    return make


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(checkpoint, name: str):
    directory, tokens, expected = checkpoint(name)
    model = load(directory)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)

    @jax.jit
    def run(model, tokens):
        hidden, _, _ = decoder.run(model, tokens, positions, model.no_states(), dense_causal_attend)
        return decoder.logits(model, hidden)

    assert_close(run(model, jnp.asarray(tokens)), expected)


class SplitK(Kernels):
    """Operations that take split-K partial sums, as kernels do, and add them up in XLA."""

    def implementation(self, operation: str) -> Implementation:
        return "reference"


@pytest.mark.slow
def test_split_k_products_give_the_same_logits(checkpoint, monkeypatch: pytest.MonkeyPatch):
    """On a GPU products are split like this for kernels that add up the partial sums."""
    directory, tokens, _ = checkpoint("llama-gqa")
    model = cast_weights(load(directory), jnp.bfloat16)
    kernels = SplitK(frozenset({"add_rms_norm", "rope_kv_write"}))

    def dense_logits(tokens: np.ndarray) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _, _ = decoder.run(
            model, jnp.asarray(tokens), positions, model.no_states(), dense_causal_attend,
            kernels=kernels,
        )  # fmt: skip
        return decoder.logits(model, hidden)

    one = tokens[:1, :1]  # a single row, which is padded

    def all_logits() -> list[jax.Array | np.ndarray]:
        paged = paged_logits(model, tokens, 16, LENGTH, kernels)
        return [dense_logits(tokens), dense_logits(one), paged]

    whole, asked = all_logits(), []
    monkeypatch.setattr(linear, "choose_split_k", lambda *sizes: asked.append(sizes) or 4)
    monkeypatch.setattr(forward, "takes_partials", lambda dtype, width: True)
    monkeypatch.setattr(forward, "heads_take_partials", lambda dtype, width: True)
    in_parts = all_logits()
    assert len(asked) == 3 * 3 * model.config.num_layers  # qkv, o and the MLP's last
    for found, expected in zip(in_parts, whole, strict=True):
        assert jnp.abs(found - expected).max() < 0.03 * jnp.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "page_size", "step"),
    [
        ("qwen3-biases-windows", 7, LENGTH),  # full and sliding layers
        ("qwen3-biases-windows", 3, 1),
        *(slow("qwen3-biases-windows", size, step) for size in (1, 4, 64) for step in (1, LENGTH)),
        *(slow(name, 3, 1) for name in VARIANTS if name != "qwen3-biases-windows"),
        *(slow(name, 7, LENGTH) for name in VARIANTS if name != "qwen3-biases-windows"),
    ],
)
def test_paged_logits_equal_transformers(checkpoint, name: str, page_size: int, step: int):
    directory, tokens, expected = checkpoint(name)
    assert_close(paged_logits(load(directory), tokens, page_size, step), expected)
