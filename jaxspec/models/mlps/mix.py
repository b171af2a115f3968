"""What experts add to each row, in four ways that do the same.

Which one runs depends on shapes, kernels and the platform only, and each adds up a row in an
order of its own: over its k experts in the order of their scores, or over all experts. So a row's
result does not depend on which experts the other rows chose. In number of rows it depends as other
products do (docs/exactness.md).

``jax.lax.ragged_dot`` is not used. In jax 0.12 it becomes, on CPUs and on NVIDIA GPUs, a dense
product of rows that are repeated for every expert and masked: of 512 rows with 8 of 128 experts,
4,096 x 128 rows of 2 GiB in memory (compiled for an H100), 8 times the work of ``every_expert``.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.config.experts import ExpertActivation
from jaxspec.models.activations import gated
from jaxspec.models.attention import PagedAttend
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.map_after import map_after
from jaxspec.models.mlps.expert_linear import AnyExpertLinear
from jaxspec.models.mlps.routing import Routes
from jaxspec.models.mlps.slots import slot_products
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.chosen_products import ChosenProducts
from pallas_kernels.expert_slots import MOST_ROWS as KERNEL_ROWS
from pallas_kernels.products import einsum_f32

MOST_ROWS = 512  # of every_expert at a time, which bounds its memory: [rows, E, 2, F] values
MOST_PRODUCTS = 1 << 27  # numbers of a kernel's products [rows, k, H] at a time, likewise
# Of these values where no state is kept, as in training: there are many rows, and small experts
# would take shorter for 512 of them than their kernels take to launch.
MOST_VALUES = 1 << 26
ROW_STEP = 64  # rows of such a part are a multiple, as tensor cores take them
MOST_WIDENED = 16  # most weights that chosen_experts widens, of experts not in memory as such
LARGEST_BLOCK = 64  # rows of one expert that blocks_of_experts multiplies at a time


@pytree
class LocalExperts(Pytree):
    """A device's experts, of which ``first`` is the first.

    Attributes:
      gate_up: [E, H, 2, F]; without gates [E, H, 1, F].
      down: [E, F, H].
    """

    gate_up: AnyExpertLinear
    down: AnyExpertLinear
    first: Array | int = array()
    activation: ExpertActivation | None = static()  # None: SwiGLU

    @property
    def in_memory(self) -> tuple[Array, Array] | None:
        """The weights of ``gate_up`` and ``down``, if memory holds both as such."""
        gate_up, down = self.gate_up.in_memory, self.down.in_memory
        return None if gate_up is None or down is None else (gate_up, down)

    def hidden_units(self, gate_up: Array, weights: Array, kept: Array) -> Array:
        """From gate and up [..., 2, F] to hidden units [..., F] times weights [...]: zeros where
        not ``kept``, whatever the values there are."""
        gate_up = gate_up.astype(self.down.dtype)
        units = gated(gate_up, self.activation or "silu").astype(jnp.float32)
        units = jnp.where(kept[..., None], units * weights[..., None], 0.0)
        return units.astype(self.down.dtype)


def mix(
    local: LocalExperts, x: Array, routes: Routes, num_experts: int, step: ForwardPass
) -> Array | ChosenProducts:
    """What the experts of this device add to rows x [N, H]: [N, H] in x's dtype, or products that
    are not added up yet.

    ``num_experts``: of all devices.
    """
    chosen = products_by_kernel(local, x, routes, step)
    if chosen is not None:
        return chosen
    mixed = by_kernel(local, x, routes, step)
    if mixed is not None:
        return mixed.astype(x.dtype)
    weights = local.in_memory
    if weights is None:  # blocks_of_experts widens the weights of one expert at a time
        few = routes.experts.size <= MOST_WIDENED
        return (chosen_experts if few else blocks_of_experts)(local, x, routes).astype(x.dtype)
    if routes.experts.size <= num_experts:
        return chosen_experts(local, x, routes).astype(x.dtype)
    most_rows = MOST_ROWS
    if not isinstance(step.attend, PagedAttend):
        most_rows = max(MOST_ROWS, MOST_VALUES // weights[0][:, 0].size)
    every = functools.partial(every_expert, most_rows=most_rows)
    mixed = lax.platform_dependent(local, x, routes, cpu=blocks_of_experts, default=every)
    return mixed.astype(x.dtype)


def products_by_kernel(
    local: LocalExperts, x: Array, routes: Routes, step: ForwardPass
) -> ChosenProducts | None:
    """``by_kernel`` for up to MOST_ROWS rows of an engine's pass, before it adds up."""
    paged = isinstance(step.attend, PagedAttend)
    if not paged or local.down.bias is not None or len(x) > MOST_ROWS:
        return None
    how = local.gate_up, local.down, local.activation, step
    if routes.slots is not None and (found := slot_products(x, routes, *how)) is not None:
        return ChosenProducts(found.products, found.places, routes.weights)
    index, here = _local(local, routes)
    here &= _is_token(step, len(x))  # experts that padding chose are not read
    experts = jnp.where(here, index, local.gate_up.num_experts).astype(jnp.int32)
    found = slot_products(x, Routes(experts, routes.weights), *how)
    if found is None:
        return None
    return ChosenProducts(found.products, jnp.where(here, found.places, -1), routes.weights)


def by_kernel(local: LocalExperts, x: Array, routes: Routes, step: ForwardPass) -> Array | None:
    """On Hopper GPUs: a kernel reads the chosen experts. Float32 [N, H]; None where it does not
    run.

    More than MOST_ROWS rows are multiplied so many at a time in passes of an engine, and always if
    experts are of 4 or 8 bits: there is no faster way for these. Training takes no kernel for
    more, as the gradient would gather weights for each row.
    """
    multiply = _product_by_kernel(local, step)
    if multiply is None:
        return None

    def total(mixed: Array, index: Array, here: Array, weights: Array) -> Array:
        if local.down.bias is not None:
            mixed = mixed + local.down.bias[index]
        return _total(jnp.where(here[..., None], mixed * weights[..., None], 0.0))

    def added(rows: tuple[Array, Array, Array, Array]) -> Array | None:
        x, index, here, weights = rows
        experts = jnp.where(here, index, local.gate_up.num_experts).astype(jnp.int32)
        mixed = multiply(x, experts)
        return None if mixed is None else total(mixed, index, here, weights)

    index, here = _local(local, routes)
    here &= _is_token(step, len(x))  # experts that padding chose are not read
    if routes.slots is not None:
        how = local.gate_up, local.down, local.activation, step
        if (found := slot_products(x, routes, *how)) is not None:
            return total(found.by_pair, index, here, routes.weights)
    rows = x, index, here, routes.weights
    if len(x) <= MOST_ROWS:
        return added(rows)
    if local.gate_up.packed is None and not isinstance(step.attend, PagedAttend):
        return None
    most_rows = _rows_of_kernel(routes.experts.shape[1] * x.shape[1])
    if jax.eval_shape(added, tuple(each[:most_rows] for each in rows)) is None:
        return None
    if len(x) <= most_rows:
        return added(rows)
    return in_parts(lambda part: jnp.asarray(added(part)), rows, most_rows)


def _rows_of_kernel(products: int) -> int:
    """Rows that a kernel multiplies at a time, each of which has so many ``products``."""
    return min(KERNEL_ROWS, max(MOST_ROWS, MOST_PRODUCTS // products // ROW_STEP * ROW_STEP))


def _is_token(step: ForwardPass, num_rows: int) -> Array | bool:
    """Whether each of N rows is no padding: bool [N, 1]; True where that is not known."""
    attend = step.attend
    if not isinstance(attend, PagedAttend) or attend.slots.size != num_rows:
        return True
    return attend.is_token.reshape(num_rows, 1)


def _product_by_kernel(
    local: LocalExperts, step: ForwardPass
) -> Callable[[Array, Array], Array | None] | None:
    """From rows and the experts that they chose to what these make of them, by the kernel that
    reads such weights; None if none does."""
    bias, activation = local.gate_up.bias, local.activation
    if (whole := local.in_memory) is not None:
        return lambda x, experts: step.expert_product(x, experts, *whole, bias, activation)
    gate_up, down = local.gate_up.packed, local.down.packed
    if gate_up is None or down is None:
        return None
    return lambda x, experts: step.packed_expert_product(
        x, experts, gate_up, down, bias, activation
    )


def chosen_experts(local: LocalExperts, x: Array, routes: Routes) -> Array:
    """For few rows: gathers the weights of each row's experts. Float32 [N, H].

    Reads the weights of the chosen experts and no others. On GPUs, XLA fuses the gather into the
    product, so nothing is copied (seen in programs compiled for an H100, where one kernel reads
    weights, rows and indices). A CPU copies the weights of the chosen experts first. On
    devices that have some of the experts, choices that others have read the first one.
    """
    experts, here = _local(local, routes)
    repeated = jnp.broadcast_to(x[:, None], (*experts.shape, x.shape[-1]))
    gate_up = einsum_f32("nkh,nkhtf->nktf", repeated, local.gate_up.of(experts))
    if local.gate_up.bias is not None:
        gate_up = gate_up + local.gate_up.bias[experts]
    units = local.hidden_units(gate_up, routes.weights, here)
    # With the sum over k inside of the product XLA would copy the weights.
    mixed = einsum_f32("nkf,nkfh->nkh", units, local.down.of(experts))
    if local.down.bias is not None:
        weights = jnp.where(here, routes.weights, 0.0)
        mixed = mixed + weights[..., None] * local.down.bias[experts]
    return _total(mixed)


def every_expert(
    local: LocalExperts, x: Array, routes: Routes, most_rows: int | None = None
) -> Array:
    """For many rows on GPUs: every expert multiplies every row, ``most_rows`` (MOST_ROWS) at a
    time. Float32 [N, H].

    Two dense products, which read each expert once. Up to some hundred rows a GPU takes as long to
    read the experts as to multiply; then the cost grows with E / k times the needed work.
    """
    most_rows = most_rows or MOST_ROWS
    if len(x) <= most_rows:
        return _every_expert(local, x, routes)
    return in_parts(lambda part: _every_expert(local, *part), (x, routes), most_rows)


def in_parts(multiply: Callable[[Any], Array], rows: Any, most_rows: int) -> Array:
    """What ``multiply`` makes of arrays [N, n], at most ``most_rows`` rows at a time: [N, ...]."""
    num_rows = len(jax.tree.leaves(rows)[0])
    count = -(-num_rows // most_rows)
    size = -(-num_rows // (count * ROW_STEP)) * ROW_STEP  # equal parts: little of it is padding

    def parts(values: Array) -> Array:
        padded = jnp.pad(values, ((0, count * size - num_rows), (0, 0)))
        return padded.reshape(count, size, values.shape[-1])

    cut = jax.tree.map(parts, rows)
    mixed = map_after(jax.tree.leaves(rows)[0], multiply, cut)
    return mixed.reshape(-1, *mixed.shape[2:])[:num_rows]


def _every_expert(local: LocalExperts, x: Array, routes: Routes) -> Array:
    ids = local.first + jnp.arange(local.gate_up.num_experts)
    is_route = routes.experts[..., None] == ids  # [N, k, E]
    is_chosen = jnp.any(is_route, axis=1)
    weights = jnp.sum(jnp.where(is_route, routes.weights[..., None], 0.0), axis=1)  # [N, E]
    gate_up = einsum_f32("nh,ehtf->netf", x, _weights(local)[0]).astype(x.dtype)
    if local.gate_up.bias is not None:
        gate_up = gate_up + local.gate_up.bias
    mixed = _down(local, gate_up, weights, is_chosen)
    if local.down.bias is None:
        return mixed
    return mixed + jnp.einsum("ne,eh->nh", weights, local.down.bias.astype(jnp.float32))


@jax.checkpoint
def _down(local: LocalExperts, gate_up: Array, weights: Array, is_chosen: Array) -> Array:
    """From gate and up [N, E, 2, F] to float32 [N, H]. A gradient computes the hidden units again:
    kept, with what they are made of, they would be several times ``gate_up``."""
    units = local.hidden_units(gate_up, weights, is_chosen)
    return einsum_f32("nef,efh->nh", units, _weights(local)[1])


def _weights(local: LocalExperts) -> tuple[Array, Array]:
    """``in_memory`` of experts that have it, as ``mix`` has seen."""
    weights = local.in_memory
    assert weights is not None
    return weights


def blocks_of_experts(local: LocalExperts, x: Array, routes: Routes) -> Array:
    """For many rows on CPUs, and of weights that are widened for it everywhere: one expert after
    the other multiplies the rows that chose it, in blocks of equal size. Float32 [N, H].

    Rows are sorted by expert; the last block of each is filled up. So the work grows with the rows
    that chose an expert of this device.
    """
    (num_rows, k), num_experts = routes.experts.shape, local.gate_up.num_experts
    experts, here = _local(local, routes)
    size = _block_size(num_rows * k, num_experts)
    # Choices of other devices' experts are sorted behind all others.
    slots, of_block = _blocks(jnp.where(here, experts, num_experts).reshape(-1), num_experts, size)
    num_slots = len(of_block) * size
    rows = jnp.zeros(num_slots, int).at[slots].set(jnp.repeat(jnp.arange(num_rows), k))
    weights = jnp.zeros(num_slots).at[slots].set(routes.weights.reshape(-1))
    kept = jnp.zeros(num_slots, bool).at[slots].set(here.reshape(-1))

    def block(part: tuple[Array, Array, Array, Array]) -> Array:
        x, weights, kept, expert = part
        gate_up = einsum_f32("nh,htf->ntf", x, local.gate_up.of(expert))
        if local.gate_up.bias is not None:
            gate_up = gate_up + local.gate_up.bias[expert]
        units = local.hidden_units(gate_up, weights, kept)
        mixed = einsum_f32("nf,fh->nh", units, local.down.of(expert))
        if local.down.bias is None:
            return mixed
        return mixed + jnp.where(kept, weights, 0.0)[:, None] * local.down.bias[expert]

    parts = (
        x[rows].reshape(-1, size, x.shape[-1]),
        weights.reshape(-1, size),
        kept.reshape(-1, size),
        of_block,
    )
    mixed = map_after(x, block, parts).reshape(-1, x.shape[-1])[slots].reshape(num_rows, k, -1)
    return _total(mixed)


def _total(mixed: Array) -> Array:
    """The sum over choices [N, k, H] -> [N, H], in their order: that of jnp.sum is XLA's choice."""
    return functools.reduce(jnp.add, (mixed[:, choice] for choice in range(mixed.shape[1])))


def _local(local: LocalExperts, routes: Routes) -> tuple[Array, Array]:
    """Index of each chosen expert among this device's (0 for others), and whether it has it."""
    index = routes.experts - local.first
    here = (index >= 0) & (index < local.gate_up.num_experts)
    return jnp.where(here, index, 0), here


def _block_size(choices: int, num_experts: int) -> int:
    """About as many rows as an expert has: a power of two."""
    return min(LARGEST_BLOCK, 1 << (choices // num_experts).bit_length())


def _blocks(experts: Array, num_experts: int, size: int) -> tuple[Array, Array]:
    """Where each choice goes: experts int32 [P], of which ``num_experts`` is none.

    Returns (its slot [P], the expert of each block of ``size`` slots; blocks that stay empty have
    some expert).
    """
    counts = jnp.bincount(experts, length=num_experts + 1)
    blocks = -(-counts // size)
    ends = jnp.cumsum(blocks)
    order = jnp.argsort(experts, stable=True)
    by_expert = experts[order]
    rank = jnp.arange(len(experts)) - (jnp.cumsum(counts) - counts)[by_expert]
    slots = jnp.zeros_like(order).at[order].set((ends - blocks)[by_expert] * size + rank)
    most = len(experts) // size + min(num_experts + 1, len(experts))
    of_block = jnp.searchsorted(ends, jnp.arange(most), side="right")
    return slots, jnp.minimum(of_block, num_experts - 1)
