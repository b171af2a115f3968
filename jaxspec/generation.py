"""A request under way, and what has come of it so far."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from jaxspec.scheduling.requests import SamplingParams
from jaxspec.state import Ending

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
REASONS: Mapping[Ending, FinishReason] = MappingProxyType(
    {Ending.STOP: "stop", Ending.LENGTH: "length"}
)
ERRORS = MappingProxyType(
    {
        Ending.NOT_FINITE: "the model's logits were not finite numbers: its weights are broken, "
        "its dtype is too narrow for them, or the request's options allow no token",
        Ending.TOO_LONG: "the prompt and its limit do not fit the cache",
        Ending.NOT_GREEDY: "a sampled request ran in a program for greedy ones",
        Ending.UNCONTROLLED: "a request with penalties or bias ran in a program without them",
    }
)


@dataclasses.dataclass
class RequestStatistics:
    """Rounds of one request; ``accepted[d]`` counts those that accepted at least d tokens."""

    rounds: int
    drafted: int
    accepted: list[int]


@dataclasses.dataclass(frozen=True)
class Timings:
    """Times of one request: on the engine's clock, which stands still while programs compile.

    Attributes:
      arrived, first_token, finished: seconds on that clock.
      compile: seconds that programs were compiled in meanwhile.
    """

    arrived: float
    first_token: float
    finished: float
    compile: float

    @property
    def prefill(self) -> float:
        """Seconds to the first token, waiting included."""
        return self.first_token - self.arrived

    @property
    def decode(self) -> float:
        """Seconds from the first token to the last."""
        return self.finished - self.first_token


@dataclasses.dataclass(eq=False)
class Generation:
    """A request that an engine generates; the engine's ``step`` extends it.

    Attributes:
      sampling: with the seed that it got, if it had none.
      token_ids: new tokens so far.
      finish_reason: None until it has ended.
      error: what went wrong, if its finish_reason is ``error``.
      timings: None until it has ended.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    statistics: RequestStatistics
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    timings: Timings | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None
