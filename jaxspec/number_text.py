"""Numbers and lists as the commands, reports and errors write them. ``form`` is a format such as
``.2f``."""

from collections.abc import Sequence


def with_interval(
    value: float, interval: tuple[float, float], form: str = ".2f", unit: str = ""
) -> str:
    """``1.94x (1.79 to 2.15)`` for the unit ``x``, which stands after the value alone."""
    return f"{value:{form}}{unit} ({span(interval, form)})"


def span(interval: tuple[float, float], form: str = ".2f") -> str:
    """``1.79 to 2.15``"""
    low, high = interval
    return f"{low:{form}} to {high:{form}}"


def or_blank(value: float | None, form: str = ".1f") -> str:
    """A cell of a table: empty if there is no value."""
    return "" if value is None else format(value, form)


def megabytes(size: float) -> str:
    """Bytes as ``1,234.5 MB``, of 10^6 bytes."""
    return f"{size / 1e6:,.1f} MB"


def gigabytes(size: float) -> str:
    """Bytes as ``1,234.56 GB``, of 10^9 bytes."""
    return f"{size / 1e9:,.2f} GB"


def first_of(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first texts of a list that may be long: ``a, b and 3 more``."""
    more = len(texts) - most
    return separator.join(texts[:most]) + (f" and {more} more" if more > 0 else "")
