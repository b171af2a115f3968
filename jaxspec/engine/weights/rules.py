"""What becomes of requests that have begun when an engine's weights change.

A rule is an object with the two methods of ``Rule``; its name stands in ``rule_for``. Whatever it
says, no text is of two versions: a request ends under the weights that it began with, or goes back
to its prompt.
"""

from typing import Protocol

from jaxspec.engine.generation import Generation


class Rule(Protocol):
    """What becomes of a request that has begun."""

    def ends_first(self, generation: Generation) -> bool:
        """Whether it ends under the old weights, which stay until then. Else it goes back to its
        prompt at once, and begins again under the new ones."""
        ...

    def draft(self, generation: Generation, old_text: tuple[int, ...]) -> tuple[int, ...]:
        """What a request verifies first that goes back to its prompt. ``old_text`` is what it has
        and, of a draft, what it has not verified."""
        ...


class Finish:
    """Requests that have begun end under the old weights."""

    def ends_first(self, generation: Generation) -> bool:
        return True

    def draft(self, generation: Generation, old_text: tuple[int, ...]) -> tuple[int, ...]:
        raise AssertionError("no request goes back")


class Restart:
    """They are generated anew. One that streams ends first: what was shown stays as it is."""

    def ends_first(self, generation: Generation) -> bool:
        return generation.streams

    def draft(self, generation: Generation, old_text: tuple[int, ...]) -> tuple[int, ...]:
        return ()
