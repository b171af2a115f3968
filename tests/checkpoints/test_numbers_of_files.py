"""Plain tensors that hold what is no number: loading is an error that names them."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.checkpoint_files import StoredTensor
from jaxspec.checkpoints.eagle import load_eagle_head, save_eagle_head
from jaxspec.checkpoints.read_arrays import WIDE, check_narrow, check_numbers
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.models.from_config.model import load_model_config
from jaxspec.parallel import make_mesh
from tests.helpers.checkpoints import changed_copy, tiny_llama
from tests.helpers.random_models import eagle3_head, random_target

TENSOR = StoredTensor(Path("model.safetensors"), "norm.weight", (4,), "F32", 0)
MESSAGE = r"model.safetensors: norm.weight holds NaN or an infinity"


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_all_numbers_pass_and_nothing_else(dtype: np.dtype):
    largest = ml_dtypes.finfo(dtype).max
    numbers = np.array([[0, -0.0, largest], [-largest, ml_dtypes.finfo(dtype).tiny, 1]], dtype)
    check_numbers(TENSOR, numbers)
    check_numbers(TENSOR, numbers.T[:, ::2])
    check_numbers(TENSOR, numbers[:0])
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        for place in np.ndindex(numbers.shape):
            changed = numbers.copy()
            changed[place] = bad
            with pytest.raises(ValueError, match=MESSAGE):
                check_numbers(TENSOR, changed.T)


def test_other_dtypes_pass():
    check_numbers(TENSOR, np.array([255], np.uint8))
    check_numbers(TENSOR, np.array([2**31 - 1], np.int32))


def test_integers_that_would_wrap_are_named():
    fits = np.array([-(2**31), 2**31 - 1])
    check_narrow(TENSOR, fits, np.dtype(np.int32))
    check_narrow(TENSOR, fits + 2**31, np.dtype(np.int64))
    message = r"norm\.weight holds -?2147483\d{3}, which int32 has not"
    for wrong in (fits - 1, fits + 1):
        with pytest.raises(ValueError, match=message):
            check_narrow(TENSOR, wrong, np.dtype(np.int32))


@pytest.mark.parametrize("devices", [None, 2])
@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"],
)
def test_the_tensor_of_a_model_is_named(name: str, devices: int | None, tmp_path: Path):
    source = tiny_llama(tmp_path / "source")
    values = load_file(source / "model.safetensors")[name]
    values.reshape(-1)[-1] = np.nan
    changed: dict[str, Any] = {name: values}
    path = changed_copy(source, tmp_path / "changed", **changed)
    mesh = None if devices is None else make_mesh(tensor_parallel=devices)
    with pytest.raises(ValueError, match=f"{path}/model.safetensors: {name} holds NaN or an inf"):
        load_decoder(path, load_model_config(path), jnp.dtype("bfloat16"), mesh)


def test_the_tensor_of_a_draft_head_is_named(tmp_path: Path):
    target = random_target()
    save_eagle_head(eagle3_head(target), tmp_path, target.config)
    name = "midlayer.hidden_norm.weight"
    values = load_file(tmp_path / "model.safetensors")[name]
    values[3] = np.inf
    changed: dict[str, Any] = {name: values}
    changed_copy(tmp_path, tmp_path, **changed)
    with pytest.raises(ValueError, match=f"{name} holds NaN or an infinity") as caught:
        load_eagle_head(tmp_path, target.config, jnp.dtype("float32"))
    assert "\n" not in str(caught.value)
