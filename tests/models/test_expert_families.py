"""Families with experts, on transformers' checkpoints: its logits, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints.fused_experts import OfExpert
from jaxspec.checkpoints.mtp import load_mtp_head
from jaxspec.checkpoints.safetensors_io import save_decoder
from jaxspec.config.experts import ExpertsConfig
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from jaxspec.quantize.checkpoint import Checkpoint
from tests.helpers.checkpoints import TINY, hf_logits, save_random_model
from tests.helpers.marks import slow
from tests.helpers.parity import assert_close, load, paged_logits

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}
QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
GLM = {
    "head_dim": 32,
    "n_routed_experts": 16,  # 4 in a group, of which the best two count
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "n_shared_experts": 2,
}
OSS = {
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "intermediate_size": 64,  # as wide as hidden states: layouts cannot be told by shapes
    "rope_parameters": YARN,
}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 6, "sliding_window": 8}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        QWEN | {"head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "qwen3_moe-every-second": (
        transformers.Qwen3MoeConfig,
        QWEN | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 8},
    ),
    "glm4_moe": (transformers.Glm4MoeConfig, GLM),
    "glm4_moe-qk-norm": (
        transformers.Glm4MoeConfig,
        GLM | {"use_qk_norm": True, "attention_bias": True, "n_group": 1, "topk_group": 1},
    ),
    "gpt_oss": (transformers.GptOssConfig, OSS),
}
LENGTH = 40


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """name of a variant -> (its directory, tokens [2, T], transformers' logits [2, T, V])"""
    made: dict[str, tuple[Path, np.ndarray, np.ndarray]] = {}

    def make(name: str) -> tuple[Path, np.ndarray, np.ndarray]:
        if name not in made:
            kind, own = VARIANTS[name]
            config = kind(**TINY | {"num_hidden_layers": 2} | own)
            directory = save_random_model(tmp_path_factory.mktemp(name), config)
            tokens = np.random.default_rng(1).integers(0, 320, (2, LENGTH))
            made[name] = directory, tokens, hf_logits(directory, tokens)
        return made[name]

    return make


@pytest.mark.parametrize("name", [slow(name) if "-" in name else name for name in VARIANTS])
def test_logits_equal_transformers(checkpoint, name: str):
    directory, tokens, expected = checkpoint(name)
    model = load(directory)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)

    @jax.jit
    def run(model, tokens):
        hidden, _, _ = decoder.run(model, tokens, positions, model.no_states(), dense_causal_attend)
        return decoder.logits(model, hidden)

    assert_close(run(model, jnp.asarray(tokens)), expected)


@pytest.mark.parametrize(
    ("name", "page_size", "step"),
    [
        ("gpt_oss", 3, 1),
        *(slow(name, 7, LENGTH) for name in VARIANTS),
        *(slow(name, 1, 1) for name in VARIANTS),
        *(slow(name, 3, 1) for name in VARIANTS if name != "gpt_oss"),
    ],
)
def test_paged_logits_equal_transformers(checkpoint, name: str, page_size: int, step: int):
    directory, tokens, expected = checkpoint(name)
    assert_close(paged_logits(load(directory), tokens, page_size, step), expected)


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
    raw = TINY | QWEN | {"model_type": "qwen3_moe", "num_local_experts": 8} | other
    del raw["initializer_range"]
    key = next(iter(other))
    with pytest.raises(ValueError, match=key):
        parse_model_config(raw)


def test_quantized_experts_are_refused_by_name(checkpoint, tmp_path: Path):
    directory, _, _ = checkpoint("gpt_oss")
    raw = json.loads((directory / "config.json").read_text())
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    raw["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="quant_method 'mxfp4' is not supported"):
        load(tmp_path)


def test_a_missing_expert_is_named(checkpoint, tmp_path: Path):
    directory, _, _ = checkpoint("mixtral")
    tensors = load_file(directory / "model.safetensors")
    missing = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(ValueError, match=f"{missing} is missing"):
        load(tmp_path)


def test_mtp_layers_are_no_part_of_the_model(checkpoint, tmp_path: Path):
    """They have experts as the model's last layer has. They are known by their names, too."""
    directory, _, _ = checkpoint("glm4_moe")
    tensors = load_file(directory / "model.safetensors")
    last = "model.layers.1."
    copies = [(name.removeprefix(last), one) for name, one in tensors.items() if last in name]
    own = {f"model.layers.2.{name}": tensor for name, tensor in copies}
    for name, shape in {
        "enorm": (64,), "hnorm": (64,), "shared_head.norm": (64,), "eh_proj": (64, 128),
    }.items():  # fmt: skip
        own[f"model.layers.2.{name}.weight"] = np.ones(shape, np.float32)
    save_file(tensors | own, tmp_path / "model.safetensors")
    raw = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    target = load(tmp_path)
    assert len(target.layers) == 2
    head = load_mtp_head(tmp_path, target.config, jnp.dtype(jnp.float32))
    ours, theirs = (jax.tree.leaves(one.layers[-1].mlp) for one in (head, target))
    assert all(map(np.array_equal, ours, theirs))
    none = {"num_nextn_predict_layers": 0, "num_mtp_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(raw | none))
    assert load(tmp_path).config.mtp is None


def test_what_is_not_written_is_an_error(checkpoint, tmp_path: Path):
    with pytest.raises(ValueError, match=r"no config\.json is written"):
        save_decoder(load(checkpoint("mixtral")[0]), tmp_path)


def test_quantizing_is_refused(checkpoint):
    with pytest.raises(ValueError, match="has experts, which are not quantized"):
        Checkpoint(checkpoint("mixtral")[0])
