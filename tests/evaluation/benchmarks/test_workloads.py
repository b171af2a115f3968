"""Workloads: they are a function of the seed, and have the sizes that were asked for."""

import json

import numpy as np
import pytest

from jaxspec.evaluation.benchmarks import workloads
from jaxspec.evaluation.benchmarks.workloads import Lengths


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_arrivals_come_at_their_rate_or_all_at_once():
    assert workloads.arrival_times(3, None, seed=0) == [0, 0, 0]
    times = workloads.arrival_times(10_000, 5.0, seed=0)
    assert times == workloads.arrival_times(10_000, 5.0, seed=0)
    assert times[0] == 0 and times == sorted(times)
    gaps = np.diff(times)
    assert np.mean(gaps) == pytest.approx(0.2, rel=0.05) == np.std(gaps)  # exponential: the same


def test_lengths_are_fixed_or_spread():
    middle = Lengths(100, 40)
    assert workloads.drawn_lengths(2, middle, 0.0, seed=0) == [middle, middle]
    drawn = workloads.drawn_lengths(500, middle, 0.5, seed=0)
    assert drawn == workloads.drawn_lengths(500, middle, 0.5, seed=0)
    prompts, news = {own.prompt for own in drawn}, {own.new for own in drawn}
    assert 50 <= min(prompts) < 60 and 140 < max(prompts) <= 150
    assert 20 <= min(news) < 24 and 56 < max(news) <= 60


def test_prompts_are_cut_from_source_files():
    prompts = workloads.source_prompts([5, 0, 3000], encode, seed=1)
    assert [len(prompt) for prompt in prompts] == [5, 0, 3000]
    assert prompts == workloads.source_prompts([5, 0, 3000], encode, seed=1)
    assert prompts != workloads.source_prompts([5, 0, 3000], encode, seed=2)


def conversation(*texts: str) -> dict:
    return {"id": "x", "conversations": [{"from": "human", "value": text} for text in texts]}


def test_questions_and_answers_are_read_from_a_file(tmp_path):
    path = tmp_path / "chats.json"
    chats = [("hello", "hello there", "more"), ("alone",), ("a", "short"), ("long" * 9, "answer")]
    path.write_text(json.dumps([conversation(*texts) for texts in chats]))
    found = workloads.tokenized_conversations(path, encode, 3, most_tokens=20, seed=0)
    assert found == [(encode("hello"), 11)] * 3
    both = workloads.tokenized_conversations(path, encode, 4, most_tokens=99, seed=0)
    assert sorted(new for _, new in both) == [6, 6, 11, 11]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a JSON list"),
        ("[1]", "not a JSON list"),
        ('{"a": 1}', "not a JSON list"),
        ("[]", "no conversation has two turns"),
        (json.dumps([conversation("a", "b")]), "no question and answer have 4 to 20 tokens"),
    ],
)
def test_a_file_of_another_form_is_refused(content, message, tmp_path):
    path = tmp_path / "chats.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        workloads.tokenized_conversations(path, encode, 1, most_tokens=20, seed=0)
