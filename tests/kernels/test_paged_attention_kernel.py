"""The Hopper kernel of paged attention: interpreted, lowered, and (with `-m gpu`) run."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from jaxspec.parallel import make_mesh
from pallas_kernels.paged_attention import misfit, paged_attention
from pallas_kernels.paged_attention.cases import (
    KERNEL_CASES,
    LONG_CASES,
    TEST_CASES,
    Case,
    make_arguments,
)
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_mosaic
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.tuning import AttentionTuning
from pallas_kernels.pages import AttentionOptions
from tests.helpers.marks import first_is_fast, slow
from tests.helpers.programs import FAST_COMPILE

run_reference = jax.jit(
    functools.partial(paged_attention_reference, order_invariant=False),
    static_argnames="options",
    compiler_options=FAST_COMPILE,
)
NARROW = AttentionTuning(block=64, stages=2)
TWO_HEADS = AttentionTuning(block=64, stages=2, heads=2)
WIDE = AttentionTuning(block=128, stages=2, warpgroups=2, registers=240)
PING_PONG = dataclasses.replace(WIDE, ping_pong=True)
# The others take up to twenty seconds each, and run on every GPU that the tests meet.
FAST = {"K: window under a tree"}
INTERPRETED = [
    pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow)
    for case in KERNEL_CASES
]


def error(case: Case, found: jax.Array, arguments: Any) -> float:
    """Relative, against the reference in float32."""

    def widen(x: Any) -> Any:
        return np.asarray(x).astype(np.float32) if x is not None and x.dtype == jnp.bfloat16 else x

    with jax.default_matmul_precision("highest"):
        reference = np.asarray(run_reference(*jax.tree.map(widen, arguments), options=case.options))
    return float(np.linalg.norm(widen(found) - reference) / np.linalg.norm(reference))


def interpret(arguments: Any, options: AttentionOptions, config: AttentionTuning) -> jax.Array:
    """Without splits: the interpreter cannot read another CTA's shared memory.

    Its callbacks run jax: they and the caller's operations would wait for each other for ever.
    """
    return jax.block_until_ready(
        paged_attention_mosaic(
            *arguments, options=options, config=config, interpret=plgpu.InterpretGPUParams()
        )
    )


def interpreted(case: Case, config: AttentionTuning) -> jax.Array:
    """The kernel's result, which is the reference's."""
    arguments = make_arguments(case, jnp.bfloat16)
    found = interpret(arguments, case.options, config)
    assert error(case, found, arguments) < 4e-3
    return found


def named(name: str) -> Case:
    return next(case for case in KERNEL_CASES if case.name == name)


@pytest.mark.slow
def test_scores_may_have_a_scale_of_their_own():
    """With twice the usual scale, it is what it is for twice the queries."""
    case = named("K: window under a tree")
    q, *others = make_arguments(case, jnp.bfloat16)
    scaled = interpret(
        (q, *others), dataclasses.replace(case.options, scale=2 * case.head_dim**-0.5), NARROW
    )
    assert jnp.array_equal(scaled, interpret((2 * q, *others), case.options, NARROW))


def test_a_soft_cap_is_left_to_the_reference():
    arguments = make_arguments(KERNEL_CASES[0], jnp.bfloat16)
    with pytest.raises(ValueError, match="cannot take scores with a soft cap of 5"):
        paged_attention(
            *arguments, options=AttentionOptions(softcap=5.0), implementation="mosaic_gpu"
        )
    capped = AttentionOptions(scale=0.5, softcap=5.0)
    run = functools.partial(paged_attention, *arguments)
    auto = jax.jit(functools.partial(run, options=capped, implementation="auto"))()
    np.testing.assert_array_equal(auto, jax.jit(functools.partial(run, options=capped))())
    plain = jax.jit(functools.partial(run, options=AttentionOptions(scale=0.5)))()
    assert np.abs(np.asarray(auto - plain, np.float32)).max() > 0.01


@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted_it_is_the_reference(case: Case):
    interpreted(case, PING_PONG if case.num_tokens > 16 else NARROW)


@pytest.mark.slow
@pytest.mark.parametrize("case", [KERNEL_CASES[2], KERNEL_CASES[4]], ids=str)
def test_a_block_of_threads_may_serve_two_heads(case: Case):
    interpreted(case, TWO_HEADS)


@pytest.mark.slow
@pytest.mark.parametrize("config", [WIDE, AttentionTuning(block=64, stages=2, warpgroups=2)])
def test_ping_pong_scheduling_changes_nothing(config: AttentionTuning):
    case = named("K: window")
    alternating = interpreted(case, dataclasses.replace(config, ping_pong=True))
    assert jnp.array_equal(alternating, interpreted(case, config))


@pytest.mark.slow
def test_blocks_of_128_slots_suit_one_warpgroup_too():
    interpreted(named("K: pages of 16, a tree"), AttentionTuning(block=128, stages=2))


@pytest.mark.parametrize(
    "config",
    [
        None,
        slow(AttentionTuning(block=64, stages=5, splits=8)),
        slow(AttentionTuning(block=64, stages=2, warpgroups=2, splits=2, ping_pong=True)),
    ],
)
@first_is_fast(KERNEL_CASES[::-1], 5)  # the last ones: windows, first slots, chunks
def test_it_lowers_for_cuda(case: Case, config: AttentionTuning | None):
    arguments = jax.eval_shape(lambda: make_arguments(case, jnp.bfloat16))
    function = functools.partial(paged_attention_mosaic, options=case.options, config=config)
    assert jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2])
def test_on_the_device_two_heads_share_a_block_of_threads(splits: int):
    for case in (KERNEL_CASES[2], KERNEL_CASES[4], LONG_CASES[1]):
        arguments = make_arguments(case, jnp.bfloat16)
        config = dataclasses.replace(TWO_HEADS, splits=splits)
        found = jax.jit(
            functools.partial(paged_attention_mosaic, options=case.options, config=config)
        )(*arguments)
        assert error(case, found, arguments) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [None, 1, 2, 8])
@pytest.mark.parametrize("case", [*KERNEL_CASES, *LONG_CASES], ids=str)
def test_on_the_device_it_is_the_reference(case: Case, splits: int | None):
    arguments = make_arguments(case, jnp.bfloat16)
    config = None
    if splits is not None:
        config = WIDE if case.num_tokens > 16 else NARROW
        config = dataclasses.replace(config, splits=splits)
    function = jax.jit(
        functools.partial(paged_attention_mosaic, options=case.options, config=config)
    )
    found = function(*arguments)
    assert error(case, found, arguments) < 4e-3
    assert all(jnp.array_equal(found, function(*arguments)) for _ in range(5)), "a race"


@pytest.mark.gpu
@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_devices_attend_with_their_own_heads(case: Case):
    """As under tensor parallelism: a mesh of two devices, each with half of the heads."""
    if len(jax.devices()) < 2:
        pytest.skip("one device")
    if case.kv_heads % 2:
        case = dataclasses.replace(case, kv_heads=2, num_heads=2 * case.num_heads)
    arguments = make_arguments(case, jnp.bfloat16)
    heads, pages, whole = P(None, None, "model"), P(None, "model"), P()
    sharded = jax.shard_map(
        functools.partial(paged_attention_mosaic, options=case.options),
        mesh=make_mesh(2),
        in_specs=(heads, pages, whole),
        out_specs=heads,
        check_vma=False,
    )
    assert error(case, jax.jit(sharded)(*arguments), arguments) < 4e-3


@pytest.mark.slow
@pytest.mark.parametrize("case", [KERNEL_CASES[0], KERNEL_CASES[4]], ids=str)
def test_it_has_its_references_gradient(case: Case):
    """A program of the gradient alone holds no kernel, so it runs on a CPU too."""
    arguments: Any = make_arguments(case, jnp.bfloat16)
    q, others = arguments[0], arguments[1:]

    def gradient(implementation: Any) -> jax.Array:
        def total(q: jax.Array) -> jax.Array:
            out = paged_attention(q, *others, options=case.options, implementation=implementation)
            return out.astype(jnp.float32).sum()

        return jax.grad(total)(q)

    assert jnp.array_equal(gradient("mosaic_gpu"), gradient("reference"))


@pytest.mark.parametrize(
    ("case", "dtype", "message"),
    [
        (TEST_CASES[0], jnp.bfloat16, "heads of 16"),
        (KERNEL_CASES[0], jnp.float32, "all must be bfloat16"),
        (Case("", (9,), 1, 2, 1, 64, 5), jnp.bfloat16, "pages of 5 slots"),
        (Case("", (9,), 1, 2, 2, 64, 16), jnp.bfloat16, "1 query heads of 64"),
    ],
    ids=["head", "dtype", "page", "group"],
)
def test_unsupported_arguments_are_named(case: Case, dtype, message: str):
    q, pages, _ = arguments = make_arguments(case, dtype)
    assert message in str(misfit(q, pages.k, pages.v, order_invariant=False))
    with pytest.raises(ValueError, match=f"the kernel cannot take .*{message}"):
        paged_attention(*arguments, implementation="mosaic_gpu")
    auto = functools.partial(paged_attention, implementation="auto")
    found = jax.jit(auto, compiler_options=FAST_COMPILE)(*arguments)
    assert np.isfinite(np.asarray(found)).all(), "the reference takes it"
