"""Corrections of block heads compute the published equations, along every path of a tree."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from safetensors.numpy import load_file

from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.decoding.trees.grow import Beams, of_parents
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads.corrections import Block, Correction, CorrectionConfig, MarkovConfig
from jaxspec.models.tensors import splitting
from tests.helpers.block_heads import block_target
from tests.helpers.correction_reference import PathLogits, markov_path
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import random_arrays, tiny_config

TARGET = block_target(tiny_config(vocab_size=101, hidden_size=24))
DEPTH, ROWS, PATHS = 5, 2, 3
CASES: dict[str, tuple[CorrectionConfig, PathLogits]] = {
    "vanilla": (MarkovConfig(7), markov_path),
    "gated": (MarkovConfig(7, "gated"), markov_path),
    "rnn": (MarkovConfig(7, "rnn"), markov_path),
}


def random_block(seed: int = 3) -> Block:
    rng = np.random.default_rng(seed)
    outputs = rng.standard_normal((ROWS, DEPTH, 24))
    logits = 2 * rng.standard_normal((ROWS, DEPTH, 101))
    return Block(jnp.float32(outputs), jnp.float32(logits))


def random_correction(config: CorrectionConfig, folder: Path) -> tuple[Any, dict[str, np.ndarray]]:
    """One of random weights, and its tensors as a checkpoint has them."""
    correction = random_arrays(config.shape(24, 101, jnp.dtype("float32")), 4)
    correction = jax.tree.map(lambda x: jnp.asarray(3 * np.asarray(x)), correction)
    save_tree(folder, correction, correction.mapped(splitting()), {})
    return correction, load_file(folder / "model.safetensors")


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def along_beams(
    target: Decoder, correction: Correction, block: Block, tokens: Array, parents: Array
) -> Array:
    """Logits [DEPTH, B, k, V] after beams of tokens [DEPTH, B, k], each behind one of the level
    before."""
    carry, found = correction.start(block), []
    for depth, (level, behind) in enumerate(zip(tokens, parents, strict=True)):
        beams = Beams(level, behind, depth, 0, jnp.zeros((*level.shape, 1), jnp.uint32))
        logits, carry = correction.step(target, block, level, depth, of_parents(beams, carry))
        found.append(logits)
    return jnp.stack(found)


@pytest.mark.parametrize("kind", CASES)
def test_corrected_logits_are_those_of_the_published_equations(kind: str, tmp_path: Path):
    config, reference = CASES[kind]
    correction, tensors = random_correction(config, tmp_path)
    block, rng = random_block(), np.random.default_rng(5)
    tokens = rng.integers(0, 101, (DEPTH, ROWS, PATHS))
    tokens[0] = tokens[0, :, :1]  # the root
    parents = rng.integers(0, PATHS, tokens.shape)
    parents[0] = 0
    ours = along_beams(TARGET, correction, block, jnp.array(tokens), jnp.array(parents))
    for row, beam in np.ndindex(ROWS, PATHS):
        path, at = [], beam
        for depth in reversed(range(DEPTH)):
            path.insert(0, int(tokens[depth, row, at]))
            at = parents[depth, row, at]
        outputs, logits = (np.asarray(x[row], np.float64) for x in block)
        theirs = reference(tensors, outputs, logits, path)
        assert np.abs(theirs - logits).max() > 0.1
        np.testing.assert_allclose(ours[-1, row, beam], theirs[-1], rtol=0, atol=1e-4)
