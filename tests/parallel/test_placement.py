"""What each of two devices holds of models with experts, latent attention and recurrent layers."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec import functional
from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import EagleDrafter, NGramDrafter
from jaxspec.decoding.state import EngineState
from jaxspec.functional import EngineParams
from jaxspec.models.mlps.expert_linear import ExpertLinear
from jaxspec.models.nodes import nodes_of
from jaxspec.models.tensors import splitting
from jaxspec.parallel import make_mesh
from jaxspec.parallel.placement import committed_beside
from tests.decoding.test_exactness_of_experts import FAMILIES, SIZES
from tests.decoding.test_exactness_of_experts import target as expert_target
from tests.decoding.test_hybrid_exactness import raw_config, target
from tests.helpers.mtp_families import save_with_mtp
from tests.helpers.programs import new_jit

DEVICES, ROWS, LENGTH, PAGE = 2, 3, 32, 4
CHAIN = SpeculationConfig.chain(2)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], EngineParams]:
    """(family, devices) -> a checkpoint on so many devices. DeepSeek-V3's has an MTP layer."""

    @functools.cache
    def path(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        if family == "deepseek_v3":
            return save_with_mtp(folder, family)
        if family == "qwen3_5_moe_text":
            model, raw = target(family), raw_config(family)
        else:
            model, raw = expert_target(family), SIZES | FAMILIES[family] | {"model_type": family}
        save_tree(folder, model, model.mapped(splitting()), raw)
        return folder

    @functools.cache
    def make(family: str, devices: int) -> EngineParams:
        drafter = "mtp" if family == "deepseek_v3" else NGramDrafter(min_match=1)
        mesh = None if devices == 1 else make_mesh(devices)
        return load(path(family), drafter, speculation=CHAIN, mesh=mesh, shard_drafter=True)

    return make


def on_devices(x: jax.Array) -> list[np.ndarray]:
    """What each device holds, in the order of the devices."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.device.id)
    assert len(shards) == DEVICES
    return [np.asarray(shard.data) for shard in shards]


def check_split(x: jax.Array, axis: int, whole: Any = None) -> None:
    """Half of ``axis`` on each device: the device's own half of ``whole``, if that is given."""
    expected = list(x.shape)
    expected[axis] //= DEVICES
    assert x.sharding.shard_shape(x.shape) == tuple(expected)
    found = on_devices(x)
    assert [part.shape for part in found] == [tuple(expected)] * DEVICES
    if whole is not None:
        halves = np.split(np.asarray(whole), DEVICES, axis=axis)
        assert all(np.array_equal(*pair) for pair in zip(found, halves, strict=True))


def check_whole(*arrays: Any) -> None:
    """All of each array on every device."""
    for x in arrays:
        assert x.sharding.is_fully_replicated
        assert [part.shape for part in on_devices(x)] == [x.shape] * DEVICES


def after_a_round(params: EngineParams, state: EngineState) -> EngineState:
    """Prompts read and a round decoded, in one program."""

    def run(params: EngineParams, state: EngineState, tokens: Any) -> EngineState:
        rows, lens = np.arange(ROWS), np.full(ROWS, 5, np.int32)
        state = functional.admit(params, state, rows, tokens, lens)
        state, _ = functional.prefill(params, state, width=8)
        return functional.decode(params, state, 1, max_rounds=1, greedy=True)[0]

    tokens = np.random.default_rng(0).integers(96, size=(ROWS, LENGTH), dtype=np.int32)
    return new_jit(run)(params, state, tokens)


def empty_state(params: EngineParams) -> EngineState:
    return functional.init_state(params, ROWS, LENGTH, page_size=PAGE)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe_text"])
def test_each_device_holds_half_of_the_experts(loaded: Any, family: str):
    one, two = loaded(family, 1), loaded(family, DEVICES)
    linears = nodes_of(two, ExpertLinear)
    assert len(linears) >= 2, "gate and up, and down"
    for linear, whole in zip(linears, nodes_of(one, ExpertLinear), strict=True):
        assert linear.weight.shape[0] == 8, "all experts, whole"
        check_split(linear.weight, 0, whole.weight)
        if linear.bias is not None:
            check_split(linear.bias, 0, whole.bias)
    mlp = two.target.layers[-1].mlp
    check_whole(*jax.tree.leaves((mlp.router, mlp.correction, mlp.shared_gate)))  # all choose alike
    if mlp.shared is not None:
        check_split(mlp.shared.down.weight, 0)  # by hidden units
    if family == "deepseek_v3":
        assert isinstance(two.drafter, EagleDrafter)
        assert len(nodes_of(two.drafter, ExpertLinear)) == 2, "the MTP layer's are split, too"


def check_latents(state: EngineState) -> None:
    for layer in (*state.pool.target.layers, *state.pool.draft.layers):
        assert layer.pages.shape[1:3] == (1, PAGE)
        check_whole(layer.pages)
        first, second = on_devices(layer.pages)
        assert np.array_equal(first, second)


def test_latents_are_on_every_device_and_heads_are_split(loaded: Any):
    params = loaded("deepseek_v3", DEVICES)
    assert isinstance(params.drafter, EagleDrafter)
    for layer in (*params.target.layers, *params.drafter.head.layers):
        own: Any = layer.mixer
        check_whole(own.q_in.weight, own.q_norm, own.kv_in.weight, own.kv_norm)
        check_split(own.q.weight, 1)
        check_split(own.key_up.weight, 1)
        check_split(own.value_up.weight, 1)
        check_split(own.o.weight, 0)
    check_latents(empty_state(params))


def check_recurrences(state: EngineState) -> None:
    """Rows are whole, their key heads split. Layers 0 and 2 are recurrent."""
    layers = state.pool.target.layers
    for layer in (layers[0], layers[2]):
        assert layer.s.shape[:2] == (ROWS, 4)
        check_split(layer.s, 1)
        for kept in (*jax.tree.leaves(layer.window), layer.channels):
            assert kept.shape[2] == 4
            check_split(kept, 2)
    check_split(layers[1].k, 1)  # the KV heads of the layer of attention


def test_states_of_recurrent_layers_are_split_by_key_heads(loaded: Any):
    one, two = loaded("qwen3_5_moe_text", 1), loaded("qwen3_5_moe_text", DEVICES)
    own, whole = (params.target.layers[0].mixer for params in (two, one))
    check_split(own.qkvz.weight, 1, whole.qkvz.weight)
    check_split(own.ba.weight, 1, whole.ba.weight)
    check_split(own.taps, 1, whole.taps)
    check_split(own.dt_bias, 0, whole.dt_bias)
    check_split(own.a_log, 0, whole.a_log)
    check_split(own.o.weight, 0, whole.o.weight)
    check_whole(own.norm)
    check_recurrences(empty_state(two))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "check"), [("deepseek_v3", check_latents), ("qwen3_5_moe_text", check_recurrences)]
)
def test_states_stay_where_they_are(loaded: Any, family: str, check: Any):
    """After prompts and a round, and latents have the same bits everywhere."""
    params = loaded(family, DEVICES)
    state = after_a_round(params, empty_state(params))
    assert np.all(np.asarray(state.rows.context_lens) > 5)
    check(state)


def test_a_new_state_is_committed_to_the_devices_of_its_weights():
    mesh = jax.make_mesh((2,), ("x",))
    weights = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh, PartitionSpec("x")))
    state = committed_beside(weights, (jnp.zeros_like(weights), jnp.zeros((), jnp.int32)))
    assert all(leaf.committed for leaf in state)
    assert state[0].sharding == weights.sharding
    assert state[1].sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec()), 0)
