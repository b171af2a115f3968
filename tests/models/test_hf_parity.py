"""Our decoder on transformers' checkpoints gives transformers' logits, dense and paged."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import init_layers, page_slots, pages_for
from jaxspec.models import decoder, layers
from jaxspec.models.attention import PagedAttend, dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.models.hf_config import load_model_config
from jaxspec.training.precision import cast_weights
from jaxspec.weights.safetensors_io import load_decoder
from tests.checkpoints import hf_logits, tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3

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


def load(directory: Path) -> Decoder:
    return load_decoder(directory, load_model_config(directory), jnp.dtype(jnp.float32))


def assert_close(ours: jax.Array | np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(checkpoint, name: str):
    directory, tokens, expected = checkpoint(name)
    model = load(directory)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    caches = (None,) * model.config.num_layers

    @jax.jit
    def forward(model, tokens):
        hidden, _, _ = decoder.run(model, tokens, positions, caches, dense_causal_attend)
        return decoder.logits(model, hidden)

    assert_close(forward(model, jnp.asarray(tokens)), expected)


def test_products_in_parts_make_the_same_logits(checkpoint, monkeypatch: pytest.MonkeyPatch):
    """As they do on a GPU, for kernels that add up the parts."""
    directory, tokens, _ = checkpoint("llama-gqa")
    model = cast_weights(load(directory), jnp.bfloat16)
    caches = (None,) * model.config.num_layers

    def dense_logits(tokens: np.ndarray) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        run = decoder.run(model, jnp.asarray(tokens), positions, caches, dense_causal_attend)
        return decoder.logits(model, run[0])

    one = tokens[:1, :1]  # a single row, which is padded

    def all_logits() -> list[jax.Array | np.ndarray]:
        return [dense_logits(tokens), dense_logits(one), paged_logits(model, tokens, 16, LENGTH)]

    whole = all_logits()
    monkeypatch.setattr(layers, "parts_of_product", lambda *sizes: 4)
    monkeypatch.setattr(decoder, "HEAD_DIM", model.config.head_dim)
    monkeypatch.setattr(decoder, "WIDTH_STEP", 1)
    for found, expected in zip(all_logits(), whole, strict=True):
        assert jnp.abs(found - expected).max() < 0.03 * jnp.abs(expected).max()


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("step", [1, LENGTH], ids=["token-by-token", "one-prefill"])
def test_paged_logits_equal_transformers(checkpoint, page_size: int, step: int):
    directory, tokens, expected = checkpoint("qwen3-biases-windows")  # full and sliding layers
    assert_close(paged_logits(load(directory), tokens, page_size, step), expected)


def paged_logits(model: Decoder, tokens: np.ndarray, page_size: int, step: int) -> np.ndarray:
    """Logits of a paged forward pass, ``step`` tokens at a time, pages in a random order."""
    batch, length = tokens.shape
    pages = pages_for(length, page_size)
    config = model.config
    caches = init_layers(
        config.num_layers,
        1 + batch * pages,
        config.num_kv_heads,
        page_size,
        config.head_dim,
        model.embed.dtype,
    )
    order = np.random.default_rng(2).permutation(batch * pages) + 1
    table = jnp.asarray(order.reshape(batch, pages), jnp.int32)

    @jax.jit
    def forward(caches, tokens, start):
        positions = jnp.broadcast_to(start + jnp.arange(step), tokens.shape)
        attend = PagedAttend(
            page_table=table,
            context_lens=jnp.full((batch,), start),
            slots=page_slots(table, positions, jnp.ones_like(positions, bool), page_size),
            positions=positions,
        )
        hidden, caches, _ = decoder.run(model, tokens, positions, caches, attend)
        return decoder.logits(model, hidden), caches

    parts = []
    for start in range(0, length, step):
        part, caches = forward(caches, jnp.asarray(tokens[:, start : start + step]), start)
        parts.append(part)
    return np.concatenate(parts, axis=1)
