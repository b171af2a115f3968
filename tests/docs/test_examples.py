"""The examples run as they stand. They check what they show, so it is enough that they end well."""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.marks import slow

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = ("speculation", "rl_rollouts")
SCRIPTS = {  # with a line that each prints
    "own_drafter": "The texts are the same.",
    "own_function_as_target": "The tokens are those of plain decoding, and of a loop without ",
    "speculation_in_100_lines": "jaxspec writes the same tokens",
    "rl_rollouts": "The same samples took ",
}
SMALL = {"rl_rollouts": ["--steps", "2", "--samples", "2", "--tokens", "8"]}  # arguments
COSTLY = {"speculation_in_100_lines", "rl_rollouts"}


def code_cells(notebook: str) -> list[dict[str, Any]]:
    text = (EXAMPLES / f"{notebook}.ipynb").read_text(encoding="utf-8")
    return [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]


def run_notebook(notebook: str, **changes: int) -> dict[str, Any]:
    """The names of a notebook after its last cell; ``changes`` are made to them after the first."""
    names: dict[str, Any] = {}
    for place, cell in enumerate(code_cells(notebook)):
        exec(compile("".join(cell["source"]), f"{notebook}: {cell['id']}", "exec"), names)
        if not place:
            assert changes.keys() <= names.keys()
            names |= changes
    return names


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_an_example_imports_is_there(name: str):
    """The guard of the slow cases below."""
    assert callable(runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"])


# Of the slow ones' calls jaxspec's are those of other tests; the rest is plain JAX.
@pytest.mark.parametrize("name", [slow(name) if name in COSTLY else name for name in SCRIPTS])
def test_an_example_runs(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    path = str(EXAMPLES / f"{name}.py")
    monkeypatch.setattr("sys.argv", [path, *SMALL.get(name, [])])
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        assert not end.code
    assert SCRIPTS[name] in capsys.readouterr().out


def test_the_rewards_and_advantages_of_rl_rollouts():
    names = runpy.run_path(str(EXAMPLES / "rl_rollouts.py"))
    assert names["reward"]("x = 1\nif x:\n    y = 2\nthis is cut") == 1.0
    assert names["reward"]("x = (1\ny = 2\n") == 0.0
    advantages = names["advantages_of"](np.array([[1.0, 0.0], [1.0, 1.0]]))
    np.testing.assert_allclose(advantages, [[1, -1], [0, 0]], atol=1e-3)


@pytest.mark.slow
def test_the_notebook_of_rounds_runs(monkeypatch: pytest.MonkeyPatch):
    """By default the example own_drafter runs the calls that the notebook makes."""
    monkeypatch.setenv("MPLBACKEND", "Agg")  # draws without a window
    names = run_notebook("speculation")
    for (_, counts), axes in zip(names["texts"].values(), names["figure"].axes, strict=True):
        assert [bar.get_height() for bar in axes.patches] == counts
        assert max(counts) > 1, "no draft was accepted"
    names["plt"].close(names["figure"])


@pytest.mark.slow
def test_the_notebook_of_rl_runs(monkeypatch: pytest.MonkeyPatch):
    """By default its imports run, and the functions of the example that it shows are tested."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.syspath_prepend(EXAMPLES)  # Jupyter runs a notebook in its folder
    names = run_notebook("rl_rollouts", STEPS=3, SAMPLES=2, TOKENS=8)
    rewards, rollouts = names["figure"].axes
    assert list(rewards.lines[0].get_ydata()) == names["rewards"]
    assert len(names["rewards"]) == 3 and all(0 <= each <= 1 for each in names["rewards"])
    drawn = {line.get_label(): list(line.get_ydata()) for line in rollouts.lines}
    assert drawn == names["seconds"] and drawn.keys() == {"plain", "speculative"}
    assert all(len(each) == 2 and min(each) > 0 for each in drawn.values())
    names["plt"].close(names["figure"])


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_notebooks_are_stored_without_outputs(notebook: str):
    cells = code_cells(notebook)
    assert cells
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)


def test_chat_prompts_are_made_of_code_and_of_texts(tmp_path: Path):
    text = "Words that explain what this function does, long enough to be summarized. " * 3
    code = f'def add(a, b):\n    """{text}"""\n    return a + b\n'
    (tmp_path / "package.py").write_text(code)
    out, folder = tmp_path / "prompts.jsonl", str(tmp_path)
    main = runpy.run_path(str(EXAMPLES / "chat_prompts.py"))["main"]
    asked = {}
    for kind in ("chat", "code", "summary"):
        main([str(out), "--kind", kind, "--folder", folder])
        chats = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
        assert [turn["role"] for turn in chats[0]] == ["user", "assistant"]
        asked[kind] = [question["content"] for question, _ in chats]
    assert len(asked["chat"]) > 1000
    assert any("return a + b\n```" in prompt for prompt in asked["code"])
    assert len(asked["summary"]) == 1 and text.strip() in asked["summary"][0]


def test_no_example_is_left_out():
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        *SCRIPTS,
        "chat_prompts",
        "compare_with_transformers",
    }
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == {*NOTEBOOKS}
    assert all(f"({path.name})" in page for path in EXAMPLES.glob("*.[pi]*"))
