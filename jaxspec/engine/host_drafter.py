"""The interface between an engine and a drafter that runs on the host."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.decoding.drafters import HostDrafted
from jaxspec.decoding.functional import EngineParams


class HostDrafter(Protocol):
    """Drafts chains of tokens between the two halves of a round, when all earlier rounds are read.

    The target verifies what it drafts, so it may draft anything. The engine's parameters have the
    drafter HostDrafted then.
    """

    @property
    def is_ready(self) -> bool:
        """Whether it may draft something in the next round; if not, the round is a plain one."""
        return True

    def draft(self, texts: Mapping[str, Sequence[int]], most: int) -> Mapping[str, Sequence[int]]:
        """At most ``most`` tokens that may follow each text, or fewer, or none.

        ``texts``: all tokens of each request so far, its prompt included, by request id.
        """
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended."""


def drafts_on_host(params: EngineParams, sampling: SamplingParams) -> bool:
    """Whether the host drafts for a request: it is then in the middle of each of its rounds."""
    return isinstance(params.drafter, HostDrafted) and not sampling.plain
