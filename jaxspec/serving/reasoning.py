"""Reasoning: how models mark it, and a growing text split into reasoning and what follows."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jaxspec.llm.tokenizer.detokenizer import overlap
from jaxspec.serving.parts import Part


@dataclasses.dataclass(frozen=True)
class ReasoningFormat:
    """What stands around a model's reasoning.

    Attributes:
      begin, end: before and after it. The prompt may have ``begin`` already.
      dropped: what may stand around the text after it, and is no part of the text.
      repeats: whether the model may reason again after some text.
      told: what a chat template has that speaks of it, all of it; empty: begin or end.
      elsewhere: what a template has that uses ``told`` for something else.
    """

    begin: str
    end: str
    dropped: tuple[str, ...] = ()
    repeats: bool = False
    told: tuple[str, ...] = ()
    elsewhere: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end, *self.dropped)

    def is_of(self, template: str) -> bool:
        """Whether a chat template speaks of it."""
        if self.elsewhere and self.elsewhere in template:
            return False
        if self.told:
            return all(words in template for words in self.told)
        return self.begin in template or self.end in template


# The more special ones first: the first that a template speaks of is taken.
FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "harmony": ReasoningFormat(  # gpt-oss
            "<|channel|>analysis<|message|>",
            "<|end|>",
            (
                *("<|start|>assistant", "<|channel|>final<|message|>"),
                "<|channel|>commentary<|message|>",
            ),
            repeats=True,
            told=("<|channel|>analysis",),
        ),
        "mm_think": ReasoningFormat("<mm:think>", "</mm:think>"),  # MiniMax-M3
        "hy3": ReasoningFormat(  # whose template makes the words of it
            "<think:opensource>", "</think:opensource>", told=(":opensource",)
        ),
        "seed": ReasoningFormat("<seed:think>", "</seed:think>"),  # Seed-OSS
        "kimi": ReasoningFormat("◁think▷", "◁/think▷"),  # Kimi before K2
        "mistral": ReasoningFormat("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
        "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),  # 3.2
        "think_response": ReasoningFormat(  # Granite 3.3, ERNIE 4.5
            *("<think>", "</think>", ("<response>", "</response>")),
            told=("think>", "<response>"),
            elsewhere="minimax:",  # where results of tools stand in it
        ),
        "think_answer": ReasoningFormat(  # Hunyuan
            *("<think>", "</think>", ("<answer>", "</answer>")),
            told=("think>", "<answer>"),
        ),
        # Qwen3, QwQ, DeepSeek, GLM, Kimi K2, MiniMax-M2, Nemotron, Olmo 3, Step 3.5
        "think": ReasoningFormat("<think>", "</think>"),
    }
)


def reasoning_format(name: str | None, template: str) -> ReasoningFormat | None:
    """The format of this name (``none``: there is none); None: the one that a chat template speaks
    of, if it does."""
    if name is not None:
        return None if name == "none" else FORMATS[name]
    return next((form for form in FORMATS.values() if form.is_of(template)), None)


class ReasoningParser:
    """Splits a growing text into reasoning, text and calls, which are left as they are.

    Line breaks around reasoning belong to the markers. A call that begins within reasoning ends it.
    Where its end does not come, all is reasoning.

    Args:
      form: what stands around reasoning.
      inside: whether the text begins within reasoning, as its prompt has the marker.
      call: what begins a call of a tool; empty: nothing does.
      trims: whether line breaks that begin the text are no part of it.
      exact: whether text, once it has begun, is left as it is, markers and all.
    """

    def __init__(
        self,
        form: ReasoningFormat,
        *,
        inside: bool = False,
        call: str = "",
        trims: bool = False,
        exact: bool = False,
    ):
        self._form, self._exact, self._trims = form, exact, trims
        self._calls = (call,) if call else ()
        self._state = "reasoning" if inside else "start"
        self._is_fresh = True  # nothing of this piece of reasoning has come
        self._pending = ""

    @property
    def inside(self) -> bool:
        """Whether reasoning has begun and not ended."""
        return self._state == "reasoning"

    def push(self, piece: str, last: bool = False) -> list[Part]:
        """What is new. With ``last`` nothing is held back."""
        self._pending += piece
        parts: list[Part] = []
        while self._pending and (step := self._step(last)) is not None:
            parts += step
        return [part for part in parts if part.text]

    def _step(self, last: bool) -> list[Part] | None:
        """Some parts, and another state or less that is pending; None: more must come."""
        match self._state:
            case "start":
                return self._start(last)
            case "reasoning":
                return self._reasoning(last)
            case "text":
                return self._text(last)
            case _:
                return [Part(self._take(len(self._pending)))]

    def _start(self, last: bool) -> list[Part] | None:
        """Nothing but white space and markers has come."""
        form, text = self._form, self._pending.lstrip()
        for marker in form.markers:
            if text.startswith(marker):
                self._trims = True
                self._take(len(self._pending) - len(text) + len(marker))
                if marker == form.begin:
                    self._state, self._is_fresh = "reasoning", True
                return []
        if not last and any(marker.startswith(text) for marker in form.markers):
            return None
        if self._trims:
            self._pending = self._pending.lstrip("\n")
        self._state = "rest" if self._exact else "text"
        return []

    def _reasoning(self, last: bool) -> list[Part] | None:
        if self._is_fresh:
            self._pending = self._pending.lstrip("\n")
        place, marker = self._next((self._form.end, *self._calls))
        if not marker:
            return self._before((self._form.end, *self._calls), last, reasoning=True)
        text = self._take(place).rstrip("\n")
        if marker == self._form.end:
            self._take(len(marker))
            self._state, self._trims = "start", True
        else:
            self._state = "rest"
        return [Part(text, reasoning=True)]

    def _text(self, last: bool) -> list[Part] | None:
        form = self._form
        markers = (form.end, *form.dropped, *self._calls, *((form.begin,) * form.repeats))
        place, marker = self._next(markers)
        if not marker:
            return self._before(markers, last, reasoning=False)
        if marker in self._calls:
            self._state = "rest"
            return [Part(self._take(place))]
        text = self._take(place).rstrip("\n")
        self._take(len(marker))
        if marker == form.begin:
            self._state, self._is_fresh = "reasoning", True
        return [Part(text)]

    def _next(self, markers: Sequence[str]) -> tuple[int, str]:
        """Where the next of some markers stands, and which it is; an empty one: there is none."""
        places = [(self._pending.find(marker), marker) for marker in markers]
        return min((found for found in places if found[0] >= 0), default=(0, ""))

    def _before(self, markers: Sequence[str], last: bool, *, reasoning: bool) -> list[Part] | None:
        """What is pending but what may begin a marker, and line breaks before that."""
        held = 0 if last else max(overlap(self._pending, marker) for marker in markers)
        text = self._pending[: len(self._pending) - held]
        text = text if last else text.rstrip("\n")
        if not text:
            return None
        self._is_fresh = False
        return [Part(self._take(len(text)), reasoning=reasoning)]

    def _take(self, characters: int) -> str:
        text, self._pending = self._pending[:characters], self._pending[characters:]
        return text
