"""Descriptions of outputs: what is kept, what is equal, what is refused."""

import pytest

from jaxspec.config.structured_output import StructuredOutput


def test_a_schema_is_kept_as_text_in_its_own_order():
    given = {"type": "object", "properties": {"b": {}, "a": {}}}
    spec = StructuredOutput(json_schema=given)
    assert spec.json_schema == '{"type": "object", "properties": {"b": {}, "a": {}}}'
    same = StructuredOutput(json_schema='{"type":"object",\n"properties":{"b":{},"a":{}}}')
    assert spec == same and hash(spec) == hash(same) and spec.kind == "json_schema"
    assert spec != StructuredOutput(json_schema={"type": "object"})


def test_every_kind_is_known():
    assert StructuredOutput(regex="a+").kind == "regex"
    assert StructuredOutput(grammar='start: "a"').kind == "grammar"
    assert StructuredOutput(choice=["yes", "no"]).choice == ("yes", "no")  # pyright: ignore
    assert StructuredOutput(json_object=True, whitespace=False).kind == "json_object"
    assert StructuredOutput(json_schema={}).kind == "json_schema"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of json_schema, regex, grammar, choice, json_object, got none"),
        ({"regex": "a", "choice": ("b",)}, "exactly one of .*, got regex and choice"),
        ({"json_object": 1}, "json_object must be True or False, got 1"),
        ({"json_schema": "{"}, "json_schema is not JSON: "),
        ({"json_schema": "[1]"}, "json_schema must be an object, got list"),
        ({"json_schema": {"enum": {1}}}, "json_schema cannot be written as JSON: .*set"),
        ({"json_schema": {"const": float("nan")}}, "json_schema cannot be written as JSON"),
        ({"regex": ""}, "regex must not be empty"),
        ({"regex": 3}, "regex must be text, got int"),
        ({"grammar": "\ud800"}, "grammar is no valid Unicode: character 0"),
        ({"choice": "yes"}, "choice must be a list of texts, not str"),
        ({"choice": 3}, "choice must be a list of texts, not int"),
        ({"choice": ()}, "choice must hold at least one text"),
        ({"choice": ("a", "")}, "choice must not be empty"),
        ({"choice": ("a", "a")}, "choice holds the same text twice"),
        ({"regex": "a", "trigger": -1}, "trigger must be a token's id, or None, got -1"),
        ({"regex": "a", "trigger": True}, "trigger must be a token's id, or None, got True"),
        ({"regex": "a", "whitespace": False}, "whitespace=False is for JSON: a regex says so"),
    ],
)
def test_bad_descriptions_are_one_line_errors(given, message):
    with pytest.raises(ValueError, match=message) as error:
        StructuredOutput(**given)
    assert "\n" not in str(error.value)
