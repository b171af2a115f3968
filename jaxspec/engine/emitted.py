"""What calls emitted: the rows of their arrays, and what is added to the requests in them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxspec.decoding.state import Emitted
from jaxspec.engine.generation import Generation, RoundTree, Running, TokenLogprob
from jaxspec.engine.programs.call import LaunchedCall
from jaxspec.scheduling.sequence import Sequence


class RowOutput(NamedTuple):
    """What a call emitted for the sequence of a row: a column of its arrays [C, B, ...]."""

    row: int
    sequence: Sequence
    column: int
    emitted: Emitted

    @property
    def counts(self) -> np.ndarray:
        """Tokens committed by each round: int32 [C]."""
        return np.asarray(self.emitted.counts)[:, self.column]

    def committed(self, values: Any) -> np.ndarray:
        """The values of committed tokens [n, ...], out of those of all tokens [C, B, T, ...]."""
        kept = np.arange(self.emitted.tokens.shape[2]) < self.counts[:, None]
        return np.asarray(values)[:, self.column][kept]

    @property
    def tokens(self) -> list[int]:
        """The tokens that its rounds committed, in order."""
        return self.committed(self.emitted.tokens).tolist()


def row_outputs(
    calls: Iterable[LaunchedCall], sequences: Mapping[int, Sequence]
) -> Iterator[RowOutput]:
    """What calls emitted, row by row.

    ``sequences`` are those of the calls' plan, by row; padding has numbers past the last row.
    """
    for call in calls:
        for column, row in enumerate(call.rows.tolist()):
            if row in sequences:
                yield RowOutput(row, sequences[row], column, call.emitted)


def take_calls(
    calls: Iterable[LaunchedCall], sequences: Mapping[int, Sequence], running: Mapping[str, Running]
) -> None:
    """Add what the calls of a plan emitted to the requests that still run."""
    for output in row_outputs(calls, sequences):
        request = running.get(output.sequence.request_id)
        if request is not None:
            _take_output(request.generation, output)


def _take_output(generation: Generation, output: RowOutput) -> None:
    """Add the rounds, trees and log-probabilities of one call to a request."""
    _take_logprobs(generation, output)
    emitted, column = output.emitted, output.column
    if not emitted.num_rounds:  # tokens of reading belong to no round
        generation.kept_tokens += int(np.asarray(emitted.accepted)[:, column].sum())
        return
    arrays = (emitted.counts, emitted.accepted, emitted.drafted)
    generation.statistics.add(*(np.asarray(array)[:, column] for array in arrays))
    if generation.trees is not None:
        generation.trees.extend(_trees(output))


def _trees(output: RowOutput) -> Iterator[RoundTree]:
    emitted, trees = output.emitted, output.emitted.trees
    assert trees is not None
    for round_index in np.flatnonzero(output.counts):
        at = round_index, output.column
        accepted, size = int(emitted.accepted[at]), int(trees.num_nodes[at])
        chances = np.exp(np.asarray(trees.logprobs[at])[1:size])
        yield RoundTree(
            tokens=_integers(trees.tokens[at], size),
            parents=_integers(trees.parents[at], size),
            probabilities=(None, *chances.tolist()),
            path=_integers(trees.path[at], accepted + 1),
            bonus=int(emitted.tokens[at][accepted]),
            committed=int(emitted.counts[at]),
        )


def _integers(values: Any, count: int) -> tuple[int, ...]:
    return tuple(np.asarray(values)[:count].tolist())


def _take_logprobs(generation: Generation, output: RowOutput) -> None:
    """Add the log-probabilities of tokens and prompt, as far as they are asked for."""
    sampling, emitted = generation.sampling, output.emitted
    if generation.logprobs is not None:
        arrays = (emitted.tokens, emitted.logprobs, emitted.top_tokens, emitted.top_logprobs)
        values = map(output.committed, arrays)
        generation.logprobs.extend(_entries(*values, alternatives=sampling.logprobs or 0))
    if generation.policy_logprobs is not None:
        generation.policy_logprobs.extend(output.committed(emitted.policy_logprobs).tolist())
    if sampling.prompt_logprobs is not None and emitted.prompt is not None:
        prompt = emitted.prompt
        valid = np.asarray(prompt.valid)[output.column]
        arrays = (prompt.logprobs, prompt.top_tokens, prompt.top_logprobs)
        values = [np.asarray(array)[output.column][valid] for array in arrays]
        known = len(generation.prompt_logprobs or ())
        tokens = np.array(generation.prompt[known : known + len(values[0])], np.int32)
        values = [array[: len(tokens)] for array in values]
        generation.add_prompt_logprobs(
            _entries(tokens, *values, alternatives=sampling.prompt_logprobs)
        )


def _entries(
    tokens: np.ndarray,
    logprobs: np.ndarray,
    top_tokens: np.ndarray,
    top_logprobs: np.ndarray,
    alternatives: int,
) -> Iterator[TokenLogprob]:
    """The entry of each token [n], with the first of its alternatives [n, K]."""
    rows = (array.tolist() for array in (tokens, logprobs, top_tokens, top_logprobs))
    for token, logprob, ids, values in zip(*rows, strict=True):
        top = zip(ids[:alternatives], values[:alternatives], strict=True)
        yield TokenLogprob(token, logprob, tuple(top))
