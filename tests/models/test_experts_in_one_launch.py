"""Experts in one launch, with the choice: when, and that they are those of several launches."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.experts import ExpertsConfig, RoutingConfig
from jaxspec.models.attention import PagedAttend
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import ChosenSum, Linear
from jaxspec.models.mlps import Experts, slots
from jaxspec.models.mlps.last_expert import LastExpert
from jaxspec.models.mlps.routing import Routes
from jaxspec.models.quantized.packed_experts import PackedExpertLinear
from jaxspec.parallel import WHOLE, Layout
from pallas_kernels.expert_gate_up_down import routed_gate_up_down
from pallas_kernels.o_gate_up_down.meeting import MEETING, SHAPE, make_meeting
from pallas_kernels.packed_expert_product.cases import Case, make_arguments
from pallas_kernels.selection import NO_KERNELS, Kernels
from tests.helpers.kernels import lowered

KERNELS = Kernels(frozenset({"expert_gate_up_down"}))
LAUNCH = "expert_gate_up_down_kernel"
ROUTING = RoutingConfig(num_experts=128, top_k=4, normalize=True)
CONFIG = ExpertsConfig(128, ROUTING, shared_size=128, shared_gate=True)


@functools.lru_cache(maxsize=3)  # of the layer that most tests change
def weights_of(case: Case) -> tuple[Any, Any]:
    *_, gate_up, down, _ = jax.jit(lambda: make_arguments(case))()
    return gate_up, down


def layer(form: str = "fp8", hidden: int = 512, units: int = 128, **fields: Any) -> Experts:
    """Experts of which the last one is shared, beside MXFP4 in FP8 blocks."""
    beside = form == "mxfp4"
    case = Case(1, 1, 128 if beside else 129, hidden, units, form=form)

    def weights(packed: Any, axes: tuple[str, ...]) -> PackedExpertLinear:
        arrays: dict[str, Any] = {"values": packed.values, "scale": packed.scale}
        if len(axes) == 3:  # all outputs in one dimension
            arrays = {name: array[:, 0] for name, array in arrays.items()}
        how: dict[str, Any] = {"axes": axes, "activations": jnp.dtype("bfloat16")}
        how |= {"code": packed.code, "block": packed.block, "scale_code": packed.scale_code}
        return PackedExpertLinear(**arrays, **how)

    def pair(case: Case) -> dict[str, PackedExpertLinear]:
        gate_up, down = weights_of(case)
        axes = ("expert", "in", "two", "out"), ("expert", "in", "out")
        return {"gate_up": weights(gate_up, axes[0]), "down": weights(down, axes[1])}

    def linear(outputs: int, seed: int) -> Linear:
        numbers = np.random.default_rng(seed).standard_normal((hidden, outputs)) * hidden**-0.5
        return Linear(weight=jnp.asarray(numbers, jnp.bfloat16), axes=("in", "out"))

    of_layer: dict[str, Any] = {
        "router": linear(128, 0),
        "correction": None,
        **pair(case),
        "last": LastExpert(**pair(Case(1, 1, 1, hidden, units))) if beside else None,
        "shared_gate": linear(1, 1),
        "config": CONFIG,
    }
    return Experts(**(of_layer | fields))


def step(rows: int = 3, kernels: Kernels = KERNELS, **fields: Any) -> ForwardPass:
    """A pass of an engine whose last row is padding."""
    lens = jnp.zeros(1, jnp.int32)
    attend = PagedAttend(
        rows=lens,
        page_table=lens[None],
        context_lens=lens,
        slots=jnp.zeros((1, rows), jnp.int32),
        positions=lens,
        kv_lens=lens + max(1, rows - 1),
    )
    shared = attend, {}, {}, 1e-5, WHOLE, kernels
    whole = ForwardPass(*shared, exchange=jnp.zeros(SHAPE, jnp.int32))
    return dataclasses.replace(whole, **fields)


def rows_of(count: int, hidden: int = 512) -> jax.Array:
    numbers = np.random.default_rng(2).standard_normal((1, count, hidden))
    return jnp.asarray(numbers, jnp.bfloat16)


def test_experts_are_those_of_several_launches(monkeypatch: pytest.MonkeyPatch):
    def by_reference(*arguments: Any, rule: Any, implementation: Any) -> Any:
        assert implementation == "auto"
        return routed_gate_up_down(*arguments, rule=rule)

    monkeypatch.setattr(slots, "routed_gate_up_down", by_reference)
    experts, several = layer(), step(kernels=NO_KERNELS)

    @jax.jit
    def both(x: jax.Array) -> Any:
        found = experts(x, step())
        assert isinstance(found, ChosenSum)
        wanted = experts.mixed(x[0], experts.routes(x[0], several), several)
        return found.products.total(), wanted

    total, expected = (np.asarray(array, np.float64) for array in both(rows_of(3)))
    assert np.linalg.norm((total - expected)[:2]) <= 1e-2 * np.linalg.norm(expected[:2])
    assert (total[2] == 0).all()  # padding chooses none


def program(experts: Experts, step: ForwardPass, rows: int = 3, hidden: int = 512) -> str:
    def total(x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, hidden)
        found = experts.in_one_launch(rows, step)
        return rows if found is None else found.total()

    return lowered(total, jax.ShapeDtypeStruct((1, rows, hidden), jnp.bfloat16))


def test_on_a_gpu_it_is_one_launch():
    assert "expert_gate_up_down" in MEETING
    assert program(layer(), step()).count("call @routed_gate_up_down_mosaic") == 1
    assert LAUNCH in program(layer(shared_gate=None), step(rows=8), rows=8)


@pytest.mark.slow  # tests/kernels lowers the kernel of both formats
def test_on_a_gpu_it_is_one_launch_of_4_bits():
    assert LAUNCH in program(layer("mxfp4", 1024, 256), step(2), rows=2, hidden=1024)


@pytest.mark.parametrize(
    ("form", "hidden", "units", "takes"), [("fp8", 512, 128, True), ("mxfp4", 1024, 256, False)]
)
def test_without_the_choice_4_bits_take_two_launches(
    form: str, hidden: int, units: int, takes: bool
):
    experts = layer(form, hidden, units)
    chosen = Routes(jnp.zeros((2, 4), jnp.int32), jnp.ones((2, 4)))

    def total(x: jax.Array) -> jax.Array:
        how = experts.gate_up, experts.down, None, step(2)
        found = slots.slot_products(x, chosen, *how)
        return x if found is None else found.products

    assert takes == (LAUNCH in lowered(total, jax.ShapeDtypeStruct((2, hidden), jnp.bfloat16)))


def routed(weighs_input: bool = False, **fields: Any) -> ExpertsConfig:
    routing = dataclasses.replace(ROUTING, **fields)
    return dataclasses.replace(CONFIG, routing=routing, weighs_input=weighs_input)


ZEROS: Any = np.zeros((512, 128), jnp.bfloat16)  # NumPy's: no device is used to collect tests
BIASED = Linear(weight=ZEROS, bias=ZEROS[0], axes=("in", "out"))
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no kernel of it": ({}, {"kernels": NO_KERNELS}),
    "no place to meet": ({}, {"exchange": None}),
    "a split model": ({}, {"layout": Layout(ff=("x",))}),
    "more rows than it takes": ({}, {"rows": 9}),
    "rows that two launches multiply faster": (
        {"form": "mxfp4", "hidden": 1024, "units": 256},
        {"rows": 3},
    ),
    "integers": ({"form": "int4"}, {}),
    "a correction of scores": ({"config": routed(correction=True)}, {}),
    "groups of experts": ({"config": routed(num_groups=4, top_groups=2)}, {}),
    "weighted inputs": ({"config": routed(top_k=1, weighs_input=True)}, {}),
    "a router with a bias": ({"router": BIASED}, {}),
}


@pytest.mark.parametrize("fields, passed", OTHERS.values(), ids=OTHERS)
def test_other_layers_take_several_launches(fields: dict[str, Any], passed: dict[str, Any]):
    rows, hidden = passed.get("rows", 3), fields.get("hidden", 512)
    assert LAUNCH not in program(layer(**fields), step(**passed), rows, hidden)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "rows"), [("fp8", 1), ("fp8", 2), ("fp8", 5), ("fp8", 8), ("mxfp4", 1), ("mxfp4", 2)]
)
def test_on_the_device_experts_are_those_of_several_launches(form: str, rows: int):
    meeting = make_meeting(jnp.zeros(1))
    assert meeting is not None, "no GPU with as many multiprocessors as an H100 SXM"
    experts, x = layer(form, 2048, 512), rows_of(rows, 2048)

    def total(operations: set[str]) -> np.ndarray:
        def run(x: jax.Array, meeting: jax.Array) -> Any:
            of_pass = step(rows, Kernels(frozenset(operations)), exchange=meeting)
            added: Any = experts(x, of_pass)
            return added.products.total() if isinstance(added, ChosenSum) else added.routed[0]

        return np.asarray(jax.jit(run)(x, meeting), np.float64)

    expected = total({"packed_expert_product", "top_k"})
    found = total({"packed_expert_product", "top_k"} | KERNELS.operations)
    assert np.linalg.norm(found - expected) <= 1e-2 * np.linalg.norm(expected)
    assert not meeting.any()
