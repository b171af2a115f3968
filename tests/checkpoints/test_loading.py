"""What jaxspec.load refuses before anything is read, and a model without a tokenizer."""

import re
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxspec import LLM, SamplingParams, SpeculationConfig, load
from jaxspec.checkpoints import hub
from jaxspec.checkpoints.load import resolve_dtype
from jaxspec.config.engine import EngineConfig
from jaxspec.decoding.drafters import NGramDrafter
from jaxspec.decoding.drafters.names import check_name
from jaxspec.llm.prompt_checks import check_prompts
from tests.helpers.random_models import save_random_target


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", refuse)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("n-gram", "ngram"),
        ("NGram", "ngram"),
        ("n-gram+owner/head", "ngram+owner/head"),
        ("sufix:65536", "suffix:65536"),
        ("ngram+suffx", "ngram+suffix"),
        ("mtp3", "mtp"),
        ("None", "none"),
        ("eagle+owner/head", None),
        ("", None),
        ("eagle:3", None),
    ],
)
@pytest.mark.usefixtures("no_hub")
def test_a_slip_in_a_drafters_name_is_told_before_the_hub_is_asked(name: str, meant: str | None):
    hint = f" Do you mean {meant}?" if meant else ""
    names = "auto, none, ngram, suffix, mtp, text, and"
    expected = f"there is no drafter {name!r}.{hint} Names are {names}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        load("owner/model", name)


@pytest.mark.parametrize(
    "name", ["ngram", "suffix:9", "mtp:after:1", "ngram+mtp", "owner/head", "ngram+owner/ngram"]
)
def test_names_ids_and_directories_pass(name: str, tmp_path: Path, monkeypatch: Any):
    check_name(name)
    check_name("gpt2")  # an id without an owner
    monkeypatch.chdir(tmp_path)
    (tmp_path / "n-gram").mkdir()
    check_name("n-gram")


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("drafter", [NGramDrafter, None, 3])
def test_what_is_no_drafter_is_refused_before_the_hub_is_asked(drafter: Any):
    with pytest.raises(ValueError, match=r"^drafter (is the class NGramDrafter|must be a name)"):
        load("owner/model", drafter)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")])
def test_dtypes_are_names_or_those_of_jax(dtype: Any):
    assert resolve_dtype(dtype) == jnp.bfloat16


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float16", "got float16, whose range is too narrow: take bfloat16"),
        (jnp.float16, "got float16, whose range is too narrow: take bfloat16"),
        ("bf16", "got 'bf16'"),
        ("int8", "got int8"),
        (16, "got 16"),
    ],
)
def test_other_dtypes_are_named(dtype: Any, expected: str):
    with pytest.raises(ValueError, match=f"dtype must be float32 or bfloat16, {expected}$"):
        resolve_dtype(dtype)


@pytest.fixture(scope="module")
def without_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_target(tmp_path_factory.mktemp("bare"))


def test_a_model_without_a_tokenizer_takes_token_ids(without_tokenizer: Path):
    bare = LLM(without_tokenizer, "none", max_length=32, engine=EngineConfig(max_rows=1))
    sampling = SamplingParams(max_tokens=6)
    [completion] = bare.generate([[1, 2, 3]], sampling)
    assert completion.text == "" and len(completion.token_ids) == 6
    assert bare.turn_end() == () and bare.token_bytes(completion.token_ids[0]) is None
    refused = {
        "text needs": lambda: bare.generate(["a"], sampling),
        "stop strings need": lambda: bare.generate([[1]], SamplingParams(stop=("a",))),
        "chats and structured outputs need": lambda: bare.chat([{"role": "user"}], sampling),
        "chats and": lambda: bare.grammars,
    }
    for needs, call in refused.items():
        with pytest.raises(ValueError, match=f"^{needs} .*{without_tokenizer} has no tokenizer.j"):
            call()
    assert bare.engine.is_idle


def test_prompts_are_checked_without_a_tokenizer(without_tokenizer: Path):
    sampling = SamplingParams(max_tokens=4)
    assert check_prompts(without_tokenizer, [[1, 2]], sampling) == [[1, 2]]
    with pytest.raises(ValueError, match=r"text needs a tokenizer, and .* give prompts of token"):
        check_prompts(without_tokenizer, ["a"], sampling)


def test_a_tokenizer_that_does_not_load_is_an_error(without_tokenizer: Path, tmp_path: Path):
    broken = shutil.copytree(without_tokenizer, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no tokenizer that loads"):
        check_prompts(broken, [[1]], SamplingParams())


def test_only_a_default_tree_is_left_out_for_many_rows():
    assert load(drafter="ngram").most_drafting_rows == 4  # on a CPU
    asked = load(drafter="ngram", speculation=SpeculationConfig.chain(3))
    assert asked.most_drafting_rows is None and asked.shape_for(64) is None
