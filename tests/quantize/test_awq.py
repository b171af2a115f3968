"""AWQ's two searches beside plain loops over candidates and inputs."""

import jax.numpy as jnp
import numpy as np

from jaxspec.quantize.awq import CLIP_STEPS, RATIOS, candidate_scales, clip_limits, scale_errors
from jaxspec.quantize.rounding import Grid, round_to_nearest

GRID = Grid(3, 8, False)
OUTPUTS, SIZE, GROUP = 12, 32, 8


def problem() -> tuple[np.ndarray, np.ndarray]:
    """Weights, and inputs [N, in] of which a few are much larger."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(200, SIZE)) * np.where(np.arange(SIZE) % 11 == 3, 12.0, 1.0)
    return rng.normal(size=(OUTPUTS, SIZE)).astype(np.float32), inputs.astype(np.float32)


def rounded(weight: np.ndarray) -> np.ndarray:
    return np.asarray(round_to_nearest(jnp.asarray(weight, jnp.float32), GRID).dense())


def scales_by_hand(weight: np.ndarray, inputs: np.ndarray) -> list[np.ndarray]:
    mean_input = np.abs(inputs).mean(0)
    mean_weight = np.zeros(SIZE)
    for k in range(SIZE):
        group = slice(k // GROUP * GROUP, k // GROUP * GROUP + GROUP)
        shares = [abs(row[k]) / (np.abs(row[group]).max() + 1e-6) for row in weight]
        mean_weight[k] = np.mean(shares)
    scales = [np.ones(SIZE)]
    for step in range(RATIOS):
        ratio = step / RATIOS
        scale = np.maximum(mean_input**ratio / (mean_weight ** (1 - ratio) + 1e-4), 1e-4)
        scales.append(scale / np.sqrt(scale.max() * scale.min()))
    return scales


def test_the_best_scale_is_that_of_plain_loops():
    weight, inputs = problem()
    hessian = jnp.asarray(inputs.T @ inputs)
    found = candidate_scales(jnp.asarray(weight), jnp.abs(inputs).mean(0), GRID)
    wanted = scales_by_hand(weight, inputs)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    errors = scale_errors(jnp.asarray(weight), hessian, found, GRID)
    by_hand = []
    for scale in np.asarray(found):
        change = rounded(weight * scale) / scale - weight
        by_hand.append(np.square(inputs @ change.T).sum())
    np.testing.assert_allclose(errors, by_hand, rtol=1e-2)
    best = int(np.argmin(errors))
    assert best == np.argmin(by_hand)
    assert by_hand[best] < 0.8 * by_hand[0]  # the large inputs are worth it


def test_the_best_limits_are_those_of_plain_loops():
    weight, inputs = problem()
    limits = np.asarray(clip_limits(jnp.asarray(weight), jnp.asarray(inputs.T @ inputs), GRID))
    fewer = 0
    for row in range(3):
        for group in range(SIZE // GROUP):
            part = slice(group * GROUP, group * GROUP + GROUP)
            own, largest = weight[row : row + 1, part], np.abs(weight[row, part]).max()
            tried = [largest * (1 - 0.5 * step / CLIP_STEPS) for step in range(CLIP_STEPS)]
            errors = [
                np.square(inputs[:, part] @ (rounded(np.clip(own, -x, x)) - own).T).sum()
                for x in [*tried, limits[row, group]]
            ]
            assert errors[-1] <= min(errors) * 1.001 + 1e-6
            fewer += limits[row, group] < largest
    assert fewer > 0
