"""From response_format and structured_outputs to StructuredOutput."""

import dataclasses
import json
from typing import Any

from jaxspec.config.structured_output import JSON_KINDS, StructuredOutput
from jaxspec.engine.structured.json_schema import read_schema
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.sampling import SamplingFields, StructuredOutputs

MOST_CHARACTERS = 100_000  # of a schema, regular expression or list of choices
MOST_OF_GRAMMAR = 30_000  # characters: no limit of the compiler is on reading them


def structured_output(
    request: SamplingFields, *, whitespace: bool = True
) -> StructuredOutput | None:
    """What the text of a request must look like. Of a response_format that is not ``strict``, what
    cannot be enforced is left out. Without ``whitespace`` JSON has none.

    Raises FieldError, which names the field.
    """
    given = request.response_format
    if given is not None and given.get("type") == "text":
        given = None
    if given is not None and request.structured_outputs is not None:
        raise FieldError("structured_outputs", "give response_format or structured_outputs")
    name = "structured_outputs" if given is None else "response_format"
    try:
        if given is not None:
            spec = _of_format(given)
        elif request.structured_outputs is not None:
            spec = _of(request.structured_outputs)
        else:
            return None
    except ValueError as error:
        raise FieldError(name, f"{name}: {error}") from error
    if spec.kind in JSON_KINDS and not whitespace:
        return dataclasses.replace(spec, whitespace=False)
    return spec


def _of_format(given: dict[str, Any]) -> StructuredOutput:
    match given:
        case {"type": "json_object"}:
            return StructuredOutput(json_object=True)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), "strict": True}}:
            return _checked(StructuredOutput(json_schema=schema))
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return _checked(StructuredOutput(json_schema=read_schema(schema).schema))
        case {"type": "json_schema"}:
            raise ValueError("json_schema must be an object with a schema")
        case {"type": kind}:
            raise ValueError(
                f"type {kind!r} is not supported: use text, json_object or json_schema, or "
                "structured_outputs for a regex, grammar or choice"
            )
    raise ValueError("type is missing: use text, json_object or json_schema")


def _of(given: StructuredOutputs) -> StructuredOutput:
    _check_one_kind(given)
    spec = StructuredOutput(
        json_schema=given.json_schema,
        regex=given.regex,
        choice=None if given.choice is None else tuple(given.choice),
        grammar=given.grammar,
        json_object=bool(given.json_object),
        whitespace=not given.disable_any_whitespace,
    )
    return _checked(spec)


def _check_one_kind(given: StructuredOutputs) -> None:
    """StructuredOutput checks the same, with its names in place of the request's."""
    kinds = {
        "json": given.json_schema,
        "regex": given.regex,
        "choice": given.choice,
        "grammar": given.grammar,
        "json_object": given.json_object,
    }
    found = [name for name, value in kinds.items() if value not in (None, False)]
    if len(found) != 1:
        got = " and ".join(found) or "none"
        raise ValueError(f"exactly one of {', '.join(kinds)} must be given, got {got}")


def _checked(spec: StructuredOutput) -> StructuredOutput:
    texts = (spec.json_schema, spec.regex, spec.grammar, *(spec.choice or ()))
    size = sum(len(text) for text in texts if isinstance(text, str))
    most = MOST_CHARACTERS if spec.grammar is None else MOST_OF_GRAMMAR
    if size > most:
        raise ValueError(f"{size} characters are too many: at most {most} are compiled")
    if isinstance(spec.json_schema, str):
        read = read_schema(json.loads(spec.json_schema))
        if read.problems:
            raise ValueError(read.message)
    return spec
