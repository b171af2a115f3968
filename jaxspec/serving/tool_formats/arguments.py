"""Schemas of arguments, for formats that write each argument by itself: which there may be, and
how their values are written."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxspec.engine.structured.json_schema import ANNOTATIONS
from jaxspec.engine.structured.subschema import resolved, standalone
from jaxspec.serving.tool_formats.table import Parameters

MOST_ALTERNATIVES = 16
COUNTS = ("minProperties", "maxProperties")
BRANCHES = ("anyOf", "oneOf")
NULL = {"type": "null"}


class Kind(enum.Enum):
    """How a value is written."""

    JSON = "JSON"
    TEXT = "text as it is"
    TEXT_OR_NULL = "text as it is; null is null"


@dataclasses.dataclass(frozen=True)
class Texts:
    """What a schema of texts allows.

    Attributes:
      choices: the texts; None: any.
      nullable: whether null is allowed, too.
    """

    choices: tuple[str, ...] | None = None
    nullable: bool = False

    @property
    def kind(self) -> Kind:
        return Kind.TEXT_OR_NULL if self.nullable else Kind.TEXT


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments that a tool may get together.

    Attributes:
      properties: the schema of each.
      required: those that must be there.
      further: the schema of others; False: there are none.
    """

    properties: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: frozenset[str] = frozenset()
    further: Any = None

    def __and__(self, other: "Arguments") -> "Arguments":
        """What both say."""
        both = {**self.properties, **other.properties}
        for name in self.properties.keys() & other.properties.keys():
            if self.properties[name] != other.properties[name]:
                both[name] = {"allOf": [self.properties[name], other.properties[name]]}
        if False in (self.further, other.further):
            further = False
        else:
            further = other.further if self.further is None else self.further
        return Arguments(both, self.required | other.required, further)


class ReadArguments(NamedTuple):
    """A tool's schema, read for a format that writes each argument by itself.

    Attributes:
      schema: the whole.
      alternatives: what it allows, without arguments whose names the format cannot write.
      kinds: how values are written, by name.
      problem: what cannot be enforced; empty: nothing was lost.
    """

    schema: Mapping[str, Any]
    alternatives: tuple[Arguments, ...]
    kinds: Mapping[str, Kind]
    problem: str


def read_arguments(schema: Mapping[str, Any], form: Parameters) -> ReadArguments:
    """Read the schema of a tool's arguments, which is one that read_schema has returned."""
    problem = ", ".join(_uncounted(schema))
    problem = problem and f"{problem}: arguments that are written one by one are not counted"
    try:
        found = [_closed(each) for each in _alternatives(schema, schema, 0)]
        if not found:
            raise ValueError("it allows no object")
    except ValueError as error:
        problem, found = str(error), [Arguments(further=True)]
    kept = tuple(_writable(arguments, form) for arguments in found)
    for arguments, writable in zip(found, kept, strict=True):
        if lost := sorted(arguments.required - writable.required):
            problem = f"an argument cannot be named {lost[0]!r} in this format"
    kinds = _kinds(schema, kept, form.after) if form.raw else {}
    return ReadArguments(schema, kept, kinds, problem)


def _writable(arguments: Arguments, form: Parameters) -> Arguments:
    """Without names that would be read in another way."""

    def is_writable(name: str) -> bool:
        return bool(name) and f"{name}{form.between}".index(form.between) == len(name)

    kept = {name: found for name, found in arguments.properties.items() if is_writable(name)}
    return Arguments(kept, arguments.required & kept.keys(), arguments.further)


def _alternatives(root: Mapping[str, Any], node: Any, depth: int) -> list[Arguments]:
    if node in (True, {}):
        return [Arguments()]
    if not isinstance(node, dict) or "object" not in _types(node):
        return []
    if depth > MOST_ALTERNATIVES:
        raise ValueError("it refers to itself")
    found = [_listed(node)]
    groups = [[part] for part in node.get("allOf", ())]
    groups += [node[keyword] for keyword in BRANCHES if keyword in node]
    if "$ref" in node:
        groups.append([resolved(root, {"$ref": node["$ref"]})])
    for group in groups:
        options = [option for part in group for option in _alternatives(root, part, depth + 1)]
        found = [option & other for option in found for other in options]
        if len(found) > MOST_ALTERNATIVES:
            raise ValueError(f"it has more than {MOST_ALTERNATIVES} alternatives")
    return found


def _listed(node: Mapping[str, Any]) -> Arguments:
    properties, required = dict(node.get("properties", {})), frozenset(node.get("required", ()))
    for name in sorted(required - properties.keys()):
        properties[name] = True
    return Arguments(properties, required, node.get("additionalProperties"))


def _closed(arguments: Arguments) -> Arguments:
    """Without those that are never there. What is said of others is said of them, else there are
    none beside those that are listed."""
    never = {name for name, schema in arguments.properties.items() if schema is False}
    if never & arguments.required:
        raise ValueError(f"nothing matches {sorted(never & arguments.required)[0]!r}")
    kept = {name: found for name, found in arguments.properties.items() if name not in never}
    further = arguments.further
    return Arguments(kept, arguments.required, not kept if further is None else further)


def _uncounted(node: Any) -> list[str]:
    if not isinstance(node, dict):
        return []
    parts = [part for keyword in ("allOf", *BRANCHES) for part in node.get(keyword, ())]
    return [name for name in COUNTS if name in node] + [n for p in parts for n in _uncounted(p)]


def _kinds(root: Mapping[str, Any], found: Sequence[Arguments], after: str) -> dict[str, Kind]:
    """How the value of each argument is written, the same in all alternatives."""
    result: dict[str, Kind] = {}
    for arguments in found:
        for name, schema in arguments.properties.items():
            found_texts = texts(root, schema)
            is_json = found_texts is None or any(
                after in choice for choice in found_texts.choices or ()
            )
            kind = Kind.JSON if found_texts is None or is_json else found_texts.kind
            result[name] = kind if result.setdefault(name, kind) == kind else Kind.JSON
    return result


def texts(root: Mapping[str, Any], schema: Any) -> Texts | None:
    """What a schema allows that allows texts alone, without a restriction but a list of them."""
    schema = resolved(root, schema)
    if not isinstance(schema, dict):
        return None
    said = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    match said:
        case {"anyOf": [*parts], **others} if not others:
            return _union([Texts((), True) if p == NULL else texts(root, p) for p in parts])
        case {"const": str(text), **others} if others in ({}, {"type": "string"}):
            return _choices([text])
        case {"enum": [*values], **others} if not others or _are_texts(others):
            return _choices(values)
        case {"type": _} if _are_texts(said):
            return Texts(nullable="null" in _types(said))
    return None


def _are_texts(said: Mapping[str, Any]) -> bool:
    return set(said) == {"type"} and "string" in _types(said) and _types(said) <= {"string", "null"}


def _choices(values: Sequence[Any]) -> Texts | None:
    found = tuple(value for value in values if isinstance(value, str))
    nullable = None in values
    if not found or len(found) + nullable < len(values) or "" in found:
        return None
    return None if nullable and "null" in found else Texts(found, nullable)


def _union(parts: Sequence[Texts | None]) -> Texts | None:
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    nullable = any(part.nullable for part in found)
    if any(part.choices is None for part in found):
        return Texts(None, nullable)
    choices = dict.fromkeys(text for part in found for text in part.choices or ())
    return None if not choices or (nullable and "null" in choices) else Texts((*choices,), nullable)


def _types(node: Mapping[str, Any]) -> set[str]:
    kinds = node.get("type", "object")
    return set(kinds) if isinstance(kinds, list) else {str(kinds)}


def value_schema(root: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    """The schema of a value, by itself."""
    return standalone(root, schema) if isinstance(schema, dict) else {}
