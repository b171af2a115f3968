"""Heads trained for families besides Llama's: hybrids with experts, scaled scores, odd layouts."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

from jaxspec import LLM, SamplingParams, SpeculationConfig
from jaxspec.checkpoints.mtp import load_mtp_head, save_mtp_head
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.commands import train_drafter
from jaxspec.config.mtp import AFTER, BEFORE_AFTER, MtpConfig
from jaxspec.decoding.drafters import EagleDrafter
from jaxspec.models.from_config.model import load_model_config, parse_model_config, with_mtp_layer
from jaxspec.models.heads import mtp_states
from jaxspec.models.heads.config import check_capture, default_capture
from jaxspec.models.json.values import read_json
from jaxspec.training.heads.loss import LossConfig, check_unrolled, unroll
from jaxspec.training.heads.step import DraftTrainConfig, init_mtp_layer
from jaxspec.training.online import HeadAdapter
from tests.helpers.checkpoints import TINY, save_byte_tokenizer, save_random_model
from tests.helpers.hybrid_checkpoints import save_hybrid, save_with_images
from tests.helpers.marks import LEFT_OUT
from tests.helpers.programs import FAST_COMPILE

FLOAT32 = jnp.dtype("float32")
BYTES: dict[str, Any] = {"vocab_size": 257, "mtp_num_hidden_layers": 0}
OWN_SCORES: dict[str, Any] = TINY | {
    "vocab_size": 257,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 256,
}
TOKENS = np.random.default_rng(0).integers(0, 257, (2, 12)).astype(np.int32)
jit_unroll = jax.jit(unroll, static_argnums=4, compiler_options=FAST_COMPILE)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recurrent layers, gated attention and experts."""
    path = save_hybrid(tmp_path_factory.mktemp("hybrid"), "qwen3_next", **BYTES)
    without_mtp(path / "config.json")
    save_byte_tokenizer(path)
    return path


def without_mtp(path: Path) -> None:
    path.write_text(json.dumps(read_json(path) | {"mtp_num_hidden_layers": 0}))


def train(model: Path, method: str, tmp_path: Path, capsys: Any) -> Path:
    """A head of two steps, by the command."""
    (tmp_path / "text.py").write_text("def add(a, b):\n    return a + b\n\n\n" * 60)
    (tmp_path / "more.py").write_text("class Stack:\n    items = []\n\n\n" * 60)
    out = tmp_path / "head"
    arguments = [
        *("--model", str(model), "--data", str(tmp_path), "--out", str(out)),
        *("--work", str(tmp_path / "work"), "--method", method, "--steps", "2"),
        *("--length", "32", "--batch", "8", "--unroll", "2"),
    ]
    assert train_drafter.main(arguments) == 0, capsys.readouterr().err
    return out


def check_text(model: Path, head: Path) -> None:
    """A head drafts, and the text is that of plain decoding."""
    speculation = SpeculationConfig.chain(2)
    llms = [LLM(model, head, speculation=speculation, max_length=64), LLM(model, "none")]
    prompts, params = ["def add", "class"], SamplingParams(max_tokens=12)
    found, plain = ([one.token_ids for one in llm.generate(prompts, params)] for llm in llms)
    assert found == plain


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_a_head_is_trained_for_a_hybrid(method: str, hybrid: Path, tmp_path: Path, capsys: Any):
    out = train(hybrid, method, tmp_path, capsys)
    names = load_file(out / "model.safetensors")
    assert ("mtp.fc.weight" in names) == (method == "mtp")
    if method == "mtp":
        assert read_json(out / "config.json")["mtp_states"] == "after"
        assert "own after its norm (`after`)" in (out / "README.md").read_text()
    check_text(hybrid, out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        transformers.Gemma2Config(**OWN_SCORES, sliding_window=12, attn_logit_softcapping=2.0),
        transformers.GptOssConfig(
            **OWN_SCORES, sliding_window=12, num_local_experts=4, num_experts_per_tok=2
        ),
    ],
    ids=["gemma2", "gpt_oss"],
)
def test_a_layer_is_trained_that_caps_scores_or_has_sinks(config: Any, tmp_path: Path, capsys: Any):
    model = save_random_model(tmp_path / "model", config)
    save_byte_tokenizer(model)
    out = train(model, "mtp", tmp_path, capsys)
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [one["total_loss"] for one in records if one["total_loss"] is not None]
    assert losses and np.isfinite(losses).all()
    target = load_model_config(model)
    head = load_mtp_head(out, target, FLOAT32)
    own = head.config.layers[0].attention
    expected = (2.0, False) if config.model_type == "gemma2" else (None, True)
    assert (own.softcap, own.sinks) == expected
    check_text(model, out)
    if own.sinks:  # which stay float32 when a head learns while it serves
        llm = LLM(
            model, out, speculation=SpeculationConfig.chain(2), max_length=64, dtype="bfloat16"
        )
        adapter = HeadAdapter(
            llm, DraftTrainConfig(loss=LossConfig(steps=2), batch_size=2), length=24
        )
        said = llm.generate(["def add", "class"], SamplingParams(max_tokens=12))
        before = _sinks(llm)
        assert np.isfinite(adapter.learn(said, steps=1)["loss"])
        assert _sinks(llm).dtype == FLOAT32
        assert (_sinks(llm) != before).any()


def _sinks(llm: LLM) -> np.ndarray:
    drafter = llm.params.drafter
    assert isinstance(drafter, EagleDrafter)
    mixer: Any = drafter.head.layers[0].mixer
    return np.asarray(mixer.sinks)


def test_a_layer_begins_as_the_last_that_attends(hybrid: Path):
    target = load_decoder(hybrid, load_model_config(hybrid), FLOAT32)
    mtp = parse_model_config(with_mtp_layer(read_json(hybrid / "config.json"))).mtp
    assert mtp is not None and mtp == MtpConfig("qwen", num_layers=1, states=AFTER)
    told = with_mtp_layer(read_json(hybrid / "config.json") | {"mtp_states": "before-after"})
    other = parse_model_config(told).mtp
    assert other is not None and other.states == BEFORE_AFTER
    assert mtp_states(init_mtp_layer(target, other)) == BEFORE_AFTER
    [layer] = init_mtp_layer(target, mtp).layers
    for one, other in zip(jax.tree.leaves(layer), jax.tree.leaves(target.layers[3]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.filterwarnings(LEFT_OUT)
def test_a_layer_for_a_model_of_text_and_images_comes_back(hybrid: Path, tmp_path: Path):
    text = save_hybrid(tmp_path / "text", "qwen3_5_moe_text", **BYTES)
    without_mtp(text / "config.json")
    path = save_with_images(tmp_path / "both", text)
    raw, config = read_json(path / "config.json"), load_model_config(path)
    mtp = parse_model_config(with_mtp_layer(raw)).mtp
    assert mtp is not None and config.mtp is None
    head = init_mtp_layer(load_decoder(path, config, FLOAT32), mtp)
    save_mtp_head(head, tmp_path / "head", raw)
    loaded = load_mtp_head(tmp_path / "head", config, FLOAT32)
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(head), strict=True):
        np.testing.assert_array_equal(one, other)


def test_scores_are_scaled_as_the_model_scales_them(tmp_path: Path):
    """Granite multiplies scores by a number of its own: it must change what a head computes."""
    sizes: dict[str, Any] = TINY | {"attention_multiplier": 0.5}
    save_random_model(tmp_path, transformers.GraniteConfig(**sizes))
    raw = read_json(tmp_path / "config.json")
    outputs = []
    for factor in (0.5, 0.05):
        model = parse_model_config(raw | {"attention_multiplier": factor})
        target = load_decoder(tmp_path, model, FLOAT32)
        head = init_mtp_layer(target, MtpConfig("deepseek", num_layers=1, states=AFTER))
        shape = (*TOKENS.shape, model.hidden_size)
        features = np.random.default_rng(0).standard_normal(shape, np.float32)
        outputs.append(jit_unroll(head, target, TOKENS, features, 2)[1][0])
    assert not np.allclose(*outputs, atol=1e-3)


def test_a_head_reads_distinct_layers_of_small_models():
    for layers in range(2, 12):
        capture = default_capture("eagle3", layers)
        assert check_capture(capture, layers) == capture


def test_a_head_with_latent_attention_does_not_learn():
    config = parse_model_config({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1})
    with pytest.raises(ValueError, match="heads with latent attention cannot be trained yet"):
        check_unrolled(config)
