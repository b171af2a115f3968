"""Which models get memory to add up products in, and the options of programs over several GPUs."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.all_reduce_buffers import with_exchanges, without_exchanges
from jaxspec.decoding.drafters import BlockDrafter
from jaxspec.engine.programs.weights import as_loaded
from jaxspec.engine.programs.xla_options import ONE_GRAPH, compiler_options, passage_options
from jaxspec.functional import EngineParams
from jaxspec.parallel import make_mesh, partition_specs
from pallas_kernels.selection import Kernels
from tests.helpers.block_heads import block_target, guessing_head
from tests.helpers.layouts import on_mesh
from tests.helpers.random_models import make_params, random_target, tiny_config

MEETS = Kernels(frozenset({"o_gate_up_down"}))
EXCHANGES = Kernels(frozenset({"reduce_add_rms_norm"}))


def words(mesh: Mesh, axis: str, width: int) -> jax.Array:
    return jnp.zeros((mesh.shape[axis], width), jnp.int32)


def split_params(name: str, kernels: Kernels, *, shard_drafter: bool = True) -> EngineParams:
    params = make_params(name, SpeculationConfig.chain(2), random_target(tiny_config()))
    params = params.replace(kernels=kernels)
    return on_mesh(params, make_mesh(2, 2), shard_drafter=shard_drafter)


def test_each_split_model_gets_its_own():
    params = with_exchanges(split_params("eagle3", EXCHANGES), words)
    drafter: Any = params.drafter
    target, head = params.target.exchange, drafter.head.exchange
    assert target is not None and head is not None and target is not head
    assert target.shape == (2, params.target.config.hidden_size)
    assert tuple(partition_specs(params).target.exchange) == ("model", None)
    mixed: Any = with_exchanges(split_params("mixed", EXCHANGES), words).drafter
    assert mixed.model.head.exchange is not None


def test_a_model_that_is_not_split_gets_none():
    params = with_exchanges(split_params("eagle3", EXCHANGES, shard_drafter=False), words)
    drafter: Any = params.drafter
    assert params.target.exchange is not None and drafter.head.exchange is None
    one_device = make_params("eagle3", SpeculationConfig.chain(2), random_target(tiny_config()))
    one_device = one_device.replace(kernels=EXCHANGES)
    assert with_exchanges(one_device, words) is one_device


def test_on_one_device_each_model_gets_its_own_place_to_meet():
    target = block_target(tiny_config())
    head = guessing_head(target, "dflash")
    params = EngineParams(
        target=target,
        drafter=BlockDrafter(head=head),
        speculation=SpeculationConfig.chain(2),
        kernels=MEETS,
    )
    given = with_exchanges(params, meet=lambda beside: jnp.zeros((1, beside.ndim - 1)))
    drafter: Any = given.drafter
    assert given.target.exchange is not None and drafter.head.exchange is not None
    assert given.target.exchange is not drafter.head.exchange
    for shown in (without_exchanges(given), as_loaded(given)):  # the latter by an engine
        assert jax.tree.structure(shown) == jax.tree.structure(params)
    assert with_exchanges(params).target.exchange is None  # on a CPU


def test_without_the_kernel_or_the_devices_for_it_there_is_none():
    params = split_params("none", Kernels())
    assert with_exchanges(params, words) is params
    assert with_exchanges(split_params("none", EXCHANGES)).target.exchange is None  # on CPUs


@dataclasses.dataclass(frozen=True)
class Device:
    platform: str
    index: int


@pytest.mark.parametrize(
    ("platform", "count", "one_graph"), [("gpu", 2, True), ("gpu", 1, False), ("cpu", 2, False)]
)
def test_only_programs_over_several_gpus_leave_all_reduces_to_nccl(
    platform: str, count: int, one_graph: bool
):
    devices = {Device(platform, index) for index in range(count)}
    array: Any = SimpleNamespace(sharding=SimpleNamespace(device_set=devices))
    options = compiler_options(array, deterministic=False)
    assert (ONE_GRAPH.items() <= options.items()) == one_graph
    assert set(ONE_GRAPH).isdisjoint(options) != one_graph
    assert bool(passage_options(array)) == (platform == "gpu")
