"""Self-distillation: the target writes the answers, also under a time budget."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from jaxspec import BUILT_IN_MODEL, LLM, SamplingParams, SpeculationConfig
from jaxspec.commands import train_drafter
from jaxspec.config.engine import EngineConfig
from jaxspec.training.heads.data import Examples
from jaxspec.training.regenerate import regenerate
from tests.helpers.checkpoints import tiny_byte_llama


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(BUILT_IN_MODEL, "ngram", speculation=SpeculationConfig.chain(2), max_length=32,
               engine=EngineConfig(max_rows=2))  # fmt: skip


@pytest.fixture(scope="module")
def examples(llm: LLM) -> Examples:
    tokens = llm.tokenizer("def read(path):\n    return open(path)\n" * 4)["input_ids"]
    rows = np.array([tokens[i : i + 32] for i in range(5)], np.int32)
    return Examples(rows, np.ones(rows.shape, bool), np.full(5, 6))


@pytest.mark.slow
def test_the_target_writes_its_own_answers_and_goes_on_where_it_stopped(llm, examples, tmp_path):
    path, told = tmp_path / "answers.jsonl", []
    answers = regenerate(llm, examples, path, temperatures=(0.0,),
                         report=lambda done, of: told.append((done, of)))  # fmt: skip
    [expected] = llm.generate([examples.prompt(1)], SamplingParams(max_tokens=26))
    assert answers.tokens[1, 6:][: len(expected.token_ids)].tolist() == expected.token_ids
    assert not answers.learned[:, :6].any() and answers.learned[1, 6]
    assert told == [(0, 5), (2, 5), (4, 5), (5, 5)]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:5])  # killed in the middle of the second row
    again = regenerate(llm, examples, path, temperatures=(0.0,))
    np.testing.assert_array_equal(again.tokens, answers.tokens)
    with pytest.raises(ValueError, match="another model or to other rows"):
        regenerate(llm, examples, path, temperatures=(1.0,))


@pytest.mark.slow
@pytest.mark.parametrize(("deadline", "written"), [(119.0, 2), (120.0, 4), (131.0, 5)])
def test_no_batch_begins_that_would_end_too_late(
    llm, examples, tmp_path, monkeypatch, deadline, written
):
    clock = iter([100.0, 110.0, 110.0, 120.0, 120.0, 130.0])  # a batch takes 10 s
    monkeypatch.setattr(
        "jaxspec.training.regenerate.time", SimpleNamespace(monotonic=lambda: next(clock))
    )
    answers = regenerate(llm, examples, tmp_path / "answers.jsonl", deadline=deadline)
    assert len(answers) == written


def test_the_first_shuffled_rows_are_a_random_sample(examples):
    rows = Examples(np.arange(1000)[:, None], np.ones((1000, 1), bool), np.ones(1000, int))
    shuffled = rows.shuffled()
    assert sorted(shuffled.tokens[:, 0]) == list(range(1000))
    assert np.histogram(shuffled.tokens[:100], 4, (0, 1000))[0].min() > 15
    np.testing.assert_array_equal(shuffled.tokens, rows.shuffled().tokens)


@pytest.mark.slow
def test_a_time_budget_bounds_the_answers_and_a_resumed_run_keeps_to_them(
    sources, tmp_path, monkeypatch, capsys
):
    model = tiny_byte_llama(tmp_path / "model")

    def prepare(*more: str) -> tuple[Examples, Examples]:
        args = train_drafter.make_parser().parse_args(
            ["--model", str(model), "--data", str(sources), "--out", "-",
             "--work", str(tmp_path / "work"), "--length", "32", "--prompt-tokens", "8",
             "--regenerate", "--regenerate-rows", "9", "--regenerate-batch", "4", *more]
        )  # fmt: skip
        train, held_out, report = train_drafter.prepare_rows(
            args, Console(soft_wrap=True), time.monotonic()
        )
        assert (report.train_rows, report.held_out_rows) == (len(train), len(held_out))
        return train, held_out

    with monkeypatch.context() as patch:
        patch.setattr(train_drafter, "ANSWERS_UNTIL", {"held-out": 0.0, "train": 0.0})
        begun = prepare("--minutes", "600")
    assert [len(part) for part in begun] == [4, 4]
    assert "answers, train: 4 of 9 rows written in 0% of --minutes" in capsys.readouterr().out
    resumed = prepare("--minutes", "600", "--resume")
    assert "4 of 9 rows written when the run began, which are used" in capsys.readouterr().out
    rest = prepare("--minutes", "600")
    assert len(rest[0]) == 9
    shared = prepare("--minutes", "600", "--answers", str(tmp_path / "work"), "--work", "-")
    np.testing.assert_array_equal(shared[0].tokens, rest[0].tokens)
    with pytest.raises(ValueError, match="no answers in"):
        prepare("--minutes", "600", "--answers", str(tmp_path))
    for one, other, more in zip(begun, resumed, rest, strict=True):
        np.testing.assert_array_equal(other.tokens, one.tokens)
        np.testing.assert_array_equal(more.tokens[:4], one.tokens)
