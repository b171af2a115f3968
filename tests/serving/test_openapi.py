"""The OpenAPI document: what it says of keys."""

from typing import Any

from jaxspec.serving.app import make_app
from jaxspec.serving.metrics import Metrics
from jaxspec.serving.security import OPEN
from jaxspec.serving.service import Service
from tests.served import MODEL


def document(**options: Any) -> dict[str, Any]:
    return make_app(Service((MODEL,)), Metrics(MODEL), **options).openapi()


def secured(document: dict[str, Any]) -> dict[str, bool]:
    """Of each path, whether all of its operations ask for a key."""
    return {
        path: all("security" in one for one in operations.values())
        for path, operations in document["paths"].items()
    }


def test_the_document_says_where_a_key_is_needed():
    found = document(api_keys=["x"])
    [(name, scheme)] = found["components"]["securitySchemes"].items()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    assert secured(found) == {path: path not in OPEN for path in found["paths"]}
    assert {path for path, needs in secured(found).items() if needs} >= {
        *("/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize")
    }
    assert found["paths"]["/v1/completions"]["post"]["security"] == [{name: []}]


def test_a_server_without_keys_asks_for_none():
    found = document()
    assert "securitySchemes" not in found["components"]
    assert not any(secured(found).values())
