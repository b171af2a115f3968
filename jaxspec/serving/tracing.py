"""Spans of requests: what a server tells a tracer, and none."""

from collections.abc import Mapping

from jaxspec.serving.prepared import Ended


class Spans:
    """Begins a span for each request. This one tells nobody; otel.py has those that do."""

    def begin(self, headers: Mapping[str, str]) -> Ended:
        """A request has come, with these headers. Returns what ends its span."""
        return lambda prepared, completions: None

    def close(self) -> None:
        """Send what has not been sent."""
