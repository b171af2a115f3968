"""Schemas as clients write them: which texts match, what is refused, and in which words."""

import copy
from typing import Any

import pytest

from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.structured.json_schema import read_schema
from tests.helpers.structured_outputs import compiler, takes

INTEGER = {"type": "integer"}


def matches(output: StructuredOutput, text: str) -> bool:
    return takes(compiler().matcher(output), text)


def object_of(**properties: Any) -> dict[str, Any]:
    closed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


# Schemas, texts that match, and texts that do not.
READ: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "pydantic's path": ({"type": "string", "format": "path"}, ['"/a b"'], ["1"]),
    "OpenAPI's int64": (
        {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1},
        ["5", "-9223372036854774784", "9223372036854775807"],
        ["9223372036854775808", "-9223372036854775809"],
    ),
    "a known format": ({"type": "string", "format": "date"}, ['"2026-01-31"'], ['"31.1."']),
    "nullable": ({"type": "string", "nullable": True}, ['"a"', "null"], ["1"]),
    "nullable enum": ({"nullable": True, "enum": ["a"]}, ['"a"', "null"], ['"b"']),
    "nullable const": ({"type": "integer", "nullable": True, "const": 4}, ["4", "null"], ["5"]),
    "nullable reference": (
        {**object_of(a={"$ref": "#/$defs/A", "nullable": True}), "$defs": {"A": INTEGER}},
        ['{"a":1}', '{"a":null}'],
        ['{"a":"x"}'],
    ),
    "zod's record": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
        ['{"b":1}', "{}"],
        ['{"b":"x"}'],
    ),
    "names of a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": INTEGER},
        ['{"xa":1}'],
        ['{"a":1}', '{"xa":"b"}'],
    ),
    "names of an enum": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "required": ["b"]},
        ['{"b":1}', '{"a":{},"b":[]}'],
        ['{"a":1}', '{"b":1,"c":1}'],
    ),
    "zod's optional": (object_of(a={"anyOf": [{"not": {}}, INTEGER]}), ['{"a":1}'], ['{"a":""}']),
    "draft 4": ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, ["1"], ["0"]),
    "oneOf as anyOf": (
        {"oneOf": [object_of(a=INTEGER), object_of(a={"type": "number"})]},
        ['{"a":1}', '{"a":1.5}'],
        ['{"b":1}'],
    ),
    "nothing unevaluated": (
        {"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False},
        ['{"a":1}', "{}"],
        ['{"b":1}'],
    ),
    "what means nothing": (
        {"type": "array", "uniqueItems": False, "if": {}, "dependentRequired": {}, "x-ui": 1},
        ["[1,1]"],
        ["{}"],
    ),
    "a unique item": ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1,2]"]),
    "enough properties": (
        {**object_of(a=INTEGER), "minProperties": 1},
        ['{"a":1}'],
        ["{}"],
    ),
    "OpenAPI's references": (
        {
            "$ref": "#/components/schemas/A",
            "components": {
                "schemas": {"A": {"type": "string", "format": "byte", "nullable": True}}
            },
        },
        ['"eA=="', "null"],
        ["1"],
    ),
    "an anchor": ({"$defs": {"A": {"$anchor": "a", **INTEGER}}, "$ref": "#a"}, ["1"], ['"a"']),
    "an id": ({"$id": "urn:s", "$defs": {"A": INTEGER}, "$ref": "urn:s#/$defs/A"}, ["1"], ['"a"']),
    "recursion": (
        {"$ref": "#/$defs/N", "$defs": {"N": {**object_of(), "properties": {"n": {"$ref": "#"}}}}},
        ['{"n":{}}', '{"n":{"n":{}}}'],
        ['{"m":1}'],
    ),
    "regular patterns": (
        {"type": "string", "pattern": r"^(?:\\b|[(?=]|(?<n>\d))$"},
        ['"7"', '"("', '"="', r'"\\b"'],
        ['"x"'],
    ),
}


@pytest.mark.parametrize("name", READ)
def test_what_clients_write_is_enforced(name: str):
    schema, good, bad = READ[name]
    before = copy.deepcopy(schema)
    output = StructuredOutput(json_schema=schema)
    assert not read_schema(schema).problems and schema == before
    assert [text for text in good if not matches(output, text)] == []
    assert [text for text in bad if matches(output, text)] == []


CANNOT = "cannot be enforced while text is generated: leave it out, and check the finished JSON"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pydantic's set": (object_of(a={"type": "array", "uniqueItems": True}), "a.uniqueItems "),
    "look-ahead": (object_of(a={"type": "string", "pattern": "^(?!a)"}), "a.pattern (look-around"),
    "look-behind": ({"type": "string", "pattern": r"\\(?<=a)b"}, "pattern (look-around"),
    "word border": ({"type": "string", "pattern": r"\bfoo"}, "pattern (look-around"),
    "back-reference": ({"type": "string", "pattern": r"(a)\1"}, "pattern (look-around"),
    "names": ({"type": "object", "patternProperties": {"(?=a)": {}}}, "patternProperties.(?=a) "),
    "long names": ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames "),
    "not": (object_of(a={"not": {"const": 1}}), "properties.a.not "),
    "if": ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if "),
    "contains": ({"type": "array", "contains": INTEGER, "minContains": 2}, "contains "),
    "dependencies": ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies "),
    "unevaluated": (
        {"type": "object", "allOf": [object_of(a=INTEGER)], "unevaluatedProperties": False},
        "unevaluatedProperties ",
    ),
    "count": (
        {"type": "object", "properties": {"a": INTEGER}, "minProperties": 1},
        "minProperties (with optional properties) ",
    ),
    "large numbers": ({"type": "number", "maximum": 1e30}, "maximum (of 2**63 or more) "),
    "in what is referred to": (
        {"$ref": "#/x/0", "x": [{"type": "array", "uniqueItems": True}]},
        "x.0.uniqueItems ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(name: str):
    schema, words = REFUSED[name]
    with pytest.raises(ValueError) as error:
        compiler().matcher(StructuredOutput(json_schema=schema))
    message = str(error.value)
    assert words in message and CANNOT in message and "\n" not in message
    # Without it the schema compiles: tools that are not strict take it.
    compiler().matcher(StructuredOutput(json_schema=read_schema(schema).schema))


def test_all_problems_are_listed_at_once():
    schema = {
        "type": "object",
        "properties": {
            "a": {"$ref": "https://json.schemastore.org/package.json"},
            "b": {"$ref": "#/x/y"},
            "c": {"type": "array", "uniqueItems": True},
        },
        "if": {"required": ["a"]},
        "then": {"required": ["b"]},
    }
    read = read_schema(schema)
    assert read.message == (
        "properties.a.$ref: 'https://json.schemastore.org/package.json' is another document: "
        "copy it into $defs; properties.b.$ref: there is no '#/x/y' in the schema; "
        "if, properties.c.uniqueItems cannot be enforced while text is generated: "
        "leave it out, and check the finished JSON yourself"
    )
    assert read.schema["properties"] == {"a": {}, "b": {}, "c": {"type": "array"}}


def test_a_schema_that_nothing_matches_is_refused():
    with pytest.raises(ValueError, match="json_schema: not: nothing matches this schema"):
        compiler().matcher(StructuredOutput(json_schema={"not": {}}))


def test_schemas_that_cannot_be_read_are_one_line_errors():
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="nested too deeply"):
        read_schema(deep)
    with pytest.raises(ValueError, match="half a surrogate pair"):
        read_schema({"const": "\ud800"})


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_white_space_is_bounded(kind: str):
    schema = object_of(a={"type": "array", "items": INTEGER})
    given: Any = {"json_schema": schema} if kind == "json_schema" else {"json_object": True}
    pretty = '{\n  "a": [\n    1,\n    2\n  ]\n}'
    free, tight = StructuredOutput(**given), StructuredOutput(**given, whitespace=False)
    for text in ('{"a":[1,2]}', '{"a": [1, 2]}', pretty, '{"a":\n' + " " * 40 + "[]}"):
        assert matches(free, text)
        assert matches(tight, text) == (text == '{"a":[1,2]}')
    for space in ("  ", "\n\n", "\n" + " " * 41, "\t", "\r\n"):
        assert not matches(free, '{"a":' + space + "[]}")


def test_a_blank_line_may_come_before_json_only_where_it_is_asked_for():
    output = StructuredOutput(json_schema=object_of(a=INTEGER), blank_line=True)
    for text in ('{"a": 1}', '\n{"a": 1}', '\n\n{"a": 1}'):
        assert matches(output, text)
    plain = StructuredOutput(json_schema=object_of(a=INTEGER))
    for text in ('\n\n\n{"a": 1}', ' {"a": 1}', '{"a": 1}\n'):
        assert not matches(output, text) and not matches(plain, text)
    assert not matches(plain, '\n{"a": 1}')
    with pytest.raises(ValueError, match="blank_line=True is for JSON: a regex says so itself"):
        StructuredOutput(regex="a", blank_line=True)
