"""How a chat template turns reasoning off, found by trying it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

# Variables that turn reasoning on: of Qwen3, GLM and others; of DeepSeek, Granite and Kimi.
THINKING = ("enable_thinking", "thinking")
EFFORT = "reasoning_effort"
OFF = ("none", "no_think")  # what templates call the effort of no reasoning; the latter is Hy3's
WORD = "qzxeffort"  # which no template has of itself

# Writes a conversation with these variables. Raises ValueError if the template refuses it.
type Render = Callable[[Mapping[str, Any]], str]


def reasoning_off(render: Render) -> Mapping[str, Any] | None:
    """The variables with which a template does not let the model reason; None: it always does.

    A template that copies the effort into the prompt, as that of gpt-oss does, knows no ``none``.
    """
    off: dict[str, Any] = dict.fromkeys(THINKING, False)
    words = [word for word in OFF if _knows(render, off, word)]
    found = off | {EFFORT: words[0]} if words else off
    switches = _written(render, dict.fromkeys(THINKING, True)) != _written(render, off)
    return MappingProxyType(found) if words or switches else None


def _knows(render: Render, variables: Mapping[str, Any], word: str) -> bool:
    """Whether this effort makes another prompt than any word does."""
    written = _written(render, {**variables, EFFORT: word}).lower()
    other = _written(render, {**variables, EFFORT: WORD}).lower()
    return bool(written) and written != other.replace(WORD, word)


def _written(render: Render, variables: Mapping[str, Any]) -> str:
    """What the template writes; empty: it refuses."""
    try:
        return render(variables)
    except ValueError:
        return ""
