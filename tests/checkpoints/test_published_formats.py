"""Checkpoints on every road to a text, quantized ones as published: speculation changes none."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec import LLM, SamplingParams, SpeculationConfig
from jaxspec.checkpoints.load import load
from jaxspec.commands import generate
from jaxspec.models.mixers.attention import Attention
from jaxspec.models.mlps.dense import Dense
from jaxspec.models.quantized.float8 import Float8Linear
from tests.helpers.checkpoints import save_byte_tokenizer
from tests.helpers.families import save_family
from tests.helpers.marks import LEFT_OUT
from tests.helpers.published_formats import PUBLISHED, publish
from tests.helpers.served import ask

PROMPT, NUM_TOKENS = "one two one two one", 24
# A model of each layout of files that is not among the quantized ones.
FAMILIES = (
    *("llama3-rope", "qwen2", "mistral-window", "gemma", "gemma2", "gemma3", "phi3", "phi4-mini"),
    *("olmo2", "olmo3", "smollm3", "granite", "mixtral", "falcon_h1", "kimi_linear"),
    "bailing_hybrid",
    *("seed_oss", "hunyuan", "granite4", "ernie4_5", "ernie4_5_moe", "exaone4", "deepseek_v32"),
    *("mistral4", "dots1", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("llama4_text", "llama4", "mistral3", "step3p7", "kimi_k25", "gemma4", "gemma4-experts"),
    *("gemma4-small", "gemma4_unified", "exaone_moe", "exaone4_5", "youtu", "axk1", "solar_open"),
    *("mellum", "glm4v_moe", "arcee", "olmoe", "granitemoe", "deepseek_v4", "qwen4_exp"),
    *("minimax_m3", "hy_v4"),
)
TREE = SpeculationConfig(num_nodes=8, max_depth=3, top_k=2)


def by_command(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What ``jaxspec generate`` says of a text, and of the one without speculation."""
    arguments = [
        "--model",
        str(path),
        "--drafter",
        "ngram",
        "--tree",
        "8:3:2",
        "--temperature",
        "0",
    ]
    arguments += ["--prompt", PROMPT, "--max-tokens", str(NUM_TOKENS), "--max-length", "64"]
    arguments += ["--compare", "--pairs", "1", "--json", "--no-compilation-cache"]
    assert generate.main(arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_a_file_is_read(tmp_path: Path):
    """The guard of the slow tests below."""
    target = load(publish("Llama, FP8 of ModelOpt", tmp_path), "none").target
    mixer, mlp = target.layers[0].mixer, target.layers[0].mlp
    assert isinstance(mixer, Attention) and isinstance(mlp, Dense)
    for linear in (mixer.qkv, mixer.o, mlp.gate_up, mlp.down):
        assert isinstance(linear, Float8Linear)
        assert linear.input_scale is not None and linear.input_scale.shape == ()


@pytest.mark.slow
@pytest.mark.filterwarnings(LEFT_OUT)
@pytest.mark.parametrize("name", [*PUBLISHED, "gpt-oss"])
def test_texts_are_those_of_plain_decoding(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    check_roads(publish(name, tmp_path), capsys)


@pytest.mark.slow
@pytest.mark.filterwarnings(LEFT_OUT)
@pytest.mark.parametrize("name", FAMILIES)
def test_texts_of_a_family_are_those_of_plain_decoding(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = save_family(tmp_path, name)
    save_byte_tokenizer(path)
    check_roads(path, capsys)


def check_roads(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command, LLM and the server write the same text, which is that of plain decoding."""
    said = by_command(path, capsys)
    assert said["identical"] is True
    llm = LLM(path, "ngram", speculation=TREE)
    [completion] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    request = {"model": "tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    [answer] = ask(llm, request)
    assert said["text"] == completion.text == answer.choices[0].text
    assert len(completion.token_ids) > 4


@pytest.mark.slow
@pytest.mark.filterwarnings(LEFT_OUT)
@pytest.mark.parametrize(
    "name", ["DeepSeek-V3, FP8", "Qwen 3.5 with experts, FP8", "Qwen3-Next, FP8"]
)
def test_mtp_layers_of_the_file_draft(name: str, tmp_path: Path):
    path = publish(name, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = [
        LLM(path, drafter, speculation=SpeculationConfig.chain(2)).generate([PROMPT], params)
        for drafter in ("none", "mtp")
    ]
    assert found[0][0].token_ids == found[1][0].token_ids
