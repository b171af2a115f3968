"""What becomes of requests that have begun when an engine's weights change.

A rule is an object with the two methods of ``Rule``; its name stands in ``RULES``. Whatever it
says, no text is of two versions: a request ends under the weights that it began with, or goes back
to its prompt.
"""

from collections.abc import Mapping
from typing import Literal, Protocol

from jaxspec.engine.generation import Generation

type InFlight = Literal["refuse", "finish", "restart"]


class Rule(Protocol):
    """What becomes of a request that has begun."""

    def ends_first(self, generation: Generation) -> bool:
        """Whether it ends under the old weights, which stay until then. Else it goes back to its
        prompt at once, and begins again under the new ones."""
        ...

    def carry_over(self, generation: Generation, old_token_ids: list[int]) -> None:
        """Called with a request that went back to its prompt, and the tokens that it had."""
        ...


class Finish:
    """Requests that have begun end under the old weights."""

    def ends_first(self, generation: Generation) -> bool:
        return True

    def carry_over(self, generation: Generation, old_token_ids: list[int]) -> None:
        raise AssertionError("no request goes back")


class Restart:
    """They are generated anew. One that streams ends first: what was shown stays as it is."""

    def ends_first(self, generation: Generation) -> bool:
        return generation.streams

    def carry_over(self, generation: Generation, old_token_ids: list[int]) -> None:
        """Nothing of the old text is of use."""


RULES: Mapping[str, Rule] = {"refuse": Finish(), "finish": Finish(), "restart": Restart()}


def rule_for(in_flight: InFlight, *, is_idle: bool) -> Rule:
    """The rule of this name.

    Raises ValueError for an unknown name, and RuntimeError for ``refuse`` unless the engine
    ``is_idle``.
    """
    rule = RULES.get(in_flight)
    if rule is None:
        raise ValueError(f"in_flight is {in_flight!r}: use one of {', '.join(RULES)}")
    if in_flight == "refuse" and not is_idle:
        raise RuntimeError(
            "requests are under way: let them finish, cancel them, or say with in_flight what "
            "becomes of them"
        )
    return rule
