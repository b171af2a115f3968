"""Hooks of schemathesis: most bodies name the model that is served, or all answers would be 404."""

from typing import Any

import schemathesis  # pyright: ignore[reportMissingImports]

from tests.helpers.served import MODEL


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """One in eight, by its length, stays as it is."""
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) % 8:
        return {**body, "model": MODEL}
    return body
