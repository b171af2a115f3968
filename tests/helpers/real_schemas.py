"""Schemas as pydantic, zod, published OpenAPI documents and MCP servers write them."""

from typing import Any

type Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NULL: Schema = {"type": "null"}
DRAFT = {"$schema": "https://json-schema.org/draft/2020-12/schema"}


def titled(*required: str, **properties: Any) -> Schema:
    """As pydantic writes a model: open, with titles."""
    titles = {name: {"title": name.title(), **part} for name, part in properties.items()}
    return {"title": "Model", "type": "object", "properties": titles, "required": list(required)}


def closed(*optional: str, **properties: Any) -> Schema:
    """As zod writes an object: closed; what is not optional is required."""
    required = [name for name in properties if name not in optional]
    closing = {"required": required, "additionalProperties": False}
    return {"type": "object", "properties": properties, **closing}


def ref(name: str, where: str = "$defs") -> Schema:
    return {"$ref": f"#/{where}/{name}"}


def maybe(part: Schema) -> Schema:
    return {"anyOf": [part, NULL], "default": None}


def among(*values: Any, **other: Any) -> Schema:
    return {"enum": list(values), **other}


def list_of(part: Any, **other: Any) -> Schema:
    return {"type": "array", "items": part, **other}


def string(**other: Any) -> Schema:
    return {"type": "string", **other}


CAT = titled("kind", "lives", kind={"const": "cat", "type": "string"}, lives=WHOLE)
DOG = titled("kind", "good", kind={"const": "dog", "type": "string"}, good={"type": "boolean"})
PETS = {
    "discriminator": {
        "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
        "propertyName": "kind",
    },
    "oneOf": [ref("Cat"), ref("Dog")],
}
DECIMAL = {"anyOf": [{"type": "number"}, string(pattern=r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$")]}
POINT = {"type": "array", "prefixItems": [{"type": "number"}] * 2, "minItems": 2, "maxItems": 2}

PYDANTIC: dict[str, Schema] = {
    "optional": titled("name", name=string(maxLength=20), age=maybe(WHOLE)),
    "nested": {
        **titled("owner", owner=ref("User"), tags=list_of(TEXT, maxItems=2)),
        "$defs": {"User": titled("id", id=WHOLE, email=maybe(string(format="email")))},
    },
    "enum by reference": {
        **titled("colour", colour=ref("Colour")),
        "$defs": {"Colour": {"enum": ["red", "green"], "title": "Colour", "type": "string"}},
    },
    "discriminated union": {**titled("pet", pet=PETS), "$defs": {"Cat": CAT, "Dog": DOG}},
    "recursion": {
        **ref("Node"),
        "$defs": {"Node": titled("value", value=WHOLE, next=maybe(ref("Node")))},
    },
    "map": titled("counts", counts={"type": "object", "additionalProperties": WHOLE}),
    "map of models": {
        **titled(by={"type": "object", "additionalProperties": ref("V"), "default": {}}),
        "$defs": {"V": titled("x", x={"type": "number"})},
    },
    "set": titled("ids", ids=list_of(WHOLE, uniqueItems=True, maxItems=4)),
    "decimal": titled("price", price=DECIMAL),
    "tuple": titled("point", point=POINT),
    "times": titled(
        *("day", "at", "id"),
        day=string(format="date"),
        at=string(format="date-time"),
        id=string(format="uuid"),
        link=string(format="uri", minLength=1, maxLength=2083),
    ),
    "literal": titled("mode", mode=among("fast", "slow", type="string"), one={"const": 1}),
    "bounds": titled(
        *("share", "code"),
        share={"type": "number", "minimum": 0, "maximum": 1},
        code=string(pattern="^[A-Z]{3}$"),
        count={"type": "integer", "exclusiveMinimum": 0, "default": 1},
    ),
    "list of a union": titled("items", items=list_of({"anyOf": [WHOLE, TEXT]}, maxItems=3)),
    "anything": titled("payload", payload={}),
    "files": titled("path", path=string(format="path"), data=string(format="binary", maxLength=9)),
    "secret": titled("token", token=string(format="password", writeOnly=True, maxLength=9)),
    "forbids": {**titled("a", a={"type": "boolean"}), "additionalProperties": False},
    "root of a union": {
        "anyOf": [ref("Cat"), ref("Dog")],
        "$defs": {"Cat": CAT, "Dog": DOG},
    },
    "duration": titled("wait", wait=string(format="duration"), host=string(format="ipv4")),
}

ZOD: dict[str, Schema] = {
    "object": {**DRAFT, **closed("b", a=TEXT, b={"type": "number"})},
    "optional": {**DRAFT, **closed("a", a={"anyOf": [{"not": {}}, TEXT]}, b={"type": "boolean"})},
    "record": {
        **DRAFT,
        **closed(r={"type": "object", "propertyNames": TEXT, "additionalProperties": WHOLE}),
    },
    "record of an enum": closed(
        r={
            "type": "object",
            "propertyNames": among("a", "b", type="string"),
            "additionalProperties": {"type": "boolean"},
        }
    ),
    "nullable": closed(a={"type": ["string", "null"]}, b=among("x", None)),
    "literals": closed(
        k={"anyOf": [{"type": "string", "const": "p"}, {"type": "number", "const": 2}]}
    ),
    "tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **closed(
            t=list_of([TEXT, WHOLE], additionalItems=False, minItems=2),
        ),
    },
    "intersection": {
        "allOf": [closed(a=WHOLE) | {"additionalProperties": True}, titled("b", b=WHOLE)],
        "unevaluatedProperties": False,
        "type": "object",
    },
    "lazy": closed(
        "children", name=string(maxLength=9), children=list_of({"$ref": "#"}, maxItems=2)
    ),
    "patterns": closed(
        id=string(pattern="^[0-9a-f]{8}$"),
        slug=string(pattern="^[a-z0-9]+(?:-[a-z0-9]+)*$", maxLength=20),
    ),
    "cents": closed(amount={"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 99}),
    "unicode": closed(größe=among("klein", "groß", "巨大", "🙂"), **{"a b": {"type": "boolean"}}),
    "discriminated": closed(
        event={
            "oneOf": [
                closed(type={"const": "click"}, x=WHOLE),
                closed(type={"const": "key"}, code=string(maxLength=4)),
            ]
        }
    ),
}

SCHEMAS = "components/schemas"
BASE = {"type": "object", "required": ["id"], "properties": {"id": {**WHOLE, "format": "int64"}}}
OPENAPI: dict[str, Schema] = {
    "pet store": {
        **titled("name", name=string(example="doggie"), category=ref("Category", SCHEMAS)),
        "xml": {"name": "pet"},
        "components": {
            "schemas": {"Category": {**titled(id=BASE["properties"]["id"]), "nullable": True}}
        },
    },
    "nullable": titled("a", a=string(nullable=True), b=among("x", "y", nullable=True)),
    "inheritance": {
        "type": "object",
        "allOf": [
            ref("Base", SCHEMAS),
            titled("tag", tag=TEXT),
        ],
        "components": {"schemas": {"Base": BASE}},
    },
    "issue": titled(
        *("title",),
        title={"oneOf": [TEXT, WHOLE]},
        labels=list_of({"oneOf": [TEXT, titled(name=TEXT, color=maybe(TEXT))]}, maxItems=2),
        state=among("open", "closed", type="string"),
    ),
    "either": titled("port", port={"anyOf": [WHOLE, TEXT], "x-kubernetes-int-or-string": True}),
    "annotations": titled(
        "id",
        id=string(readOnly=True, deprecated=True, example="x", contentEncoding="base64"),
        size={"type": "integer", "format": "int32", "minimum": -(2**31), "maximum": 2**31 - 1},
    ),
    "block": titled(
        "blocks",
        blocks=list_of(
            {
                "anyOf": [
                    closed(type=among("section"), text=closed(type=among("mrkdwn"), text=TEXT)),
                    closed("text", type=among("divider"), text=string(maxLength=3)),
                ]
            },
            minItems=1,
            maxItems=2,
        ),
    ),
    "draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        **titled("n", n={"type": "integer", "minimum": 0, "exclusiveMinimum": True}),
    },
}

TOOLS: dict[str, Schema] = {
    "edit": titled(
        *("path", "edits"),
        path=TEXT,
        edits=list_of(closed(old=TEXT, new=TEXT), minItems=1, maxItems=2),
        dry_run={"type": "boolean", "default": False},
    ),
    "click": closed("button", x=WHOLE, y=WHOLE, button=among("left", "right", type="string")),
    "query": {
        **titled(select=list_of(TEXT, maxItems=2), where={"type": "object"}, limit=WHOLE),
        "minProperties": 1,
    },
    "meeting": {
        **titled("kind", kind=among("room", "call"), room=TEXT, url=TEXT),
        "if": {"properties": {"kind": {"const": "room"}}},
        "then": {"required": ["room"]},
        "else": {"required": ["url"]},
        "dependentRequired": {"url": ["kind"]},
    },
    "filter": {
        "type": "object",
        "patternProperties": {"^x_": {"type": "number"}},
        "additionalProperties": False,
        "properties": {
            "name": {"not": {"const": ""}, **TEXT},
            "all": list_of(WHOLE, contains=WHOLE),
        },
    },
}

REAL: dict[str, Schema] = {
    f"{where}: {name}": schema
    for where, schemas in (
        ("pydantic", PYDANTIC),
        ("zod", ZOD),
        ("openapi", OPENAPI),
        ("tool", TOOLS),
    )
    for name, schema in schemas.items()
}
