"""Gate, up and down of chosen experts, of few rows, in one launch on Hopper GPUs.

As many thread blocks as there are multiprocessors stay for both products, whatever the number of
chosen experts, and meet between them. Within a thread block warpgroups have roles:

- One copies weights into a ring, product after product. It does not wait where blocks meet: the
  ring is full of down's weights by then.
- Several multiply, each its blocks of a job, and each warp a quarter of their inputs.
- One lists the slots that have an expert, adds up the parts of a job, stores the outputs, and meets
  the other thread blocks.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.chosen_products import ChosenProducts
from pallas_kernels.expert_gate_up_down.choice import choose
from pallas_kernels.expert_gate_up_down.fetch_scales import fetch_scales
from pallas_kernels.expert_gate_up_down.filled import list_filled
from pallas_kernels.expert_gate_up_down.memory import LISTS, results, scratch_of, viewed
from pallas_kernels.expert_gate_up_down.outputs import store_products, store_units
from pallas_kernels.expert_gate_up_down.places import (
    Place,
    block_of,
    first_input,
    place_of,
    scale_places,
)
from pallas_kernels.expert_gate_up_down.plan import (
    BUFFERS,
    GROUP,
    OUTPUTS,
    PHASES,
    ROWS,
    UNITS,
    WARPGROUPS,
    WARPS,
    Kind,
    Phase,
    Plan,
    RouterPlan,
    Stored,
    Tuning,
)
from pallas_kernels.expert_gate_up_down.products import (
    SPAN,
    block_scales,
    block_sums,
    no_sums,
)
from pallas_kernels.expert_gate_up_down.router import store_logits, sum_parts
from pallas_kernels.expert_gate_up_down.weights import ExpertWeights, Router
from pallas_kernels.expert_slots import SlotProducts, Slots
from pallas_kernels.fetch_ahead import fetch_share
from pallas_kernels.grid_barrier import meet
from pallas_kernels.mosaic_module_names import fixed_name
from pallas_kernels.packed_expert_product.widening import SUMS_OF_SCALED
from pallas_kernels.packed_experts import PackedExperts
from pallas_kernels.packed_product.blocks import write_plain
from pallas_kernels.top_k.routes import RouteRule

Refs = dict[str, Any]
Weights = dict[str, PackedExperts]  # by the keys of phases

BARRIERS = 2  # of a launch; see grid_barrier.meet


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def expert_gate_up_down_mosaic(
    x: Array,  # [N, H]
    slots: Slots,
    gate_up: PackedExperts,
    down: PackedExperts,
    meeting: Array,  # int32 [1, 1]
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> SlotProducts:
    """See pallas_kernels.expert_gate_up_down; only for arguments that ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests. Then each phase is a launch, unless there is
    one thread block: the interpreter does not run several side by side, so they cannot meet.
    """
    plan = _plan_of(x, len(slots.expert), [gate_up], tuning, interpret)
    arrays = {"x": x, "experts": slots.expert, "meeting": meeting}
    arrays = _launches(plan, arrays, _by_key(plan, ExpertWeights(gate_up, down)), interpret)
    return SlotProducts(arrays["products"], slots.places)


@functools.partial(jax.jit, static_argnames=("rule", "tuning", "interpret"))
def routed_gate_up_down_mosaic(
    x: Array,  # [N, H]
    is_row: Array,  # int32 [N]
    router: Router,
    weights: ExpertWeights,
    meeting: Array,
    *,
    rule: RouteRule,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> ChosenProducts:
    """See pallas_kernels.expert_gate_up_down.routed_gate_up_down, and as
    ``expert_gate_up_down_mosaic``."""
    slots = len(x) * (rule.k + rule.has_shared)
    every = [weights] if weights.shared is None else [weights, weights.shared]
    plan = _plan_of(x, slots, [each.gate_up for each in every], tuning, interpret)
    experts, has_gate = len(router.weight), router.gate is not None
    sizes = experts, experts + has_gate, x.shape[1], plan.tuning.blocks
    plan = dataclasses.replace(plan, router=RouterPlan(rule, *sizes), routes=True)
    arrays = {"x": x, "is_row": is_row, "router": router.weight, "meeting": meeting}
    # Where there is no gate the former is not read as such.
    arrays["gate"] = router.weight if router.gate is None else router.gate[None]
    found = _launches(plan, arrays, _by_key(plan, *every), interpret)
    return ChosenProducts(found["products"], found["places"], found["weights"])


def _by_key(plan: Plan, *weights: ExpertWeights) -> Weights:
    pairs = list(zip(plan.kinds, weights, strict=True))
    return {f"{kind.name}.{name}": getattr(each, name) for name in PHASES for kind, each in pairs}


def _plan_of(
    x: Array, slots: int, gate_up: Sequence[PackedExperts], tuning: Tuning | None, interpret: Any
) -> Plan:
    """``gate_up``: of the experts, and of a shared one that is stored in another way."""
    kinds, first = [], 0
    for name, each in zip(("experts", "shared"), gate_up, strict=False):
        stored = Stored(each.code, each.block)  # pyright: ignore[reportArgumentType]
        kinds.append(Kind(stored, first, each.num_experts, name))
        first += each.num_experts
    return Plan(
        rows=len(x),
        slots=slots,
        hidden=x.shape[1],
        units=gate_up[0].width,
        kinds=tuple(kinds),
        tuning=tuning or Tuning(),
        interpret=interpret is not None,
    )


def _launches(plan: Plan, arrays: Refs, weights: Weights, interpret: Any) -> Refs:
    """The arrays, and the results of one launch; of several where thread blocks cannot meet."""
    if interpret is None or plan.tuning.blocks == 1:
        return arrays | _launch(plan, arrays, weights, interpret)
    if plan.routes:
        product = dataclasses.replace(plan, names=())
        arrays = arrays | _launch(product, arrays, {}, interpret)
    for name in PHASES:
        part = dataclasses.replace(plan, names=(name,), routes=False)
        arrays = arrays | _launch(part, arrays, weights, interpret)
    return arrays


def _launch(plan: Plan, arrays: Refs, weights: Weights, interpret: Any) -> Refs:
    """The results of a launch, by name; ``arrays``: what it may read besides weights."""
    inputs = dict(arrays)
    for phase in plan.phases:
        inputs |= viewed(phase, weights[phase.key])
    found = results(plan)
    inputs = {name: array for name, array in inputs.items() if name not in found}
    names = *inputs, *found

    @fixed_name(interpret)
    def expert_gate_up_down_kernel(*arguments, **scratch):
        refs = dict(zip(names, arguments, strict=True)) | scratch
        role = kernel_axes.index("warpgroup")

        @pl.when(role < WARPGROUPS)
        def _multiply():
            if plan.router is not None and plan.routes:
                _sum_parts(plan.router, plan, refs)
            plgpu.barrier_wait(refs["listed"])
            for at in range(len(plan.phases)):
                _multiply_phase(plan, at, refs)

        @pl.when(role == WARPGROUPS)
        def _add_up():
            _prepare(plan, refs)
            for at in range(len(plan.phases)):
                _store_phase(plan, at, refs)

        @pl.when(role == WARPGROUPS + 1)
        def _copy():
            _fetch_shared(plan, refs)
            plgpu.barrier_wait(refs["listed"])
            for at in range(len(plan.phases)):
                _copy_phase(plan, at, refs)
            _wait_for_ring(plan, refs)

    kernel = plgpu.kernel(
        expert_gate_up_down_kernel,
        out_type=tuple(found.values()),
        scratch_types=scratch_of(plan),
        grid=(plan.tuning.blocks,),
        grid_names=kernel_axes.names("block"),
        num_threads=WARPGROUPS + 2,
        thread_name=kernel_axes.name("warpgroup"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return dict(zip(found, kernel(*inputs.values()), strict=True))


def _sum_parts(router: RouterPlan, plan: Plan, refs: Refs) -> None:
    """A multiplying warpgroup's sums of the router's product."""
    if not plan.interpret:
        sum_parts(router, refs, kernel_axes.index("block"), kernel_axes.index("warpgroup"))
    plgpu.barrier_arrive(refs["routed"])


def _fetch_shared(plan: Plan, refs: Refs) -> None:
    """Begin to read the shared expert, which rows choose in any case, into the cache."""
    if plan.interpret or plan.router is None or not plan.router.rule.has_shared:
        return
    for phase in plan.phases:
        if phase.kind != plan.kinds[-1]:
            continue
        values = refs[f"{phase.key}.values"]
        of_expert = len(values) // phase.kind.count
        shared = values.at[pl.ds(len(values) - of_expert, of_expert)]
        fetch_share(shared, kernel_axes.index("block"), plan.tuning.blocks)


def _prepare(plan: Plan, refs: Refs) -> None:
    """Copy x, see to the choice of experts, and list the slots that have an expert."""
    block, how = kernel_axes.index("block"), {"interpret": plan.interpret}
    if "gate_up" in plan.names:
        rows = pl.ds(0 * block, ROWS)  # not known: so it is not checked
        plgpu.copy_gmem_to_smem(refs["x"].at[rows], refs["rows"], refs["rows_copied"])
    experts = refs.get("experts")
    if plan.router is not None:
        if plan.routes:
            plgpu.barrier_wait(refs["routed"])
            store_logits(plan.router, refs, block, **how)
            if not plan.interpret:
                meet(refs["meeting"], plan.tuning.blocks, 0, BARRIERS)
        if plan.phases:
            choose(plan.router, refs, block, **how)
            experts = refs["of_slots"]
    if plan.phases:
        for kind in plan.kinds:
            lists = [refs[f"{kind.name}.{name}"] for name in LISTS]
            list_filled(experts, lists, kind, **how)
    plgpu.barrier_arrive(refs["listed"])


def _copy_phase(plan: Plan, at: int, refs: Refs) -> None:
    """Copy a phase's weights into the ring."""
    phase, filled = plan.phases[at], _filled(plan, refs)
    before = plan.steps_before(at, filled)
    first, jobs = plan.own_jobs(at, filled)

    def copy(index: Array, _: None) -> None:
        number = before + index
        stage = lax.rem(number, plan.stages)
        place = place_of(phase, refs, first + lax.div(index, phase.steps))
        step = lax.rem(index, phase.steps)
        if phase.stored.has_bytes and not plan.interpret:
            pl.when(step == 0)(lambda: _fetch_scales(plan, phase, refs, place))
        for warpgroup in range(WARPGROUPS):
            slot = stage * WARPGROUPS + warpgroup

            @pl.when(number >= plan.stages)
            def _wait_until_free(slot=slot):
                plgpu.barrier_wait(refs["free"].at[slot])

            source = block_of(plan, phase, refs, place, step, warpgroup)
            plgpu.copy_gmem_to_smem(source, refs["values"].at[slot], refs["full"].at[slot])

    lax.fori_loop(0, jobs * phase.steps, copy, None)


def _fetch_scales(plan: Plan, phase: Phase, refs: Refs, place: Place) -> None:
    """Begin to read a job's scales, of all warpgroups."""
    sizes = {"rows": plan.units // GROUP, "width": plan.hidden, "outputs": OUTPUTS}
    if phase.name == "gate_up":
        sizes = {"rows": 2 * plan.hidden // GROUP, "width": plan.units, "outputs": UNITS}
    first = scale_places(plan, phase, place, jnp.int32(0)).first
    fetch_scales(refs[f"{phase.key}.scale"], refs["nowhere"], first, **sizes)


def _multiply_phase(plan: Plan, at: int, refs: Refs) -> None:
    """A multiplying warpgroup's part of a phase."""
    phase, filled = plan.phases[at], _filled(plan, refs)
    before, jobs_before = plan.steps_before(at, filled), plan.jobs_before(at, filled)
    first, jobs = plan.own_jobs(at, filled)
    warpgroup, interpret = kernel_axes.index("warpgroup"), plan.interpret
    ahead = phase.stored.scales_ahead
    if plan.begins(at):  # also without jobs: there may be some of the next kind
        plgpu.barrier_wait(refs["rows_copied" if phase.name == "gate_up" else "met"])

    def scales_of(index: Array) -> Array:
        """Those of a block among this thread block's."""
        index = jnp.minimum(index, jobs * phase.steps - 1)
        place = place_of(phase, refs, first + lax.div(index, phase.steps))
        scale, places = refs[f"{phase.key}.scale"], scale_places(plan, phase, place, warpgroup)
        start = first_input(phase, lax.rem(index, phase.steps), warpgroup)
        inputs = phase.block // WARPS
        return block_scales(phase.stored, scale, places, start, inputs, interpret=interpret)

    def job(index: Array, scales: Sequence[Array]) -> Sequence[Array]:
        place = place_of(phase, refs, first + index)

        def step(turn: Array, carry: Any) -> Any:
            (total, scales, *following), block = carry, index * phase.steps + turn
            if ahead == 1:
                following.append(scales_of(block + ahead))  # while this block is multiplied
            stage = lax.rem(before + block, plan.stages) * WARPGROUPS + warpgroup
            plgpu.barrier_wait(refs["full"].at[stage])
            x, from_slot = refs["rows"], 0
            if phase.name == "down":
                x, from_slot = refs["units"], place.slot * (plan.units // SPAN)
            span = from_slot + lax.div(first_input(phase, turn, warpgroup), SPAN)
            given = phase.stored, refs["values"].at[stage], x, span, scales
            total += block_sums(phase.name, *given, interpret=interpret)
            plgpu.commit_smem()  # what was read comes before what the copy engine writes there next
            plgpu.barrier_arrive(refs["free"].at[stage])
            if ahead > 1:  # not before: ``commit_smem`` waits for all reads that are under way
                following.append(scales_of(block + ahead))
            return total, *following

        carry = no_sums(interpret=interpret), *scales
        total, *scales = lax.fori_loop(0, phase.steps, step, carry)
        number = jobs_before + index
        buffer = lax.rem(number, BUFFERS)

        @pl.when(number >= BUFFERS)
        def _():
            plgpu.barrier_wait(refs["stored"].at[buffer])

        if phase.stored.has_bytes:
            total *= SUMS_OF_SCALED
        write_plain(refs["parts"].at[buffer, warpgroup], total)
        plgpu.barrier_arrive(refs["done"].at[buffer])
        return scales

    @pl.when(jobs > 0)
    def _():
        scales = [scales_of(jnp.int32(block)) for block in range(ahead)]
        lax.fori_loop(0, jobs, job, scales)


def _store_phase(plan: Plan, at: int, refs: Refs) -> None:
    """Store the outputs of a phase's jobs; before the first ones of the second product, meet."""
    phase, filled = plan.phases[at], _filled(plan, refs)
    first, jobs = plan.own_jobs(at, filled)
    jobs_before = plan.jobs_before(at, filled)
    if at and plan.begins(at) and not plan.interpret:
        blocks = plan.tuning.blocks
        if plan.routes:
            meet(refs["meeting"], blocks, 1, BARRIERS)
        else:
            meet(refs["meeting"], blocks, 0, BARRIERS)
            meet(refs["meeting"], blocks, 1, BARRIERS, waits=False)
    if phase.name == "down" and plan.begins(at):
        plgpu.barrier_arrive(refs["met"])

    def store(index: Array, _: None) -> None:
        buffer = lax.rem(jobs_before + index, BUFFERS)
        plgpu.barrier_wait(refs["done"].at[buffer])
        place = place_of(phase, refs, first + index)
        parts, how = refs["parts"].at[buffer], {"rows": plan.rows, "interpret": plan.interpret}
        if phase.name == "gate_up":
            store_units(parts, refs["units"], place.slot * plan.units + place.job * UNITS, **how)
        else:
            store_products(parts, refs["products"], place.slot, place.job * OUTPUTS, **how)
        plgpu.barrier_arrive(refs["stored"].at[buffer])

    lax.fori_loop(0, jobs, store, None)


def _filled(plan: Plan, refs: Refs) -> dict[str, Array]:
    return {kind.name: refs[f"{kind.name}.count"][0] for kind in plan.kinds}


def _wait_for_ring(plan: Plan, refs: Refs) -> None:
    """Every barrier must have completed its last phase."""
    if not plan.phases:
        return
    steps = plan.steps_before(len(plan.phases), _filled(plan, refs))
    for place in range(plan.stages * WARPGROUPS):

        @pl.when(steps > place // WARPGROUPS)
        def _wait(place=place):
            plgpu.barrier_wait(refs["free"].at[place])
