"""Hands texts of requests that ended to a drafter that looks them up."""

from collections.abc import Sequence

import numpy as np

from jaxspec.decoding.past_text import GAP
from jaxspec.engine.generation import Generation
from jaxspec.engine.programs.programs import Programs

PART = 256  # tokens that a launch writes
BEFORE = 24  # last tokens of a prompt, kept so that an output's first tokens are drafted, too


class PastOutputs:
    """Writes outputs to the ring of past text, if the drafter has one."""

    def __init__(self, programs: Programs):
        self._programs, self._size = programs, programs.params.drafter.past_tokens

    def add(self, generation: Generation) -> None:
        """The output of a request that ended by itself, and the last tokens of its prompt.

        One with a cache_salt shares nothing with others: it is left out.
        """
        whole = generation.finish_reason in ("stop", "length")
        if self._size and whole and generation.sampling.cache_salt is None:
            self.write([*generation.prompt[-BEFORE:], *generation.token_ids])

    def prepare(self) -> None:
        """Compile the program that writes, by writing nothing."""
        if self._size:
            self._programs.remember(np.full(min(PART, self._size), GAP, np.int32), 0)

    def forget(self) -> None:
        """Overwrite all of them."""
        part = min(PART, self._size)
        for start in range(0, self._size, part or 1):
            count = min(part, self._size - start)
            self._programs.remember(np.full(part, GAP, np.int32), count)

    def write(self, text: Sequence[int]) -> None:
        """A text and a gap; of a text that is longer than the ring, its end."""
        part = min(PART, self._size)
        kept = np.array([*text, GAP], np.int32)[-self._size :]
        for start in range(0, len(kept), part):
            tokens = np.full(part, GAP, np.int32)
            new = kept[start : start + part]
            tokens[: len(new)] = new
            self._programs.remember(tokens, len(new))
