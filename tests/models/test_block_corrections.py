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
    DominoConfig,
    LiLiCorrConfig,
    MarkovConfig,
    PairCorrection,
    PairScores,
    SelectorConfig,
    XPressConfig,
    lattice_of,
)
from jaxspec.models.tensors import joining, splitting, tensor_shapes
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.block_heads import block_target
from tests.helpers.correction_reference import (
    PathLogits,
    domino_path,
    jacobi_passes,
    lilicorr_scores,
    markov_path,
    selector_scores,
    xpress_logits,
)
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import as_dtype, random_arrays, tiny_config

TARGET = block_target(tiny_config(vocab_size=101, hidden_size=24))
EMBED = np.asarray(TARGET.embed)
DEPTH, ROWS, PATHS = 5, 2, 3
LATTICE = LiLiCorrConfig(
    candidates=3, hidden=10, layers=2, heads=2, units=15, factor=7, depths=DEPTH + 1,
    vector_eps=1e-4, logit_scale=8.0, eps=1e-5,
)  # fmt: skip
LATTICE_SIZES = {"count": 3, "heads": 2, "eps": 1e-5, "vector_eps": 1e-4, "scale": 8.0}
CASES: dict[str, tuple[CorrectionConfig, PathLogits]] = {
    "vanilla": (MarkovConfig(7), markov_path),
    "gated": (MarkovConfig(7, "gated"), markov_path),
    "rnn": (MarkovConfig(7, "rnn"), markov_path),
    "domino": (
        DominoConfig(state=5, rank=7, first=1),
        functools.partial(domino_path, embeddings=EMBED, first=1),
    ),
}


def random_block(seed: int = 3) -> Block:
    rng = np.random.default_rng(seed)
    outputs = rng.standard_normal((ROWS, DEPTH, 24))
    logits = 2 * rng.standard_normal((ROWS, DEPTH, 101))
    context = rng.standard_normal((ROWS, 24))
    return Block(*(as_dtype(values, np.float32) for values in (outputs, logits, context)))


def random_correction(
    config: CorrectionConfig, folder: Path, scale: float = 3.0
) -> tuple[Any, dict[str, np.ndarray]]:
    """One of random weights, and its tensors as a checkpoint has them."""
    correction = random_arrays(config.shape(24, 101, jnp.dtype("float32")), 4)
    correction = jax.tree.map(lambda x: as_dtype(scale * np.asarray(x), x.dtype), correction)
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
    ours = np.asarray(along_beams(TARGET, correction, block, tokens, parents))
    for row, beam in np.ndindex(ROWS, PATHS):
        path, at = [], beam
        for depth in reversed(range(DEPTH)):
            path.insert(0, int(tokens[depth, row, at]))
            at = parents[depth, row, at]
        outputs, logits, _ = (np.asarray(x[row], np.float64) for x in block if x is not None)
        theirs = reference(tensors, outputs, logits, path)
        assert np.abs(theirs - logits).max() > 0.1
        np.testing.assert_allclose(ours[-1, row, beam], theirs[-1], rtol=0, atol=1e-4)


def test_a_refiner_walks_to_the_fixed_point_of_its_passes(tmp_path: Path):
    """The greedy chain of XPress is what Jacobi passes end with, and its logits along any path are
    those of one pass over it."""
    refiner, tensors = random_correction(XPressConfig(7, 9, DEPTH + 1), tmp_path, 1.5)
    block, rng = random_block(), np.random.default_rng(8)
    root_output, before = rng.standard_normal((ROWS, 24)), rng.integers(0, 101, ROWS)
    root_output, before = as_dtype(root_output, np.float32), before.astype(np.int32)
    block = block._replace(root_output=root_output, before=jax.device_put(before))
    roots, parents = rng.integers(0, 101, ROWS), np.zeros((DEPTH, ROWS, 1), np.int32)
    outputs = np.concatenate([np.asarray(root_output)[:, None], block.outputs], axis=1)
    tokens = np.zeros((DEPTH + 1, ROWS, 1), np.int32)  # nothing reads later ones
    tokens[0, :, 0] = roots
    for depth in range(DEPTH):
        ours = along_beams(TARGET, refiner, block, tokens[:DEPTH], parents)[depth, :, 0]
        for row in range(ROWS):
            path = [int(before[row]), *tokens[:DEPTH, row, 0].tolist()]
            base = np.asarray(block.logits[row], np.float64)
            theirs = xpress_logits(tensors, outputs[row], base, path)
            assert np.abs(theirs - base).max() > 0.1
            np.testing.assert_allclose(ours[row], theirs[depth], rtol=0, atol=1e-4)
        tokens[depth + 1, :, 0] = np.asarray(ours).argmax(axis=1)
    for row in range(ROWS):
        known = [int(before[row]), int(roots[row])]
        base = np.asarray(block.logits[row], np.float64)
        passes = [jacobi_passes(tensors, outputs[row], base, known, n) for n in (0, DEPTH)]
        assert tokens[1:, row, 0].tolist() == passes[1] != passes[0]


PairReference = Callable[..., list[dict[tuple[int, int], float]]]
PAIRS: dict[str, tuple[CorrectionConfig, PairReference]] = {
    "dflash2": (SelectorConfig(5, 6), functools.partial(selector_scores, count=6)),
    "lilicorr": (
        LATTICE,
        functools.partial(lilicorr_scores, embeddings=EMBED, sizes=LATTICE_SIZES),
    ),
}


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def scored(target: Decoder, correction: PairCorrection, block: Block, roots: Array) -> PairScores:
    lattice = lattice_of(block, correction, target.layout, NO_KERNELS)
    return correction.scores(target, lattice, roots)


@pytest.mark.parametrize("kind", PAIRS)
def test_scores_of_pairs_are_those_of_the_published_equations(kind: str, tmp_path: Path):
    """Up to a constant for each token before: a softmax follows."""
    config, reference = PAIRS[kind]
    correction, tensors = random_correction(config, tmp_path)
    block, roots = random_block(), [3, 77]
    scores = scored(TARGET, correction, block, np.array(roots))
    scores = jax.tree.map(np.asarray, scores)
    for row, root in enumerate(roots):
        known = (np.asarray(x[row], np.float64) for x in block if x is not None)
        outputs, logits, context = known
        own = {"context": context} if kind == "lilicorr" else {}
        theirs = reference(tensors, outputs, logits, root, **own)
        before = [root]
        for depth, pairs in enumerate(theirs):
            tokens = scores.tokens[row, depth].tolist()
            ours = scores.pairs[row, depth - 1] if depth else scores.first[row][None]
            wanted = np.array([[pairs[token, one] for one in tokens] for token in before])
            assert np.ptp(wanted - logits[depth, tokens]) > 0.1
            difference = np.asarray(ours) - wanted
            np.testing.assert_allclose(difference - difference[:, :1], 0, rtol=0, atol=1e-4)
            before = tokens


@pytest.mark.parametrize("kind", PAIRS)
def test_candidates_may_be_ranked_otherwise(kind: str, tmp_path: Path):
    """Their log-probabilities stay those of the logits, in whose order they are."""
    correction, _ = random_correction(PAIRS[kind][0], tmp_path)
    block = random_block()
    ranked = jax.random.permutation(jax.random.key(8), block.logits, axis=2, independent=True)
    lattice = lattice_of(block, correction, TARGET.layout, NO_KERNELS, ranked)
    chosen = np.asarray(jax.lax.top_k(ranked, correction.candidates)[1])
    places = np.argsort(-np.take_along_axis(np.asarray(block.logits), chosen, axis=2), axis=2)
    best = np.take_along_axis(chosen, places, axis=2)
    np.testing.assert_array_equal(lattice.tokens, best)
    log_probs = jax.nn.log_softmax(block.logits) if correction.reads_sums else block.logits
    wanted = np.take_along_axis(np.asarray(log_probs), best, axis=2)
    np.testing.assert_allclose(lattice.log_probs, wanted, atol=1e-5)


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


def test_scores_of_a_lattice_are_those_of_another_implementation():
    """Weights and scores as a test of TensorRT-LLM has them, from Model Optimizer's own head."""
    renamed = {".mlp.0.": ".mlp.up_proj.", ".mlp.2.": ".mlp.down_proj."}
    renamed |= {"feature_mlp.0.": "feature_norm.", "feature_mlp.1.": "feature_mlp.up_proj."}
    renamed |= {"feature_mlp.3.": "feature_mlp.down_proj."}
    config = LiLiCorrConfig(
        candidates=3, hidden=8, layers=2, heads=2, units=16, factor=8, depths=3,
        vector_eps=1e-4, logit_scale=8.0, eps=1e-5,
    )  # fmt: skip
    shapes = config.shape(32, 16, jnp.dtype("float32"))
    splits = jax.tree.leaves(shapes.mapped(splitting()))
    tensors = {}
    for name, shape in tensor_shapes(zip(jax.tree.leaves(shapes), splits, strict=True)).items():
        theirs = name.removeprefix("lilicorr.")
        for ours, other in renamed.items():
            theirs = theirs.replace(ours, other)
        values = np.arange(np.prod(shape.shape), dtype=np.float32).reshape(shape.shape)
        sines = np.sin(values * 0.17 + sum(theirs.encode()) * 0.013)
        tensors[name] = jnp.float32(0.2 * sines)
    correction = shapes.mapped(joining(tensors))
    ids = [[2, 5, 9], [6, 3, 1], [4, 7, 8]]
    logs = np.array([[-0.4, -1.5, -3.0], [-0.6, -1.7, -2.7], [-0.2, -2.1, -3.4]])
    logits = np.empty((1, 3, 16), np.float32)
    for depth, (row, known) in enumerate(zip(ids, logs, strict=True)):
        logits[0, depth] = np.log((1 - np.exp(known).sum()) / 13)
        logits[0, depth, row] = known
    outputs = np.linspace(-0.7, 0.9, 96, dtype=np.float32).reshape(1, 3, 32)
    context = np.linspace(-0.5, 0.4, 32, dtype=np.float32).reshape(1, 32)
    embed = jnp.float32(np.linspace(-1.2, 1.3, 512).reshape(16, 32))
    block = Block(*map(jnp.asarray, (outputs, logits, context)))
    scores = scored(block_target().replace(embed=embed), correction, block, jnp.array([0]))
    assert scores.tokens[0].tolist() == ids
    np.testing.assert_allclose(scores.first[0], [-2.00565147, -2.00631571, -2.01010752], atol=2e-5)
    pairs = [
        [
            [1.16437435, 1.16812551, 1.15701485],
            [1.16656375, 1.17030466, 1.15921211],
            [1.17068172, 1.17445230, 1.16334319],
        ],
        [
            [1.14806044, 1.14459574, 1.12698877],
            [1.14481199, 1.14134955, 1.12373281],
            [1.14475155, 1.14125943, 1.12357390],
        ],
    ]
    np.testing.assert_allclose(scores.pairs[0], pairs, atol=2e-5)
