"""Kernels on a CPU: interpreted, and lowered for cuda; and attention beside its reference."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.tuning import AttentionTuning
from tests.helpers.programs import FAST_COMPILE

run_reference = jax.jit(
    functools.partial(paged_attention_reference, order_invariant=False),
    static_argnames="options",
    compiler_options=FAST_COMPILE,
)


def interpreted(
    kernel: Callable[..., Any], *arguments: Any, detect_races: bool = False, **options: Any
) -> Any:
    """What a Hopper kernel returns.

    The interpreter's callbacks run jax: they and the caller's operations would wait for each other
    for ever. It knows no clusters: no CTA can read another one's shared memory.
    """
    interpret = plgpu.InterpretGPUParams(detect_races=detect_races)
    return jax.block_until_ready(kernel(*arguments, **options, interpret=interpret))


def lowered(function: Callable[..., Any], *arguments: Any) -> str:
    """The program of a function of such arguments, or shapes, for a GPU."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text
    return text


def widened(x: Any) -> Any:
    """Numbers of 16 bits in float32, others as they are, in NumPy; None stays."""
    return np.asarray(x).astype(np.float32) if x is not None and x.dtype == jnp.bfloat16 else x


def relative_error(found: Any, expected: Any) -> float:
    """Of outputs [B, T, Q, D], over the queries that see a slot; all are finite."""
    found, expected = np.asarray(widened(found)), np.asarray(widened(expected))
    assert found.shape == expected.shape and np.isfinite(found).all()
    sees = np.linalg.norm(expected, axis=(2, 3)) > 0
    return float(np.linalg.norm((found - expected)[sees]) / np.linalg.norm(expected[sees]))


def attention_error(case: Case, found: Any, arguments: Any) -> float:
    """Relative, of paged attention, against the reference in float32."""
    with jax.default_matmul_precision("highest"):
        expected = run_reference(*jax.tree.map(widened, arguments), options=case.options)
    return relative_error(found, expected)


def fitting(case: Case, config: AttentionTuning | None) -> Case:
    """The case, with another KV head if thread blocks of the configuration need an even number."""
    if config is None or case.kv_heads % config.heads == 0:
        return case
    return dataclasses.replace(case, kv_heads=2, num_heads=2 * case.num_heads)
