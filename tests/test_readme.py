"""The README's Python examples run as they stand."""

import re
from pathlib import Path

import pytest

from tests.marks import slow

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_examples():
    assert len(EXAMPLES) >= 2


def trains(example: str) -> bool:
    return "jaxspec.training" in example


@pytest.mark.parametrize(
    "example",
    [slow(text) if trains(text) else text for text in EXAMPLES],
    ids=lambda text: text.split()[1],
)
def test_example_runs(example: str):
    exec(compile(example, "README.md", "exec"), {})
