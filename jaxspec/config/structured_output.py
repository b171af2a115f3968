"""What a request's output must look like."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxspec.config.checks import check_unicode, is_integer

KINDS = ("json_schema", "regex", "grammar", "choice", "json_object")
JSON_KINDS = ("json_schema", "json_object")


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """What may stand before a structured output: any text between markers.

    Attributes:
      begin, end: the markers.
      inside: whether the prompt has ``begin``: the text begins within the reasoning.
      optional: whether a text that has begun to reason may match the description without ``end``.
      dropped: markers that may come between the reasoning and the output.
      begin_ids: the tokens that a text begins with which reasons, in all ways.
      end_id: the token of ``end``. If it is given, reasoning is free: no mask restricts it, and
        rows run as many rounds a call as others. An end that is spelled in other tokens ends
        nothing then.
    """

    begin: str
    end: str
    inside: bool = False
    optional: bool = False
    dropped: tuple[str, ...] = ()
    begin_ids: tuple[tuple[int, ...], ...] = ()
    end_id: int | None = None

    def __post_init__(self):
        for name in ("begin", "end"):
            _check_text(name, getattr(self, name))


@dataclasses.dataclass(frozen=True)
class StructuredOutput:
    """A description of the whole output; exactly one kind is given.

    Attributes:
      json_schema: a JSON schema, as an object or as text; it is kept as text. The order of its
        properties is the order of the output's. ``oneOf`` is read as ``anyOf``, and formats that
        are not enforced are annotations (see json_schema.FORMATS).
      regex: a regular expression that the whole output matches, in the syntax of Rust's regex.
      grammar: a grammar in llguidance's variant of Lark, with a rule ``start``.
      choice: the possible outputs.
      json_object: any JSON object.
      whitespace: whether JSON may hold white space between its tokens: nothing, one space, or a
        line break and at most 40 spaces, so that no text is white space up to its limit. False:
        none at all.
      blank_line: whether at most two line breaks may come before JSON. Chat templates leave them
        after reasoning, and models write them. They are no part of the answer.
      reasoning: what may come before the output; None: nothing.
      trigger: a token. The text before the first one is free: no mask restricts it, rows run as
        many rounds a call as others, and the description sees the text from there on. It must allow
        any text before, too: of a request with too many stop tokens it sees all.

    Equal descriptions are equal and have one hash. Raises ValueError for none or several kinds, and
    for values that are none. What only a compiler can see, GrammarCompiler refuses.
    """

    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    json_object: bool = False
    whitespace: bool = True
    blank_line: bool = False
    reasoning: Reasoning | None = None
    trigger: int | None = None

    def __post_init__(self):
        for name in ("json_object", "whitespace", "blank_line"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r:.80}")
        if not isinstance(self.reasoning, Reasoning | None):
            raise ValueError(f"reasoning must be a Reasoning, or None, got {self.reasoning!r:.80}")
        if self.trigger is not None and not (is_integer(self.trigger) and self.trigger >= 0):
            raise ValueError(f"trigger must be a token's id, or None, got {self.trigger!r:.80}")
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"a structured output needs exactly one of {', '.join(KINDS)}, got "
                f"{' and '.join(given) or 'none'}"
            )
        if not self.whitespace and self.kind not in JSON_KINDS:
            raise ValueError(f"whitespace=False is for JSON: a {self.kind} says so itself")
        if self.blank_line and self.kind not in JSON_KINDS:
            raise ValueError(f"blank_line=True is for JSON: a {self.kind} says so itself")
        if self.kind == "json_schema":
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.kind == "choice":
            object.__setattr__(self, "choice", _checked_choice(self.choice))
        if self.kind in ("regex", "grammar"):
            _check_text(self.kind, getattr(self, self.kind))

    @property
    def kind(self) -> str:
        """The name of the kind that is given, one of KINDS."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


def _schema_text(schema: Any) -> str:
    """The schema as JSON text without line breaks."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(f"json_schema is not JSON: {error}") from error
    if not isinstance(schema, Mapping):
        raise ValueError(f"json_schema must be an object, got {type(schema).__name__}")
    try:
        text = json.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema cannot be written as JSON: {error}") from error
    return text


def _checked_choice(choice: Any) -> tuple[str, ...]:
    if isinstance(choice, str) or not hasattr(choice, "__iter__"):
        raise ValueError(f"choice must be a list of texts, not {type(choice).__name__}")
    choices = tuple(choice)
    if not choices:
        raise ValueError("choice must hold at least one text")
    for text in choices:
        _check_text("choice", text)
    if len(set(choices)) != len(choices):
        raise ValueError("choice holds the same text twice")
    return choices


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{name} must be text, got {type(text).__name__}")
    if not text:
        raise ValueError(f"{name} must not be empty")
    check_unicode(name, text)
