"""Checkpoints whose config.json ties the LM head to the embeddings, and that store a head, too."""

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints import tied_head
from jaxspec.checkpoints.checkpoint_files import StoredTensor, canonical_tensors
from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.safetensors_io import load_decoder, load_pipeline
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import load_model_config
from jaxspec.parallel import make_mesh, stage_meshes
from jaxspec.quantize.checkpoint import Checkpoint, Streamed
from tests.helpers.checkpoints import changed_copy, hf_logits, tiny_llama
from tests.helpers.quantized_checkpoints import gptq, quantize_checkpoint
from tests.helpers.sampling_reference import plain_logits

FLOAT32 = jnp.dtype("float32")
TOKENS = np.random.default_rng(3).integers(0, 320, (2, 12))
WARNING = r"has an lm_head of other values, which is used"
SMALL: dict[str, Any] = {"num_hidden_layers": 2}


def tied(directory: Path) -> Path:
    """Says in its config.json that the LM head is the embeddings."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    return directory


def load_from(directory: Path, **options: Any) -> Decoder:
    return load_decoder(directory, load_model_config(directory), FLOAT32, **options)


def stored_head(directory: Path) -> np.ndarray:
    return load_file(directory / "model.safetensors")["lm_head.weight"]


@pytest.fixture(scope="module")
def other_head(tmp_path_factory) -> Path:
    return tied(tiny_llama(tmp_path_factory.mktemp("other"), **SMALL))


@pytest.fixture
def with_head(other_head: Path, tmp_path: Path) -> Any:
    """Writes the checkpoint with ``change`` applied to a copy of its embeddings as LM head."""

    def write(change: Any) -> Path:
        table = load_file(other_head / "model.safetensors")["model.embed_tokens.weight"]
        return changed_copy(other_head, tmp_path, **{"lm_head.weight": change(table)})

    return write


def test_a_stored_head_of_other_values_is_used(other_head: Path):
    with pytest.warns(UserWarning, match=WARNING) as caught:
        model = load_from(other_head)
    assert len(caught) == 1 and str(other_head) in str(caught[0].message)
    head: Any = model.lm_head
    np.testing.assert_array_equal(head.weight, stored_head(other_head).T)
    assert not model.config.tie_word_embeddings


def test_the_logits_are_those_of_transformers(other_head: Path):
    with pytest.warns(UserWarning, match=WARNING):
        model = load_from(other_head)
    ours = plain_logits(model, TOKENS)
    theirs = hf_logits(other_head, TOKENS)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize("devices", [2, (2, 1)])
def test_devices_decide_alike(other_head: Path, devices: Any):
    with pytest.warns(UserWarning, match=WARNING):
        model = load_from(other_head, mesh=make_mesh(devices))
    head: Any = model.lm_head
    np.testing.assert_array_equal(head.weight, stored_head(other_head).T)


def test_a_pipeline_decides_alike(other_head: Path):
    meshes: Any = stage_meshes(make_mesh(pipeline_parallel=2), None)
    config = load_model_config(other_head)
    with pytest.warns(UserWarning, match=WARNING):
        pipeline = load_pipeline(other_head, config, FLOAT32, meshes, (1, 1))
    head: Any = pipeline.last.lm_head
    np.testing.assert_array_equal(head.weight, stored_head(other_head).T)


def test_a_target_that_is_shared_is_accepted(other_head: Path):
    with pytest.warns(UserWarning, match=WARNING):
        target = load(other_head, "none", dtype="float32").target
    assert load(other_head, "none", dtype="float32", target=target).target is target


def test_the_quantizer_decides_alike(other_head: Path, with_head: Any):
    with pytest.warns(UserWarning, match=WARNING):
        head: Any = Streamed(other_head).ends().lm_head
    np.testing.assert_array_equal(head.weight, stored_head(other_head).T)
    with pytest.warns(UserWarning, match=WARNING):
        checkpoint = Checkpoint(other_head)
    assert checkpoint.units(lm_head=True)[-1].projections == ("lm_head",)
    assert checkpoint.raw["tie_word_embeddings"] is False  # as it is written
    with pytest.raises(ValueError, match=r"has no lm_head.weight of its own: no --lm-head"):
        Checkpoint(with_head(lambda table: table)).units(lm_head=True)


def test_a_copy_is_tied(with_head: Any):
    assert load_from(with_head(lambda table: table)).lm_head is None


def test_a_copy_with_padding_or_other_zeros_is_tied(with_head: Any):
    def changed(table: np.ndarray) -> np.ndarray:
        return np.concatenate([np.where(table == 0, -table, table), table[:64]])

    assert load_from(with_head(changed)).lm_head is None


def test_a_copy_in_a_wider_dtype_is_tied(with_head: Any, tmp_path: Path):
    path = with_head(lambda table: table.astype(np.float16))
    wide: dict[str, Any] = {"model.embed_tokens.weight": stored_head(path).astype(np.float32)}
    assert load_from(changed_copy(path, tmp_path / "wider", **wide)).lm_head is None


@pytest.mark.parametrize("row", [0, -1])
def test_one_other_value_unties(with_head: Any, row: int, monkeypatch):
    """Whatever the chunks that are compared, of which none is read after the first difference."""
    rows_read: list[int] = []
    read = StoredTensor.read

    def record(self: StoredTensor, *index: slice) -> np.ndarray:
        part = read(self, *index)
        if self.name == "lm_head.weight":
            rows_read.append(len(part))
        return part

    def change(table: np.ndarray) -> np.ndarray:
        table[row, 7] += 1
        return table

    path = with_head(change)
    monkeypatch.setattr(StoredTensor, "read", record)
    monkeypatch.setattr(tied_head, "CHUNK_ELEMENTS", 64 * 50)
    config = load_model_config(path)
    stored = canonical_tensors(path)
    with pytest.warns(UserWarning, match=WARNING):
        assert not tied_head.with_stored_head(config, stored, path).tie_word_embeddings
    assert max(rows_read) == 50
    assert sum(rows_read) == (50 if row == 0 else config.vocab_size)


def test_a_head_of_another_shape_is_a_misfit(with_head: Any):
    path = with_head(lambda table: table[:300])
    message = r"lm_head.weight is \[300, 64\], not \[320, 64\]"
    with pytest.warns(UserWarning, match=WARNING), pytest.raises(ValueError, match=message):
        load_from(path)


def test_a_quantized_head_is_used(other_head: Path, tmp_path: Path):
    chosen = ("proj.weight", "lm_head.weight")
    quantized, dense = quantize_checkpoint(
        other_head, tmp_path, gptq(), lambda name: name.endswith(chosen)
    )
    with pytest.warns(UserWarning, match=WARNING):
        model, meant = load_from(quantized), load_from(dense)
    head, wide = model.lm_head, meant.lm_head
    assert head is not None and wide is not None
    x = jax.random.normal(jax.random.key(0), (3, 64))
    np.testing.assert_allclose(head.float32(x), wide.float32(x), rtol=1e-4, atol=1e-4)


def test_no_warning_without_a_head(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_from(tiny_llama(tmp_path, tie_word_embeddings=True)).lm_head is None
