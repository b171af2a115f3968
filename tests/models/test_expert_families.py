"""Families with experts: which layers have them, and what is refused."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.fused_experts import OfExpert
from jaxspec.checkpoints.mtp import load_mtp_head
from jaxspec.checkpoints.safetensors_io import save_decoder
from jaxspec.config.experts import ExpertsConfig
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from jaxspec.quantize.checkpoint import Checkpoint
from tests.helpers.checkpoints import TINY, changed_copy
from tests.helpers.families import QWEN_MOE
from tests.helpers.parity import load


def test_which_layers_have_experts(checkpoint):
    def layers(name: str) -> list[bool]:
        config = load_model_config(checkpoint(name)[0])
        return [isinstance(layer.mlp, ExpertsConfig) for layer in config.layers]

    assert layers("mixtral") == [True, True]
    assert layers("qwen3_moe") == [False, True] == layers("qwen3_moe-every-second")


def test_parts_of_a_tensor_of_all_experts():
    """The slices that loading reads, whatever the layout."""
    whole = np.arange(2 * 3 * 8).reshape(2, 3, 8)  # [E, in, all] or [E, all, in]

    class Stored:
        file, name, shape, dtype = Path("x"), "x", whole.shape, "F32"

        def read(self, *index: slice) -> np.ndarray:
            assert all(part.step in (None, 1) for part in index), "safetensors reads no steps"
            return whole[index]

    up = OfExpert(Stored(), 1, 1, 2, 4, inputs_first=True)
    assert up.shape == (4, 3)
    np.testing.assert_array_equal(up.read(), whole[1, :, 1::2].T)
    np.testing.assert_array_equal(up.read(slice(1, 3), slice(0, 2)), whole[1, :2, 3:7:2].T)
    gate = OfExpert(Stored(), 0, 1, 1, 2, inputs_first=False)
    np.testing.assert_array_equal(gate.read(slice(1, 2), slice(2, 5)), whole[0, 2:3, 2:5])
    np.testing.assert_array_equal(gate.read(slice(1, 1), slice(2, 5)), whole[0, 2:2, 2:5])


@pytest.mark.parametrize("other", [{"num_experts": 4}, {"mlp_only_layers": 1}])
def test_values_that_do_not_fit_are_named(other: dict[str, Any]):
    raw = TINY | QWEN_MOE | {"model_type": "qwen3_moe", "num_local_experts": 8} | other
    del raw["initializer_range"]
    key = next(iter(other))
    with pytest.raises(ValueError, match=key):
        parse_model_config(raw)


def test_quantized_experts_are_refused_by_name(checkpoint, tmp_path: Path):
    quantization = {"quantization_config": {"quant_method": "aqlm"}}
    changed_copy(checkpoint("gpt_oss")[0], tmp_path, quantization)
    with pytest.raises(ValueError, match="quant_method 'aqlm' is not supported"):
        load(tmp_path)


def test_a_missing_expert_is_named(checkpoint, tmp_path: Path):
    missing = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    changed_copy(checkpoint("mixtral")[0], tmp_path, **{missing: None})
    with pytest.raises(ValueError, match=f"{missing} is missing"):
        load(tmp_path)


def test_mtp_layers_are_no_part_of_the_model(checkpoint, tmp_path: Path):
    """They have experts as the model's last layer has. They are known by their names, too."""
    directory, _, _ = checkpoint("glm4_moe")
    tensors = load_file(directory / "model.safetensors")
    last = "model.layers.1."
    copies = [(name.removeprefix(last), one) for name, one in tensors.items() if last in name]
    added: dict[str, Any] = {f"model.layers.2.{name}": tensor for name, tensor in copies}
    for name, shape in {
        "enorm": (64,), "hnorm": (64,), "shared_head.norm": (64,), "eh_proj": (64, 128),
    }.items():  # fmt: skip
        added[f"model.layers.2.{name}.weight"] = np.ones(shape, np.float32)
    changed_copy(directory, tmp_path, **added)
    target = load(tmp_path)
    assert len(target.layers) == 2
    head = load_mtp_head(tmp_path, target.config, jnp.dtype(jnp.float32))
    ours, theirs = (jax.tree.leaves(one.layers[-1].mlp) for one in (head, target))
    assert all(map(np.array_equal, ours, theirs))
    none = {"num_nextn_predict_layers": 0, "num_mtp_layers": 0}
    changed_copy(tmp_path, tmp_path, none)
    assert load(tmp_path).config.mtp is None


def test_what_is_not_written_is_an_error(checkpoint, tmp_path: Path):
    with pytest.raises(ValueError, match=r"no config\.json is written"):
        save_decoder(load(checkpoint("mixtral")[0]), tmp_path)


def test_quantizing_is_refused(checkpoint):
    with pytest.raises(ValueError, match="has experts, which are not quantized"):
        Checkpoint(checkpoint("mixtral")[0])
