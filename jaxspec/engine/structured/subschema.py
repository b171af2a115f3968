"""Parts of a JSON schema that stand alone: what they refer to comes along."""

import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

NOT_THERE = (LookupError, ValueError, TypeError)


def pointer_steps(fragment: str) -> tuple[str, ...]:
    """The steps of a JSON pointer, which is what follows the # of a reference: ``/$defs/A``."""
    steps = urllib.parse.unquote(fragment).split("/")[1:]
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in steps)


def at(node: Any, steps: Sequence[str]) -> Any:
    """What is there, some steps into a schema. Raises one of NOT_THERE."""
    for step in steps:
        node = node[int(step)] if isinstance(node, list) else node[step]
    return node


def resolved(root: Mapping[str, Any], node: Any) -> Any:
    """The node, or what it refers to if it says nothing else."""
    seen: set[str] = set()
    while isinstance(node, dict) and set(node) == {"$ref"} and _is_pointer(node["$ref"]):
        reference = node["$ref"]
        if reference in seen:
            break
        seen.add(reference)
        try:
            node = at(root, pointer_steps(reference[1:]))
        except NOT_THERE:
            break
    return node


def standalone(root: Mapping[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    """A part of the schema ``root`` as a schema, which defines what the part refers to."""
    names: dict[str, str] = {}
    found: dict[str, Any] = {}

    def copied(part: Any) -> Any:
        if isinstance(part, list):
            return [copied(item) for item in part]
        if not isinstance(part, dict):
            return part
        new = {key: copied(value) for key, value in part.items()}
        if _is_pointer(part.get("$ref")):
            new["$ref"] = f"#/$defs/{named(part['$ref'])}"
        return new

    def named(reference: str) -> str:
        if reference not in names:
            names[reference] = f"d{len(names)}"
            try:
                target = at(root, pointer_steps(reference[1:]))
            except NOT_THERE:
                target = {}
            found[names[reference]] = copied(target)
        return names[reference]

    schema = copied(node)
    return {**schema, "$defs": found} if found else schema


def _is_pointer(reference: Any) -> bool:
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
