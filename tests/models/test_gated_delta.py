"""The gated delta rule as a mixer: transformers' layer, and exactness in an engine."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import Array
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from jaxspec import functional
from jaxspec.cache import Geometry
from jaxspec.config.gated_delta import GatedDeltaConfig
from jaxspec.config.model import LayerConfig
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.decoding.drafters import NGramDrafter
from jaxspec.decoding.state import EngineState, Status
from jaxspec.functional import EngineParams
from jaxspec.models import decoder
from jaxspec.models.attention import PagedAttend, dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward_pass import make_pass
from jaxspec.models.mixers.gated_delta import GatedDelta, gated_delta_shape
from jaxspec.parallel import ONE_SHARD, WHOLE
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.programs import new_jit
from tests.helpers.random_models import CONFIG, make_drafter, padded, random_prompts, random_target

HIDDEN, EPS = CONFIG.hidden_size, 1e-6
DELTA = GatedDeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=8, folded=8)
CAPACITY = SpeculationConfig(num_nodes=7, max_depth=3, top_k=2)
SHAPES = (None, TreeShape(3, 2), PLAIN)
PROMPTS = random_prompts((9, 3, 14, 6), seed=11)
ROWS, LENGTH, WIDTH = 2, 48, 4

admit, release = new_jit(functional.admit), new_jit(functional.release)
prefill = new_jit(functional.prefill, "width")
decode = new_jit(functional.decode, "max_rounds", "shape", "checked")


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


@pytest.mark.parametrize("step", [30, 7, 1])
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
    model = random_target()
    description: Any = DELTA
    layers = (model.layers[0], model.layers[1].replace(mixer=ours(theirs())))
    own = LayerConfig(description, CONFIG.layers[1].mlp)
    config = dataclasses.replace(model.config, layers=(model.config.layers[0], own))
    return model.replace(layers=layers, config=config)


@pytest.fixture(scope="module")
def expected(target: Decoder) -> list[list[int]]:
    """Greedy texts, each token by a pass over all tokens before it that keeps nothing."""

    @jax.jit
    def following(tokens: Array) -> Array:
        places = jnp.arange(LENGTH)[None]
        hidden, _, _ = decoder.run(
            target, tokens[None], places, target.no_states(), dense_causal_attend
        )
        return jnp.argmax(decoder.logits(target, hidden)[0], axis=-1)

    results = []
    for prompt in PROMPTS:
        tokens = padded([prompt], LENGTH)[0]
        for place in range(len(prompt), LENGTH):
            tokens[place] = following(tokens)[place - 1]
        results.append(tokens.tolist())
    return results


@pytest.mark.slow
def test_rows_admitted_at_any_time_have_the_same_texts(target: Decoder, expected: list[list[int]]):
    params = EngineParams(target=target, drafter=NGramDrafter(), speculation=CAPACITY)
    state: EngineState = functional.init_state(params, ROWS, LENGTH, page_size=4)
    rng, waiting, accepted = np.random.default_rng(0), list(range(len(PROMPTS))), 0
    owner: list[int | None] = [None] * ROWS
    for _ in range(200):
        status = np.asarray(state.rows.status)
        for row, request in enumerate(owner):
            if request is not None and status[row] == Status.DONE:
                assert np.asarray(state.rows.tokens)[row].tolist() == expected[request]
                state, owner[row] = release(params, state, np.array([row])), None
            if owner[row] is None and waiting:
                owner[row] = request = waiting.pop()
                tokens, lens = padded([PROMPTS[request]], LENGTH), [len(PROMPTS[request])]
                state = admit(params, state, np.array([row]), tokens, np.array(lens))
        if owner == [None] * ROWS:
            break
        listed = rng.permutation([0, 1, -1, ROWS])[:2].astype(np.int32)
        counts = rng.integers(0, WIDTH + 1, 2).astype(np.int32)
        state, _ = prefill(params, state, listed, counts, width=WIDTH)
        shape = SHAPES[rng.integers(len(SHAPES))]
        state, emitted = decode(
            params, state, int(rng.integers(3)), max_rounds=2, shape=shape, checked=False
        )
        accepted += int(emitted.accepted.sum())
    assert owner == [None] * ROWS and not waiting, "requests that never end"
    print(f"{accepted} drafted tokens accepted")
    assert accepted > 0, "this run tested little"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_texts_are_those_of_plain_decoding(target: Decoder, expected: list[list[int]], name: str):
    drafter = make_drafter(name, random_target())
    params = EngineParams(target=target, drafter=drafter, speculation=CAPACITY)
    state = functional.init_state(params, len(PROMPTS), LENGTH, page_size=4)
    lens = np.array([len(prompt) for prompt in PROMPTS])
    state = admit(params, state, np.arange(len(PROMPTS)), padded(PROMPTS, LENGTH), lens)
    for _ in range(4):
        state, _ = prefill(params, state, width=WIDTH)
    state, emitted = decode(params, state, LENGTH, max_rounds=LENGTH, shape=None, checked=False)
    assert np.asarray(state.rows.tokens).tolist() == expected
    assert emitted.accepted.sum() > 0, "this run tested little"
