"""Which files and tensors of a directory are a checkpoint, and which do not belong together."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints.checkpoint_files import scan
from jaxspec.checkpoints.eagle import head_method
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import load_model_config
from jaxspec.quantize.checkpoint import Checkpoint
from tests.helpers.checkpoints import tiny_eagle1_head, tiny_llama
from tests.helpers.quantized_checkpoints import awq, gptq, modelopt_float8, quantize_checkpoint

SMALL: dict[str, Any] = {"num_hidden_layers": 2}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# As AutoGPTQ 0.7 and AutoAWQ 0.1 write them.
AUTO_GPTQ = {
    "bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "static_groups": False,
    "sym": True, "true_sequential": True, "model_name_or_path": None,
    "model_file_base_name": "model", "quant_method": "gptq", "checkpoint_format": "gptq",
}  # fmt: skip
AUTO_AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), tie_word_embeddings=True, **SMALL)


def load_from(directory: Path) -> Decoder:
    return load_decoder(directory, load_model_config(directory), jnp.dtype("float32"))


def assert_same(first: Any, second: Any) -> None:
    for left, right in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(left, right)


def indexed(llama: Path, folder: Path, files: tuple[str, str]) -> Path:
    """The checkpoint in two files, with an index."""
    tensors = load_file(llama / SINGLE)
    parts = [dict(list(tensors.items())[half::2]) for half in range(2)]
    folder.mkdir()
    shutil.copy(llama / "config.json", folder)
    for file, part in zip(files, parts, strict=True):
        save_file(part, folder / file)
    where = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_a_single_file_beside_an_index_of_others_is_refused(llama: Path, tmp_path: Path):
    folder = indexed(llama, tmp_path / "both", SHARDS)
    assert_same(load_from(folder), load_from(llama))
    shutil.copy(llama / SINGLE, folder)
    with pytest.raises(ValueError, match=r"two checkpoints are in one directory") as caught:
        load_from(folder)
    message = str(caught.value)
    assert str(folder / SINGLE) + " stands beside" in message and str(folder / INDEX) in message


def test_a_single_file_beside_shards_without_an_index_is_refused(llama: Path, tmp_path: Path):
    folder = indexed(llama, tmp_path / "left", SHARDS)
    (folder / INDEX).unlink()
    assert_same(load_from(folder), load_from(llama))
    shutil.copy(llama / SINGLE, folder)
    with pytest.raises(ValueError, match=f"{SINGLE} stands beside .*{SHARDS[0]}, which no index"):
        load_from(folder)


def test_an_index_may_name_the_single_file(llama: Path, tmp_path: Path):
    folder = indexed(llama, tmp_path / "named", (SINGLE, "more.safetensors"))
    assert_same(load_from(folder), load_from(llama))


def test_a_tensor_in_two_files_is_refused(llama: Path, tmp_path: Path):
    for name in ("first.safetensors", "second.safetensors"):
        shutil.copy(llama / SINGLE, tmp_path / name)
    with pytest.raises(ValueError, match=r"first.safetensors and .*second.safetensors both hold"):
        scan(tmp_path)


def bare(folder: Path, **overrides: Any) -> Path:
    """A model without its LM head, as transformers saves it."""
    source = tiny_llama(folder / "whole", **SMALL, **overrides)
    model = transformers.AutoModel.from_pretrained(source)
    model.save_pretrained(folder / "bare")
    return folder / "bare"


def test_names_of_a_model_without_its_head_are_read(tmp_path: Path):
    folder = bare(tmp_path, tie_word_embeddings=True)
    assert "embed_tokens.weight" in load_file(folder / SINGLE)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaModel"]
    assert_same(load_from(folder), load_from(tmp_path / "whole"))
    assert Checkpoint(folder).units(lm_head=False)[0].prefix == "model.layers.0."


def test_names_without_the_prefix_are_read_beside_an_lm_head(tmp_path: Path):
    source = tiny_llama(tmp_path / "source", **SMALL)
    tensors = load_file(source / SINGLE)
    assert "lm_head.weight" in tensors
    folder = tmp_path / "short"
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    short = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(short, folder / SINGLE)
    assert_same(load_from(folder), load_from(source))


def test_a_model_that_has_no_head_is_refused_in_its_users_words(tmp_path: Path):
    folder = bare(tmp_path)
    with pytest.raises(ValueError, match=r"without an LM head.* checkpoint of LlamaForC"):
        load_from(folder)
    shutil.copy(tmp_path / "whole" / "config.json", folder)
    with pytest.raises(ValueError, match=r"its config.json: lm_head.weight is missing"):
        load_from(folder)


def test_a_heads_names_stay(llama: Path, tmp_path: Path):
    head = tiny_eagle1_head(tmp_path, llama)
    assert head_method(head) == "eagle1" and "fc.weight" in scan(head)
    assert not any(name.startswith("model.") for name in scan(head))


@pytest.fixture(scope="module")
def packed(llama: Path, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packed")
    forms = {"gptq": gptq(), "awq": awq(), "fp8": modelopt_float8()}
    return {
        name: quantize_checkpoint(llama, folder / name, form)[0] for name, form in forms.items()
    }


def with_file(packed: Path, folder: Path, name: str, content: dict[str, Any] | None) -> Path:
    """A copy whose config.json says nothing of its quantization; a file beside it does."""
    shutil.copytree(packed, folder)
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    if content is not None:
        (folder / name).write_text(json.dumps(content))
    return folder


MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
OLDER = {key: value for key, value in AUTO_GPTQ.items() if key[:5] not in ("quant", "check")}


@pytest.mark.parametrize(
    ("form", "name", "content"),
    [
        ("gptq", "quantize_config.json", AUTO_GPTQ),
        ("gptq", "quantize_config.json", OLDER),
        ("awq", "quant_config.json", AUTO_AWQ),
        (
            "fp8",
            "hf_quant_config.json",
            {"quantization": MODELOPT, "producer": {"name": "modelopt"}},
        ),
    ],
    ids=["AutoGPTQ", "older AutoGPTQ", "AutoAWQ", "ModelOpt"],
)
def test_a_quantizers_own_file_is_read(form: str, name: str, content, packed, tmp_path: Path):
    folder = with_file(packed[form], tmp_path / "beside", name, content)
    assert_same(load_from(folder), load_from(packed[form]))
    with pytest.raises(ValueError, match="is quantized already"):
        Checkpoint(folder)


@pytest.mark.parametrize(("form", "part"), [("gptq", "qweight"), ("fp8", "weight")])
def test_packed_tensors_need_a_word_of_how(form: str, part: str, packed, tmp_path: Path):
    folder = with_file(packed[form], tmp_path / "silent", "", None)
    message = rf"{part} is packed, but config.json has no quantization_config, and there is no quan"
    with pytest.raises(ValueError, match=message) as caught:
        load_from(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_of_an_unpacked_checkpoint_means_nothing(llama: Path, tmp_path: Path):
    shutil.copytree(llama, tmp_path / "stale")
    (tmp_path / "stale" / "quantize_config.json").write_text(json.dumps(AUTO_GPTQ))
    assert_same(load_from(tmp_path / "stale"), load_from(llama))


def test_every_dtype_is_read_at_its_place(tmp_path: Path):
    rng = np.random.default_rng(0)
    kinds = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "bool", "bfloat16")
    tensors = {kind: rng.integers(0, 2, (3, 5)).astype(kind) for kind in kinds}
    tensors |= {"scalar": np.array(7, np.float32), "empty": np.zeros((0, 4), np.int8)}
    save_file(tensors, tmp_path / SINGLE)
    for name, tensor in scan(tmp_path).items():
        wanted = tensors[name]
        found = tensor.read()
        assert found.dtype == wanted.dtype and found.shape == wanted.shape == tensor.shape
        np.testing.assert_array_equal(found, wanted)
        if wanted.size > 1:
            np.testing.assert_array_equal(tensor.read(slice(1, 3), slice(2, 4)), wanted[1:3, 2:4])
