"""Calls parsed out of a text that grows."""

import json
import re
import secrets
import string
from collections.abc import Callable

from jaxspec.llm.tokenizer.detokenizer import overlap
from jaxspec.serving.parts import Part
from jaxspec.serving.tool_formats.arguments import Kind
from jaxspec.serving.tool_formats.json_end import JsonEnd
from jaxspec.serving.tool_formats.syntax import CallSyntax

LETTERS = string.ascii_letters + string.digits
MOST_DIGITS = 4  # of a call's number, with its colon
UNMARKED = re.compile(r"[^'\\]+")  # of a text in single quotes
PYTHON = {"True": "true", "False": "false", "None": "null"}

# Takes something of what is pending; None: it waits for more.
type State = Callable[[bool], list[Part] | None]


class ToolParser:
    """Splits a growing text into free text and calls of tools.

    No text is lost but line breaks before a call, which chat templates write themselves. A call
    that ends before its arguments begin is free text. Arguments come as JSON, as they grow.
    """

    def __init__(self, syntax: CallSyntax):
        self._syntax, self._form = syntax, syntax.form
        self._state: State = self._text if syntax.form.trigger else self._start
        self._pending = ""
        begins = (syntax.form.section[0] + begin for begin, _ in syntax.form.heads)
        self._openings = tuple(dict.fromkeys((*syntax.form.openings, *begins)))
        self._opened = ""  # what was read of a call before its name
        self._middles: tuple[str, ...] = ()  # what may come after it
        self._calls, self._number = 0, syntax.first
        self._tool = ""
        self._arguments = 0  # of the call under way, if each is written by itself
        self._kind = Kind.JSON
        self._end = JsonEnd()

    @property
    def calls(self) -> int:
        """The number of calls that have begun."""
        return self._calls

    def push(self, piece: str, last: bool = False) -> list[Part]:
        """What is new. With ``last`` nothing is held back."""
        self._pending += piece
        parts: list[Part] = []
        while (step := self._state(last)) is not None:
            parts += step
        return [part for part in parts if part.text or part.name is not None]

    # Outside of calls.

    def _start(self, last: bool) -> list[Part] | None:
        """Calls are the whole text, if there are any."""
        form = self._form
        for opening in self._openings:
            if self._take(opening):
                return self._begin(opening)
        if form.text and self._take(form.text):
            return self._go(self._free)
        waits = not last and any(map(self._may_come, (form.text, *self._openings)))
        return None if waits else self._go(self._free)

    def _text(self, last: bool) -> list[Part] | None:
        pending, openings = self._pending, self._openings
        places = [(pending.find(opening), opening) for opening in openings]
        place, opening = min((found for found in places if found[0] >= 0), default=(-1, ""))
        if place < 0:
            held = max(overlap(pending, opening) for opening in openings)
            said = pending[: len(pending) - held].rstrip("\n")
            if last and self._calls and not pending.strip("\n"):  # line breaks after the last call
                return self._drop()
            return self._said(len(pending) if last else len(said))
        said = pending[:place].rstrip("\n")
        self._pending = pending[place + len(opening) :]
        self._begin(pending[len(said) : place] + opening)
        return [Part(said)]

    def _free(self, last: bool) -> list[Part] | None:
        if self._form.preamble is not None:
            return self._text(last)
        return self._said(len(self._pending))

    def _said(self, characters: int) -> list[Part] | None:
        return [Part(self._cut(characters))] if characters else None

    # The head of a call, and what follows the arguments.

    def _begin(self, opened: str) -> list[Part]:
        self._opened, heads = opened, self._form.heads
        begin = max((begin for begin, _ in heads if opened.endswith(begin)), key=len)
        self._middles = tuple(middle for other, middle in heads if other == begin)
        if self._form.middle == "" and self._form.arguments is not None:
            self._middles = (self._form.arguments.before, self._form.end)
        return self._go(self._head)

    def _head(self, last: bool) -> list[Part] | None:
        form, pending = self._form, self._pending
        places = [(pending.find(middle), middle) for middle in self._middles]
        place, middle = min((found for found in places if found[0] >= 0), default=(-1, ""))
        most = self._syntax.longest_name + (MOST_DIGITS if form.numbered else 0)
        most += len(form.id_mark) + (form.id_length or 0) + max(map(len, self._middles))
        if place < 0 and not last and len(pending) < most:
            return None
        head = pending[: max(place, 0)]
        name, _, label = head.rpartition(":") if form.numbered else (head, "", "")
        if form.id_mark:
            name, _, label = head.partition(form.id_mark)
        if place < 0 or name not in self._syntax.kinds:
            text, self._opened = self._opened, ""
            return [Part(text), *self._go(self._text if form.trigger else self._free)]
        self._cut(place + (len(middle) if form.middle else 0))
        self._tool, self._arguments, self._end = name, 0, JsonEnd()
        self._calls += 1
        self._state = self._json if form.arguments is None else self._argument
        return [Part(call=self._calls - 1, name=name, id=self._id(name, label))]

    def _id(self, name: str, label: str) -> str | None:
        form = self._form
        if form.numbered:  # as it is written, but never twice in a conversation
            self._number = max(self._number, int(label) if label.isdecimal() else 0)
            self._number += 1
            return f"functions.{name}:{self._number - 1}"
        if label:
            return label
        if form.id_length is not None:
            return "".join(secrets.choice(LETTERS) for _ in range(form.id_length))
        return None

    def _closing(self, last: bool) -> list[Part] | None:
        if self._form.late_id is None:
            return self._go(self._end_of_call)
        return self._expect(self._form.late_id[0], self._late_id, last, self._end_of_call)

    def _late_id(self, last: bool) -> list[Part] | None:
        """An id that comes after the arguments is not told: the call has got another before."""
        form = self._form
        assert form.late_id is not None
        place = self._pending.find(form.late_id[1])
        if place < 0:
            return self._drop() if last else None
        self._cut(place + len(form.late_id[1]))
        return self._go(self._end_of_call)

    def _end_of_call(self, last: bool) -> list[Part] | None:
        return self._expect(self._form.end, self._next, last)

    def _next(self, last: bool) -> list[Part] | None:
        """Another call, or the end of them."""
        form = self._form
        close = form.section[1]
        if not close and form.trigger:
            return self._expect(form.separator, self._text, last)
        if close and self._take(close):
            return self._go(self._free)
        if self._may_come(close):  # it may begin as what stands between calls
            return self._drop() if last else None
        if self._take(form.further):
            return self._begin(form.further)
        if self._may_come(form.further):
            return self._drop() if last else None
        return self._go(self._free)

    # Arguments as JSON, of a call or of one argument.

    def _json(self, last: bool) -> list[Part] | None:
        if not self._pending:
            return None
        end = self._end.find(self._pending)
        if end is not None:
            self._state = self._closing if self._form.arguments is None else self._after
        return [self._more(self._cut(len(self._pending) if end is None else end))]

    # Arguments that are written each by itself.

    def _argument(self, last: bool) -> list[Part] | None:
        form = self._form
        assert form.arguments is not None
        if self._take(form.end):
            self._state = self._next
            return [self._more("}" if self._arguments else "{}")]
        lead = (form.arguments.separator if self._arguments else "") + form.arguments.before
        if last and not self._pending:
            return None
        if any(self._may_come(text) for text in (form.end, lead)):
            return self._drop() if last else None
        return self._go(self._key if self._take(lead) else self._free)

    def _key(self, last: bool) -> list[Part] | None:
        form = self._form.arguments
        assert form is not None
        name, between, rest = self._pending.partition(form.between)
        self._kind = self._syntax.kinds[self._tool].get(name, Kind.JSON) if form.raw else Kind.JSON
        mark = form.kinds[self._kind is Kind.JSON]
        if not between or len(rest) < len(mark):
            return self._drop() if last and self._pending else None
        self._pending, self._end = rest[len(mark) :], JsonEnd()
        self._state = self._word if self._kind is Kind.JSON else self._raw
        self._arguments += 1
        return [self._more(f"{'{' if self._arguments == 1 else ', '}{json_text(name)}: ")]

    def _word(self, last: bool) -> list[Part] | None:
        """A value may be a word or a text, which Python writes in another way than JSON."""
        self._pending = self._pending.lstrip()
        if not self._pending:
            return None
        if self._take("'"):
            return [self._more('"'), *self._go(self._quoted)]
        is_word = self._pending[0].isalpha()
        end = JsonEnd().find(self._pending) if is_word else None
        if end is None:
            return None if is_word and not last else self._go(self._json)
        self._state, word = self._after, self._cut(end)
        return [self._more(PYTHON.get(word, word))]

    def _quoted(self, last: bool) -> list[Part] | None:
        """More of a text in single quotes."""
        pending = self._pending
        if not pending or pending == "\\":
            return self._drop() if last else None
        if self._take("'"):
            return [self._more('"'), *self._go(self._after)]
        if pending[0] == "\\":
            escape = self._cut(2)
            return [self._more("'" if escape == "\\'" else escape)]
        plain = UNMARKED.match(pending)
        return [self._more(json_text(self._cut(plain.end() if plain else 1))[1:-1])]

    def _raw(self, last: bool) -> list[Part] | None:
        """The beginning of a text that stands as it is."""
        form = self._form.arguments
        assert form is not None
        if self._kind is Kind.TEXT_OR_NULL and self._take(f"null{form.after}"):
            self._state = self._argument
            return [self._more("null")]
        waits = self._kind is Kind.TEXT_OR_NULL and self._may_come(f"null{form.after}")
        if (waits or not self._pending) and not last:
            return None
        self._state = self._more_raw
        return [self._more('"')]

    def _more_raw(self, last: bool) -> list[Part] | None:
        form, pending = self._form.arguments, self._pending
        assert form is not None
        place = pending.find(form.after)
        if place >= 0:
            self._cut(place + len(form.after))
            self._state = self._argument
            return [self._more(json_text(pending[:place])[1:])]
        text = self._cut(len(pending) - overlap(pending, form.after))
        if text:
            return [self._more(json_text(text)[1:-1])]
        return self._drop() if last and pending else None

    def _after(self, last: bool) -> list[Part] | None:
        form = self._form.arguments
        assert form is not None
        return self._expect(form.after, self._argument, last)

    # What is pending.

    def _expect(
        self, text: str, then: State, last: bool, otherwise: State | None = None
    ) -> list[Part] | None:
        """The text comes next, or not, and ``then`` or ``otherwise`` goes on. What is cut in its
        midst is no part of the answer."""
        if self._take(text):
            return self._go(then)
        if self._may_come(text):
            return self._drop() if last and self._pending else None
        return self._go(otherwise or then)

    def _take(self, text: str) -> bool:
        found = self._pending.startswith(text)
        if found:
            self._cut(len(text))
        return found

    def _may_come(self, text: str) -> bool:
        """Whether what is pending begins this text, without being all of it."""
        return len(self._pending) < len(text) and text.startswith(self._pending)

    def _cut(self, characters: int) -> str:
        text, self._pending = self._pending[:characters], self._pending[characters:]
        return text

    def _drop(self) -> list[Part] | None:
        if not self._pending:
            return None
        self._pending = ""
        return []

    def _go(self, state: State) -> list[Part]:
        self._state = state
        return []

    def _more(self, text: str) -> Part:
        return Part(text, self._calls - 1)


def json_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
