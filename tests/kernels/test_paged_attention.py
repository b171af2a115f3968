"""Paged attention against a loop over queries in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import (
    BENCHMARK_CASES,
    TEST_CASES,
    Case,
    make_arguments,
    poisoned,
)
from pallas_kernels.pages import LayerPages
from tests.helpers.marks import first_is_fast, slow
from tests.helpers.programs import FAST_COMPILE

run = jax.jit(
    paged_attention,
    static_argnames=("options", "order_invariant", "implementation"),
    compiler_options=FAST_COMPILE,
)


def visible(case: Case, context: int, position: int, token: int, words) -> list[int]:
    """Slots that a query sees, by the words of the docstring."""
    past = range(case.first_slot, context)
    if words is None:
        own = [context + j for j in range(token + 1)]
    else:
        own = [context + j for j in range(32 * len(words)) if words[j // 32] >> (j % 32) & 1]
    own = [slot for slot in own if slot >= case.first_slot]
    if case.window is None:
        return [*past, *own]
    return [slot for slot in [*past, *own] if (words is not None and slot in own)
            or position - slot < case.window]  # fmt: skip


def naive(case: Case, arguments) -> np.ndarray:
    """[B, T, Q, D] in float64, one query and head at a time."""
    q, (k_pages, v_pages, *_), context = jax.tree.map(np.asarray, arguments)
    table, context_lens, positions, ancestors, kv_lens = context
    q, k_pages, v_pages = (a.astype(np.float64) for a in (q, k_pages, v_pages))
    out, per_group = np.full(q.shape, np.nan), case.num_heads // case.kv_heads
    for b, t, head in np.ndindex(q.shape[:3]):
        words = None if ancestors is None else [int(word) for word in ancestors[b, t]]
        slots = np.array(visible(case, int(context_lens[b]), int(positions[b, t]), t, words), int)
        slots = slots[slots < kv_lens[b]]
        if not len(slots):
            continue
        page, offset = table[b, slots // case.page_size], slots % case.page_size
        scores = k_pages[page, head // per_group, offset] @ q[b, t, head] / case.head_dim**0.5
        weights = np.exp(scores - scores.max())
        out[b, t, head] = weights / weights.sum() @ v_pages[page, head // per_group, offset]
    return out


def attend(case: Case, arguments, order_invariant: bool = False) -> np.ndarray:
    found = run(*arguments, options=case.options, order_invariant=order_invariant)
    return np.asarray(found).astype(np.float32)


@pytest.mark.parametrize("order_invariant", [False, slow(True)])
@first_is_fast(TEST_CASES, 8)
def test_it_is_attention_over_the_visible_slots(case: Case, order_invariant: bool):
    arguments = make_arguments(case)
    found, expected = attend(case, arguments, order_invariant), naive(case, arguments)
    assert np.isfinite(found).all(), "a query that sees nothing stays finite"
    sees = ~np.isnan(expected)
    assert sees.mean() > 0.9
    np.testing.assert_allclose(found[sees], expected[sees], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, slow(2), slow(31), 32, 33, slow(63), 64])
@pytest.mark.parametrize("tree", [False, True], ids=["causal", "tree"])
def test_any_number_of_queries(num_tokens: int, tree: bool):
    case = Case("", (21, 8), num_tokens, 2, 1, 8, 8, tree=tree)
    arguments = make_arguments(case, seed=num_tokens)
    np.testing.assert_allclose(attend(case, arguments), naive(case, arguments), atol=2e-6)


def test_nodes_past_kv_lens_are_hidden():
    case = next(case for case in TEST_CASES if case.name == "tree of two mask words")
    *q_and_pages, context = jax.device_get(make_arguments(case))
    lens, ancestors = context.context_lens, context.ancestors
    unlimited = context._replace(kv_lens=None)
    for limit in (1, 20, 33):
        bits = (1 << limit) - 1
        kept = np.array([bits & 0xFFFFFFFF, bits >> 32], np.uint32)
        np.testing.assert_array_equal(
            run(*q_and_pages, context._replace(kv_lens=lens + limit)),
            run(*q_and_pages, unlimited._replace(ancestors=ancestors & kept)),
        )


def test_by_default_kv_lens_ends_with_the_queries_or_their_mask():
    for case in (TEST_CASES[0], TEST_CASES[9]):  # causal, a tree
        *q_and_pages, context = jax.device_get(make_arguments(case))
        ancestors, lens = context.ancestors, context.context_lens
        length = case.num_tokens if ancestors is None else 32 * ancestors.shape[2]
        found, wanted = (
            run(*q_and_pages, context._replace(kv_lens=kv_lens), options=case.options)
            for kv_lens in (None, lens + length)
        )
        np.testing.assert_array_equal(found, wanted)


def test_a_sequence_may_end_before_its_context():
    """As for an empty row: its queries see no slot, and no query sees its slots."""
    case = TEST_CASES[1]
    *q_and_pages, context = make_arguments(case)
    arguments = (*q_and_pages, context._replace(kv_lens=np.array([0, 0, 5], np.int32)))
    found = attend(case, poisoned(case, arguments, np.nan))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[2], naive(case, arguments)[2], atol=2e-6, rtol=1e-5)


@first_is_fast(TEST_CASES, 3)
def test_unseen_slots_may_hold_nan_or_infinity(case: Case):
    arguments = make_arguments(case)
    arguments = jax.device_get(arguments)
    expected = run(*arguments, options=case.options)
    for poison in (np.nan, np.inf, -np.inf):
        spoiled = poisoned(case, arguments, poison)
        np.testing.assert_array_equal(run(*spoiled, options=case.options), expected)


def test_unseen_slots_do_not_change_order_invariant_sums():
    case = next(case for case in TEST_CASES if case.name == "padded tree")
    arguments = make_arguments(case)
    found = attend(case, poisoned(case, arguments, np.nan), order_invariant=True)
    np.testing.assert_array_equal(found, attend(case, arguments, order_invariant=True))


def test_a_node_that_no_query_sees_may_be_anything():
    """Only finite values: the kernel requires them between the context and kv_lens."""
    case = next(case for case in TEST_CASES if case.name == "small tree")
    arguments: Any = jax.tree.map(np.array, make_arguments(case))
    _, pages, context = arguments
    context.ancestors[:] &= ~np.uint32(1 << 2)
    slots = np.array(case.context_lens) + 2
    places = context.page_table[np.arange(len(slots)), slots // case.page_size]
    expected = attend(case, arguments)
    for array in (pages.k, pages.v):
        array[places, :, slots % case.page_size] = np.nan
    np.testing.assert_array_equal(attend(case, arguments), expected)


def test_unseen_slots_do_not_change_gradients():
    case = next(case for case in TEST_CASES if case.name == "window")

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def gradients(arguments: Any) -> list[jax.Array]:
        def total(q: jax.Array, pages: LayerPages) -> jax.Array:
            return paged_attention(q, pages, arguments[2], options=case.options).sum()

        return jax.tree.leaves(jax.grad(total, argnums=(0, 1))(*arguments[:2]))

    clean, *_ = gradients(make_arguments(case))
    found, *of_pages = gradients(poisoned(case, make_arguments(case), np.nan))
    np.testing.assert_array_equal(found, clean)
    assert all(np.isfinite(one).all() for one in of_pages)


def test_bfloat16_is_rounded_only_between_steps():
    case = TEST_CASES[0]
    arguments = make_arguments(case, jnp.bfloat16)
    np.testing.assert_allclose(attend(case, arguments), naive(case, arguments), atol=0.03)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_order_invariant_sums_do_not_depend_on_where_keys_lie(dtype):
    """A path spread over a tree's slots scores as the same path right after the context."""
    case = Case("", (50,), 40, 4, 2, 16, 16, tree=True)
    path = np.array([0, 3, 11, 30, 39])
    arguments = jax.device_get(make_arguments(case, dtype))
    q, (k, v, *_), context = arguments
    table = context.page_table
    slots = 50 + np.arange(case.num_tokens)
    page, offset = table[0, slots // 16], slots % 16

    def score(k, v, nodes) -> np.ndarray:
        words = np.zeros((1, case.num_tokens, 2), np.uint32)
        for node in nodes:
            words[..., node // 32] |= np.uint32(1 << (node % 32))
        seen = context._replace(ancestors=words, kv_lens=None)
        return np.asarray(run(q, LayerPages(k, v), seen, order_invariant=True))

    def moved(pages: np.ndarray) -> np.ndarray:
        pages = pages.copy()
        pages[page[:5], :, offset[:5]] = pages[page[path], :, offset[path]]
        return pages

    assert np.array_equal(score(k, v, path), score(moved(k), moved(v), range(5)))


def test_order_invariant_sums_in_bfloat16_do_not_depend_on_the_width_of_the_table():
    case = Case("", (50, 7), 5, 4, 2, 16, 16, tree=False)
    q, pages, context = jax.device_get(make_arguments(case, jnp.bfloat16))
    expected = run(q, pages, context, order_invariant=True)
    for width in (1, 4, 9, 27):
        wider = context._replace(page_table=np.pad(context.page_table, ((0, 0), (0, width))))
        found = run(q, pages, wider, order_invariant=True)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("order_invariant", [False, True])
@pytest.mark.parametrize("case", [TEST_CASES[0], TEST_CASES[13], BENCHMARK_CASES[2]], ids=str)
def test_it_lowers_for_cuda(case: Case, order_invariant: bool):
    shapes = jax.eval_shape(lambda: make_arguments(case, jnp.bfloat16))
    function = jax.jit(
        lambda *a: paged_attention(*a, options=case.options, order_invariant=order_invariant)
    )
    assert function.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("k", (9, 2, 16, 8), "do not fit pages"),
        ("page_table", (3, 4), "do not fit a batch of 2"),
        ("context_lens", (3,), "do not fit a batch of 2"),
        ("kv_lens", (3,), "do not fit a batch of 2"),
        ("positions", (2, 7), "positions must be"),
    ],
)
def test_shapes_that_do_not_fit_are_named(name: str, shape: tuple[int, ...], message: str):
    q, pages, context = make_arguments(TEST_CASES[0])
    if name == "k":
        pages = pages._replace(k=jnp.zeros(shape, pages.k.dtype))
    else:
        context = context._replace(**{name: jnp.zeros(shape, getattr(context, name).dtype)})
    with pytest.raises(ValueError, match=message):
        paged_attention(q, pages, context)
