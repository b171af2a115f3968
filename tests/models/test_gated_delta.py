"""The gated delta rule as a mixer: transformers' layer, and exactness in an engine."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import Array
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from jaxspec.cache import Geometry
from jaxspec.config.recurrent import GatedDeltaConfig
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward_pass import make_pass
from jaxspec.models.mixers.gated_delta import GatedDelta, gated_delta_shape
from jaxspec.parallel import ONE_SHARD, WHOLE
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.admitted_rows import (
    assert_rows_have_texts,
    drafted_texts,
    greedy_texts,
    with_mixer,
)
from tests.helpers.marks import slow
from tests.helpers.random_models import CONFIG, make_drafter, random_target

HIDDEN, EPS = CONFIG.hidden_size, 1e-6
DELTA = GatedDeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=8, folded=8)


def theirs(seed: int = 0) -> Qwen3NextGatedDeltaNet:
    """transformers' layer of random weights."""
    torch.manual_seed(seed)
    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=4,
        linear_num_key_heads=DELTA.num_key_heads,
        linear_num_value_heads=DELTA.num_value_heads,
        linear_key_head_dim=DELTA.key_dim,
        linear_value_head_dim=DELTA.value_dim,
        rms_norm_eps=EPS,
    )
    layer = Qwen3NextGatedDeltaNet(config, layer_idx=0).float().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def ours(layer: Qwen3NextGatedDeltaNet) -> GatedDelta:
    """The same weights in our layout."""
    shape = gated_delta_shape(DELTA, HIDDEN, jnp.dtype(jnp.float32), ONE_SHARD)
    tensors = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    groups, values, width = DELTA.num_key_heads, DELTA.values_per_key, DELTA.key_dim
    taps = tensors["conv1d.weight"][:, 0].T  # [K, q of all groups, then k, then v]
    cut = groups * width
    parts = [
        part.reshape(DELTA.taps, groups, -1) for part in np.split(taps, [cut, 2 * cut], axis=-1)
    ]

    def linear(own: Any, name: str) -> Any:
        weight = tensors[f"{name}.weight"].T
        return own.replace(weight=jnp.asarray(weight.reshape(own.weight.shape)))

    return shape.replace(
        qkvz=linear(shape.qkvz, "in_proj_qkvz"),
        ba=linear(shape.ba, "in_proj_ba"),
        taps=jnp.asarray(np.concatenate(parts, axis=-1)),
        dt_bias=jnp.asarray(tensors["dt_bias"].reshape(groups, values)),
        a_log=jnp.asarray(tensors["A_log"].reshape(groups, values)),
        norm=jnp.asarray(tensors["norm.weight"]),
        o=linear(shape.o, "out_proj"),
    )


@pytest.mark.parametrize("step", [30, 7, slow(1)])
def test_outputs_equal_transformers(step: int):
    layer, batch, length = theirs(), 2, 30
    mixer = ours(layer)
    x = np.random.default_rng(0).standard_normal((batch, length, HIDDEN)).astype(np.float32)
    with torch.no_grad():
        expected = layer(torch.from_numpy(x)).numpy()
    state, found = mixer.init_state(Geometry(1, 4, batch), WHOLE), []

    @jax.jit
    def run(state, x: Array, start: Array):
        lens = jnp.full(batch, start)
        positions = lens[:, None] + jnp.arange(x.shape[1])
        attend = PagedAttend(
            rows=jnp.arange(batch),
            page_table=jnp.zeros((batch, 1), int),
            context_lens=lens,
            slots=jnp.zeros_like(positions),
            positions=positions,
            kv_lens=lens + x.shape[1],
        )
        shared = make_pass([], positions, attend, EPS, WHOLE, NO_KERNELS)
        product, state = mixer(x, state, shared)
        return product.result(WHOLE, NO_KERNELS), state

    for start in range(0, length, step):
        out, state = run(state, jnp.asarray(x[:, start : start + step]), jnp.int32(start))
        found.append(out)
    error = np.abs(np.concatenate(found, axis=1) - expected).max()
    print(f"{step} tokens at once: {error:.1e} of {np.abs(expected).max():.1f}")
    assert error < 1e-4 * np.abs(expected).max()


@pytest.fixture(scope="module")
def target() -> Decoder:
    """Attention, then the recurrence."""
    return with_mixer(ours(theirs()), DELTA)


@pytest.fixture(scope="module")
def expected(target: Decoder) -> list[list[int]]:
    return greedy_texts(target)


@pytest.mark.slow
def test_rows_admitted_at_any_time_have_the_same_texts(target: Decoder, expected: list[list[int]]):
    assert_rows_have_texts(target, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_texts_are_those_of_plain_decoding(target: Decoder, expected: list[list[int]], name: str):
    assert drafted_texts(target, make_drafter(name, random_target())) == expected
