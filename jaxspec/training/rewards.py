"""Rewards that programs give."""

import re
import warnings

FENCED = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.DOTALL)
LEAST_LINES = 2


def compiles(text: str, prompt: str = "") -> float:
    """1 for Python that compiles, else 0.

    Of a text with a fenced block, as chats have it, that block counts; of any other the prompt and
    the text, up to the last whole line. Fewer than two lines of code are none.
    """
    fenced = FENCED.search(text)
    code = fenced.group(1) if fenced else "\n".join((prompt + text).split("\n")[:-1])
    if sum(bool(line.strip()) for line in code.split("\n")) < LEAST_LINES:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what models write warns now and then
        try:
            compile(code + "\n", "sample", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return 0.0
    return 1.0
