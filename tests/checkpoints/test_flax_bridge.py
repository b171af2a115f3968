"""Weights of flax models, linen and nnx: the same logits, and swapped without a compile."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util
from jax.sharding import SingleDeviceSharding

from jaxspec import Engine, EngineParams, SamplingParams, SpeculationConfig
from jaxspec.checkpoints.flax_bridge import head_from_flax, order_of_axes, target_from_flax
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.decoding.drafters import EagleDrafter
from jaxspec.models import decoder
from jaxspec.models.decoder import Decoder
from jaxspec.models.quantized.kv_cache import with_float8_cache
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import CONFIG, eagle3_head, random_target
from tests.helpers.sampling_reference import plain_logits

ATTENTION = CONFIG.layers[0].attention
H, F = "inputs", "outputs"  # of the projection gate
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
        y, ff = norm("post_norm")(x), CONFIG.layers[0].units
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


def test_a_linen_model_has_the_same_logits(params: Any, like: Decoder):
    target = target_from_flax(like, params, NAMES)
    expected: Any = jax.jit(Llama().apply, compiler_options=FAST_COMPILE)(params, TOKENS)
    np.testing.assert_allclose(plain_logits(target, TOKENS), expected, atol=1e-4)


def tunix_tree(params: Any) -> nnx.State:
    """The same weights named and laid out as google-tunix 0.1.7 does in its Llama 3."""
    flat = traverse_util.flatten_dict(params["params"], sep=".")
    tree: dict[Any, Any] = {
        ("embedder", "input_embedding"): flat["embed.embedding"],
        ("final_norm", "w"): flat["norm.scale"],
        ("lm_head", "w"): flat["lm_head.kernel"],  # [D, V]
    }
    for i in range(CONFIG.num_layers):
        old = f"layers_{i}"
        for name, norm in (("input", "input_norm"), ("post_attention", "post_norm")):
            tree["layers", i, f"{name}_layernorm", "w"] = flat[f"{old}.{norm}.scale"]
        for name in "qkvo":  # [D, N, H] and [N, H, D]
            tree["layers", i, "attn", f"{name}_proj", "w"] = flat[f"{old}.{name}.kernel"]
        for name in ("gate", "up", "down"):  # [in, out]
            tree["layers", i, "mlp", f"{name}_proj", "kernel"] = flat[f"{old}.{name}.kernel"]
    return nnx.State(jax.tree.map(nnx.Param, traverse_util.unflatten_dict(tree)))


PARTS = {name: f"{LAYER}self_attn.{name}_proj.weight" for name in "qkvo"}
TUNIX: dict[str, Any] = {
    "model.embed_tokens.weight": "embedder.input_embedding",
    "model.norm.weight": "final_norm.w",
    "lm_head.weight": ("lm_head.w", "in out"),
    f"{LAYER}input_layernorm.weight": "layers.{i}.input_layernorm.w",
    f"{LAYER}post_attention_layernorm.weight": "layers.{i}.post_attention_layernorm.w",
    **{PARTS[name]: (f"layers.{{i}}.attn.{name}_proj.w", "in heads dim") for name in "qkv"},
    PARTS["o"]: ("layers.{i}.attn.o_proj.w", "heads dim out"),
    **{
        f"{LAYER}mlp.{name}_proj.weight": f"layers.{{i}}.mlp.{name}_proj.kernel"
        for name in ("gate", "up", "down")
    },
}


def assert_same(ours: Any, theirs: Any) -> None:
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


def test_axes_are_stated_for_arrays_of_einsums(params: Any, like: Decoder):
    made = target_from_flax(like, tunix_tree(params), TUNIX)
    assert_same(made, target_from_flax(like, params, NAMES))


@pytest.mark.parametrize(
    ("axes", "order"),
    [("heads in dim", (1, 0, 2)), ("heads dim in", (1, 2, 0)), ("in heads dim", (0, 1, 2))],
)
def test_heads_stand_before_or_after_the_inputs(axes: str, order: Any, params: Any, like: Decoder):
    """Gemma's q_einsum, in Tunix and its own library, is [heads, in, dim]."""
    state = nnx.to_pure_dict(tunix_tree(params))
    for layer in state["layers"].values():
        layer["attn"]["q_proj"]["w"] = layer["attn"]["q_proj"]["w"].transpose(order)
    names = TUNIX | {PARTS["q"]: ("layers.{i}.attn.q_proj.w", axes)}
    assert_same(target_from_flax(like, state, names), target_from_flax(like, params, NAMES))


def test_an_array_may_stack_others(params: Any, like: Decoder):
    """Keys and values as Gemma's kv_einsum has them, [2, heads, in, dim], and layers of a scan."""
    state = nnx.to_pure_dict(tunix_tree(params))
    for layer in state["layers"].values():
        parts = (layer["attn"].pop(f"{name}_proj")["w"] for name in "kv")
        layer["attn"]["kv_einsum"] = {"w": jnp.stack([x.transpose(1, 0, 2) for x in parts])}
    gates = [layer["mlp"].pop("gate_proj") for layer in state["layers"].values()]
    state["gates"] = jax.tree.map(lambda *layers: jnp.stack(layers), *gates)
    kv = "layers.{i}.attn.kv_einsum.w"
    names = TUNIX | {
        PARTS["k"]: (f"{kv}[0]", "heads in dim"),
        PARTS["v"]: (f"{kv}[1]", "heads in dim"),
        f"{LAYER}mlp.gate_proj.weight": "gates.kernel[{i}]",
    }
    assert_same(target_from_flax(like, state, names), target_from_flax(like, params, NAMES))
    state["gates"]["kernel"] = jnp.repeat(state["gates"]["kernel"], 2, axis=0)
    names[PARTS["k"]] = names[PARTS["k"]][0].replace("0", "7")
    with pytest.raises(ValueError, match=r"layers.0.attn.kv_einsum.w.7., which is not") as caught:
        target_from_flax(like, state, names)
    message, layers = str(caught.value), CONFIG.num_layers
    assert f"gates.kernel[{layers}] is no tensor" in message and "einsum.w[0] is no te" in message


def test_arrays_of_unstated_layouts_are_all_named(params: Any, like: Decoder):
    """Sizes alone would fit each of them."""
    bare = {name: path if isinstance(path, str) else path[0] for name, path in TUNIX.items()}
    with pytest.raises(ValueError, match=r"state the axes of arrays whose names do not") as caught:
        target_from_flax(like, tunix_tree(params), bare)
    message = str(caught.value)
    for i in range(CONFIG.num_layers):
        assert all(f"layers.{i}.attn.{name}_proj.w is [" in message for name in "qkvo")
    assert "lm_head.w is [" in message and "\n" not in message and "final_norm" not in message


@pytest.mark.parametrize(
    ("leaf", "array", "axes", "message"),
    [
        ("kernel", (F, H), None, "a kernel has its inputs first, model.*gate_proj.w"),
        ("w", (F, H), "out in", None),
        ("w", (H, F), "in out", None),
        ("w", (F, H), None, None),  # as the checkpoint has it
        ("w", (H, F), None, r"gate.w is "),
        ("w", (F, H), "in out", r"with the axes 'in out'"),
        ("w", (H, F), "in out more", r"with the axes 'in out more'"),
        ("w", (H, F), "inputs outputs", r"with the axes 'inputs outputs'"),
        ("w", (H, F), "in in", r"with the axes 'in in'"),
    ],
)
def test_matrices_have_their_layouts_shape(
    leaf: str, array: Any, axes: str | None, message: str | None, params: Any, like: Decoder
):
    tree = jax.tree.map(lambda x: x, params["params"])
    kernel = tree["layers_0"].pop("gate")["kernel"]  # [in, out]
    tree["layers_0"]["gate"] = {leaf: kernel if array == (H, F) else kernel.T}
    path = f"layers_0.gate.{leaf}"
    names = NAMES | {"model.layers.0.mlp.gate_proj.weight": (path, axes) if axes else path}
    if message is None:
        assert_same(target_from_flax(like, tree, names), target_from_flax(like, params, NAMES))
    else:
        with pytest.raises(ValueError, match=message):
            target_from_flax(like, tree, names)


def test_integers_are_no_weights(params: Any, like: Decoder):
    """Of quantized trees, say: they would be taken as they are, without their scales."""
    tree = jax.tree.map(lambda x: x, params["params"])
    tree["layers_0"]["gate"] = {"kernel": tree["layers_0"]["gate"]["kernel"].astype(jnp.int8)}
    with pytest.raises(ValueError, match=r"gate\.kernel is int8, model.*needs floats"):
        target_from_flax(like, tree, NAMES)


@pytest.mark.parametrize("entry", [("q.w",), ("q.w", ("in", "out")), 5])
def test_entries_of_the_table_are_checked(entry: Any, params: Any, like: Decoder):
    with pytest.raises(
        ValueError, match=r"names\['lm_head.weight'\] is .*: give a path, or a path"
    ):
        target_from_flax(like, params, NAMES | {"lm_head.weight": entry})


def test_square_matrices_need_a_layout():
    """flax's names state theirs; of other arrays, sizes do not say it."""
    assert order_of_axes("q.kernel", (8, 8), (8, 8), None) == (1, 0)
    assert order_of_axes("embed.embedding", (8, 8), (8, 8), None) == (0, 1)
    assert order_of_axes("q.w", (8, 8), (8, 8), "out in") == (0, 1)
    assert order_of_axes("q.w", (8, 8), (8, 8), "in out") == (1, 0)
    with pytest.raises(ValueError, match=r"q.w is \[8, 8\], square, and its name states no layout"):
        order_of_axes("q.w", (8, 8), (8, 8), None)


def test_kernels_of_other_layers_have_flax_layouts():
    assert order_of_axes("conv.kernel", (4, 1, 6), (6, 1, 4), None) == (2, 1, 0)
    assert order_of_axes("o.kernel", (2, 3, 5), (5, 6), None) == (2, 0, 1)
    assert order_of_axes("q.bias", (2, 3), (6,), None) == (0, 1)
    for path, shape, wanted in (
        ("conv.kernel", (6, 1, 4), (6, 1, 4)),
        ("q.kernel", (2, 5, 3), (6, 5)),
        ("norm.scale", (2, 3), (6,)),
    ):
        with pytest.raises(ValueError, match=path):
            order_of_axes(path, shape, wanted, None)


def test_like_may_be_shapes(params: Any, like: Decoder):
    shapes = decoder.decoder_shapes(CONFIG, jnp.dtype("float32"))
    made = jax.jit(lambda tree: target_from_flax(shapes, tree, NAMES))(params)
    assert_same(made, target_from_flax(like, params, NAMES))
    sharding = SingleDeviceSharding(jax.devices()[1])

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype("bfloat16"), sharding=sharding)

    there = target_from_flax(jax.tree.map(placed, shapes), params, NAMES)
    leaves = jax.tree.leaves(there)
    assert all(leaf.sharding == sharding and leaf.dtype == jnp.bfloat16 for leaf in leaves)


def test_shapes_that_lack_values_are_refused(params: Any, like: Decoder):
    shapes: Any = decoder.decoder_shapes(CONFIG, jnp.dtype("float32"))
    with pytest.raises(ValueError, match="scales of an 8-bit cache are taken from it"):
        target_from_flax(with_float8_cache(shapes, None), params, NAMES)
    head = eagle3_head(like)
    ids = jax.ShapeDtypeStruct((40,), jnp.dtype("int32"))
    shaped: Any = head.replace(token_ids=ids)
    with pytest.raises(ValueError, match="token_ids are a shape alone"):
        head_from_flax(shaped, {}, {})


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
        (
            lambda tree, names: names.update({PARTS["k"]: "layers_{i}.v.kernel"}),
            r"layers_0.v.kernel is given for both .*k_proj.* and .*v_proj.*layers_0.k.kernel is no",
        ),
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
