"""Qwen3-Next and Qwen 3.5: transformers' logits, and what is refused."""

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
from jaxspec.models.hf_config import load_model_config, parse_model_config
from tests.hybrid_checkpoints import VARIANTS, save_hybrid
from tests.checkpoints import hf_logits
from tests.marks import slow
from tests.parity import load, paged_logits

LENGTH = 40


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """name of a variant -> (its directory, tokens [2, T], transformers' logits [2, T, V])"""
    made: dict[str, tuple[Path, np.ndarray, np.ndarray]] = {}

    def make(name: str) -> tuple[Path, np.ndarray, np.ndarray]:
        if name not in made:
            directory = save_hybrid(tmp_path_factory.mktemp(name), name)
            tokens = np.random.default_rng(1).integers(0, 320, (2, LENGTH))
            made[name] = directory, tokens, hf_logits(directory, tokens)
        return made[name]

    return make


@pytest.mark.parametrize("name", [slow(name) if "-" in name else name for name in VARIANTS])
def test_logits_equal_transformers(checkpoint, name: str):
    directory, tokens, expected = checkpoint(name)
    model = load(directory)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)

    @jax.jit
    def run(model, tokens):
        hidden, _, _ = decoder.run(model, tokens, positions, model.no_states(), dense_causal_attend)
        return decoder.logits(model, hidden)

    found = run(model, jnp.asarray(tokens))
    print(f"{name}: {np.abs(found - expected).max():.1e} of {np.abs(expected).max():.1f}")
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "page_size", "step"),
    [
        ("qwen3_next", 3, 1),
        *(slow(name, 7, LENGTH) for name in VARIANTS),
        *(slow(name, 5, 10) for name in VARIANTS),
        *(slow(name, 1, 1) for name in VARIANTS),
    ],
)
def test_paged_logits_equal_transformers(checkpoint, name: str, page_size: int, step: int):
    directory, tokens, expected = checkpoint(name)
    found = paged_logits(load(directory), tokens, page_size, step)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
