"""The rounds of a request: what they committed, their draft trees, and these as JSON."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.calls import Call
from jaxspec.detokenizer import Detokenizer
from jaxspec.generation import Generation, RoundTree, Running
from jaxspec.logprobs import take_logprobs
from jaxspec.scheduling.plan import Plan
from jaxspec.scheduling.requests import SamplingParams
from jaxspec.state import Emitted


def check_trees(sampling: Iterable[SamplingParams], emitted: bool) -> None:
    """Raise ValueError for requests that want trees, unless the engine's programs emit them."""
    if not emitted and any(params.trees for params in sampling):
        raise ValueError("trees needs an engine that emits them: make it with trees=True")


def take_calls(calls: Iterable[Call], plan: Plan, running: Mapping[str, Running]) -> None:
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


class RoundTexts:
    """Turns the rounds of one request into JSON, in their order.

    Args:
      decode: token ids to text, special tokens included.
      prompt: of the request.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]):
        self._before = Detokenizer(decode, prompt)
        self._last: int | None = None  # the last token, which is not in it yet

    def add(self, trees: Iterable[RoundTree]) -> list[dict[str, Any]]:
        """The next rounds, each ``{"nodes": [{"token", "text", "parent", "probability"}], "path",
        "bonus": {"token", "text"}, "committed"}``; see RoundTree.

        A token's text is what it adds to the text before it: U+FFFD where it leaves a character
        unfinished, and the whole character for the token that ends it.
        """
        return [self._add(tree) for tree in trees]

    def _add(self, tree: RoundTree) -> dict[str, Any]:
        if self._last not in (None, tree.tokens[0]):  # the root was sampled as a prompt was read
            self._before.push([self._last])
        nodes, after = [], []
        rows = zip(tree.tokens, tree.parents, tree.probabilities, strict=True)
        for token, parent, probability in rows:
            state, text = _follow(self._before if parent < 0 else after[parent], token)
            after.append(state)
            nodes.append(
                {"token": token, "text": text, "parent": parent, "probability": probability}
            )
        _, text = _follow(after[tree.path[-1]], tree.bonus)
        tokens = [tree.tokens[0], *tree.committed_tokens]
        self._before.push(tokens[:-1])
        self._last = tokens[-1]
        path, committed = list(tree.path), tree.committed
        bonus = {"token": tree.bonus, "text": text}
        return {"nodes": nodes, "path": path, "bonus": bonus, "committed": committed}


def _follow(before: Detokenizer, token: int) -> tuple[Detokenizer, str]:
    """A token after a text: what follows both, and what the token adds."""
    after = before.copy()
    text = after.push([token])
    return after, text or after.held
