"""The tables of fields in docs/serving.md: they are what the code takes and refuses."""

import re
from pathlib import Path

from jaxspec.serving.protocol.base import HINTS, ROUTER_FIELDS
from jaxspec.serving.protocol.chat import ChatRequest
from jaxspec.serving.protocol.completions import CompletionRequest

DOCS = Path(__file__).parent.parent.parent / "docs" / "serving.md"
REQUESTS = {"chat": ChatRequest, "completions": CompletionRequest}


def tables() -> tuple[str, str]:
    """The rows of fields that are taken, and of those that are refused."""
    _, section = DOCS.read_text(encoding="utf-8").split("### Fields\n")
    section, _ = section.split("\n### ", 1)
    taken, refused = section.split("| refused | instead |")
    return taken, refused


def names(table: str) -> set[str]:
    """The first cell of each row names fields; what stands in brackets is a value."""
    found = set()
    for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        found |= set(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", row)))
    return found


def test_every_field_that_is_taken_stands_in_the_table():
    known = {name for request in REQUESTS.values() for name in request.model_fields}
    assert names(tables()[0]) == known | HINTS | set(ROUTER_FIELDS)


def test_every_field_that_is_refused_stands_in_the_other():
    refused = {name for request in REQUESTS.values() for name in request.refused}
    assert names(tables()[1]) == refused


def test_where_a_field_is_taken_is_told():
    """Of several fields in a row the places follow in order, the last one for the rest."""
    for cells in re.findall(r"^\| (`.*?) \| (.*?) \|", tables()[0], re.MULTILINE):
        fields, places = re.findall(r"`(\w+)`", cells[0]), cells[1].split("; ")
        places += places[-1:] * len(fields)
        for field, place in zip(fields, places, strict=False):
            for path in REQUESTS if place == "both" else [place]:
                known = {*REQUESTS[path].model_fields, *HINTS, *ROUTER_FIELDS}
                assert field in known, f"{field} is not a field of {path}"
