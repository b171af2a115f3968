"""Experts of 8-bit floats: their bytes in memory, what they mean, and wrong checkpoints."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open

from jaxspec.checkpoints.formats.compressed_tensors import read_compressed_tensors
from jaxspec.checkpoints.formats.float8 import read_float8
from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.safetensors_io import save_decoder, save_tree
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.mlps import mix
from jaxspec.models.mlps.expert_linear import ExpertLinear
from jaxspec.models.mlps.experts import Experts
from jaxspec.models.mlps.mix import LocalExperts
from jaxspec.models.mlps.routing import Routes
from jaxspec.models.quantized.float8 import Float8Linear
from jaxspec.models.quantized.float8_experts import Float8Experts
from jaxspec.models.quantized.schemes import in_scheme
from jaxspec.models.tensors import splitting
from jaxspec.parallel import Layout, make_mesh
from jaxspec.training.online import to_train
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.marks import slow
from tests.helpers.mtp_families import save_with_mtp
from tests.helpers.quantized_checkpoints import (
    Format,
    float8_blocks,
    float8_channel,
    float8_static,
    mxfp8,
    quantize_checkpoint,
)
from tests.helpers.random_experts import random_expert_target, random_own, random_rows, written_out
from tests.helpers.random_models import generate, random_prompts

BLOCKS = float8_blocks()
CONFIG: dict[str, Any] = BLOCKS.config
NO_BLOCK_IS_FULL: dict[str, Any] = {
    "hidden_size": 192,
    "moe_intermediate_size": 160,
    "intermediate_size": 256,
}
LATENT: dict[str, Any] = {"kv_lora_rank": 128, "q_lora_rank": 64, "qk_rope_head_dim": 64}
LATENT |= {"qk_nope_head_dim": 64, "v_head_dim": 64, "num_hidden_layers": 2}
QWEN: dict[str, Any] = NO_BLOCK_IS_FULL | {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
ONLY_QWEN = ("num_experts", "moe_intermediate_size", "norm_topk_prob")
PROMPTS = random_prompts((5, 1, 17, 9), seed=7)


def table() -> np.ndarray:
    """The number of each code of e4m3: a sign, four bits of exponent and three of fraction."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7)
    number = np.where(exponent == 0, fraction / 8 * 2.0**-6, normal)
    return np.where(code >= 128, -number, number).astype(np.float32)


def codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random codes that are numbers."""
    drawn = rng.integers(0, 254, shape)
    return np.where(drawn >= 127, drawn + 1, drawn).astype(np.uint8)


def widened(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Float32 [..., out, in], entry by entry."""
    rows, columns = (np.arange(size) // n for size, n in zip(codes.shape[-2:], block, strict=True))
    return table()[codes] * scale[..., rows[:, None], columns[None]]


@dataclasses.dataclass(frozen=True)
class InMemory:
    """A CheckpointTensor."""

    name: str
    values: np.ndarray
    dtype: str = "F32"
    file: Path = Path("model.safetensors")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self, *index: slice) -> np.ndarray:
        return self.values[index or slice(None)]


def module(name: str, outputs: int, inputs: int, **changes: Any) -> dict[str, Any]:
    """A module's tensors by name. Changes are of the weight, and scales, by name; None: without."""
    rng = np.random.default_rng(outputs)
    values = codes(rng, outputs, inputs).view(ml_dtypes.float8_e4m3fn)
    grid = rng.uniform(0.5, 2.0, (-(-outputs // 128), -(-inputs // 128))).astype(np.float32)
    parts = {"weight": values, "weight_scale_inv": grid} | changes
    dtypes = {"float8_e4m3fn": "F8_E4M3", "uint8": "F8_E8M0", "float32": "F32", "bfloat16": "BF16"}
    return {
        f"{name}.{kind}": InMemory(f"{name}.{kind}", part, dtypes[part.dtype.name])
        for kind, part in parts.items()
        if part is not None
    }


EXPERT = "model.layers.3.mlp.experts.7.down_proj"
DENSE = "model.layers.0.self_attn.kv_a_proj_with_mqa"


@pytest.mark.parametrize(
    ("dtype", "block"),
    [
        *(("float32", block) for block in ((128, 128), (1, 320), (200, 320), (1, 32))),
        ("bfloat16", (128, 128)),
    ],
)
def test_chosen_experts_are_widened_as_the_table_says(dtype: str, block: tuple[int, int]):
    rng = np.random.default_rng(0)
    stored = codes(rng, 3, 2, 200, 320)  # [E, *out, in]
    assert len(np.unique(stored)) == 254
    shape = (-(-200 // block[0]), -(-320 // block[1]))
    scale = rng.lognormal(-5, 2, (3, 2, *shape)).astype(np.float32)
    in_memory = scale
    if block == (1, 32):  # exponents
        in_memory = rng.integers(110, 140, scale.shape).astype(np.uint8)
        scale = np.ldexp(np.float32(1), in_memory.astype(int) - 127)
    experts = Float8Experts(
        values=jnp.asarray(stored.view(ml_dtypes.float8_e4m3fn)),
        scale=jnp.asarray(in_memory),
        axes=("experts", "whole_hidden", "two", "units"),
        block=block,
        activations=jnp.dtype(dtype),
    )
    index = np.array([[2, 0], [2, 1]])
    wanted = widened(stored, scale, block)[index].astype(jnp.dtype(dtype))
    wanted = np.moveaxis(wanted, -1, 2)  # [..., in, *out]
    found = jax.jit(Float8Experts.of)(experts, index)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found), wanted)
    one = jax.eval_shape(Float8Experts.of, experts, jnp.asarray(1))
    assert one.shape == (320, 2, 200)


def in_8_bits(linear: Any, axes: tuple[str, ...]) -> Float8Experts:
    """The nearest experts whose scales are all 1."""
    weight = np.moveaxis(np.asarray(linear.weight), 1, -1)
    return Float8Experts(
        values=jax.device_put(weight.astype(ml_dtypes.float8_e4m3fn)),
        scale=jax.device_put(np.ones((*weight.shape[:-2], 1, 1), np.float32)),
        axes=axes,
        block=(128, 128),
        activations=jnp.dtype("float32"),
    )


def mixed(local: LocalExperts, x: Any, routes: Routes) -> Any:
    step = ForwardPass(dense_causal_attend, {}, {}, 1e-6, Layout(), NO_KERNELS)
    return mix.mix(local, x, routes, 8, step)


LOCAL = random_own(8, 32, 40, None)
LOCAL_8_BITS = LOCAL.replace(
    gate_up=in_8_bits(LOCAL.gate_up, ("experts", "whole_hidden", "two", "units")),
    down=in_8_bits(LOCAL.down, ("experts", "units", "whole_hidden")),
)


@pytest.mark.parametrize(("rows", "widened"), [(2, 4), (8, 16), (9, 1), (24, 1)])
def test_few_experts_are_widened_at_a_time(rows: int, widened: int, monkeypatch: Any):
    asked, whole = [], Float8Experts.of
    monkeypatch.setattr(
        Float8Experts, "of", lambda self, index: asked.append(index.size) or whole(self, index)
    )
    jax.eval_shape(mixed, LOCAL_8_BITS, *random_rows(rows, 32, 8, 2, seed=1))
    assert asked == [widened] * 2 and widened <= mix.MOST_WIDENED


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 24])
def test_products_are_those_of_the_wide_weights(rows: int):
    every = jnp.arange(8)
    wide = LOCAL.replace(
        gate_up=ExpertLinear(weight=LOCAL_8_BITS.gate_up.of(every), axes=()),
        down=ExpertLinear(weight=LOCAL_8_BITS.down.of(every), axes=()),
    )
    x, routes = random_rows(rows, 32, 8, 2, seed=1)
    found = jax.jit(mixed)(LOCAL_8_BITS, x, routes)
    np.testing.assert_allclose(found, written_out(wide, x, routes), atol=2e-5)


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16, np.uint8])
@pytest.mark.parametrize("name", [DENSE, EXPERT])
def test_scales_of_short_blocks_are_read(name: str, kind: Any):
    """The last rows and columns have blocks of their own, as many as there are."""
    rng, outputs, inputs = np.random.default_rng(1), 576, 320
    grid = rng.integers(120, 130, (5, 3)).astype(np.uint8)
    numbers = np.ldexp(np.float32(1), grid.astype(int) - 127)
    scales = grid if kind == np.uint8 else numbers.astype(kind)
    stored = module(name, outputs, inputs, weight_scale_inv=scales)
    read = read_float8(CONFIG | {"scale_fmt": "ue8m0"}, stored)
    values, suffix = stored[f"{name}.weight"].values, "blocks" if name == EXPERT else "scale"
    assert set(read) == {f"{name}.values", f"{name}.{suffix}"}
    scale = read[f"{name}.{suffix}"]
    if name == EXPERT:
        np.testing.assert_array_equal(scale.read().astype(np.float32), numbers)
        return
    assert scale.shape == (576, 5)  # groups of 64 inputs, in all blocks
    by_group = values.astype(np.float32).reshape(576, 5, 64)
    found = by_group * scale.read().astype(np.float32)[..., None]
    wanted = widened(values.view(np.uint8), numbers, (128, 128))
    np.testing.assert_array_equal(found.reshape(576, 320), wanted)
    part = scale.read(slice(100, 300), slice(1, 4))
    np.testing.assert_array_equal(part, scale.read()[100:300, 1:4])


PLAIN = {"weight": np.ones((8, 8), np.float32), "weight_scale_inv": None}
LISTED = {"modules_to_not_convert": ["lm_head", "model.layers.3.mlp.gate"]}
WRONG: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (EXPERT, {"weight_scale_inv": None}, {}, f"weight is F8_E4M3, but the scales of {EXPERT} are"),
    (EXPERT, {"weight": None}, {}, f"{EXPERT}.weight is missing"),
    (EXPERT, {"weight": np.ones((8, 8), np.float32)}, {}, r"weight is F32 \[8, 8\], not a F8_E4M3"),
    (EXPERT, {"weight_scale_inv": np.ones((1, 2), np.float32)}, {}, r"\[1, 2\], but must be \[2, "),
    (EXPERT, {"weight_scale_inv": np.full((2, 2), np.nan, np.float32)}, {}, "has the scale nan"),
    (EXPERT, {"weight_scale_inv": np.full((2, 2), 255, np.uint8)}, {}, "has the scale nan"),
    (EXPERT, PLAIN, LISTED, "modules_to_not_convert does not name it"),
    (DENSE.replace("_with_mqa", ""), PLAIN, {"ignored_layers": ["x"]}, "ignored_layers does not n"),
    (EXPERT, PLAIN, {"ignored_layers": "lm_head"}, "ignored_layers must be a list of names"),
    (EXPERT, {}, {"scale_fmt": "e5m2"}, "scale_fmt is 'e5m2'; supported is 'float' or 'ue8m0'"),
]


@pytest.mark.parametrize(("name", "tensors", "config", "message"), WRONG)
def test_what_does_not_fit_is_named(
    name: str, tensors: dict[str, Any], config: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message) as error:
        for tensor in read_float8(CONFIG | config, module(name, 160, 192, **tensors)).values():
            tensor.read()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "entry",
    ["model.layers.3", "model.language_model.layers.3.mlp.experts", EXPERT, "down_proj", "re:.*e"],
)
def test_lists_may_name_what_is_plain(entry: str):
    names = EXPERT, "lm_head", "model.layers.0.self_attn.indexer.weights_proj"  # GLM-5.2 misspells
    tensors = {key: x for name in names for key, x in module(name, 8, 8, **PLAIN).items()}
    for config in (CONFIG | {"modules_to_not_convert": [entry]}, CONFIG):  # which may be absent
        assert set(read_float8(config, tensors)) == {f"{name}.weight" for name in names}


def test_compressed_tensors_have_such_experts():
    form = float8_channel()
    rng = np.random.default_rng(0)
    parts, _ = form.write(rng.standard_normal((8, 16)).astype(np.float32), rng)
    tensors = module(EXPERT, 8, 16, weight_scale_inv=None, **parts)
    read = read_compressed_tensors(form.config, tensors)
    assert set(read) == {f"{EXPERT}.values", f"{EXPERT}.blocks"}
    assert read[f"{EXPERT}.blocks"].shape == (8, 1)


def save_qwen(folder: Path) -> Path:
    target = random_expert_target(parse_model_config(QWEN))
    save_tree(folder, target, target.mapped(splitting()), QWEN)
    return folder


def save_minimax(folder: Path) -> Path:
    """Its experts are called w1, w2 and w3."""
    raw = QWEN | {"model_type": "minimax_m2", "num_local_experts": 8, "intermediate_size": 160}
    raw = {key: value for key, value in raw.items() if key not in ONLY_QWEN}
    target = random_expert_target(parse_model_config(raw))
    save_tree(folder, target, target.mapped(splitting()), raw)
    return folder


def save_deepseek(folder: Path) -> Path:
    return save_with_mtp(folder, "deepseek_v3", **NO_BLOCK_IS_FULL, **LATENT)


MODELS: dict[str, Callable[[Path], Path]] = {"qwen3_moe": save_qwen, "deepseek_v3": save_deepseek}


@pytest.mark.parametrize(
    ("form", "block"),
    [
        (float8_channel(), (1, 192)),
        slow(BLOCKS, (128, 128)),
        slow(mxfp8(), (1, 32)),
        slow(float8_static(), None),  # the inputs of experts are not rounded
    ],
)
def test_other_names_and_scales(form: Format, block: tuple[int, int] | None, tmp_path: Path):
    path, wide = quantize_checkpoint(save_minimax(tmp_path / "bf16"), tmp_path, form, is_of_expert)
    found, wanted = (load(each, "none").target.layers[1].mlp for each in (path, wide))
    assert isinstance(found, Experts) and isinstance(wanted, Experts)
    assert isinstance(found.gate_up, Float8Experts) and isinstance(found.down, Float8Experts)
    if block is None:
        assert (found.gate_up.block, found.down.block) == ((160, 192), (192, 160))
    else:
        assert found.gate_up.block == block
    assert found.gate_up.scale.dtype == (np.uint8 if block == (1, 32) else np.float32)
    for ours, theirs in ((found.gate_up, wanted.gate_up), (found.down, wanted.down)):
        np.testing.assert_array_equal(ours.of(jnp.arange(2)), theirs.of(jnp.arange(2)))


def is_of_expert(name: str) -> bool:
    return ".experts." in name


def is_published_in_8_bits(name: str) -> bool:
    """Projections of attention and MLPs, not the router, norms and what joins an MTP layer."""
    return (name.endswith("_proj.weight") and "eh_proj" not in name) or "with_mqa" in name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """A checkpoint in 8 bits and the wide one that it means, by family and what is quantized."""
    made: dict[Any, tuple[Path, Path]] = {}

    def of(
        family: str, quantizes: Callable[[str], bool] = is_of_expert, form: Format = BLOCKS
    ) -> tuple[Path, Path]:
        key = family, quantizes, id(form)
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            source = MODELS[family](folder / "source")
            made[key] = quantize_checkpoint(source, folder, form, quantizes)
        return made[key]

    return of


def test_memory_has_the_bytes_of_the_file(checkpoint: Callable[..., tuple[Path, Path]]):
    """All of DeepSeek's projections, those of the MTP layer too."""
    path, _ = checkpoint("deepseek_v3", is_published_in_8_bits)
    params = load(path, "mtp")
    target, drafter = params.target, params.drafter
    mlp: Any = target.layers[1].mlp
    mixer: Any = target.layers[0].mixer
    heads: Any = drafter
    for layer, experts in ((1, mlp), (2, heads.head.layers[0].mlp)):
        assert isinstance(experts.gate_up, Float8Experts)
        assert isinstance(experts.down, Float8Experts)
        with safe_open(path / "model.safetensors", framework="pt") as file:
            for i, names in ((0, ("gate_proj", "up_proj")), (7, ("down_proj",))):
                for part, name in enumerate(names):
                    stem = f"model.layers.{layer}.mlp.experts.{i}.{name}"
                    stored = file.get_tensor(f"{stem}.weight").view(dtype=torch.uint8)
                    scale = file.get_tensor(f"{stem}.weight_scale_inv")
                    linear = experts.down if name == "down_proj" else experts.gate_up
                    index = (i,) if name == "down_proj" else (i, part)
                    found = np.asarray(linear.values)[index].view(np.uint8)
                    np.testing.assert_array_equal(found, stored)
                    np.testing.assert_array_equal(np.asarray(linear.scale)[index], scale)
    assert isinstance(mixer.kv_in, Float8Linear)
    with pytest.raises(ValueError, match="quantized weights are not saved"):
        save_decoder(target, path / "copy")
    with pytest.raises(ValueError, match="experts cannot be quantized"):
        in_scheme(target, "fp8", lm_head=False)
    with pytest.raises(ValueError, match="a head with quantized experts or in integers"):
        to_train(heads.head)


def texts(path: Path, drafter: str, tree: SpeculationConfig, **options: Any) -> list[list[int]]:
    params = load(path, drafter, speculation=tree, **options)
    found, _ = generate(params, PROMPTS, page_size=4, max_lens=[len(p) + 30 for p in PROMPTS])
    return found


CHAIN, TREE = SpeculationConfig.chain(3), SpeculationConfig(num_nodes=8, max_depth=3, top_k=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_texts_are_those_of_the_wide_weights_on_any_devices(family: str, checkpoint):
    path, wide = checkpoint(family)
    expected = texts(wide, "none", CHAIN)
    assert texts(path, "none", CHAIN) == expected
    assert texts(path, "ngram", TREE) == expected
    assert texts(path, "ngram", CHAIN, mesh=make_mesh(2)) == expected
    if family == "deepseek_v3":
        assert texts(path, "mtp", TREE) == expected
        assert texts(path, "mtp", CHAIN, mesh=make_mesh(2), shard_drafter=True) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("scales", ["weight_scale_inv", "scale"])
def test_speculation_changes_no_text_of_a_published_layout(family: str, scales: str, checkpoint):
    """Dense products round their inputs, so passes of two shapes differ by up to 0.2 in logits:
    near ties may fall otherwise. These prompts lead to none."""
    dtype = np.float32 if scales == "weight_scale_inv" else ml_dtypes.float8_e8m0fnu
    path, _ = checkpoint(family, is_published_in_8_bits, float8_blocks(scales, dtype))
    expected = texts(path, "none", CHAIN)
    assert texts(path, "ngram", TREE) == expected
    if family == "deepseek_v3":
        assert texts(path, "mtp", CHAIN) == expected
