"""Bodies of requests for hypothesis: what a server's OpenAPI document allows, and almost that."""

import copy
import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

MOST_ITEMS = 3  # of a list, or fields beyond those that must be
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
)
JSON: SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


class Bodies:
    """Those of a document.

    Args:
      likely: values of fields by name, beside those that the document allows. They make more
        bodies such that the server answers them.
    """

    def __init__(self, document: Mapping[str, Any], likely: Mapping[str, SearchStrategy[Any]]):
        self._document, self._likely = document, likely

    def paths(self) -> list[str]:
        """That take a body."""
        paths = self._document["paths"].items()
        return [path for path, operations in paths if "requestBody" in operations.get("post", {})]

    def allowed(self, path: str) -> SearchStrategy[dict[str, Any]]:
        """What the document allows."""
        body = self._document["paths"][path]["post"]["requestBody"]
        return self._values(body["content"]["application/json"]["schema"])

    def mutated(self, path: str) -> SearchStrategy[bytes]:
        """What it allows with one change: some value, or some bytes."""
        return self.allowed(path).flatmap(_changed) | self.allowed(path).flatmap(_torn)

    def _values(self, schema: Mapping[str, Any]) -> SearchStrategy[Any]:
        if "$ref" in schema:
            name = schema["$ref"].rsplit("/", 1)[1]
            return self._values(self._document["components"]["schemas"][name])
        if "anyOf" in schema:
            return st.one_of([self._values(one) for one in schema["anyOf"]])
        if "const" in schema or "enum" in schema:
            return st.sampled_from(schema.get("enum", [schema.get("const")]))
        match schema.get("type"):
            case "null":
                return st.none()
            case "boolean":
                return st.booleans()
            case "integer" | "number" as kind:
                return _numbers(schema, st.integers if kind == "integer" else _floats)
            case "string":
                if "pattern" in schema:
                    return st.from_regex(schema["pattern"], fullmatch=True)
                return st.text(max_size=min(8, schema.get("maxLength", 8)))
            case "array":
                least = schema.get("minItems", 0)
                return st.lists(
                    self._values(schema["items"]), min_size=least, max_size=least + MOST_ITEMS
                )
            case "object":
                return self._objects(schema)
        return JSON

    def _objects(self, schema: Mapping[str, Any]) -> SearchStrategy[dict[str, Any]]:
        fields = schema.get("properties", {})
        if not fields:
            more = schema.get("additionalProperties", True)
            values = JSON if more is True else self._values(more)
            return st.dictionaries(st.from_regex("[0-9]{1,4}") | st.text(), values, max_size=3)
        values = {name: self._field(name, own) for name, own in fields.items()}
        needed = {name: values[name] for name in schema.get("required", ())}
        names = st.lists(st.sampled_from(sorted(fields)), max_size=MOST_ITEMS)
        return names.flatmap(
            lambda chosen: st.fixed_dictionaries(needed | {name: values[name] for name in chosen})
        )

    def _field(self, name: str, schema: Mapping[str, Any]) -> SearchStrategy[Any]:
        values = self._values(schema)
        return self._likely[name] | values if name in self._likely else values


def _floats(least: float | None, most: float | None) -> SearchStrategy[float]:
    return st.floats(least, most, allow_nan=False, allow_infinity=False)


def _numbers(schema: Mapping[str, Any], kind: Any) -> SearchStrategy[Any]:
    """Where all are allowed, small ones more often."""
    least, most = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMaximum" in schema:  # of integers
        most = schema["exclusiveMaximum"] - 1
    return kind(least, most) if (least, most) != (None, None) else kind(0, 2) | kind(None, None)


@st.composite
def _changed(draw: st.DrawFn, body: dict[str, Any]) -> bytes:
    """One value, at any depth, is another one, is gone, or has another name."""
    body = copy.deepcopy(body)  # values of sampled_from are shared by all bodies
    places = _places(body)
    if not places:
        return json.dumps({draw(st.text()): draw(JSON)}).encode()
    inside, key = draw(st.sampled_from(places))
    what = draw(st.sampled_from(["other", "gone", "renamed"]))
    if what == "other":
        inside[key] = draw(JSON)
    elif what == "renamed" and isinstance(inside, dict):
        inside[draw(st.text(max_size=4))] = inside.pop(key)
    else:
        del inside[key]
    return json.dumps(body).encode()


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key inside."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return []
    inner = [place for _, one in items for place in _places(one)]
    return [(value, key) for key, _ in items] + inner


@st.composite
def _torn(draw: st.DrawFn, body: dict[str, Any]) -> bytes:
    """Some bytes are others."""
    text = json.dumps(body).encode()
    start = draw(st.integers(0, len(text)))
    stop = draw(st.integers(start, len(text)))
    return text[:start] + draw(st.binary(max_size=4)) + text[stop:]
