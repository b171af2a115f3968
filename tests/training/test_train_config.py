"""Training a language model whose config.json is given: of any family, exported as such."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from jaxspec.commands import train_lm
from jaxspec.models.hf_config import parse_model_config
from jaxspec.training.initial import init_decoder
from tests.checkpoints import hf_logits
from tests.hybrid_checkpoints import EXPERTS, HYBRID
from tests.parity import load
from tests.sampling_reference import plain_logits

HYBRID_WITH_EXPERTS: dict[str, Any] = HYBRID | EXPERTS | {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "tie_word_embeddings": True, "mtp_num_hidden_layers": 0,
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
DENSE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "granite": lambda: transformers.GraniteConfig(**DENSE, embedding_multiplier=2.0),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**HYBRID_WITH_EXPERTS),
}


def written(folder: Path, name: str, **changes: Any) -> Path:
    raw = json.loads(CONFIGS[name]().to_json_string(use_diff=False)) | changes
    (folder / "given.json").write_text(json.dumps(raw))
    for file in ("a.py", "b.py"):
        (folder / file).write_text(f"def {file[0]}(x):\n    return x + 1\n" * 40)
    return folder / "given.json"


def train(folder: Path, config: Path, *more: str) -> int:
    return train_lm.main([
        "--data", str(folder / "a.py"), str(folder / "b.py"), "--out", str(folder / "out"),
        "--work", str(folder / "work"), "--config", str(config), "--vocab", "260", "--steps", "2",
        "--batch", "8", "--context", "40", "--sample-tokens", "4", *more,
    ])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_exported_is_read_by_transformers(name: str, tmp_path: Path):
    assert train(tmp_path, written(tmp_path, name)) == 0
    tokens = np.random.default_rng(0).integers(0, 260, (2, 24))
    model = load(tmp_path / "out")
    found = plain_logits(model, tokens)
    np.testing.assert_allclose(found, hf_logits(tmp_path / "out", tokens), atol=2e-4)


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        ({}, ["--layers", "3"], "--layers and --config exclude each other"),
        ({}, ["--attention", "cudnn"], "--attention cudnn and --config exclude each other"),
        ({}, ["--context", "65"], "--context 65 exceeds the longest position 64"),
        ({"num_nextn_predict_layers": 1}, [], "set its number of MTP layers to 0"),
        ({"mlp_bias": "yes"}, [], "mlp_bias"),
    ],
)
def test_what_does_not_fit_is_an_error(
    changes: dict[str, Any], more: list[str], message: str, tmp_path: Path, capsys: Any
):
    assert train(tmp_path, written(tmp_path, "granite", **changes), *more) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert message in line


def test_recurrent_layers_begin_with_slow_and_fast_decays_and_experts_with_their_own_scale():
    raw = json.loads(CONFIGS["qwen3_next"]().to_json_string(use_diff=False))
    layer: Any = init_decoder(parse_model_config(raw | {"vocab_size": 260}), 0).layers[0]
    steps = np.log1p(np.exp(layer.mixer.dt_bias))
    assert 1e-3 <= steps.min() < steps.max() <= 0.1
    assert 0 <= layer.mixer.a_log.min() < layer.mixer.a_log.max() <= np.log(16)
    for weight, size in ((layer.mlp.gate_up.weight, 64), (layer.mixer.qkvz.weight, 64)):
        assert abs(np.std(weight) * size**0.5 - 1) < 0.05
    assert np.std(layer.mixer.taps) > 0 and np.std(layer.mlp.router.weight) > 0
