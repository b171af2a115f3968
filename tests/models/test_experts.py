"""Routing, and the three ways of multiplying by experts, against what is written out in NumPy."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.experts import (
    BoundedSwiglu,
    ClampedSwiglu,
    ExpertsConfig,
    LimitedSwiglu,
    RoutingConfig,
)
from jaxspec.models.attention import PagedAttend, dense_causal_attend
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Linear
from jaxspec.models.mlps import mix, slots
from jaxspec.models.mlps.experts import experts_shape
from jaxspec.models.mlps.routing import choose_experts
from jaxspec.models.quantized.schemes import in_scheme
from jaxspec.parallel import Layout, Shards
from pallas_kernels.selection import NO_KERNELS, Kernels
from pallas_kernels.top_k import top_k
from pallas_kernels.top_k.routes import expert_routes_in_slots
from tests.helpers.marks import slow
from tests.helpers.random_experts import random_own, random_rows, written_out

WAYS = tuple(jax.jit(way) for way in (mix.chosen_experts, mix.every_expert, mix.blocks_of_experts))
CLAMPED = ClampedSwiglu(alpha=1.7, limit=1.0)
# experts, chosen, rows, units, activation
CASES = [
    (8, 2, 24, 40, None),
    (16, 4, 37, 24, CLAMPED),
    (6, 3, 1, 8, LimitedSwiglu(0.2)),
    (6, 3, 2, 8, BoundedSwiglu(0.2)),
    (4, 2, 5, 8, "gelu_tanh"),
]


@pytest.mark.parametrize("case", CASES)
def test_ways_are_what_is_written_out(case):
    num_experts, k, rows, units, activation = case
    own = random_own(num_experts, 32, units, activation)
    x, routes = random_rows(rows, 32, num_experts, k, seed=1)
    for way in WAYS:
        np.testing.assert_allclose(way(own, x, routes), written_out(own, x, routes), atol=2e-5)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_row_does_not_depend_on_the_others(way):
    own = random_own(8, 32, 40, None)
    x, routes = random_rows(24, 32, 8, 2, seed=1)
    expected = np.asarray(way(own, x, routes))[0]
    for seed in range(2, 8):
        others, chosen = random_rows(24, 32, 8, 2, seed)
        others[seed - 2] = np.nan  # of another row
        place = seed * 4 - 5
        others[place] = x[0]
        moved = jax.tree.map(lambda o, r, at=place: o.at[at].set(r[0]), chosen, routes)
        np.testing.assert_array_equal(np.asarray(way(own, others, moved))[place], expected)


def test_devices_add_their_share(monkeypatch):
    own = random_own(8, 32, 40, CLAMPED)
    x, routes = random_rows(24, 32, 8, 3, seed=1)
    monkeypatch.setattr(mix, "MOST_ROWS", 10)  # every_expert in three parts
    monkeypatch.setattr(mix, "ROW_STEP", 4)
    for way in map(jax.jit, (mix.chosen_experts, mix.every_expert, mix.blocks_of_experts)):
        shares = []
        for first in (0, 4):
            part = jax.tree.map(lambda leaf, first=first: leaf[first : first + 4], own.gate_up)
            down = jax.tree.map(lambda leaf, first=first: leaf[first : first + 4], own.down)
            shares.append(way(own.replace(gate_up=part, down=down, first=first), x, routes))
        np.testing.assert_allclose(sum(shares), written_out(own, x, routes), atol=2e-5)


@pytest.mark.parametrize("rows", [mix.MOST_ROWS + 1, slow(2 * mix.MOST_ROWS + 70)])
def test_many_rows_are_those_of_smaller_pieces(rows, monkeypatch):
    """More than MOST_ROWS go through every_expert in equal parts, the last one padded."""
    own = random_own(8, 32, 8, CLAMPED)
    x, routes = random_rows(rows, 32, 8, 2, seed=1)
    whole, asked = mix._every_expert, []
    monkeypatch.setattr(mix, "_every_expert", lambda *part: asked.append(part[1]) or whole(*part))
    found = jax.jit(mix.every_expert)(own, x, routes)
    [part] = asked  # traced once
    assert 2 * mix.ROW_STEP < part.shape[0] <= mix.MOST_ROWS
    piece = jax.jit(whole)
    pieces = [
        piece(own, *jax.tree.map(lambda one, at=start: one[at : at + 200], (x, routes)))
        for start in range(0, rows, 200)
    ]
    np.testing.assert_allclose(found, np.concatenate(pieces), rtol=0, atol=1e-5)
    np.testing.assert_allclose(found, written_out(own, x, routes), rtol=0, atol=2e-5)
    blocks = jax.jit(mix.blocks_of_experts)(own, x, routes)  # on CPUs
    np.testing.assert_allclose(blocks, found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", [slow(None), CLAMPED])
def test_ways_for_many_rows_have_the_gradient_of_the_way_for_few(activation):
    own = random_own(8, 32, 40, activation)
    x, routes = random_rows(24, 32, 8, 2, seed=1)
    cotangent = jnp.asarray(random_rows(24, 32, 8, 2, seed=2)[0])

    def gradient(way):
        def total(gate_up, down, x, weights):
            used = own.replace(gate_up=gate_up, down=down)
            return jnp.sum(cotangent * way(used, x, routes._replace(weights=weights)))

        found = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))
        return jax.tree.leaves(found(own.gate_up, own.down, jnp.asarray(x), routes.weights))

    expected = gradient(mix.chosen_experts)
    for way in (mix.every_expert, functools.partial(mix.every_expert, most_rows=10)):
        for one, other in zip(gradient(way), expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize(("paged", "loops"), [(True, True), (False, False)])
def test_passes_that_keep_nothing_take_small_experts_in_one_part(paged, loops):
    own = random_own(8, 32, 40, None)
    x, routes = random_rows(mix.MOST_ROWS + 1, 32, 8, 2, seed=1)
    places = ("rows", "page_table", "context_lens", "slots", "positions", "kv_lens")
    unread = dict.fromkeys(places, jnp.zeros(1))
    attend = PagedAttend(**unread) if paged else dense_causal_attend
    step = ForwardPass(attend, {}, {}, 1e-6, Layout(), NO_KERNELS)
    mixed = jax.jit(lambda own, x, routes: mix.mix(own, x, routes, 8, step))
    lowered = mixed.trace(own, jnp.asarray(x), routes).lower(lowering_platforms=("cuda",))
    assert ("stablehlo.while" in lowered.as_text()) == loops


@pytest.mark.parametrize("tree", [False, True])
def test_kernels_read_no_experts_for_padding(tree, monkeypatch):
    """Of a run the tokens that are there count, also where others have written them; of a tree the
    nodes of rows that decode."""
    real = [[True, True, False], [True, False, False]]
    attend = PagedAttend(
        rows=jnp.arange(2),
        page_table=jnp.ones((2, 1), jnp.int32),
        context_lens=jnp.array([4, 0]),
        slots=jnp.array(real) * 5 if tree else jnp.array([[0, 9, 0], [7, 0, 0]]),
        positions=jnp.zeros((2, 3), jnp.int32),
        kv_lens=jnp.array([7, 3]) if tree else jnp.array([6, 1]),
        ancestors=jnp.ones((2, 3, 1), jnp.uint32) if tree else None,
    )
    x, routes = random_rows(6, 32, 8, 2, seed=1)
    step = ForwardPass(attend, {}, {}, 1e-6, Layout(), NO_KERNELS)
    given = []

    def product(step, x, experts, *weights):
        given.append(experts)
        return jnp.ones((*experts.shape, x.shape[1]))

    monkeypatch.setattr(ForwardPass, "expert_product", product)
    mixed = mix.mix(random_own(8, 32, 40, None), x, routes, 8, step)
    is_token = np.array(real).reshape(6, 1)
    np.testing.assert_array_equal(given[0], np.where(is_token, routes.experts, 8))
    wanted = np.where(is_token, np.sum(routes.weights, axis=1, keepdims=True), 0)
    np.testing.assert_allclose(mixed, np.broadcast_to(wanted, x.shape), rtol=1e-6)


def test_softmax_of_all_or_of_the_chosen():
    logits = jnp.array([[0.0, 3.0, 1.0, 3.0, -1.0]])
    total = np.exp([0.0, 3.0, 1.0, 3.0, -1.0]).sum()
    routes = choose_experts(logits, RoutingConfig(5, 3), None, top_k)
    assert routes.experts.tolist() == [[1, 3, 2]]  # of equals the lower index first
    np.testing.assert_allclose(routes.weights[0], np.exp([3.0, 3.0, 1.0]) / total, rtol=1e-6)
    share = np.exp([3.0, 3.0, 1.0]) / np.exp([3.0, 3.0, 1.0]).sum()
    for config in (RoutingConfig(5, 3, normalize=True), RoutingConfig(5, 3, "chosen")):
        routes = choose_experts(logits, config, None, top_k)
        assert routes.experts.tolist() == [[1, 3, 2]]
        np.testing.assert_allclose(routes.weights[0], share, rtol=1e-6)


def test_groups_and_a_correction_decide_the_choice_not_the_weights():
    config = RoutingConfig(
        8, 2, "sigmoid", normalize=True, scale=2.5, num_groups=4, top_groups=2, correction=True
    )
    logits = jnp.array([[5.0, -9.0, 1.0, 1.1, 0.9, 1.0, -9.0, -9.0]])
    correction = jnp.zeros(8).at[5].set(0.2)
    routes = choose_experts(logits, config, correction, top_k)
    # Groups (2, 3) and (4, 5) have the largest sums of two; expert 0 is the best, in a bad group.
    assert routes.experts.tolist() == [[5, 3]]
    scores = 1 / (1 + np.exp(-np.array([1.0, 1.1])))
    np.testing.assert_allclose(routes.weights[0], 2.5 * scores / scores.sum(), rtol=1e-6)


@pytest.mark.parametrize("scores", ["chosen", "softmax"])
def test_a_kernel_has_the_routes_of_any_number_of_experts_and_of_a_bias(
    scores: Literal["chosen", "softmax"], monkeypatch: pytest.MonkeyPatch
):
    def by_reference(*given):
        assert given[-1] == "auto"
        return expert_routes_in_slots(*given[:-1])

    monkeypatch.setattr(slots, "expert_routes_in_slots", by_reference)
    rng = np.random.default_rng(0)
    weight, bias, x = (rng.standard_normal(size) for size in ((64, 20), 20, (4, 64)))
    router = Linear(weight=jnp.asarray(weight), bias=jnp.asarray(bias), axes=("in", "out"))
    config = RoutingConfig(20, 4, scores, bias=True)
    attend = PagedAttend(  # the last of four tokens is padding
        rows=jnp.arange(1),
        page_table=jnp.ones((1, 1), jnp.int32),
        context_lens=jnp.zeros(1, jnp.int32),
        slots=jnp.zeros((1, 4), jnp.int32),
        positions=jnp.arange(4)[None],
        kv_lens=jnp.array([3]),
    )
    step = ForwardPass(attend, {}, {}, 1e-6, Layout(), Kernels(frozenset({"top_k"})))
    found = slots.routes_by_kernel(jnp.asarray(x), router, None, config, False, step)
    assert found is not None and found.slots is not None
    wanted = choose_experts(jnp.asarray(x @ weight + bias), config, None, top_k)
    np.testing.assert_array_equal(found.experts[:3], wanted.experts[:3])
    np.testing.assert_allclose(found.weights[:3], wanted.weights[:3], rtol=1e-5)
    assert (found.experts[3] >= 20).all() and (found.slots.places[3] < 0).all()


def test_configs_that_mean_nothing_are_refused():
    for make, message in [
        (lambda: RoutingConfig(8, 9), "9 experts cannot be chosen from 8"),
        (lambda: RoutingConfig(8, 2, num_groups=3), "8 experts cannot be split into 3 groups"),
        (lambda: RoutingConfig(8, 2, num_groups=2, top_groups=3), "3 of 2 groups"),
        (lambda: RoutingConfig(8, 5, num_groups=2), "5 experts cannot be chosen from 4"),
        (lambda: RoutingConfig(8, 2, "chosen", normalize=True), "over the chosen experts"),
        (lambda: ExpertsConfig(0, RoutingConfig(8, 2)), "intermediate_size must be above 0"),
        (lambda: ExpertsConfig(8, RoutingConfig(8, 2), shared_gate=True), "needs a shared expert"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_what_experts_cannot_do_is_an_error():
    config = ExpertsConfig(16, RoutingConfig(6, 2))
    shards = Shards(Layout(experts=("model",)), (("model", 4),))
    with pytest.raises(ValueError, match="num_experts 6 cannot be split over 4 devices"):
        experts_shape(config, 32, jnp.dtype("float32"), shards)
    shapes = experts_shape(config, 32, jnp.dtype("float32"), Shards())
    with pytest.raises(ValueError, match="experts cannot be quantized"):
        in_scheme(shapes, "w8a16", lm_head=False)
