"""Models with experts of 4 bits as published: their weights, logits and texts are those of dense
checkpoints that hold the same weights."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.load import load as load_params
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.quantized.four_bit_experts import FourBitExperts
from jaxspec.models.quantized.packed_experts import PackedExpertLinear, packed_experts
from jaxspec.parallel import make_mesh
from tests.helpers import four_bit_checkpoints as four_bits
from tests.helpers.checkpoints import changed_copy, hf_logits
from tests.helpers.families import LENGTH, save_family
from tests.helpers.marks import slow
from tests.helpers.parity import assert_close, load, paged_logits
from tests.helpers.quantized_checkpoints import Format, awq, compressed, gptq, quantize_checkpoint
from tests.helpers.random_models import generate, random_prompts
from tests.helpers.sampling_reference import plain_logits

TOKENS = np.random.default_rng(3).integers(0, 320, (2, LENGTH))
# Of a checkpoint in which each expert has tensors of its own, as Kimi K2.
FORMATS: dict[str, Format] = {
    "int4": compressed(4, 32),
    "awq": awq(32),
    "gptq": gptq(4, 32, symmetric=False),
    "mxfp4": four_bits.mxfp4(),
    "nvfp4": four_bits.nvfp4(),
    "modelopt": four_bits.modelopt(),
}
NAMES = ("gpt-oss", *FORMATS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a format: the quantized checkpoint, and the dense one."""
    made: dict[str, tuple[Path, Path]] = {}

    def of(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp("four bits")
            if name == "gpt-oss":
                made[name] = four_bits.write_gpt_oss(save_family(folder / "of", "gpt_oss"), folder)
            else:
                source = save_family(folder / "of", "deepseek_v3", moe_intermediate_size=64)
                quantizes = ".mlp.experts."
                made[name] = quantize_checkpoint(
                    source, folder, FORMATS[name], lambda tensor: quantizes in tensor
                )
        return made[name]

    return of


def experts_of(model: Decoder) -> list[Any]:
    """The projections of its experts."""
    mlps: list[Any] = [layer.mlp for layer in model.layers if hasattr(layer.mlp, "router")]
    return [linear for mlp in mlps for linear in (mlp.gate_up, mlp.down)]


@pytest.mark.parametrize(
    "name", ["gpt-oss", "int4", *map(slow, ("awq", "mxfp4", "nvfp4", "modelopt"))]
)
def test_experts_are_the_numbers_of_the_file(name: str, folders: Any):
    quantized, dense = map(load, folders(name))
    found, wanted = experts_of(quantized), experts_of(dense)
    assert found and len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert isinstance(ours, FourBitExperts) and ours.num_experts == theirs.num_experts
        assert ours.pairs.nbytes * 8 == theirs.weight.size * 4
        chosen = jnp.array([[5, 0], [7, 5]])
        np.testing.assert_allclose(ours.of(chosen), theirs.of(chosen), rtol=3e-7, atol=0)
        in_bfloat16 = dataclasses.replace(ours, activations=jnp.dtype("bfloat16")).of(chosen)
        np.testing.assert_array_equal(in_bfloat16, ours.of(chosen).astype(jnp.bfloat16))
        if ours.bias is not None:
            np.testing.assert_array_equal(ours.bias, theirs.bias)


def test_experts_that_the_files_lack_are_named(folders: Any, tmp_path: Path):
    folder = changed_copy(folders("gpt-oss")[0], tmp_path / "more", {"num_local_experts": 64})
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj_blocks\[8\] to .*\[63\] are"):
        load(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_the_same_in_the_order_of_the_kernel(name: str, folders: Any):
    chosen = jnp.array([[5, 0], [7, 5]])
    for linear in experts_of(load(folders(name)[0])):
        packed = packed_experts(linear)
        assert isinstance(packed, PackedExpertLinear)
        assert packed.values.nbytes == linear.pairs.nbytes
        assert packed.scale.nbytes == linear.scale.nbytes
        np.testing.assert_array_equal(packed.of(chosen), linear.of(chosen))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_dense_weights(name: str, folders: Any):
    quantized, dense = map(load, folders(name))
    wanted = np.asarray(plain_logits(dense, TOKENS))
    np.testing.assert_allclose(plain_logits(quantized, TOKENS), wanted, rtol=0, atol=1e-5)
    few = paged_logits(quantized, TOKENS[:, :8], 3, 1)  # a token of each row at a time
    np.testing.assert_allclose(few, wanted[:, :8], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_logits_of_gpt_oss_are_those_of_transformers(folders: Any):
    """transformers widens the experts of the same file."""
    quantized, dense = folders("gpt-oss")
    expected = hf_logits(quantized, TOKENS)
    np.testing.assert_allclose(expected, hf_logits(dense, TOKENS), rtol=0, atol=1e-5)
    assert_close(plain_logits(load(quantized), TOKENS), expected)
    assert_close(paged_logits(load(quantized), TOKENS, 7, LENGTH), expected)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", ["gpt-oss", "int4", "nvfp4"])
def test_devices_have_whole_experts(name: str, devices: int, folders: Any):
    quantized, _ = folders(name)
    whole = experts_of(load(quantized))
    mesh = make_mesh(devices)
    split = experts_of(load_params(quantized, "none", mesh=mesh).target)
    for ours, theirs in zip(split, whole, strict=True):
        for part, all_of_it in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
            assert part.addressable_shards[0].data.shape[0] * devices == len(all_of_it)
            np.testing.assert_array_equal(part, all_of_it)


CHAIN, TREE = SpeculationConfig.chain(4), SpeculationConfig(num_nodes=12, max_depth=3, top_k=3)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "shape"), [(1, TREE), (2, CHAIN)], ids=["tree", "two devices"])
@pytest.mark.parametrize("name", ["gpt-oss", "int4"])
def test_speculation_changes_no_text(
    name: str, devices: int, shape: SpeculationConfig, folders: Any
):
    """The dense checkpoint drafts."""
    quantized, dense = folders(name)
    prompts = random_prompts((5, 17), vocab=320)
    limits = [len(prompt) + 40 for prompt in prompts]

    def texts(folder: Path, drafter: Any, **options: Any) -> Any:
        params = load_params(folder, drafter, **options)
        return generate(params, prompts, page_size=4, max_lens=limits)

    mesh = None if devices == 1 else make_mesh(devices)
    found, state = texts(quantized, dense, speculation=shape, mesh=mesh)
    assert state.rows.stats.accepted[:, 1].sum() > 10, "few drafts were accepted"
    assert found == texts(quantized, "none")[0] == texts(dense, "none")[0]
