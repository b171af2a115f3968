"""Targets from actors as Tunix and MaxText keep them: the very weights of the checkpoint."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec import Lora, check_against, forward, from_nnx, make_mesh
from jaxspec.checkpoints.flax_bridge import target_from_flax
from jaxspec.checkpoints.safetensors_io import load_decoder, save_decoder
from jaxspec.config.model import ModelConfig
from jaxspec.models.decoder import Decoder, decoder_shapes
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.tensors import splitting, tensor_shapes
from jaxspec.parallel.moving import moved
from jaxspec.parallel.placement import in_place_of
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import random_arrays

type Tensors = dict[str, np.ndarray]
type Tree = dict[str, Any]

# Attention's matrices are square: sizes do not tell how they lie.
D, N, K, H, F, V, LAYERS = 32, 4, 2, 8, 48, 64, 2
SIZES: dict[str, Any] = dict(
    vocab_size=V, hidden_size=D, num_hidden_layers=LAYERS, num_attention_heads=N, head_dim=H,
    num_key_value_heads=K, intermediate_size=F, rms_norm_eps=1e-6, max_position_embeddings=128,
    hidden_act="silu", eos_token_id=2, bos_token_id=1, rope_theta=1e4, tie_word_embeddings=False,
)  # fmt: skip
GELU = "gelu_pytorch_tanh"
GEMMA = {"hidden_act": GELU, "hidden_activation": GELU, "tie_word_embeddings": True}
GEMMA2 = {
    **GEMMA, "sliding_window": 16, "query_pre_attn_scalar": H, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}  # fmt: skip


def config_of(model_type: str, architecture: str, **changes: Any) -> ModelConfig:
    names = {"model_type": model_type, "architectures": [architecture]}
    return parse_model_config({**SIZES, **names, **changes})


LLAMA = config_of("llama", "LlamaForCausalLM")
QWEN2 = config_of("qwen2", "Qwen2ForCausalLM")
QWEN3 = config_of("qwen3", "Qwen3ForCausalLM")


def tensors_of(config: ModelConfig) -> tuple[Decoder, Tensors]:
    """A random target, and the tensors of its checkpoint."""
    shapes = decoder_shapes(config, jnp.dtype(jnp.float32))
    splits = jax.tree.leaves(shapes.mapped(splitting(config.vocab_size)))
    wanted = tensor_shapes(list(zip(jax.tree.leaves(shapes), splits, strict=True)))
    tensors = jax.tree.map(np.asarray, random_arrays(wanted, 3))
    table = {name: (name, "out in") if array.ndim == 2 else name for name, array in tensors.items()}
    return target_from_flax(shapes, jax.tree.map(jnp.asarray, tensors), table), tensors


def into_heads(weight: np.ndarray) -> np.ndarray:
    return weight.T.reshape(D, -1, H)  # [D, N, H]


def out_of_heads(weight: np.ndarray) -> np.ndarray:
    return weight.T.reshape(-1, H, D)  # [N, H, D]


def tunix(tensors: Tensors) -> Tree:
    tree: Tree = {
        "embedder.input_embedding": tensors["model.embed_tokens.weight"],
        "final_norm.w": tensors["model.norm.weight"],
        "lm_head.w": tensors["lm_head.weight"].T,
    }
    for i in range(LAYERS):
        old, new = f"model.layers.{i}", f"layers.{i}"
        for part in "qkv":
            tree[f"{new}.attn.{part}_proj.w"] = into_heads(
                tensors[f"{old}.self_attn.{part}_proj.weight"]
            )
            for name, end in (
                (f"{part}_proj.bias", f"{part}_bias"),
                (f"{part}_norm.weight", f"{part}_norm.w"),
            ):
                if f"{old}.self_attn.{name}" in tensors:
                    tree[f"{new}.attn.{end}"] = tensors[f"{old}.self_attn.{name}"]
        tree[f"{new}.attn.o_proj.w"] = out_of_heads(tensors[f"{old}.self_attn.o_proj.weight"])
        for part in ("gate", "up", "down"):
            tree[f"{new}.mlp.{part}_proj.kernel"] = tensors[f"{old}.mlp.{part}_proj.weight"].T
        for part in ("input", "post_attention"):
            tree[f"{new}.{part}_layernorm.w"] = tensors[f"{old}.{part}_layernorm.weight"]
    return tree


def tunix_gemma(tensors: Tensors) -> Tree:
    tree: Tree = {
        "embedder.input_embedding": tensors["model.embed_tokens.weight"],
        "final_norm.scale": tensors["model.norm.weight"],
    }
    is_second = "model.layers.0.pre_feedforward_layernorm.weight" in tensors
    norms = {"input": "pre_attention", "post_attention": "pre_ffw"}
    if is_second:
        norms |= {"post_attention": "post_attn"}
        norms |= {f"{part}_feedforward": f"{part}_ffw" for part in ("pre", "post")}
    for i in range(LAYERS):
        old, new = f"model.layers.{i}", f"layers.{i}"
        q, k, v = (
            np.moveaxis(into_heads(tensors[f"{old}.self_attn.{part}_proj.weight"]), 1, 0)
            for part in "qkv"
        )  # [N, D, H]
        if len(q) == len(k):
            tree[f"{new}.attn.qkv_einsum.w"] = np.stack([q, k, v])
        else:
            tree[f"{new}.attn.q_einsum.w"], tree[f"{new}.attn.kv_einsum.w"] = q, np.stack([k, v])
        tree[f"{new}.attn.attn_vec_einsum.w"] = out_of_heads(
            tensors[f"{old}.self_attn.o_proj.weight"]
        )
        for part in ("gate", "up", "down"):
            tree[f"{new}.mlp.{part}_proj.kernel"] = tensors[f"{old}.mlp.{part}_proj.weight"].T
        for name, end in norms.items():
            tree[f"{new}.{end}_norm.scale"] = tensors[f"{old}.{name}_layernorm.weight"]
    return tree


def interleaved(kernel: np.ndarray) -> np.ndarray:
    """Neighbours are what are halves in a checkpoint, as MaxText's Llama 3.1 has it."""
    return np.stack(np.split(kernel, 2, axis=-1), axis=-1).reshape(kernel.shape)


def maxtext(tensors: Tensors, *, scanned: bool = True, llama: str = "") -> Tree:
    layers: list[Tree] = []
    for i in range(LAYERS):
        old, scale = f"model.layers.{i}", "self_attention_layer_norm.scale"
        parts = {
            "mlp.wi_0.kernel": tensors[f"{old}.mlp.gate_proj.weight"].T,
            "mlp.wi_1.kernel": tensors[f"{old}.mlp.up_proj.weight"].T,
            "mlp.wo.kernel": tensors[f"{old}.mlp.down_proj.weight"].T,
            "self_attention.out.kernel": out_of_heads(tensors[f"{old}.self_attn.o_proj.weight"]),
            f"pre_{scale}": tensors[f"{old}.input_layernorm.weight"],
            f"post_{scale}": tensors[f"{old}.post_attention_layernorm.weight"],
        }
        for part, name in (("q", "query"), ("k", "key"), ("v", "value")):
            kernel = into_heads(tensors[f"{old}.self_attn.{part}_proj.weight"])
            if llama and part != "v":
                scaled = kernel / (math.sqrt(H) if part == "q" else 1.0)
                kernel = interleaved(scaled) if llama == "pairs" else scaled
            parts[f"self_attention.{name}.kernel"] = kernel.astype(np.float32)
            if not llama and part != "v":
                norm = tensors[f"{old}.self_attn.{part}_norm.weight"]
                parts[f"self_attention.{name}_norm.scale"] = norm
        layers.append(parts)
    tree: Tree = {
        "token_embedder.embedding": tensors["model.embed_tokens.weight"],
        "decoder.decoder_norm.scale": tensors["model.norm.weight"],
        "decoder.logits_dense.kernel": tensors["lm_head.weight"].T,
    }
    for name in layers[0]:
        if scanned:  # [D, L, N, H]
            tree[f"decoder.layers.{name}"] = np.stack([part[name] for part in layers], axis=1)
        else:
            tree |= {f"decoder.layers_{i}.{name}": part[name] for i, part in enumerate(layers)}
    return {f"base.{path}": array for path, array in tree.items()} if scanned else tree


def state_of(tree: Tree) -> nnx.State:
    keys = {
        tuple(int(key) if key.isdigit() else key for key in path.split(".")): nnx.Param(array)
        for path, array in jax.device_put(tree).items()
    }
    return nnx.State(traverse_util.unflatten_dict(keys))


def check_equal(found: Decoder, expected: Decoder, atol: float) -> None:
    assert found.config == expected.config
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=0, atol=atol)


CASES: list[tuple[str, ModelConfig, Callable[[Tensors], Tree]]] = [
    ("tunix.llama3", LLAMA, tunix),
    ("tunix.qwen2", QWEN2, tunix),
    ("tunix.qwen3", QWEN3, tunix),
    ("tunix.gemma", config_of("gemma", "GemmaForCausalLM", **GEMMA), tunix_gemma),
    (
        "tunix.gemma",
        config_of("gemma", "GemmaForCausalLM", **GEMMA, num_key_value_heads=N),
        tunix_gemma,
    ),
    ("tunix.gemma", config_of("gemma2", "Gemma2ForCausalLM", **GEMMA2), tunix_gemma),
    ("maxtext.llama", LLAMA, partial(maxtext, llama="halves")),
    ("maxtext.llama3.1", LLAMA, partial(maxtext, llama="pairs")),
    ("maxtext.llama3.1", LLAMA, partial(maxtext, llama="pairs", scanned=False)),
    ("maxtext.qwen3", QWEN3, maxtext),
]


@pytest.mark.parametrize(("names", "config", "layout"), CASES)
def test_the_weights_are_those_of_the_checkpoint(
    names: str, config: ModelConfig, layout: Callable[[Tensors], Tree]
):
    expected, tensors = tensors_of(config)
    state = state_of(layout(tensors))
    atol = 1e-6 if names.startswith("maxtext.llama") else 0.0
    check_equal(from_nnx(state, config, names=names), expected, atol)
    half = from_nnx(state, config, names=names, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Tree, Path]:
    folder = tmp_path_factory.mktemp("llama")
    target, tensors = tensors_of(LLAMA)
    save_decoder(target, folder)
    return target, tunix(tensors), folder


def pointers(tree: Any) -> set[int]:
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}


def test_it_can_be_traced_and_then_copies(llama: tuple[Decoder, Tree, Path]):
    """So a trainer may donate its weights while the engine uses those."""
    target, tree, _ = llama
    state = state_of(tree)
    copy = jax.jit(lambda state: from_nnx(state, LLAMA, names="tunix.llama3"))
    with jax.transfer_guard("disallow_explicit"):
        found = copy(state)
    check_equal(found, target, atol=0.0)
    assert not pointers(found) & pointers(state)
    check_equal(from_nnx(state, names="tunix.llama3", like=target), target, atol=0.0)


class Model(nnx.Module):
    """Some weights, and what is none."""

    def __init__(self, tree: Tree):
        self.embedder = nnx.Dict(
            input_embedding=nnx.Param(jnp.asarray(tree["embedder.input_embedding"]))
        )
        self.calls = nnx.Variable(jnp.zeros(()))


def test_of_a_module_only_parameters_are_taken(llama: tuple[Decoder, Tree, Path]):
    with pytest.raises(ValueError, match=r"final_norm\.w, which is not there") as caught:
        from_nnx(Model(llama[1]), LLAMA, names="tunix.llama3")
    assert "calls" not in str(caught.value)


def with_lora(tree: Tree, rank: int) -> tuple[Tree, Tree]:
    """The tree with LoRA weights as qwix adds them, and with these merged."""
    rng, whole, merged = np.random.default_rng(5), dict(tree), dict(tree)

    def add(path: str, shape_a: tuple[int, ...], shape_b: tuple[int, ...], product: str) -> None:
        a, b = (rng.normal(size=shape).astype(np.float32) for shape in (shape_a, shape_b))
        whole[f"{path}_lora_a"], whole[f"{path}_lora_b"] = a, b
        merged[path] = (tree[path] + 2.0 * np.einsum(product, a, b)).astype(np.float32)

    for path, array in tree.items():
        end = ".".join(path.split(".")[-2:])
        match end:
            case "q_proj.w" | "k_proj.w" | "v_proj.w":
                add(path, (D, rank), (rank, *array.shape[1:]), "dr,rnh->dnh")
            case "o_proj.w" | "attn_vec_einsum.w":
                add(path, (*array.shape[:2], rank), (rank, D), "nhr,rd->nhd")
            case "q_einsum.w":
                add(path, (D, rank), (rank, len(array), H), "dr,rnh->ndh")
            case "kv_einsum.w" | "qkv_einsum.w":
                add(path, (D, rank), (rank, *array.shape[:2], H), "dr,rcnh->cndh")
            case "gate_proj.kernel" | "down_proj.kernel":
                add(path, (len(array), rank), (rank, array.shape[1]), "ir,ro->io")
    return whole, merged


@pytest.mark.parametrize("case", [0, 3, 4])
def test_lora_weights_are_merged(case: int):
    names, config, layout = CASES[case]
    whole, merged = with_lora(layout(tensors_of(config)[1]), rank=3)
    expected = from_nnx(state_of(merged), config, names=names)
    for lora in (Lora(alpha=6.0, rank=3), (6.0, 3)):
        found = from_nnx(state_of(whole), config, names=names, lora=lora)
        check_equal(found, expected, atol=1e-5)


def test_what_does_not_say_enough_is_refused(llama: tuple[Decoder, Tree, Path]):
    target, tree, _ = llama
    whole, _ = with_lora(tree, rank=3)

    def refused(match: str, params: Any = tree, config: Any = LLAMA, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            from_nnx(params, config, **{"names": "tunix.llama3", **options})

    refused("LoRA weights of rank 3: give lora=", whole)
    refused("rank 3, lora says 4", whole, lora=Lora(8.0, 4))
    refused("has no LoRA weights", lora=Lora(8.0, 4))
    only = {path: array for path, array in whole.items() if "lora" in path}
    refused("give the whole state", only, lora=Lora(6.0, 3))
    path = "layers.0.attn.q_proj.w_lora_b"
    refused("its LoRA weights are", {**whole, path: whole[path][:, :2]}, lora=Lora(6.0, 3))
    refused("use one of|or one of tunix.llama3", names="tunix.llama4")
    refused("give the config of the model", config=None)
    refused("leave out mesh and dtype", like=target, dtype="float32")
    refused("of another config", config=QWEN3, like=target)
    refused("is no tensor of the model", {**tree, "layers.0.attn.q_bias": np.zeros(N * H)})
    missing = {path: array for path, array in tree.items() if "lm_head" not in path}
    refused("lm_head.weight should be at lm_head.w", missing)
    refused("square|axes", {**tree, "layers.0.attn.q_proj.w": tree["layers.0.attn.o_proj.w"]})


# From a trainer's devices to an engine's.


def devices(first: int, count: int) -> np.ndarray:
    return np.array(jax.devices()[first : first + count])


def sharded(tree: Tree, mesh: Mesh) -> Tree:
    """Divided over the mesh along the first axis, as a trainer with FSDP has it."""

    def place(array: np.ndarray) -> Array:
        whole = array.shape[0] % mesh.size
        spec = PartitionSpec() if whole else PartitionSpec("fsdp")
        return jax.device_put(array, NamedSharding(mesh, spec))

    return {path: place(array) for path, array in tree.items()}


@pytest.mark.parametrize(
    ("source", "tp", "kind"),
    [
        ((0, 4), 2, AxisType.Auto),
        ((4, 2), 4, AxisType.Explicit),
        *(slow(source, 2, AxisType.Auto) for source in ((4, 4), (3, 3))),
        *(slow(source, 2, AxisType.Explicit) for source in ((0, 4), (4, 4), (3, 3))),
        slow((4, 2), 4, AxisType.Auto),
    ],
)
def test_weights_move_from_a_mesh_to_another(
    llama: tuple[Decoder, Tree, Path], source: tuple[int, int], tp: int, kind: AxisType
):
    """Of four devices two are repeated for the KV heads, where there are four."""
    _, tree, folder = llama
    trainer = Mesh(devices(*source), ("fsdp",), axis_types=(kind,))
    mesh = make_mesh(tp)
    assert mesh is not None
    expected = load_decoder(folder, LLAMA, jnp.dtype(jnp.float32), mesh)
    given = sharded(tree, trainer)
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        found = from_nnx(given, LLAMA, names="tunix.llama3", mesh=mesh)
    check_equal(found, expected, atol=0.0)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


@pytest.mark.parametrize(
    ("source", "target"),
    [((0, 4), (4, 4)), ((0, 4), (2, 4)), ((0, 2), (2, 6)), ((0, 4), (5, 1)), ((5, 1), (0, 4)),
     ((0, 3), (3, 2))],
)  # fmt: skip
def test_no_array_is_read_by_the_host(source: tuple[int, int], target: tuple[int, int]):
    wanted = np.arange(12 * 24, dtype=np.float32).reshape(12, 24)
    here = NamedSharding(Mesh(devices(*source), ("a",)), PartitionSpec("a"))
    there = NamedSharding(Mesh(devices(*target), ("b",)), PartitionSpec(None, "b"))
    array = jax.device_put(wanted, here)
    current = jax.device_put(np.zeros_like(wanted), there)
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        found = moved(array, there)
        used = in_place_of({"weight": current}, {"weight": array})["weight"]  # as use_target does
    for one in (found, used):
        assert one.sharding == there
        np.testing.assert_array_equal(np.asarray(one), wanted)


# The check at the start of a run.


def test_a_rotary_base_or_a_norm_that_differs_is_found(llama: tuple[Decoder, Tree, Path]):
    target, tree, _ = llama
    logits = jax.jit(lambda tokens: forward(target, tokens), compiler_options=FAST_COMPILE)
    assert check_against(logits, target) < 1e-5
    base = config_of("llama", "LlamaForCausalLM", rope_theta=1e6)
    with pytest.raises(ValueError, match="first token's agree: look at the rotary"):
        check_against(logits, from_nnx(tree, base, names="tunix.llama3"))
    assert target.norm is not None
    other = target.replace(norm=target.norm * 1.5)
    with pytest.raises(ValueError, match="first token's differ already"):
        check_against(logits, other)
    assert check_against(logits, other, tolerance=10.0) > 0.1
    with pytest.raises(ValueError, match=r"gave \[2, 63, 64\]"):
        check_against(lambda tokens: logits(tokens)[:, 1:], target)
    with pytest.raises(ValueError, match="not finite"):
        check_against(lambda tokens: logits(tokens) * jnp.nan, target)
