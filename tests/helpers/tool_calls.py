"""Texts that call tools, as each format has them, and what is parsed out of texts."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from jaxspec.engine.structured import Matcher
from jaxspec.serving.parts import Part
from jaxspec.serving.tool_formats.arguments import Kind
from jaxspec.serving.tool_formats.parser import ToolParser
from jaxspec.serving.tool_formats.syntax import CallSyntax
from tests.helpers.structured_outputs import legal

MOST_WALKED = 600  # tokens
CLOSING = '"}])<Ċ/'  # letters of a byte-level tokenizer, which writes a line break as Ċ

type Call = tuple[str, dict[str, Any]]


def written(syntax: CallSyntax, calls: Sequence[Call]) -> str:
    """Calls as a model writes them, one after the other."""
    form = syntax.form
    texts = []
    for number, (name, arguments) in enumerate(calls):
        index = f":{syntax.first + number}" if form.numbered else ""
        given = _arguments(syntax, name, arguments)
        texts.append(f"{form.begin}{name}{index}{form.middle}{given}{form.end}")
    return form.section[0] + form.separator.join(texts) + form.section[1]


def _arguments(syntax: CallSyntax, name: str, arguments: Mapping[str, Any]) -> str:
    form = syntax.form.arguments
    if form is None:
        return json.dumps(arguments, ensure_ascii=False)
    parts = []
    for key, value in arguments.items():
        kind = syntax.kinds[name].get(key, Kind.JSON)
        is_json = kind is Kind.JSON
        text = json.dumps(value, ensure_ascii=False) if is_json or value is None else value
        if form.python and (value is None or isinstance(value, bool)):
            text = str(value)
        mark = form.kinds[is_json]
        parts.append(f"{form.before}{key}{form.between}{mark}{text}{form.after}")
    return form.separator.join(parts)


def parts_of(syntax: CallSyntax, pieces: Sequence[str]) -> list[Part]:
    """What is parsed out of a text that comes in pieces."""
    parser = ToolParser(syntax)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return [*parts, *parser.push("", last=True)]


def text_and_calls(parts: Sequence[Part]) -> tuple[str, list[tuple[str, str]]]:
    """The free text, and each call's name and the text of its arguments."""
    text = "".join(part.text for part in parts if part.call is None)
    firsts = [part for part in parts if part.name is not None]
    calls = [
        (str(first.name), "".join(part.text for part in parts if part.call == first.call))
        for first in firsts
    ]
    return text, calls


def cut(text: str, places: Sequence[int]) -> list[str]:
    """A text in pieces, cut at these places (of any size)."""
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def walk(
    matcher: Matcher, tokenizer: Tokenizer, end: int, seed: int, phrase: str = ""
) -> str | None:
    """A text at random that a grammar allows; None: it does not come to an end, or is no UTF-8.

    Args:
      tokenizer: one_token_a_byte, and perhaps further tokens.
      end: the token that ends a text.
      phrase: what is written now and then, as far as it is allowed.
    """
    rng, matcher = random.Random(seed), matcher.copy()
    letters = {token: text for text, token in tokenizer.get_vocab().items()}
    planned = tokenizer.encode(phrase).ids
    pending: list[int] = []
    ids: list[int] = []
    while len(ids) < MOST_WALKED:
        may = legal(matcher)
        if end in may and (rng.random() < 0.8 or len(may) == 1):
            text = tokenizer.decode(ids, skip_special_tokens=False)
            return None if "\ufffd" in text else text
        # What may close something is as likely as all else together, so that texts end.
        may = [token for token in may if token != end]
        last = [token for token in may if letters[token] in CLOSING or len(letters[token]) > 2]
        if not pending and rng.random() < 0.1:
            pending = planned.copy()
        if pending and pending[0] in may:
            ids.append(pending.pop(0))
        else:
            pending = []
            ids.append(rng.choice(last if last and rng.random() < 0.5 else may))
        matcher.advance(ids[-1:])
    return None
