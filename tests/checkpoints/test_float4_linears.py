"""Dense models in 4-bit floats as published: memory holds the file's bytes, and weights, logits and
texts are those of dense checkpoints that hold the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxspec import load as load_params
from jaxspec.checkpoints.checkpoint_files import canonical_tensors
from jaxspec.checkpoints.formats.widened import widened
from jaxspec.checkpoints.safetensors_io import save_decoder
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import EagleDrafter
from jaxspec.models.decoder import Decoder
from jaxspec.models.linear import Linear
from jaxspec.models.nodes import map_nodes, nodes_of
from jaxspec.models.quantized.float4 import Float4Linear, in_float4_order
from jaxspec.parallel import make_mesh
from tests.helpers import four_bit_checkpoints as four_bits
from tests.helpers.checkpoints import tiny_eagle3_head, tiny_qwen2
from tests.helpers.families import save_family
from tests.helpers.marks import slow
from tests.helpers.model_kinds import KINDS
from tests.helpers.parity import load, paged_logits
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.quantized_checkpoints import Format, quantize_checkpoint
from tests.helpers.random_models import generate, random_prompts
from tests.helpers.sampling_reference import plain_logits
from tests.parallel.test_several_gpus import differences, logprobs

SIZES = {"hidden_size": 128, "intermediate_size": 256}
TOKENS = np.random.default_rng(3).integers(0, 90, (2, 21))
FORMATS: dict[str, Format] = {
    "modelopt": four_bits.modelopt(),
    "nvfp4": four_bits.nvfp4(),
    "mxfp4": four_bits.mxfp4(),
}
FLOAT32 = jnp.dtype("float32")
in_float32 = jax.jit(lambda linear: linear.dense(FLOAT32), compiler_options=FAST_COMPILE)
reordered = jax.jit(in_float4_order, compiler_options=FAST_COMPILE)
CHAIN, TREE = SpeculationConfig.chain(4), SpeculationConfig(num_nodes=12, max_depth=3, top_k=3)


def is_matrix(name: str) -> bool:
    return name.endswith("proj.weight") or name in ("lm_head.weight", "fc.weight")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Of a format: the checkpoint of a model with biases, and the dense one."""
    source = tiny_qwen2(tmp_path_factory.mktemp("source"), **SIZES)
    made: dict[str, tuple[Path, Path]] = {}

    def of(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp("four bits")
            made[name] = quantize_checkpoint(source, folder, FORMATS[name], is_matrix)
        return made[name]

    return of


def linears(model: Decoder) -> list[Any]:
    """Every projection of a model of attention and dense MLPs, and its LM head."""
    layers: list[Any] = list(model.layers)
    by_layer = ((x.mixer.qkv, x.mixer.o, x.mlp.gate_up, x.mlp.down) for x in layers)
    return [*(linear for each in by_layer for linear in each), model.lm_head]


def file_bytes(folder: Path, kinds: tuple[str, ...]) -> int:
    """Of all tensors of these names."""
    with safe_open(folder / "model.safetensors", "np") as file:
        parts = (file.get_slice(name) for name in file.keys() if name.endswith(kinds))  # noqa: SIM118
        return sum(int(np.prod(part.get_shape())) for part in parts)


@pytest.mark.parametrize("name", ["modelopt", *map(slow, ("nvfp4", "mxfp4"))])
def test_memory_holds_the_numbers_of_the_file(name: str, folders: Any):
    """Weights are bit for bit what a table look-up makes of the file."""
    quantized, dense = map(load, folders(name))
    found = linears(quantized)
    for ours, theirs in zip(found, linears(dense), strict=True):
        assert isinstance(ours, Float4Linear)
        wanted = np.moveaxis(np.asarray(theirs.weight), 0, -1)
        np.testing.assert_allclose(in_float32(ours), wanted, rtol=3e-7, atol=0)
    np.testing.assert_array_equal(in_float32(reordered(found[1])), in_float32(found[1]))
    stored = canonical_tensors(folders(name)[0])
    for module, ours in (("lm_head", found[-1]), ("model.layers.0.self_attn.o_proj", found[1])):
        weights = widened(stored, module).read()
        np.testing.assert_array_equal(in_float32(ours)[: len(weights)], weights)
    codes = {"modelopt": ".weight"}.get(name, ".weight_packed")
    in_file = file_bytes(folders(name)[0], (f"proj{codes}", f"lm_head{codes}", ".weight_scale"))
    assert sum(x.values.nbytes + x.scale.nbytes for x in found) == in_file
    with pytest.raises(ValueError, match="quantized weights are not saved"):
        save_decoder(quantized, "never")


@pytest.mark.slow  # by default: the products of tests/models/quantized/test_float4.py
@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dense_weights(name: str, folders: Any):
    quantized, dense = map(load, folders(name))
    wanted = np.asarray(plain_logits(dense, TOKENS))
    bound = 1e-5 * np.abs(wanted).max()
    np.testing.assert_allclose(plain_logits(quantized, TOKENS), wanted, rtol=0, atol=bound)
    few = paged_logits(quantized, TOKENS[:, :8], 3, 1)  # a token of each row at a time
    np.testing.assert_allclose(few, wanted[:, :8], rtol=0, atol=bound)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "shape"), [(1, TREE), (1, CHAIN), (2, CHAIN)], ids=["tree", "chain", "two devices"]
)
@pytest.mark.parametrize("name", FORMATS)
def test_speculation_changes_no_text(
    name: str, devices: int, shape: SpeculationConfig, folders: Any
):
    """The dense checkpoint drafts; also where two devices share the outputs and the inputs."""
    quantized, dense = folders(name)
    prompts = random_prompts((5, 17), vocab=90)
    limits = [len(prompt) + 40 for prompt in prompts]

    def texts(folder: Path, drafter: Any, **options: Any) -> Any:
        params = load_params(folder, drafter, **options)
        return generate(params, prompts, page_size=4, max_lens=limits)

    mesh = None if devices == 1 else make_mesh(devices)
    found, state = texts(quantized, dense, speculation=shape, mesh=mesh)
    assert state.rows.stats.accepted[:, 1].sum() > 10, "few drafts were accepted"
    assert found == texts(quantized, "none")[0] == texts(dense, "none")[0]


@pytest.mark.slow
def test_devices_have_parts_of_the_bytes(folders: Any):
    quantized, _ = folders("nvfp4")
    whole = linears(load(quantized))
    split = linears(load_params(quantized, "none", mesh=make_mesh(2)).target)
    for ours, theirs in zip(split, whole, strict=True):
        for part, of_one in ((ours.values, theirs.values), (ours.scale, theirs.scale)):
            assert 2 * part.addressable_shards[0].data.size == part.size
            np.testing.assert_array_equal(part, of_one)


def test_projections_of_several_formats_are_widened(folders: Any, tmp_path: Path):
    """Of one product, as far as one of them has 4-bit floats."""
    source = tiny_qwen2(tmp_path / "source", **SIZES)
    quantized, dense = quantize_checkpoint(
        source,
        tmp_path,
        FORMATS["nvfp4"],
        lambda name: name.endswith(("q_proj.weight", "down_proj.weight")),
    )
    ours, theirs = linears(load(quantized)), linears(load(dense))
    assert [type(x) for x in ours[:4]] == [Linear, Linear, Linear, Float4Linear]
    np.testing.assert_allclose(ours[0].weight, theirs[0].weight, rtol=3e-7)


@pytest.mark.slow
def test_projections_with_multipliers_are_widened(tmp_path: Path):
    source = save_family(tmp_path / "of", "falcon_h1")
    quantized, dense = quantize_checkpoint(source, tmp_path, FORMATS["nvfp4"])
    ours, theirs = map(load, (quantized, dense))
    assert nodes_of(ours, Float4Linear) and nodes_of(ours.layers, Linear)
    wanted = np.asarray(plain_logits(theirs, TOKENS))
    np.testing.assert_allclose(plain_logits(ours, TOKENS), wanted, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_heads_and_draft_models_of_4_bits_draft(folders: Any, tmp_path: Path):
    """A CPU widens a head once."""
    quantized, dense = folders("nvfp4")
    head = tiny_eagle3_head(tmp_path / "head", dense)
    folder, wide = quantize_checkpoint(head, tmp_path, FORMATS["nvfp4"], is_matrix)
    drafters = [load_params(quantized, one, speculation=CHAIN).drafter for one in (folder, wide)]
    for ours, theirs in zip(*map(jax.tree.leaves, drafters), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=3e-7, atol=0)
    assert isinstance(drafters[0], EagleDrafter)
    split = load_params(quantized, folder, speculation=CHAIN, mesh=make_mesh(2)).drafter
    assert isinstance(split, EagleDrafter) and isinstance(split.head.front.fc, Float4Linear)
    model = load_params(dense, quantized, speculation=CHAIN).drafter
    assert nodes_of(model, Float4Linear)


@pytest.mark.gpu
def test_the_kernel_computes_what_the_widened_weights_do(tmp_path: Path):
    kind = KINDS["nvfp4"]
    path = kind.save(tmp_path)
    ours, wide = (kind.load(path, 1, kernels) for kernels in ("all", "none"))
    # Loaders do so where the kernel runs by default.
    ours = ours.replace(target=map_nodes(ours.target, in_float4_order, Float4Linear))
    found = nodes_of(ours.target, Float4Linear)
    assert found and all(linear.reordered for linear in found)
    off = np.concatenate(differences(logprobs(ours), logprobs(wide), last=5))
    assert off.max() <= kind.close and off.mean() <= kind.close_on_average
