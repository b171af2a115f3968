"""Experts in passes of an engine, which need no gradient: a kernel makes routes of partial sums of
a router's product, others leave products of experts in slots, and the norm that follows adds them
up."""

from collections.abc import Sequence
from typing import TypeGuard

import jax.numpy as jnp
from jax import Array

from jaxspec.config.experts import ExpertActivation, ExpertsConfig, RoutingConfig, SquaredRelu
from jaxspec.models.activations import clamp_of
from jaxspec.models.attention import PagedAttend
from jaxspec.models.forward_pass import Attend, ForwardPass
from jaxspec.models.linear import AnyLinear, Linear
from jaxspec.models.mlps.expert_linear import AnyExpertLinear
from jaxspec.models.mlps.routing import Routes
from jaxspec.parallel import WHOLE
from pallas_kernels.chosen_products import ChosenProducts
from pallas_kernels.expert_gate_up_down import (
    expert_gate_up_down,
    is_faster,
    routed_gate_up_down,
)
from pallas_kernels.expert_gate_up_down import routes_misfit as one_launch_routes_misfit
from pallas_kernels.expert_gate_up_down import weights_misfit as one_launch_misfit
from pallas_kernels.expert_gate_up_down.weights import ExpertWeights, Router
from pallas_kernels.expert_product import expert_slots
from pallas_kernels.expert_product import misfit as expert_misfit
from pallas_kernels.expert_slots import SlotProducts, make_slots
from pallas_kernels.packed_expert_product import misfit as packed_expert_misfit
from pallas_kernels.packed_expert_product import packed_expert_slots
from pallas_kernels.packed_experts import PackedExperts
from pallas_kernels.products import split_k_product
from pallas_kernels.top_k.routes import (
    LANES,
    RouteRule,
    SharedGate,
    expert_routes,
    expert_routes_in_slots,
    slots_misfit,
)
from pallas_kernels.top_k.routes import misfit as routes_misfit

SPLITS = 16  # of a router's product of few rows, as XLA splits it for an H100
MOST_SPLIT_ROWS = 64
LEAST_DEPTH = 128  # of a split
NEVER = -1e30  # the logit of an expert that there is not


def routes_by_kernel(
    rows: Array,
    router: AnyLinear,
    gate: AnyLinear | None,
    config: RoutingConfig,
    has_shared: bool,
    step: ForwardPass,
) -> Routes | None:
    """The routes of rows [N, H], of padding to no expert; None where no kernel finds them.

    ``has_shared``: whether the last expert is the shared one, which all rows choose; ``gate``: of
    its weight, if it has one.
    """
    is_row = _rows_that_choose(len(rows), step.attend)
    gate = gate if has_shared else None
    if "top_k" not in step.kernels or is_row is None or not isinstance(router, Linear):
        return None
    rule, given = _rule(config, has_shared), None
    if gate is not None:
        if not _is_plain(gate):
            return None
        given = SharedGate(rows, gate.weight.reshape(-1))
    if rule is None:
        return None
    partials = _logits(rows, router)
    if not has_shared:  # whose index is the number of experts
        partials = _filled_up(partials)
    if routes_misfit(partials, rule, given):
        return None
    how = step.kernels.implementation("top_k")
    if not step.layout.axes("experts") and not slots_misfit(len(rows), rule):
        return Routes(*expert_routes_in_slots(partials, is_row, rule, given, how))
    return Routes(*expert_routes(partials, is_row, rule, given, how))


def _rule(config: RoutingConfig, has_shared: bool) -> RouteRule | None:
    """The choice as kernels make it; None for others."""
    if config.correction or config.num_groups > 1 or config.scores == "sqrt_softplus":
        return None
    return RouteRule(config.top_k, config.scores, config.normalize, config.scale, has_shared)


def _rows_that_choose(num_rows: int, attend: Attend) -> Array | None:
    """Whether each of N rows is no padding, bool [N]; None where that is not known."""
    if not isinstance(attend, PagedAttend) or attend.slots.size != num_rows:
        return None
    return attend.is_token.reshape(-1)


def _is_plain(linear: AnyLinear) -> TypeGuard[Linear]:
    return isinstance(linear, Linear) and linear.bias is None


def _logits(rows: Array, router: Linear) -> Array:
    """Partial sums float32 [S, N or more, E]."""
    few = len(rows) <= MOST_SPLIT_ROWS and router.bias is None
    if few and rows.shape[-1] % (SPLITS * LEAST_DEPTH) == 0:
        return split_k_product(rows, router.weight, SPLITS)
    return router.float32(rows)[None]


def _filled_up(partials: Array) -> Array:
    """The partial sums, with as many experts as the kernel takes: no row chooses the new ones."""
    new = -partials.shape[-1] % LANES
    return jnp.pad(partials, ((0, 0), (0, 0), (0, new)), constant_values=NEVER)


def slot_products(
    x: Array,
    routes: Routes,
    gate_up: AnyExpertLinear,
    down: AnyExpertLinear,
    activation: ExpertActivation | None,
    step: ForwardPass,
) -> SlotProducts | None:
    """What each chosen expert makes of rows x [N, H], see expert_product, packed_expert_product and
    expert_gate_up_down; None where no kernel does it. ``routes``: to E for no expert."""
    if isinstance(activation, SquaredRelu):
        return None
    clamp, kernels = activation and clamp_of(activation), step.kernels
    if gate_up.in_memory is not None and down.in_memory is not None:
        wide = gate_up.in_memory, down.in_memory, gate_up.bias
        if "expert_product" not in kernels or expert_misfit(x, *wide):
            return None
        how = kernels.implementation("expert_product")
        return expert_slots(x, routes.experts, *wide, routes.slots, clamp=clamp, implementation=how)
    if gate_up.packed is None or down.packed is None:
        return None
    if clamp is None and gate_up.bias is None:
        found = _in_one_launch(x, routes, gate_up.packed, down.packed, step)
        if found is not None:
            return found
    packed = gate_up.packed, down.packed, gate_up.bias
    if "packed_expert_product" not in kernels or packed_expert_misfit(x, *packed):
        return None
    how = kernels.implementation("packed_expert_product")
    return packed_expert_slots(
        x, routes.experts, *packed, routes.slots, clamp=clamp, implementation=how
    )


def _in_one_launch(
    x: Array, routes: Routes, gate_up: PackedExperts, down: PackedExperts, step: ForwardPass
) -> SlotProducts | None:
    """``slot_products`` of few rows, where thread blocks of a launch can meet."""
    if not _takes_one_launch(x, ExpertWeights(gate_up, down), step, chooses=False):
        return None
    slots = routes.slots or make_slots(routes.experts, gate_up.num_experts)
    how = step.exchange, step.kernels.implementation("expert_gate_up_down")
    return expert_gate_up_down(x, routes.experts, slots, gate_up, down, *how)


def routed_in_one_launch(
    rows: Array,
    routers: tuple[AnyLinear, AnyLinear | None],
    every: Sequence[tuple[AnyExpertLinear, AnyExpertLinear]],
    config: ExpertsConfig,
    has_shared: bool,
    step: ForwardPass,
) -> ChosenProducts | None:
    """What experts make of the few rows [N, H] that choose them, with the choice in the same
    launch; None where it takes several.

    ``routers``: the router, and the gate of a shared expert that is the last one, as of
    ``routes_by_kernel``. ``every``: gate and up, and down, of the experts, and of the last one if
    it is stored in another way.
    """
    is_row, rule = _rows_that_choose(len(rows), step.attend), _rule(config.routing, has_shared)
    if is_row is None or rule is None:
        return None
    if config.activation is not None or config.weighs_input or config.latent is not None:
        return None
    weights = _weights_of(every)
    if weights is None or config.bias:
        return None
    router, gate = routers
    if not _is_plain(router) or not _takes_one_launch(rows, weights, step, chooses=True):
        return None
    of_gate = None
    if has_shared and gate is not None:
        if not _is_plain(gate):
            return None
        of_gate = gate.weight.reshape(-1)
    # XLA stores weights so, or transposes them once for all rounds of a call.
    chooses = Router(router.weight.T, of_gate)
    if one_launch_routes_misfit(rows, chooses, weights, rule):
        return None
    given = rows, is_row, chooses, weights, step.exchange
    how = step.kernels.implementation("expert_gate_up_down")
    return routed_gate_up_down(*given, rule=rule, implementation=how)


def _weights_of(every: Sequence[tuple[AnyExpertLinear, AnyExpertLinear]]) -> ExpertWeights | None:
    """All weights as the kernel takes them; None if memory has them in another way."""
    weights = None
    for gate_up, down in reversed(every):
        if gate_up.packed is None or down.packed is None:
            return None
        weights = ExpertWeights(gate_up.packed, down.packed, weights)
    return weights


def _takes_one_launch(
    x: Array, weights: ExpertWeights, step: ForwardPass, *, chooses: bool
) -> bool:
    """Whether a launch takes these rows and is faster than two, and its thread blocks can wait for
    each other. ``chooses``: whether rows choose their experts in it."""
    if "expert_gate_up_down" not in step.kernels or step.layout != WHOLE or step.exchange is None:
        return False
    return not one_launch_misfit(x, weights) and is_faster(x, weights.gate_up, chooses=chooses)
