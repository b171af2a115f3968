"""What commands print with --json."""

import json
from typing import Any


def joined(printed: str, of: str) -> dict[str, Any]:
    """The parts of a run as one object: each is a line, and complete; their lists are joined."""
    parts = [json.loads(line) for line in printed.splitlines()]
    assert parts
    lists = [row for part in parts for row in part[of]]
    return parts[-1] | {of: lists}
