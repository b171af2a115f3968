"""Pages of lists: some items after another, or before it."""

from collections.abc import Sequence
from typing import Any

from jaxspec.serving.errors import ApiError


def page[T](
    items: Sequence[T], ids: Sequence[str], limit: int, **at: str | None
) -> tuple[list[T], dict[str, Any]]:
    """At most ``limit`` items and what is told of them: ``has_more``, ``first_id``, ``last_id``.

    Args:
      ids: of the items, in their order.
      at: the name of a query's field, and the id that it gives: items after it, or, where its name
        begins with ``before``, before it. None: from the first one on.

    Raises ApiError for an id that is not among them.
    """
    begin, end, backwards = 0, len(ids), False
    for name, other in at.items():
        if other is None:
            continue
        if other not in ids:
            raise ApiError(404, f"{name}: there is no {other[:80]!r}", param=name)
        if name.startswith("before"):
            end, backwards = ids.index(other), True
        else:
            begin = ids.index(other) + 1
    has_more = end - begin > limit
    if has_more:
        begin, end = (end - limit, end) if backwards else (begin, begin + limit)
    shown = list(ids[begin:end])
    first, last = (shown[0], shown[-1]) if shown else (None, None)
    return list(items[begin:end]), {"has_more": has_more, "first_id": first, "last_id": last}
