"""Who is told of requests while they are served: the limits of clients, and spans."""

import dataclasses
from functools import partial

from fastapi import Request

from jaxspec.serving.prepared import Told
from jaxspec.serving.rates import Rates
from jaxspec.serving.security import client_of
from jaxspec.serving.tracing import Spans


@dataclasses.dataclass(frozen=True)
class Listeners:
    """What clients may spend, and the spans of requests."""

    rates: Rates = dataclasses.field(default_factory=Rates)
    spans: Spans = dataclasses.field(default_factory=Spans)

    def of(self, request: Request) -> Told:
        """Those of a request that has come."""
        spend = partial(self.rates.spend, client_of(request.scope))
        return Told(spend, self.spans.begin(request.headers))
