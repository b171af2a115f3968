"""Weights of flax models, linen and nnx: the same logits, and swapped without a compile."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec import Engine, EngineParams, SamplingParams, SpeculationConfig
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.speculation.drafters import EagleDrafter
from jaxspec.weights.flax_bridge import head_from_flax, target_from_flax
from tests.programs import FAST_COMPILE
from tests.random_models import CONFIG, eagle3_head, random_target

ATTENTION = CONFIG.layers[0].attention
LAYER = "model.layers.{i}."
NAMES = {
    "model.embed_tokens.weight": "embed.embedding",
    "model.norm.weight": "norm.scale",
    "lm_head.weight": "lm_head.kernel",
    f"{LAYER}input_layernorm.weight": "layers_{i}.input_norm.scale",
    f"{LAYER}post_attention_layernorm.weight": "layers_{i}.post_norm.scale",
    f"{LAYER}self_attn.q_proj.weight": "layers_{i}.q.kernel",
    f"{LAYER}self_attn.k_proj.weight": "layers_{i}.k.kernel",
    f"{LAYER}self_attn.v_proj.weight": "layers_{i}.v.kernel",
    f"{LAYER}self_attn.o_proj.weight": "layers_{i}.o.kernel",
    f"{LAYER}mlp.gate_proj.weight": "layers_{i}.gate.kernel",
    f"{LAYER}mlp.up_proj.weight": "layers_{i}.up.kernel",
    f"{LAYER}mlp.down_proj.weight": "layers_{i}.down.kernel",
}


def rotate(x: Any) -> Any:
    """Llama's rope over x [B, T, heads, D], positions from 0."""
    half = x.shape[-1] // 2
    frequencies = ATTENTION.rope.theta ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Block(nn.Module):
    """A Llama layer as one writes it in linen, heads in dimensions of their own."""

    @nn.compact
    def __call__(self, x):
        size, config = CONFIG.hidden_size, ATTENTION

        def heads(name: str, count: int) -> nn.DenseGeneral:
            return nn.DenseGeneral((count, config.head_dim), use_bias=False, name=name)

        def norm(name: str) -> nn.RMSNorm:
            return nn.RMSNorm(epsilon=CONFIG.rms_norm_eps, name=name)

        y = norm("input_norm")(x)
        q, k = rotate(heads("q", config.num_heads)(y)), rotate(heads("k", config.num_kv_heads)(y))
        out = jax.nn.dot_product_attention(q, k, heads("v", config.num_kv_heads)(y), is_causal=True)
        x = x + nn.DenseGeneral(size, axis=(-2, -1), use_bias=False, name="o")(out)
        y, ff = norm("post_norm")(x), CONFIG.layers[0].mlp.intermediate_size
        gate = nn.Dense(ff, use_bias=False, name="gate")(y)
        up = nn.Dense(ff, use_bias=False, name="up")(y)
        return x + nn.Dense(size, use_bias=False, name="down")(nn.silu(gate) * up)


class Llama(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(CONFIG.vocab_size, CONFIG.hidden_size, name="embed")(tokens)
        for index in range(CONFIG.num_layers):
            x = Block(name=f"layers_{index}")(x)
        x = nn.RMSNorm(epsilon=CONFIG.rms_norm_eps, name="norm")(x)
        return nn.Dense(CONFIG.vocab_size, use_bias=False, name="lm_head")(x)


TOKENS = np.arange(14, dtype=np.int32).reshape(2, 7) * 5 % CONFIG.vocab_size


@pytest.fixture(scope="module")
def params() -> Any:
    init = jax.jit(Llama().init, compiler_options=FAST_COMPILE)
    return init(jax.random.key(1), TOKENS)


@pytest.fixture(scope="module")
def like() -> Decoder:
    return random_target()


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def our_logits(target: Decoder) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    states = target.no_states()
    hidden, _, _ = decoder.run(target, jnp.asarray(TOKENS), positions, states, dense_causal_attend)
    return decoder.logits(target, hidden)


def test_a_linen_model_has_the_same_logits(params: Any, like: Decoder):
    target = target_from_flax(like, params, NAMES)
    expected: Any = jax.jit(Llama().apply, compiler_options=FAST_COMPILE)(params, TOKENS)
    np.testing.assert_allclose(our_logits(target), expected, atol=1e-4)


def test_an_nnx_state_is_taken_as_well(params: Any, like: Decoder):
    state = nnx.State(jax.tree.map(nnx.Param, params["params"]))
    from_state, from_dict = (target_from_flax(like, tree, NAMES) for tree in (state, params))
    for one, other in zip(jax.tree.leaves(from_state), jax.tree.leaves(from_dict), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_head_comes_from_a_tree_named_as_its_checkpoint(like: Decoder):
    head: Any = eagle3_head(like)
    fc = jnp.asarray(np.random.default_rng(0).standard_normal(head.front.fc.weight.shape))
    layer = head.layers[0]
    first, attention, mlp = "midlayer.", layer.mixer, layer.mlp
    qkv, bias = attention.qkv.weight, attention.qkv.bias
    tree = {
        "fc.kernel": fc,
        "norm.scale": head.norm,
        "lm_head.kernel": head.lm_head.weight,
        "layer.hidden_norm.scale": head.front.hidden_norm,
        "layer.input_layernorm.scale": layer.input_norm,
        "layer.post_attention_layernorm.scale": layer.post_norm,
        "layer.q.kernel": qkv[:, :, :-2],
        "layer.k.kernel": qkv[:, :, -2],
        "layer.v.kernel": qkv[:, :, -1],
        "layer.q.bias": bias[:, :-2],
        "layer.k.bias": bias[:, -2],
        "layer.v.bias": bias[:, -1],
        "layer.o.kernel": attention.o.weight,
        "layer.gate.kernel": mlp.gate_up.weight[:, 0],
        "layer.up.kernel": mlp.gate_up.weight[:, 1],
        "layer.down.kernel": mlp.down.weight,
    }
    names = {
        "fc.weight": "fc.kernel",
        "norm.weight": "norm.scale",
        "lm_head.weight": "lm_head.kernel",
        f"{first}hidden_norm.weight": "layer.hidden_norm.scale",
        f"{first}input_layernorm.weight": "layer.input_layernorm.scale",
        f"{first}post_attention_layernorm.weight": "layer.post_attention_layernorm.scale",
        f"{first}self_attn.o_proj.weight": "layer.o.kernel",
    }
    for ours in ("q", "k", "v"):
        names[f"{first}self_attn.{ours}_proj.weight"] = f"layer.{ours}.kernel"
        names[f"{first}self_attn.{ours}_proj.bias"] = f"layer.{ours}.bias"
    for ours in ("gate", "up", "down"):
        names[f"{first}mlp.{ours}_proj.weight"] = f"layer.{ours}.kernel"
    made: Any = head_from_flax(head, tree, names)
    np.testing.assert_array_equal(made.front.fc.weight, fc)
    rest = made.replace(front=made.front.replace(fc=head.front.fc))
    for one, other in zip(jax.tree.leaves(rest), jax.tree.leaves(head), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree, names: names.pop("model.norm.weight"), "no path is given for model.norm"),
        (lambda tree, names: tree.pop("norm"), "model.norm.weight should be at norm.scale"),
        (lambda tree, names: tree["norm"].update(scale=jnp.ones(3)), r"norm.scale is \[3\]"),
        (lambda tree, names: tree.update(extra=jnp.ones(3)), "extra is no tensor of the model"),
    ],
)
def test_a_tree_that_does_not_fit_is_a_clear_error(params: Any, like: Decoder, change, message):
    tree = {name: dict(value) for name, value in params["params"].items()}
    names = dict(NAMES)
    change(tree, names)
    with pytest.raises(ValueError, match=message):
        target_from_flax(like, tree, names)


def test_weights_are_swapped_without_a_compile(params: Any, like: Decoder):
    speculation = SpeculationConfig.chain(2)
    drafter = EagleDrafter(head=eagle3_head(like))
    started = EngineParams(target=like, drafter=drafter, speculation=speculation)
    engine = Engine(started, CacheConfig(page_size=4, max_length=32), EngineConfig(max_rows=1))
    sampling = SamplingParams(max_tokens=8)

    def text() -> list[int]:
        generation = engine.add([1, 2, 3], sampling)
        engine.finish([generation])
        return generation.token_ids

    before = text()
    programs: list[Any] = [
        getattr(engine.programs, name) for name in ("admit_rows", "prefill", "decode")
    ]
    traces = [program._cache_size() for program in programs]
    engine.use_target(target_from_flax(like, params, NAMES))
    engine.use_drafter(EagleDrafter(head=eagle3_head(like, seed=9)))
    after = text()
    assert before != after
    assert [program._cache_size() for program in programs] == traces
    engine.use_target(like)
    assert text() == before


def test_weights_of_other_shapes_are_refused(like: Decoder):
    params = EngineParams(
        target=like,
        drafter=EagleDrafter(head=eagle3_head(like)),
        speculation=SpeculationConfig.chain(2),
    )
    engine = Engine(params, CacheConfig(page_size=4, max_length=32), EngineConfig(max_rows=1))
    wider = random_target(dataclasses.replace(CONFIG, vocab_size=97))
    with pytest.raises(ValueError, match="other shapes"):
        engine.use_target(wider)
