"""Products of experts in passes of an engine, which need no gradient: kernels leave them in slots,
and the norm that follows adds them up."""

from jax import Array

from jaxspec.config.experts import ExpertActivation, SquaredRelu
from jaxspec.models.activations import clamp_of
from jaxspec.models.mlps.expert_linear import AnyExpertLinear
from pallas_kernels.expert_product import expert_slots
from pallas_kernels.expert_product import misfit as expert_misfit
from pallas_kernels.expert_product.slots import SlotProducts
from pallas_kernels.packed_expert_product import misfit as packed_expert_misfit
from pallas_kernels.packed_expert_product import packed_expert_slots
from pallas_kernels.selection import Kernels


def slot_products(
    x: Array,
    experts: Array,
    gate_up: AnyExpertLinear,
    down: AnyExpertLinear,
    activation: ExpertActivation | None,
    kernels: Kernels,
) -> SlotProducts | None:
    """What each chosen expert makes of rows x [N, H], see expert_product and packed_expert_product;
    None where no kernel does it. ``experts``: int32 [N, k], E for none."""
    if isinstance(activation, SquaredRelu):
        return None
    clamp = activation and clamp_of(activation)
    if gate_up.in_memory is not None and down.in_memory is not None:
        wide = gate_up.in_memory, down.in_memory, gate_up.bias
        if "expert_product" not in kernels or expert_misfit(x, *wide):
            return None
        how = kernels.implementation("expert_product")
        return expert_slots(x, experts, *wide, clamp=clamp, implementation=how)
    if gate_up.packed is None or down.packed is None:
        return None
    packed = gate_up.packed, down.packed, gate_up.bias
    if "packed_expert_product" not in kernels or packed_expert_misfit(x, *packed):
        return None
    how = kernels.implementation("packed_expert_product")
    return packed_expert_slots(x, experts, *packed, clamp=clamp, implementation=how)
