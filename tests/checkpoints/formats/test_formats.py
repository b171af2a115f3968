"""Quantized checkpoints of every format: what they mean, over devices, and what is refused."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from safetensors import safe_open
from safetensors.torch import save_file

from jaxspec.checkpoints import kernel_order
from jaxspec.checkpoints.safetensors_io import load_decoder, save_decoder
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward_pass import make_pass
from jaxspec.models.from_config.model import load_model_config
from jaxspec.models.linear import Computed, Linear, RoundedRows
from jaxspec.models.quantized.float8 import Float8Linear, rounded_to_float8
from jaxspec.models.quantized.grouped import GroupedLinear, in_kernel_order, rounded_to_groups
from jaxspec.parallel import MODEL_AXIS, WHOLE, make_mesh, partition_specs
from pallas_kernels.round_tokens import round_tokens
from pallas_kernels.selection import Kernels
from tests.helpers.checkpoints import tiny_llama, tiny_qwen2
from tests.helpers.families import save_family
from tests.helpers.marks import slow
from tests.helpers.quantized_checkpoints import FORMATS, awq, gptq, quantize_checkpoint
from tests.helpers.random_models import as_dtype

TOKENS = np.random.default_rng(3).integers(0, 320, (2, 12))
FLOATS = ("float8", "float8 blocks", "float8 static", "mxfp8")
ROUNDED = tuple(name for name in FORMATS if name.endswith("rounded inputs"))
ROUNDS = (*FLOATS, *ROUNDED)  # inputs of products to e4m3
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("source"), **SIZES)


@pytest.fixture(scope="module")
def latent(tmp_path_factory) -> Path:
    """Of latent attention: kv_b_proj is keys and values, two projections in memory."""
    sizes = SIZES | dict.fromkeys(("q_lora_rank", "qk_nope_head_dim", "v_head_dim"), 128)
    sizes |= {"kv_lora_rank": 128, "qk_rope_head_dim": 32}
    path = tmp_path_factory.mktemp("latent")
    return save_family(path, "deepseek_v3-halves", **sizes)


@pytest.fixture(scope="module")
def checkpoints(source: Path, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Of each format: the quantized checkpoint, and a dense one of the same weights."""
    folder = tmp_path_factory.mktemp("quantized")
    return {
        name: quantize_checkpoint(source, folder / name, form) for name, form in FORMATS.items()
    }


def load(directory: Path, **options: Any) -> Any:
    return load_decoder(directory, load_model_config(directory), jnp.dtype("float32"), **options)


def logits(model: Decoder, tokens: Any) -> Any:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _, _ = decoder.run(model, tokens, positions, model.no_states(), dense_causal_attend)
    return decoder.logits(model, hidden)


def weights_of(linear: Any) -> np.ndarray:
    """[*out, in] in float32."""
    if isinstance(linear, GroupedLinear):
        return np.asarray(linear.dense(jnp.dtype("float32")))
    if isinstance(linear, Float8Linear):
        *outputs, size = linear.values.shape
        scale = np.moveaxis(np.asarray(linear.scale, np.float32), 0, -1)  # [*out, n]
        by_group = np.asarray(linear.values, np.float32).reshape(*scale.shape, -1)
        return (by_group * scale[..., None]).reshape(*outputs, size)
    return np.moveaxis(np.asarray(linear.weight), 0, -1)


def assert_same_weights(name: str, ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    for found, wanted in zip(ours, theirs, strict=True):
        assert isinstance(found, Float8Linear if name in FLOATS else GroupedLinear)
        np.testing.assert_allclose(weights_of(found), weights_of(wanted), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_is_what_the_format_says(name: str, checkpoints):
    models = (load(folder) for folder in checkpoints[name])
    for layers in zip(*(model.layers for model in models), strict=True):
        parts = [(x.mixer.qkv, x.mixer.o, x.mlp.gate_up, x.mlp.down) for x in layers]
        assert_same_weights(name, *parts)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("devices", [slow(1), 2])
def test_keys_and_values_of_latents_are_what_the_format_says(
    name: str, devices: int, latent: Path, tmp_path: Path
):
    quantized, dense = quantize_checkpoint(latent, tmp_path, FORMATS[name])
    mesh = None if devices == 1 else make_mesh(devices, 1)
    layers = load(quantized, mesh=mesh).layers + load(dense).layers
    assert_same_weights(name, *((layer.mixer.key_up, layer.mixer.value_up) for layer in layers))


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ROUNDS])
@pytest.mark.parametrize("devices", [slow(1), 2])
def test_logits_are_those_of_the_dense_weights(name: str, checkpoints, devices: int):
    """By default over two devices; test_every_weight_is_what_the_format_says reads on one."""
    quantized, reference = checkpoints[name]
    mesh = make_mesh(tensor_parallel=devices)
    model = load(quantized, mesh=mesh)
    found = np.asarray(sharded_logits(model, mesh))
    wanted = np.asarray(jax.jit(logits)(load(reference), TOKENS))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def sharded_logits(model: Decoder, mesh: Any) -> Any:
    forward = jax.shard_map(
        logits,
        mesh=mesh,
        in_specs=(partition_specs(model), P()),
        out_specs=P(None, None, MODEL_AXIS),
        check_vma=False,
    )
    return jax.jit(forward)(model, jnp.asarray(TOKENS))


@pytest.mark.parametrize("name", ROUNDS)
def test_products_round_their_inputs(name: str, checkpoints):
    quantized, reference = (load(folder).layers[0].mlp.down for folder in checkpoints[name])
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    x[1] = 0  # no scale
    x[2] *= 1e4
    groups = x.reshape(3, 1 if name in ROUNDED else len(quantized.scale), -1)
    step = np.maximum(np.abs(groups).max(-1, keepdims=True) / 448, 1e-30)
    if name == "float8 static":
        x[2] /= 1e4  # larger values would be cut off
        step = np.asarray(quantized.input_scale)
    read = ((groups / step).astype(jnp.float8_e4m3fn).astype(np.float32) * step).reshape(x.shape)
    wanted = read @ np.asarray(reference.weight)
    np.testing.assert_allclose(quantized(x), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_allclose(read, x, rtol=0.07, atol=1e-3 * np.abs(x).max())


def test_scales_of_the_file_cut_off_larger_inputs():
    """Of projections that are computed together the largest scale counts."""
    linear = rounded_to_float8(Linear(weight=jnp.eye(32), axes=("hidden", "ff")))
    scale = jnp.full(32, 0.25).at[3].set(0.5)
    x = jnp.asarray([[1e6, -1e6, 1.0, *[0.0] * 29]])
    found = linear.replace(input_scale=scale).with_one_input_scale()(x)
    np.testing.assert_allclose(found[0, :4], [224, -224, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(linear(x)[0, :4], [1e6, -1e6, 0, 0], atol=3)


def test_tokens_are_rounded_by_themselves():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)), jnp.bfloat16)
    whole, scales = round_tokens(x, 2)
    for row in range(4):
        one, scale = round_tokens(x[row : row + 1], 2)
        np.testing.assert_array_equal(one[0].view(jnp.uint8), whole[row].view(jnp.uint8))
        np.testing.assert_array_equal(scale[:, 0], scales[:, row])


ROUNDINGS = (rounded_to_float8, functools.partial(rounded_to_groups, group=32, rounds=True))


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=["8 bits", "4 bits"])
def test_rounded_rows_stand_for_an_array(rounding: Any):
    x = as_dtype(np.random.default_rng(0).normal(size=(2, 3, 64)), jnp.bfloat16)

    @jax.jit
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = rounding(Linear(weight=x.reshape(6, 64).T, axes=("hidden", "ff")))
        values, scale = round_tokens(x.reshape(6, 64))
        rows = RoundedRows(values=values.reshape(x.shape), scale=scale, dtype=x.dtype)
        return own(rows), own(x)

    np.testing.assert_array_equal(*both(x))


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=["8 bits", "4 bits"])
def test_norms_round_for_products_that_would_round_themselves(rounding: Any):
    kernels = Kernels(frozenset({"add_rms_norm", "round_tokens"}))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 3, 512), (512,))]
    weight: Any = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    linear = Linear(weight=weight, axes=("hidden", "ff"))

    def normed(rounding: Any, kernels: Kernels) -> Any:
        def run(linear: Linear, x: jax.Array, weight: jax.Array) -> Any:
            step = make_pass([], jnp.zeros((2, 3), int), dense_causal_attend, 1e-5, WHOLE, kernels)
            reader = None if rounding is None else rounding(linear)
            return step.add_norm(x, Computed(x), weight, reader)[1]

        return jax.eval_shape(run, linear, *shapes)

    found = normed(rounding, kernels)
    assert isinstance(found, RoundedRows)
    assert found.shape == (2, 3, 512) and found.scale.shape == (1, 32)
    for other, chosen in (
        (rounding, Kernels(frozenset({"add_rms_norm"}))),
        (rounded_to_groups, kernels),
        (functools.partial(rounded_to_float8, num_groups=4), kernels),
        (lambda linear: linear, kernels),
        (None, kernels),
    ):
        assert normed(other, chosen).dtype == jnp.bfloat16


# A scale for each row. The others differ in their weights, which
# test_logits_are_those_of_the_dense_weights has over devices.
@pytest.mark.parametrize(
    "name",
    [name if name == "float8" else slow(name) for name in ROUNDS],
)
def test_rounded_inputs_over_devices_are_as_good_as_on_one(name: str, checkpoints):
    """Each device rounds its part of a product's inputs with a scale of its own."""
    quantized, reference = checkpoints[name]
    mesh = make_mesh(tensor_parallel=2)
    wanted = np.asarray(jax.jit(logits)(load(reference), TOKENS))
    one = np.asarray(jax.jit(logits)(load(quantized), TOKENS))
    two = np.asarray(sharded_logits(load(quantized, mesh=mesh), mesh))
    assert np.square(two - wanted).mean() < 1.5 * np.square(one - wanted).mean()


def test_modules_are_put_in_the_order_of_kernels_one_at_a_time(checkpoints, monkeypatch: Any):
    """Otherwise all would be in memory twice."""
    before = {id(array) for array in jax.live_arrays()}
    seen: list[int] = []

    def in_order(linear: GroupedLinear) -> GroupedLinear:
        new = [array for array in jax.live_arrays() if id(array) not in before]
        seen.append(sum(array.dtype == jnp.int4 for array in new))
        return in_kernel_order(linear)

    monkeypatch.setattr(kernel_order, "in_kernel_order", in_order)
    load(checkpoints["compressed"][0])
    assert len(seen) == max(seen) == 4  # those in order, the one that is put in order, and others


def edited(folder: Path, checkpoint: Path, tensors: dict[str, Any], **config: Any) -> Path:
    """A copy of a checkpoint with other tensors (None: without) and fields of its quantization."""
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        own = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        own.pop(name)
        if tensor is not None:
            own[name] = tensor
    whole = json.loads((checkpoint / "config.json").read_text())
    whole["quantization_config"] |= config
    folder.mkdir()
    save_file(own, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def stored(checkpoint: Path, name: str) -> torch.Tensor:
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        return file.get_tensor(name).clone()


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(("written", "said"), [(2, "gptq"), (1, "gptq_v2"), (2, "gptq_v2")])
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_zeros_tell_their_version(
    bits: int, written: int, said: str, source: Path, tmp_path: Path
):
    """As some tools write version 2 and say version 1. The middle is 8: version 1 stores 7."""
    form = gptq(bits, version=written)
    quantized, reference = quantize_checkpoint(source, tmp_path, form)
    found = load(edited(tmp_path / "said", quantized, {}, checkpoint_format=said))
    linear = found.layers[0].mlp.down
    assert isinstance(linear, GroupedLinear) and linear.zero is None
    meant = load(reference).layers[0].mlp.down
    np.testing.assert_allclose(weights_of(linear), weights_of(meant), rtol=1e-6)


# Fields as GPTQModel 5.6 to 5.8 and AutoAWQ write them, beside those that they have always had.
TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPTQModel 5.6": (
        "gptq",
        {"checkpoint_format": "gptq", "format": "gptq", "pack_dtype": "int32", "pack_impl": "cpu",
         "act_group_aware": True, "mse": 0.0, "gptaq": False, "gptaq_alpha": 0.25,
         "meta": {"quantizer": ["gptqmodel:5.6.12"], "act_group_aware": True}},
    ),
    "GPTQModel 5.8": (
        "gptq",
        {"method": "gptq", "format": "gptq", "dynamic": {"-:.*o_gate.*": {}},
         "meta": {"pack_impl": "cpu", "quantizer": ["gptqmodel:5.8.0"]}},
    ),
    "AutoAWQ": ("awq", {"version": "GEMM"}),
    "GPTQModel's AWQ": (
        "awq",
        {"version": None, "format": "gemm", "checkpoint_format": "gemm", "method": "awq",
         "sym": False, "desc_act": False, "lm_head": False, "pack_dtype": "int32", "meta": {}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_fields_of_tools_change_nothing(tool: str, checkpoints, tmp_path: Path):
    name, fields = TOOLS[tool]
    quantized, _ = checkpoints[name]
    found, known = (load(edited(tmp_path / "of tool", quantized, {}, **fields)), load(quantized))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(known), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_symmetric_zeros_of_two_versions_are_refused(checkpoints, tmp_path: Path):
    quantized, _ = checkpoints["gptq"]
    name = f"{Q}.qzeros"
    other = torch.full_like(stored(quantized, name), -0x77777778)  # eight times 8
    with pytest.raises(ValueError, match=r"store the middle zero differently") as caught:
        load(edited(tmp_path / "mixed", quantized, {name: other}))
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "part", "change", "message"),
    [
        ("awq", "scales", None, f"{Q}.scales is missing"),
        ("awq", "qweight", None, f"{Q}.qweight is missing"),
        ("gptq", "qweight", None, f"{Q}.qweight is missing"),
        ("compressed", "weight_packed", None, f"{Q}.weight_packed is missing"),
        ("awq", "scales", lambda x: x * 0, f"{Q}.scales has the scale 0.0 for output 0, group 0"),
        ("awq", "scales", lambda x: x / 0, f"{Q}.scales has the scale inf"),
        ("awq", "qzeros", lambda x: x[:1], f"{Q}.qzeros is I32 [1, 16], but must be packed as I32"),
        ("awq", "qweight", lambda x: x.float(), f"{Q}.qweight is F32 [128, 16], but must be"),
        ("gptq act-order", "g_idx", None, f"{Q}.g_idx is missing"),
        ("gptq act-order", "g_idx", lambda x: x + 1, f"{Q}.g_idx names groups 1 to 4, but there"),
        ("gptq act-order", "g_idx", lambda x: x[:5], f"{Q}.g_idx is I32 [5], not I32 [128]"),
        ("gptq act-order", "g_idx", lambda x: x.flip(0), "q_proj and .*k_proj are quantized diff"),
        ("gptq", "qzeros", lambda x: x + 1, f"{Q}.qzeros has zeros other than the middle, but"),
        ("gptq", "qweight", lambda x: x.T.contiguous(), "qzeros is I32"),
        ("gptq", "bias", lambda x: x + 1, f"{Q}.bias is not part of this model"),
        ("compressed", "weight_shape", lambda x: x[:1], f"{Q}.weight_shape must hold two sizes"),
        ("compressed", "weight_packed", lambda x: x[:, :3] + 0, f"{Q}.weight_packed is I32 [128,"),
        ("compressed", "weight_scale", lambda x: -x, f"{Q}.weight_scale has the scale -"),
        ("compressed, zeros", "weight_zero_point", None, f"{Q}.weight_zero_point is missing"),
        ("float8", "weight_scale", lambda x: x[:7], f"{Q}.weight_scale is [7, 1], but must be"),
        ("float8", "weight", lambda x: x.float(), f"{Q}.weight is F32 [128, 128], not a F8_E4M3"),
        ("float8", "weight", lambda x: x.view(torch.uint8).fill_(127).view(x.dtype),
         "weight has values that are no numbers"),
        ("float8 blocks", "weight_scale_inv", lambda x: x * float("nan"), "has the scale nan for"),
    ],
)  # fmt: skip
def test_bad_tensors_are_named(
    name: str, part: str, change: Any, message: str, checkpoints, tmp_path: Path
):
    quantized, _ = checkpoints[name]
    whole = f"{Q}.{part}"
    tensor = None if change is None else change(stored(quantized, whole))
    bad = edited(tmp_path / "bad", quantized, {whole: tensor})
    with pytest.raises(ValueError) as error:
        load(bad)
    text = str(error.value)
    assert message in text or re.search(message, text), text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("awq", {"version": "gemv"}, "version is 'gemv'; supported is 'gemm'"),
        ("awq", {"bits": 3}, "bits is 3; supported is 4"),
        ("awq", {"group_size": 0}, "group_size must be a positive integer, or -1"),
        ("awq", {"group_size": 48}, "group_size 48 does not divide the 256 inputs of model.layers"),
        ("awq", {"twist": 1}, "field 'twist' (= 1) is not supported"),
        ("awq", {"quant_method": "aqlm"}, "quant_method 'aqlm' is not supported; supported are"),
        ("gptq", {"bits": 3}, "bits is 3; supported is 4 or 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ("gptq", {"format": "gptq_p"}, "checkpoint_format is 'gptq_p'; supported is 'gptq' or"),
        ("gptq", {"checkpoint_format": "gptq", "format": "gptq_v2"},
         "format is 'gptq_v2'; supported is 'gptq'"),
        ("gptq", {"rotation": "hadamard"}, "field 'rotation' (= 'hadamard') is not supported"),
        ("awq", {"format": "llm-awq"}, "format is 'llm-awq'; supported is 'gemm' or 'GEMM'"),
        ("awq", {"desc_act": True}, "desc_act is True; supported is False"),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic (= {'+:.*down.*'"),
        ("gptq", {"sym": "yes"}, "sym is 'yes'; supported is True or False"),
        ("compressed", {"format": "marlin-24"}, "format is 'marlin-24'; supported is"),
        ("compressed", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ("compressed", {"config_groups": []}, "config_groups must be an object of objects"),
        ("float8 blocks", {"weight_block_size": [64, 64]}, "weight_block_size is [64, 64]"),
        ("float8 blocks", {"activation_scheme": "static"}, "static goes with weight_block_size"),
    ],
)  # fmt: skip
def test_unsupported_fields_are_named(
    name: str, fields: dict[str, Any], message: str, checkpoints, tmp_path: Path
):
    bad = edited(tmp_path / "bad", checkpoints[name][0], {}, **fields)
    with pytest.raises(ValueError, match=re.escape(message)):
        load(bad)


def with_group(folders: tuple[Path, Path]) -> tuple[Path, dict[str, Any]]:
    """A quantized checkpoint, and its only config group."""
    config = json.loads((folders[0] / "config.json").read_text())["quantization_config"]
    [group] = config["config_groups"].values()
    return folders[0], group


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("weights", {"num_bits": 3}, "weights: num_bits is 3; supported is 4 or 8"),
        ("weights", {"strategy": "tensor"}, "weights: strategy is 'tensor'"),
        ("weights", {"type": "fp"}, "weights: type is 'fp'"),
        ("weights", {"scale": 1}, "weights: field 'scale' (= 1) is not supported"),
        ("weights", {"num_bits": 8}, "input_activations is not supported for integer weights with"),
        ("weights", {"symmetric": False}, "input_activations is not supported for integer weights"),
        (
            "input_activations",
            {"type": "int"},
            "input_activations: type is 'int'; supported is 'fl",
        ),
        ("input_activations", {"type": None}, "input_activations: type is None; supported is"),
        ("input_activations", {"num_bits": 4}, "input_activations: num_bits is 4; supported is 8"),
        ("input_activations", {"dynamic": False}, "input_activations: dynamic is False; supported"),
        ("input_activations", {"dynamic": "local"}, "input_activations: dynamic is 'local'; supp"),
        ("input_activations", {"symmetric": False}, "input_activations: symmetric is False; supp"),
        ("input_activations", {"strategy": "tensor"}, "input_activations: strategy is 'tensor'"),
        ("input_activations", {"twist": 1}, "input_activations: field 'twist' (= 1) is not supp"),
        ("input_activations", None, "input_activations must be an object"),
    ],
)
def test_unsupported_fields_of_a_group_are_named(
    part: str, fields: dict[str, Any] | None, message: str, checkpoints, tmp_path: Path
):
    quantized, group = with_group(checkpoints["compressed, rounded inputs"])
    group = group | {part: True if fields is None else group[part] | fields}
    bad = edited(tmp_path / "bad", quantized, {}, config_groups={"group_0": group})
    with pytest.raises(ValueError, match=re.escape(f"config_groups.group_0.{message}")):
        load(bad)


def test_a_group_may_target_modules_by_expression(checkpoints, tmp_path: Path):
    quantized, group = with_group(checkpoints["compressed"])
    for index, (targets, message) in enumerate(
        (
            (["re:.*_proj$"], None),
            (["re:.*mlp.*", "re:.*self_attn.*"], None),
            (["re:.*mlp.*"], "self_attn.k_proj holds packed integers, but no group of quant"),
            (["re:("], "target 're:(' is no regular expression"),
        )
    ):
        groups = {"group_0": group | {"targets": targets}}
        folder = edited(tmp_path / str(index), quantized, {}, config_groups=groups)
        if message is None:
            load(folder)
        else:
            with pytest.raises(ValueError, match=re.escape(message)):
                load(folder)


def test_projections_computed_together_have_one_format(source: Path, tmp_path: Path):
    form = FORMATS["awq"]
    quantized, reference = quantize_checkpoint(
        source, tmp_path, form, lambda name: name.endswith(("gate_proj.weight", "down_proj.weight"))
    )
    with pytest.raises(ValueError, match=r"gate_proj is quantized and .*up_proj is not"):
        load(quantized)
    assert isinstance(load(reference).layers[0].mlp.down, Linear)


def test_projections_computed_together_round_alike(checkpoints, tmp_path: Path):
    quantized, group = with_group(checkpoints["compressed, rounded inputs"])

    def read(*unrounded: str) -> Any:
        """With modules whose inputs stay as they are."""
        plain = group | {"targets": [*unrounded], "input_activations": None}
        folder = tmp_path / str(len(unrounded))
        groups = {"group_0": plain, "group_1": group}
        return load(edited(folder, quantized, {}, config_groups=groups)).layers[0]

    found = read("re:.*down_proj$")
    assert found.mixer.qkv.rounds and found.mlp.gate_up.rounds and not found.mlp.down.rounds
    message = r"gate_proj and .*up_proj are quantized differently \(rounds\)"
    with pytest.raises(ValueError, match=message):
        read("re:.*down_proj$", "re:.*gate_proj$")


def test_modules_left_out_and_a_quantized_lm_head(source: Path, tmp_path: Path):
    def quantizes(name: str) -> bool:
        return name.endswith(("gate_proj.weight", "up_proj.weight")) or name == "lm_head.weight"

    folders = quantize_checkpoint(source, tmp_path, FORMATS["gptq"], quantizes)
    model, reference = (load(folder) for folder in folders)
    assert isinstance(model.lm_head, GroupedLinear) and isinstance(model.layers[0].mlp.down, Linear)
    found, wanted = (np.asarray(jax.jit(logits)(one, TOKENS)) for one in (model, reference))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    mesh = make_mesh(tensor_parallel=2)
    split = np.asarray(sharded_logits(load(folders[0], mesh=mesh), mesh))
    np.testing.assert_allclose(split, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_biases_of_the_model_are_kept(tmp_path: Path):
    source = tiny_qwen2(tmp_path / "source", **SIZES)
    for name in ("awq", "compressed"):  # GPTQ's writer here writes zeros in their place
        folders = quantize_checkpoint(source, tmp_path / name, FORMATS[name])
        found, wanted = (np.asarray(jax.jit(logits)(load(one), TOKENS)) for one in folders)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_devices_that_would_cut_a_group_are_refused(source: Path, tmp_path: Path):
    quantized, _ = quantize_checkpoint(source, tmp_path, awq(group=64))
    with pytest.raises(ValueError, match=r"the 2 groups of inputs of .*o_proj cannot be split"):
        load(quantized, mesh=make_mesh(tensor_parallel=4))


def test_a_quantized_model_is_not_saved_as_another(checkpoints, tmp_path: Path):
    with pytest.raises(ValueError, match="quantized weights are not saved"):
        save_decoder(load(checkpoints["awq"][0]), tmp_path)
