"""Acceptance as counted from completions, and the command line that measures it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxspec import BUILT_IN_HEAD, Completion
from jaxspec.commands import eval_drafter
from jaxspec.commands.shared.shell import show_results
from jaxspec.engine.generation import Timings
from jaxspec.evaluation.acceptance import summarize, summarize_kinds


def completion(tokens: int, rounds: int, by_depth: list[float]) -> Completion:
    return Completion(
        text="",
        token_ids=list(range(tokens)),
        prompt_token_ids=[1],
        finish_reason="length",
        error=None,
        seed=0,
        num_rounds=rounds,
        num_drafted=0,
        acceptance_length=0.0,
        acceptance_by_depth=by_depth,
        timings=Timings(arrived=0.0, first_token=1.0, finished=5.0, compile=0.0),
    )


def test_rounds_weigh_alike_whichever_prompt_they_are_of():
    found = summarize([completion(11, 10, [0.0]), completion(91, 30, [1.0])])
    assert found.rounds == 40 and found.tokens == 100
    assert found.length == pytest.approx(100 / 40)  # not the mean of 1 and 3
    assert found.by_depth == pytest.approx([0.75])
    assert found.length_interval == pytest.approx((1.0, 3.0))
    assert found.decode_tokens_per_second == pytest.approx(100 / 4)


def test_an_interval_holds_the_truth_about_as_often_as_it_says():
    rng, truth, held = np.random.default_rng(0), 0.6, 0
    for trial in range(200):
        shares = rng.binomial(20, truth, size=30) / 20
        rows = [completion(21 + round(20 * share), 20, [share]) for share in shares]
        low, high = summarize(rows, seed=trial).by_depth_intervals[0]
        held += low <= truth <= high
    assert 0.88 <= held / 200 <= 0.99


def test_texts_without_a_round_count_for_nothing():
    [alone, both] = [
        summarize([completion(11, 5, [0.5]), *others]) for others in ([], [completion(1, 0, [0.0])])
    ]
    assert both.length == alone.length and both.by_depth == alone.by_depth
    with pytest.raises(ValueError, match="nothing was drafted"):
        summarize([completion(1, 0, [0.0])])


def test_each_kind_is_summarized_alone():
    """A kind of which nothing was drafted has no acceptance."""
    rows = [completion(11, 10, [0.0]), completion(1, 0, [0.0]), completion(91, 30, [1.0])]
    found = summarize_kinds([*rows, completion(21, 10, [0.5])], ["text", "none", "code", "text"])
    assert list(found) == ["code", "text"]
    assert found["code"] == summarize(rows[2:3])
    assert (found["text"].prompts, found["text"].length) == (2, pytest.approx(30 / 20))


def test_a_table_has_a_row_for_each_kind(capsys: pytest.CaptureFixture[str]):
    all_rows = [completion(11, 10, [0.0, 0.0]), completion(31, 10, [1.0, 0.5])]
    by_kind = summarize_kinds(all_rows, ["chat", "code"])
    row = dataclasses.asdict(summarize(all_rows)) | {
        "mode": "chain:2", "rule": "coupled", "temperature": 0.0,
        "by_kind": {kind: dataclasses.asdict(found) for kind, found in by_kind.items()},
    }  # fmt: skip
    results = {"drafter": "head", "model": "tiny", "device": "cpu", "results": [row]}
    show_results(results, eval_drafter.make_table(results), as_json=True)
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.err.splitlines() if "%" in line][-3:]
    assert [line[-3:-1] for line in lines] == [["50%", "25%"], ["0%", "0%"], ["100%", "50%"]]
    assert [" ".join(line) for line in lines if "chat" in line]
    assert json.loads(printed.out)["results"][0]["by_kind"]["code"]["length"] == 3.0


@pytest.mark.slow
def test_the_script_reports_every_rule(sources: Path, capsys: pytest.CaptureFixture[str]):
    code = eval_drafter.main(
        ["--data", str(sources), "--modes", "chain:3", "--prompts", "2", "--json",
         "--prompt-tokens", "16", "--max-tokens", "24", "--rules", "coupled", "rejection"]
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0
    report = json.loads(printed.out)
    assert report["drafter"] == str(BUILT_IN_HEAD)
    settings = [(row["mode"], row["temperature"], row["rule"]) for row in report["results"]]
    assert settings == [
        ("chain:3", temperature, rule)
        for temperature, rule in ((0.0, "coupled"), (1.0, "coupled"), (1.0, "rejection"))
    ]
    for row in report["results"]:
        low, high = row["length_interval"]
        assert 1 <= low <= row["length"] <= high <= 4
        assert len(row["by_depth"]) == len(row["by_depth_intervals"]) == 3
        [(kind, alone)] = row["by_kind"].items()
        assert kind == sources.name and alone["length"] == row["length"]
    assert "acceptance length" in printed.err
