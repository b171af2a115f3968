"""What calls emitted, added to the requests that they served: rounds, draft trees and
log-probabilities."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.decoding.state import Emitted
from jaxspec.engine.generation import Generation, RoundTree, Running, TokenLogprob
from jaxspec.engine.programs.call import LaunchedCall
from jaxspec.scheduling.plan import Plan


def check_trees(sampling: Iterable[SamplingParams], emitted: bool) -> None:
    """Raise ValueError for requests that want trees, unless the engine's programs emit them."""
    if not emitted and any(params.trees for params in sampling):
        raise ValueError("trees needs an engine that emits them: make it with trees=True")


def take_calls(calls: Iterable[LaunchedCall], plan: Plan, running: Mapping[str, Running]) -> None:
    """Add what the calls of a plan emitted to the requests that still run."""
    for call in calls:
        for place, row in enumerate(call.rows.tolist()):
            sequence = plan.sequences.get(row)  # None: a row of padding
            request = None if sequence is None else running.get(sequence.request_id)
            if request is not None:
                take_emitted(request.generation, call.emitted, place)


def take_emitted(generation: Generation, emitted: Emitted, place: int) -> None:
    """Add the rounds and log-probabilities of a row, in ``place`` of what one call emitted."""
    take_logprobs(generation, emitted, place)
    if not emitted.num_rounds:  # a prefill's token belongs to no round
        return
    counts = (emitted.counts, emitted.accepted, emitted.drafted)
    generation.statistics.add(*(np.asarray(x)[:, place] for x in counts))
    if generation.trees is not None:
        generation.trees.extend(_trees(emitted, place))


def _trees(emitted: Emitted, place: int) -> Iterator[RoundTree]:
    trees = emitted.trees
    assert trees is not None
    for round_ in np.flatnonzero(np.asarray(emitted.counts)[:, place]):
        at, accepted = (round_, place), int(emitted.accepted[round_, place])
        size = int(trees.num_nodes[at])
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


def take_logprobs(generation: Generation, emitted: Emitted, place: int) -> None:
    """Add those of a row, in ``place`` of what one call emitted, as far as they are asked for."""
    sampling = generation.sampling
    if generation.logprobs is not None:
        counts = np.asarray(emitted.counts)[:, place]
        kept = np.arange(emitted.tokens.shape[2]) < counts[:, None]
        arrays = (emitted.tokens, emitted.logprobs, emitted.top_tokens, emitted.top_logprobs)
        own = [np.asarray(x)[:, place][kept] for x in arrays]
        generation.logprobs.extend(_entries(*own, alternatives=sampling.logprobs or 0))
    if sampling.prompt_logprobs is not None and emitted.prompt is not None:
        prompt = emitted.prompt
        kept = np.asarray(prompt.valid)[place]
        arrays = (prompt.logprobs, prompt.top_tokens, prompt.top_logprobs)
        own = [np.asarray(x)[place][kept] for x in arrays]
        known = len(generation.prompt_logprobs or ())
        tokens = np.array(generation.prompt[known : known + len(own[0])], np.int32)
        own = [x[: len(tokens)] for x in own]
        generation.add_prompt_logprobs(
            _entries(tokens, *own, alternatives=sampling.prompt_logprobs)
        )


def _entries(
    tokens: np.ndarray,
    logprobs: np.ndarray,
    top_tokens: np.ndarray,
    top_logprobs: np.ndarray,
    alternatives: int,
) -> Iterator[TokenLogprob]:
    """Of tokens [n], with the first of their alternatives [n, K]."""
    rows = (x.tolist() for x in (tokens, logprobs, top_tokens, top_logprobs))
    for token, logprob, ids, values in zip(*rows, strict=True):
        top = zip(ids[:alternatives], values[:alternatives], strict=True)
        yield TokenLogprob(token, logprob, tuple(top))
