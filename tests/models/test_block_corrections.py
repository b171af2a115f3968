"""Corrections of block heads compute the published equations, along every path of a tree."""

import functools
from collections.abc import Callable
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
from jaxspec.models.heads.convolutions import ConvolutionConfig, convolved
from jaxspec.models.heads.corrections import (
    Block,
    Correction,
    CorrectionConfig,
    MarkovConfig,
    PairCorrection,
    PairScores,
    SelectorConfig,
)
from jaxspec.models.tensors import splitting
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.block_heads import block_target
from tests.helpers.correction_reference import PathLogits, Tensors, markov_path, selector_scores
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


PairReference = Callable[[Tensors, np.ndarray, np.ndarray, int], list[dict[tuple[int, int], float]]]
PAIRS: dict[str, tuple[CorrectionConfig, PairReference]] = {
    "dflash2": (SelectorConfig(5, 6), functools.partial(selector_scores, count=6)),
}


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def scored(target: Decoder, correction: PairCorrection, block: Block, roots: Array) -> PairScores:
    return correction.scores(target, block, roots, NO_KERNELS)


@pytest.mark.parametrize("kind", PAIRS)
def test_scores_of_pairs_are_those_of_the_published_equations(kind: str, tmp_path: Path):
    """Up to a constant for each token before: a softmax follows."""
    config, reference = PAIRS[kind]
    correction, tensors = random_correction(config, tmp_path)
    block, roots = random_block(), [3, 77]
    scores = scored(TARGET, correction, block, jnp.array(roots))
    for row, root in enumerate(roots):
        outputs, logits = (np.asarray(x[row], np.float64) for x in block)
        theirs = reference(tensors, outputs, logits, root)
        before = [root]
        for depth, pairs in enumerate(theirs):
            tokens = scores.tokens[row, depth].tolist()
            ours = scores.pairs[row, depth - 1] if depth else scores.first[row][None]
            wanted = np.array([[pairs[token, one] for one in tokens] for token in before])
            assert np.ptp(wanted - logits[depth, tokens]) > 0.1
            difference = np.asarray(ours) - wanted
            np.testing.assert_allclose(difference - difference[:, :1], 0, rtol=0, atol=1e-4)
            before = tokens


def test_taps_do_not_reach_before_a_block(tmp_path: Path):
    """And they are those of the published equations, with groups of channels."""
    rng = np.random.default_rng(6)
    convolution = random_arrays(ConvolutionConfig(3, 4).shape(24, jnp.dtype("float32")), 7)
    save_tree(tmp_path, convolution, convolution.mapped("", splitting()), {})
    tensors = load_file(tmp_path / "model.safetensors")
    read, given = (jnp.float32(rng.standard_normal((2, DEPTH, 24))) for _ in range(2))
    taps = convolution.taps(read)
    base, said = tensors["base_kernel"], np.asarray(read) @ tensors["kernel_projection.weight"].T
    said = said.reshape(2, DEPTH, 2, 3, 6)
    both = [np.asarray(convolved(given, taps, side)) for side in (0, 1)]
    for row, token, side, channel in np.ndindex(2, DEPTH, 2, 24):
        wanted = sum(
            (base[side, back, channel] + said[row, token, side, back, channel // 4])
            * float(given[row, token - back, channel])
            for back in range(min(3, token + 1))
        )
        assert abs(both[side][row, token, channel] - wanted) < 1e-4
