"""examples/compare_with_transformers.py: all runs of both libraries write the same greedy texts."""

import json
import runpy
from pathlib import Path

import pytest

from tests.real.published import model_file

pytestmark = pytest.mark.slow  # minutes: transformers reads the text anew in every round

EXAMPLE = Path(__file__).parents[2] / "examples" / "compare_with_transformers.py"
PROMPTS = ["List three uses of copper.", "Repeat three times: the river was high, and it rained."]


def test_speculation_of_both_libraries_writes_the_same_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model_file("smollm2")
    chats = tmp_path / "chat.jsonl"
    lines = [{"messages": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]
    chats.write_text("\n".join(map(json.dumps, lines)))
    main = runpy.run_path(str(EXAMPLE))["main"]
    main([str(chats), "--tokens", "12", "--temperatures", "0", "--lookup", "3", "--json"])
    found = json.loads(capsys.readouterr().out)
    rows = {row["run"]: row for row in found["rows"]}
    assert len(rows) == 7 and found["temperature"] == 0
    assert all(row["identical"] == row["texts"] == len(PROMPTS) for row in rows.values())
    assert all(row["tokens_per_second"] > 0 for row in rows.values())
    for library in ("transformers", "jaxspec"):
        assert rows[library]["per_round"] == rows[library]["over_plain"][0] == 1
    assert rows["transformers, 25 first layers"]["per_round"] > 1
    assert rows["jaxspec, head, chain of 3"]["per_round"] > 1
