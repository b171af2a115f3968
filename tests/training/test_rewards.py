"""Rewards that programs give."""

import pytest

from jaxspec.training.rewards import compiles

FUNCTION = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (FUNCTION, 1.0),
        (FUNCTION + "and here the text was cut", 1.0),  # only whole lines count
        ("def add(a, b)\n    return a + b\n", 0.0),
        ("x = 1\ny = '\0'\n", 0.0),  # not a SyntaxError in all versions of Python
        ("x = 1\n", 0.0),  # too short
        ("x = 1\n\n  \n", 0.0),  # of blank lines none counts
        ("x = 1\ny = 2", 0.0),  # the second line is not whole
        ("", 0.0),
        (f"Here it is:\n```python\n{FUNCTION}```\nIt adds numbers.", 1.0),
        (f"```\n{FUNCTION}```", 1.0),
        (f"```py\n{FUNCTION}", 1.0),  # a block that was cut
        ("```python\nx = (1\ny = 2\n```\n", 0.0),
        ("```python\nx = 1\n```\n" + FUNCTION, 0.0),  # the block counts, and is too short
        (f"```python\n{FUNCTION}```\n```python\nx = (\ny\n```\n", 1.0),  # the first block
    ],
)
def test_python_that_compiles_is_rewarded(text: str, reward: float):
    assert compiles(text) == reward


def test_a_prompt_belongs_to_what_is_not_fenced():
    assert compiles("    return a + b\n", "def add(a, b):\n") == 1.0
    assert compiles("return a + b\n", "def add(a, b):\n") == 0.0
    assert compiles(f"```python\n{FUNCTION}```", "Write (a function\n") == 1.0


def test_what_the_compiler_warns_of_is_silent():
    assert compiles("x = 1\nx is 1\n") == 1.0
