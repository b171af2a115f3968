"""Devices that share a model stay bit-identical over many rounds.

What every device holds whole (tokens, lengths, the drafter's cache) is computed on each of them.
A sum that reached one device in another order, or a row read before it had arrived, would leave
other bits there. It would also change a text that is generated again.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import PagedKV
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.all_reduce_buffers import with_exchanges
from jaxspec.decoding.state import EngineState
from jaxspec.functional import EngineParams, admit, decode, init_state, prefill
from jaxspec.parallel import make_mesh
from pallas_kernels.selection import Kernels
from tests.helpers.layouts import on_mesh
from tests.helpers.marks import slow
from tests.helpers.random_models import (
    make_params,
    padded,
    random_prompts,
    random_target,
    tiny_config,
)

SIZES = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128, "num_layers": 4}
ROUNDS = 100_000
LENGTH, SHORT_LENGTH = 2048, 96
PROMPTS = random_prompts((30, 7, 16, 22, 3, 12, 28, 9), seed=3)


def params_over(devices: int, mode: str) -> EngineParams:
    """A random model in bfloat16 over so many devices, each with the whole EAGLE-3 head."""
    config = tiny_config(num_heads=8, num_kv_heads=4, max_position=LENGTH + 64, **SIZES)
    speculation = SpeculationConfig.chain(3)
    params = make_params(
        "none" if mode == "plain" else "eagle3", speculation, random_target(config)
    )
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, params)
    params = params.replace(kernels=Kernels.for_device(sharing=2))
    return with_exchanges(on_mesh(params, make_mesh(devices), shard_drafter=False))


def program(length: int) -> Any:
    """A compiled function from parameters to the final state of all prompts, and its rounds."""
    tokens = padded(PROMPTS, max(map(len, PROMPTS)))
    lengths = np.array([len(prompt) for prompt in PROMPTS], np.int32)

    @jax.jit
    def run(params: EngineParams) -> tuple[EngineState, jax.Array]:
        state = init_state(params, len(PROMPTS), length, page_size=64)
        state = admit(params, state, np.arange(len(PROMPTS)), tokens, lengths)
        state, _ = prefill(params, state, width=tokens.shape[1], greedy=True)
        state, emitted = decode(params, state, length, max_rounds=length, greedy=True)
        return state, emitted.num_rounds

    return run


def bits(array: Any) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


def without_null_page(state: EngineState) -> list[jax.Array]:
    """The state's arrays. Nothing reads page 0; of the rows that are written there at once, another
    one may win on each device."""

    def kept(part: Any) -> Any:
        return [part.k[1:], part.v[1:]] if isinstance(part, PagedKV) else part

    return jax.tree.leaves(
        jax.tree.map(kept, state, is_leaf=lambda part: isinstance(part, PagedKV))
    )


def check_copies(state: EngineState) -> int:
    """Every copy of an array has the same bits. Returns how many arrays have copies."""
    copied = 0
    for leaf in without_null_page(state):
        shards = leaf.addressable_shards
        if len(shards) > 1 and leaf.is_fully_replicated:
            copied += 1
            first, *others = (bits(shard.data) for shard in shards)
            assert all(np.array_equal(first, other) for other in others), "devices disagree"
    return copied


@pytest.mark.parametrize("mode", ["plain", "chain"])
@pytest.mark.parametrize(
    ("devices", "rounds", "length"),
    [
        *(pytest.param(n, ROUNDS, LENGTH, marks=pytest.mark.gpu) for n in (2, 4, 8)),
        slow(2, 1, SHORT_LENGTH),
    ],
)
def test_devices_hold_the_same_bits(devices: int, rounds: int, length: int, mode: str):
    if len(jax.devices()) < devices:
        pytest.skip(f"{devices} devices are needed")
    params = params_over(devices, mode)
    run = program(length)
    first: np.ndarray | None = None
    done = 0
    while done < rounds:
        state, num_rounds = run(params)
        done += int(np.max(num_rounds))
        assert check_copies(state) > 5
        texts = np.asarray(state.rows.tokens)
        first = texts if first is None else first
        assert np.array_equal(texts, first), f"another text after {done} rounds"
