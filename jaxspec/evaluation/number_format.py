"""Numbers as the commands and reports write them. ``form`` is a format such as ``.2f``."""


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
