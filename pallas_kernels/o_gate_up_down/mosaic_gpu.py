"""From the output projection to the partial sums of the MLP, in one launch on Hopper GPUs.

As many thread blocks as there are multiprocessors stay for all three products, and meet between
them. Within a thread block warpgroups have roles:

- One copies weights into a ring, product after product. It does not wait where blocks meet: the
  ring is full of the next product's weights by then.
- Several multiply, each a block of weights in turn, and each warp a quarter of its inputs.
- One adds up their parts of a job, stores the outputs, and meets the other thread blocks.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array, lax

from pallas_kernels import kernel_axes
from pallas_kernels.grid_barrier import fence_copies, gather, meet
from pallas_kernels.mosaic_module_names import fixed_name
from pallas_kernels.o_gate_up_down.buffers import (
    RESULTS,
    Refs,
    Weights,
    results_of,
    scratch_of,
    viewed,
)
from pallas_kernels.o_gate_up_down.float8_rows import Place, Source, put_rounded
from pallas_kernels.o_gate_up_down.formats import format_of
from pallas_kernels.o_gate_up_down.outputs import (
    Scales,
    clear_largest,
    store_job,
    tell_largest,
)
from pallas_kernels.o_gate_up_down.plan import (
    BLOCK,
    BUFFERS,
    PHASES,
    ROWS,
    TILE,
    TILES,
    WARPS,
    Phase,
    PhaseName,
    Plan,
    Tuning,
    splits_of,
)
from pallas_kernels.o_gate_up_down.products import no_sums
from pallas_kernels.o_gate_up_down.rows import NORM_PART, put_normed
from pallas_kernels.o_gate_up_down.weights import LayerWeights

READS: dict[PhaseName, str] = {"o": "x", "gate_up": "total", "down": "units"}


# Traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("eps", "tuning", "interpret"))
def o_gate_up_down_mosaic(
    x: Array,  # [M, A]
    residual: Array,  # [M, H]
    weights: LayerWeights,
    meeting: Array,  # int32 [1, 1]
    eps: float,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """See pallas_kernels.o_gate_up_down; only for arguments that ``misfit`` accepts.

    ``interpret``: plgpu.InterpretGPUParams, for tests. Then each phase is a launch, unless there is
    one thread block: the interpreter does not run several side by side, so they cannot meet.
    """
    norm, *products = weights
    units = weights.down.values.shape[1]
    num_splits = splits_of(units)
    assert num_splits is not None
    plan = Plan(
        rows=len(x),
        inputs=x.shape[1],
        hidden=len(norm),
        units=units,
        num_splits=num_splits,
        eps=eps,
        tuning=tuning or Tuning(),
        form=format_of(weights.o),
        names=PHASES,
        interpret=interpret is not None,
    )
    by_phase: Weights = dict(zip(PHASES, products, strict=True))
    norm = norm.reshape(-1, NORM_PART)
    arrays = {"x": x, "residual": residual, "norm": norm, "meeting": meeting}
    if interpret is None or plan.tuning.blocks == 1:
        arrays |= _launch(plan, arrays, by_phase, interpret)
    else:
        for name in plan.names:
            phase = dataclasses.replace(plan, names=(name,))
            product: Weights = {key: packed for key, packed in by_phase.items() if key == name}
            arrays |= _launch(phase, arrays, product, interpret)
    return arrays["total"], arrays["partials"]


def _launch(plan: Plan, arrays: Refs, weights: Weights, interpret: Any) -> Refs:
    """The results of a launch, by name; ``arrays``: what it may read besides weights."""
    inputs = dict(arrays)
    for name, packed in weights.items():
        inputs |= viewed(plan, name, packed)
    results = results_of(plan, weights)
    names, warpgroups = (*inputs, *results), plan.tuning.warpgroups

    @fixed_name(interpret)
    def o_gate_up_down_kernel(*arguments, **scratch):
        refs = dict(zip(names, arguments, strict=True)) | scratch
        role = kernel_axes.index("warpgroup")

        @pl.when(role < warpgroups)
        def _multiply():
            for at in range(len(plan.phases)):
                _multiply_phase(plan, at, refs)

        @pl.when(role == warpgroups)
        def _add_up():
            for at in range(len(plan.phases)):
                _store_phase(plan, at, refs)

        @pl.when(role == warpgroups + 1)
        def _copy():
            if "norm_weight" in refs:
                plgpu.copy_gmem_to_smem(refs["norm"], refs["norm_weight"], refs["norm_copied"])
            for at in range(len(plan.phases)):
                _copy_phase(plan, at, refs)
            _wait_for_ring(plan, refs)

    kernel = plgpu.kernel(
        o_gate_up_down_kernel,
        out_type=tuple(results.values()),
        scratch_types=scratch_of(plan, weights),
        grid=(plan.tuning.blocks,),
        grid_names=kernel_axes.names("block"),
        num_threads=warpgroups + 2,
        thread_name=kernel_axes.name("warpgroup"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return dict(zip(results, kernel(*inputs.values()), strict=True))


def _copy_phase(plan: Plan, at: int, refs: Refs) -> None:
    """Copy a phase's weights into the ring."""
    phase, before = plan.phases[at], plan.blocks_before(at)
    first, jobs = plan.own_jobs(phase)

    def copy(index: Array, _: None) -> None:
        number = before + index
        slot = lax.rem(number, plan.stages)

        @pl.when(number >= plan.stages)
        def _wait_until_free():
            plgpu.barrier_wait(refs["free"].at[slot])

        job, block = lax.div(index, phase.blocks), lax.rem(index, phase.blocks)
        _copy_block(plan, phase, refs, first + job, block, slot)

    lax.fori_loop(0, jobs * phase.blocks, copy, None)


def _copy_block(
    plan: Plan, phase: Phase, refs: Refs, job: Array, block: Array, slot: Array
) -> None:
    """Copy a block of a job's weights, and its scales and zeros, to a slot."""
    block += plan.split(phase) * phase.blocks
    inputs, groups = pl.ds(block * BLOCK, BLOCK), pl.ds(block * WARPS, WARPS)
    gate_up = phase.name == "gate_up"
    tiles: Any = slice(None) if gate_up else pl.ds(job * TILES, TILES)
    outputs: Any = pl.ds(job * TILE, TILE) if gate_up else slice(None)
    full = refs["full"].at[slot]
    values = refs[f"{phase.name}.values"].at[tiles, outputs, inputs]
    plgpu.copy_gmem_to_smem(values, refs["values"].at[slot], full)
    for factor in plan.form.factors:
        if factor in refs:
            of_block = refs[f"{phase.name}.{factor}"].at[groups, tiles, outputs]
            plgpu.copy_gmem_to_smem(of_block, refs[factor].at[slot], full)


def _multiply_phase(plan: Plan, at: int, refs: Refs) -> None:
    """A multiplying warpgroup's part of a phase."""
    phase, count, before = plan.phases[at], plan.tuning.warpgroups, plan.blocks_before(at)
    warpgroup, jobs = kernel_axes.index("warpgroup"), plan.own_jobs(phase)[1]
    jobs_before = plan.jobs_before(at)
    if at:
        plgpu.barrier_wait(refs["met"])
    if plan.form.rounds:
        _round_rows(plan, phase, refs)
    elif phase.name == "gate_up":
        _norm_rows(plan, refs)
    else:
        plgpu.barrier_wait(refs["rows_copied"])

    def job(index: Array, _: None) -> None:
        number = before + index * phase.blocks  # of the job's first block
        first = lax.rem(warpgroup + count - lax.rem(number, count), count)

        def step(turn: Array, total: Array) -> Array:
            block = first + count * turn
            slot = plan.slot(number + block)
            plgpu.barrier_wait(refs["full"].at[slot])
            values, start = refs["values"].at[slot], block * BLOCK
            factors = [refs[factor].at[slot] for factor in plan.form.factors if factor in refs]
            if plan.form.by_group:
                factors.append(refs["row_scales"])
            given = values, factors, refs["rows"], start, total
            total = plan.form.add_block(*given, interpret=plan.interpret)
            _end_reads(plan)  # of the slot, before the copy engine writes there next
            plgpu.barrier_arrive(refs["free"].at[slot])
            return total

        steps = lax.div(phase.blocks - first + count - 1, count)
        total = lax.fori_loop(0, steps, step, no_sums(interpret=plan.interpret))
        place = jobs_before + index
        buffer = lax.rem(place, BUFFERS)

        @pl.when(place >= BUFFERS)
        def _():
            plgpu.barrier_wait(refs["stored"].at[buffer])

        refs["parts"][buffer, warpgroup] = total
        plgpu.barrier_arrive(refs["done"].at[buffer])

    lax.fori_loop(0, jobs, job, None)


def _end_reads(plan: Plan) -> None:
    """Wait for all threads of the warpgroup: what they have read is in registers.

    Stores would need a fence, too. The interpreter wants it for reads, and 8-bit floats have it:
    without it one of 21 of their tests on a GPU failed, and it is not known why.
    """
    if plan.interpret or plan.form.rounds:
        plgpu.commit_smem()
    else:
        inlined: Any = plgpu.inline_mgpu()
        inlined(lambda _: gather())()


def _norm_rows(plan: Plan, refs: Refs) -> None:
    """Put the normed rows of the residual stream where they are multiplied."""
    warpgroup = kernel_axes.index("warpgroup")
    plgpu.barrier_wait(refs["norm_copied"])
    given = refs["total"], refs["norm_weight"], refs["rows"], refs["sums"].at[warpgroup]
    how: Any = {"step": plan.tuning.warpgroups, "eps": plan.eps, "interpret": plan.interpret}
    put_normed(*given, warpgroup, **how)
    plgpu.barrier_arrive(refs["rows_put"])
    plgpu.barrier_wait(refs["rows_put"])


def _round_rows(plan: Plan, phase: Phase, refs: Refs) -> None:
    """Put a phase's rows, rounded, where they are multiplied."""
    warpgroup, name = kernel_axes.index("warpgroup"), phase.name
    if name == "gate_up":
        plgpu.barrier_wait(refs["norm_copied"])
    source = Source(
        refs[READS[name]],
        plan.split(phase) * phase.depth,
        norm=refs["norm_weight"] if name == "gate_up" else None,
        largest=refs["largest_units"] if plan.form.scales_sums and name == "down" else None,
    )
    place = Place(refs["rows"], refs["row_scales"], refs["sums"].at[warpgroup])
    how: Any = {"step": plan.tuning.warpgroups, "eps": plan.eps, "interpret": plan.interpret}
    put_rounded(source, place, warpgroup, width=phase.depth, **how)
    plgpu.barrier_arrive(refs["rows_put"])
    plgpu.barrier_wait(refs["rows_put"])


def _store_phase(plan: Plan, at: int, refs: Refs) -> None:
    """Store the outputs of a phase's jobs; before that, see to its x."""
    phase = plan.phases[at]
    first, jobs = plan.own_jobs(phase)
    jobs_before = plan.jobs_before(at)
    if at:
        if not plan.interpret:
            meet(refs["meeting"], plan.tuning.blocks, at - 1, plan.meetings)
        plgpu.barrier_arrive(refs["met"])
    tells = plan.form.scales_sums and phase.name == "gate_up"
    if plan.form.rounds or phase.name == "gate_up":
        plgpu.barrier_wait(refs["rows_put"])  # before the next phase's rows take their place
    else:
        _copy_rows(plan, phase, refs)
    if tells:
        clear_largest(refs["largest"], interpret=plan.interpret)
    result = refs[RESULTS[phase.name]]
    if phase.name == "down":
        result = result.at[plan.split(phase)]
    if phase.name == "gate_up":
        result = result.at[: plan.rows]

    def store(index: Array, _: None) -> None:
        buffer = lax.rem(jobs_before + index, BUFFERS)
        plgpu.barrier_wait(refs["done"].at[buffer])
        column = (first + index) * (TILE if phase.name == "gate_up" else TILES * TILE)
        given = refs["parts"].at[buffer], result, refs["residual"], column
        store_job(phase.name, *given, _scales(plan, phase, refs), interpret=plan.interpret)
        plgpu.barrier_arrive(refs["stored"].at[buffer])

    lax.fori_loop(0, jobs, store, None)
    if tells:
        given = refs["largest"], refs["largest_units"], kernel_axes.index("block")
        tell_largest(*given, interpret=plan.interpret)


def _scales(plan: Plan, phase: Phase, refs: Refs) -> Scales | None:
    if not plan.form.scales_sums:
        return None
    return Scales(refs["row_scales"], refs[f"{phase.name}.scale"], refs["largest"])


def _copy_rows(plan: Plan, phase: Phase, refs: Refs) -> None:
    """Copy the inputs of this thread block; the copy engine writes zeros for rows that are not
    there. Products of rows behind the last one are not stored."""
    start = plan.split(phase) * phase.depth
    rows = pl.ds(0 * start, ROWS)  # a start that is not known keeps the slice from being checked
    if not plan.interpret:
        fence_copies()
    source = refs[READS[phase.name]].at[rows, pl.ds(start, phase.depth)]
    place = refs["rows"].at[:, pl.ds(0, phase.depth)]
    plgpu.copy_gmem_to_smem(source, place, refs["rows_copied"])


def _wait_for_ring(plan: Plan, refs: Refs) -> None:
    """Every barrier must have completed its last phase."""
    blocks = plan.blocks_before(len(plan.phases))
    for slot in range(plan.stages):

        @pl.when(blocks > slot)
        def _wait(slot=slot):
            plgpu.barrier_wait(refs["free"].at[slot])
