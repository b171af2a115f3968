"""JSON schemas as pydantic, zod and OpenAPI write them, in the terms that llguidance enforces.

What means the same in other words is rewritten, what means nothing is dropped. A keyword that
restricts the text and cannot be enforced is a problem, which has a name: it is never dropped
without a word.
"""

import copy
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxspec.engine.structured.subschema import NOT_THERE, at, pointer_steps

# Formats that llguidance enforces. Every other one is an annotation, as the standard has it.
FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "time", "email", "hostname", "ipv4", "ipv6", "uri"),
        "uuid",
    }
)
# Where JSON may hold white space, this is matched once at most: compact texts have it, those of
# json.dumps, and indented ones.
WHITESPACE = r" ?|\n {0,40}"
# Where the schemas within a schema are.
BY_NAME = ("$defs", "definitions", "properties", "patternProperties")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = ("items", "additionalItems", "additionalProperties")

ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
COMPANIONS = ("then", "else", "minContains", "maxContains", "$dynamicAnchor", "$recursiveAnchor")
UNENFORCED = (
    *("$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired"),
    *("dependentSchemas", "if", "not", "propertyNames", "unevaluatedItems"),
    *("unevaluatedProperties", "uniqueItems"),
)
BRANCHES = ("$ref", "allOf", "anyOf", "oneOf", "if")
NEVER = ({}, True)  # of "not": nothing matches
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")

# llguidance reads bounds as 64-bit floats, and takes an integer's down to this one.
LEAST_INTEGER = -(2**63) + 1024
LARGEST_NUMBER = 2.0**63
# Escapes, classes of characters (where \b is a backspace), and what Rust's regex does not have.
TOKENS = re.compile(r"\\k<|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?<?[=!]", re.DOTALL)
NOT_REGULAR = re.compile(r"\\[1-9bB]|\\k<|\(\?")


class ReadSchema(NamedTuple):
    """A schema in llguidance's terms.

    Attributes:
      schema: without what cannot be enforced: its texts are those of the whole schema, or more.
      problems: what cannot be enforced, each with its place and its cure; empty: nothing was lost.
    """

    schema: dict[str, Any]
    problems: tuple[str, ...]

    @property
    def message(self) -> str:
        """All problems in one line."""
        return "; ".join(self.problems)


def read_schema(schema: Mapping[str, Any]) -> ReadSchema:
    """Read a JSON schema (draft 4 to 2020-12, or OpenAPI's). The argument stays as it is.

    ``oneOf`` is read as ``anyOf``, by llguidance's option coerce_one_of.

    Raises ValueError for a schema that is nested too deeply, and for half surrogate pairs.
    """
    try:
        text = json.dumps(dict(schema), ensure_ascii=False)
        text.encode()
        root = json.loads(text)  # a copy; deepcopy recurses in Python
        reader = _Reader(root)
        root = reader.read(root, ())
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("the schema is no valid Unicode: half a surrogate pair") from None
    if root is False:
        reader.problems.append("not: nothing matches this schema")
    return ReadSchema(root if isinstance(root, dict) else {}, reader.all_problems())


def guided_text(schema: Mapping[str, Any], whitespace: bool = True) -> str:
    """A schema as JSON text with llguidance's options: white space, and oneOf as anyOf."""
    space = {"whitespace_pattern": WHITESPACE} if whitespace else {"whitespace_flexible": False}
    guided = {**schema, "x-guidance": {"coerce_one_of": True, **space}}
    return json.dumps(guided, ensure_ascii=False)


class _Reader:
    """Rewrites a schema in place, so that references go on pointing into it."""

    def __init__(self, root: dict[str, Any]):
        self._root = root
        self._seen: dict[int, Any] = {}  # by id; kept, so that no id is given twice
        self._unenforced: list[str] = []
        self.problems: list[str] = []
        self._names = {"", *_identifiers(root)}

    def all_problems(self) -> tuple[str, ...]:
        if not self._unenforced:
            return tuple(self.problems)
        names = ", ".join(self._unenforced)
        cure = "leave it out, and check the finished JSON yourself"
        return (*self.problems, f"{names} cannot be enforced while text is generated: {cure}")

    def read(self, node: Any, path: tuple[str, ...]) -> Any:
        """The schema to put in the node's place: itself, or False where nothing matches."""
        if not isinstance(node, dict) or id(node) in self._seen:
            return node
        self._seen[id(node)] = node
        if "not" in node and node["not"] in NEVER:
            return False
        for name in [name for name in node if name.startswith("x-")]:
            del node[name]  # annotations; llguidance's own options among them
        if node.get("format") not in FORMATS:
            node.pop("format", None)
        self._reference(node, path)
        self._rewrite(node)
        self._restrictions(node, path)
        self._parts(node, path)
        _allow_null(node)
        return node

    def _parts(self, node: dict[str, Any], path: tuple[str, ...]) -> None:
        for keyword in BY_NAME:
            parts = _named(node, keyword)
            for name in list(parts):
                parts[name] = self.read(parts[name], (*path, keyword, name))
        for keyword in LISTS:
            parts = node[keyword] if isinstance(node.get(keyword), list) else []
            for index in range(len(parts)):
                parts[index] = self.read(parts[index], (*path, keyword, str(index)))
        for keyword in SINGLE:
            if isinstance(node.get(keyword), dict):
                node[keyword] = self.read(node[keyword], (*path, keyword))

    def _reference(self, node: dict[str, Any], path: tuple[str, ...]) -> None:
        """Read what is referred to, wherever in the schema it is."""
        reference = node.get("$ref")
        if not isinstance(reference, str):
            return
        document, _, fragment = reference.partition("#")
        place = ".".join((*path, "$ref"))
        if document not in self._names:
            self.problems.append(f"{place}: {document!r} is another document: copy it into $defs")
        elif not fragment.startswith("/") or document not in ("", self._root.get("$id")):
            if not fragment or f"#{fragment}" in self._names:
                return
            self.problems.append(f"{place}: there is no {reference!r} in the schema")
        else:
            steps = pointer_steps(fragment)
            try:
                self.read(at(self._root, steps), steps)
                return
            except NOT_THERE:
                self.problems.append(f"{place}: there is no {reference!r} in the schema")
        del node["$ref"]

    def _rewrite(self, node: dict[str, Any]) -> None:
        """Say in other words what these keywords mean, or drop them where they mean nothing."""
        names = _without_annotations(node.get("propertyNames"))
        is_map = not node.get("properties") and not node.get("patternProperties")
        match names:
            case {"enum": [*texts]} if is_map and all(isinstance(text, str) for text in texts):
                value = node.pop("additionalProperties", True)
                node["properties"] = {text: copy.deepcopy(value) for text in texts}
                node["additionalProperties"] = False
                del node["propertyNames"]
            case {"pattern": str(pattern)} if is_map and len(names) == 1:
                node["patternProperties"] = {pattern: node.pop("additionalProperties", True)}
                node["additionalProperties"] = False
                del node["propertyNames"]
        for keyword, closed in (
            ("unevaluatedProperties", "additionalProperties"),
            ("unevaluatedItems", "items" if "prefixItems" in node else "additionalItems"),
        ):
            if node.get(keyword) is False and not any(name in node for name in BRANCHES):
                node.setdefault(closed, False)
                del node[keyword]
        for keyword in UNENFORCED:
            if keyword in node and _means_nothing(node, keyword):
                del node[keyword]
        for keyword in LOWER if _is_integer(node) else ():
            if _is_number(node.get(keyword)) and node[keyword] < LEAST_INTEGER:
                node[keyword] = LEAST_INTEGER

    def _restrictions(self, node: dict[str, Any], path: tuple[str, ...]) -> None:
        """Take out what cannot be enforced."""
        for keyword in UNENFORCED:
            if keyword in node:
                self._drop(node, keyword, path)
        for keyword in COMPANIONS:
            node.pop(keyword, None)
        for keyword in () if _is_integer(node) else (*LOWER, *UPPER):
            if _is_number(node.get(keyword)) and abs(node[keyword]) >= LARGEST_NUMBER:
                self._drop(node, keyword, path, " (of 2**63 or more)")
        if not _is_regular(node.get("pattern")):
            self._drop(node, "pattern", path, " (look-around, word borders and back-references)")
        patterns = _named(node, "patternProperties")
        for pattern in list(patterns):
            if not _is_regular(pattern):
                self._drop(patterns, pattern, (*path, "patternProperties"))
                node.pop("additionalProperties", None)
        if not _counts_properties(node):
            for keyword in ("minProperties", "maxProperties"):
                if keyword in node:
                    self._drop(node, keyword, path, " (with optional properties)")

    def _drop(
        self, node: dict[str, Any], keyword: str, path: tuple[str, ...], why: str = ""
    ) -> None:
        del node[keyword]
        self._unenforced.append(".".join((*path, keyword)) + why)


def _named(node: dict[str, Any], keyword: str) -> dict[str, Any]:
    return node[keyword] if isinstance(node.get(keyword), dict) else {}


def _identifiers(node: Any) -> list[str]:
    """The names that references to this document may have: its ids, and "#anchor"."""
    if isinstance(node, list):
        return [name for part in node for name in _identifiers(part)]
    if not isinstance(node, dict):
        return []
    found = [node[key] for key in ("$id", "id") if isinstance(node.get(key), str)]
    found += [f"#{node['$anchor']}"] if isinstance(node.get("$anchor"), str) else []
    return found + [name for part in node.values() for name in _identifiers(part)]


def _without_annotations(names: Any) -> Any:
    """What a schema of names says, but that they are strings."""
    if not isinstance(names, dict):
        return names
    said = {key: value for key, value in names.items() if key not in ANNOTATIONS}
    return {key: value for key, value in said.items() if (key, value) != ("type", "string")}


def _means_nothing(node: Mapping[str, Any], keyword: str) -> bool:
    value = node[keyword]
    match keyword:
        case "uniqueItems":
            most = node.get("maxItems")
            return value is False or (isinstance(most, int) and most <= 1)
        case "if":
            return "then" not in node and "else" not in node
        case "not":
            return value is False
        case "contains":
            return node.get("minContains") == 0 and "maxContains" not in node
        case "propertyNames":
            return value is True or _without_annotations(value) == {}
        case _:
            return value is True or value == {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(node: Mapping[str, Any]) -> bool:
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return "integer" in kinds and "number" not in kinds


def _is_regular(pattern: Any) -> bool:
    found = TOKENS.findall(pattern) if isinstance(pattern, str) else []
    return not any(NOT_REGULAR.match(token) for token in found)


def _counts_properties(node: Mapping[str, Any]) -> bool:
    """Whether llguidance can count the properties: those listed are required, or none may be."""
    listed, required = node.get("properties"), node.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list):
        return True
    if all(name in required for name in listed):
        return True
    least, most = node.get("minProperties", 0), node.get("maxProperties", 1)
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    return closed and least in (0, 1) and most in (0, 1) and (least, most) != (1, 1)


def _allow_null(node: dict[str, Any]) -> None:
    """OpenAPI 3.0's ``nullable``: null matches, too."""
    if node.pop("nullable", False) is not True:
        return
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if isinstance(node.get("enum"), list) and None not in node["enum"]:
        node["enum"] = [*node["enum"], None]
    kind = node.get("type")
    if any(name in node for name in BRANCHES):
        kept = {name: node.pop(name) for name in ("$defs", "definitions", "$id") if name in node}
        inner = dict(node)
        node.clear()
        node |= {**kept, "anyOf": [inner, {"type": "null"}]}
    elif kind is not None:
        kinds = kind if isinstance(kind, list) else [kind]
        node["type"] = kinds if "null" in kinds else [*kinds, "null"]
