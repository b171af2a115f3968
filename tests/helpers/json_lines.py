"""What commands print with --json."""

import functools
import json
import operator
from typing import Any


def joined(printed: str, of: str) -> dict[str, Any]:
    """The parts of a run as one object: each is a line; their lists are joined, and the last of any
    other value counts."""
    parts = [json.loads(line) for line in printed.splitlines()]
    assert parts
    lists = [row for part in parts for row in part[of]]
    return functools.reduce(operator.or_, parts) | {of: lists}
