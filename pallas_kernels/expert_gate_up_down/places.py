"""What jobs of expert_gate_up_down read: their slots, blocks of weights, and scales."""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
from jax import Array, lax

from pallas_kernels.expert_gate_up_down.memory import HALF
from pallas_kernels.expert_gate_up_down.plan import (
    OUTPUTS,
    TILE,
    UNITS,
    WARPGROUPS,
    Phase,
    Plan,
)
from pallas_kernels.expert_gate_up_down.products import Places

Refs = dict[str, Any]


class Place(NamedTuple):
    """Where a job is: its slot, the number of the slot's expert among those of its kind, and its
    index among the jobs of the slot."""

    slot: Array
    expert: Array
    job: Array


def place_of(phase: Phase, refs: Refs, job: Array) -> Place:
    index, kind = lax.div(job, phase.jobs), phase.kind.name
    slot, expert = (refs[f"{kind}.{name}"][index] for name in ("filled", "expert"))
    return Place(slot, expert, lax.rem(job, phase.jobs))


def block_of(
    plan: Plan, phase: Phase, refs: Refs, place: Place, step: Array, warpgroup: int
) -> Any:
    """The weights of a warpgroup's block of a job: [2, HALF, inputs]."""
    expert, job = place.expert, place.job
    first_byte = first_input(phase, step, warpgroup) * phase.stored.bits // 8
    inputs = pl.ds(first_byte, plan.row)
    if phase.name == "gate_up":
        parts, units = pl.ds(expert * 2, 2), pl.ds(job * UNITS, UNITS)
        return refs[f"{phase.key}.values"].at[parts, units, inputs]
    first = expert * (plan.hidden // HALF) + job * (OUTPUTS // HALF) + 2 * warpgroup
    return refs[f"{phase.key}.values"].at[pl.ds(first, 2), :, inputs]


def first_input(phase: Phase, step: Array, warpgroup: Any) -> Array:
    if phase.name == "gate_up":
        return (step * WARPGROUPS + warpgroup) * phase.block
    return step * phase.block


def scale_places(plan: Plan, phase: Phase, place: Place, warpgroup: Array) -> Places:
    """Where the scales of a warpgroup's tile are."""
    (outputs, inputs), (_, expert, job) = phase.stored.scaled, place
    if phase.name == "gate_up":
        parts, width, depth = 2, plan.units, plan.hidden
        firsts = [(part, job * UNITS) for part in range(2)]
    else:
        parts, width, depth = 1, plan.hidden, plan.units
        tile = job * OUTPUTS + warpgroup * TILE
        firsts = [(0, tile), (0, tile + HALF)]
    columns = -(-depth // inputs)
    if phase.stored.has_bytes:  # [E, parts, columns, width]
        first, second = (
            (expert * parts + part) * columns * width + output for part, output in firsts
        )
        return Places(first, second, width)
    rows = -(-width // outputs)  # [E, parts, rows, columns]
    first, second = (
        ((expert * parts + part) * rows + lax.div(output, outputs)) * columns
        for part, output in firsts
    )
    return Places(first, second, 1)
