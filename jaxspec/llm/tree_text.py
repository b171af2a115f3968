"""The draft trees of a request's rounds as JSON, with the text of each node."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxspec.engine.generation import RoundTree
from jaxspec.llm.tokenizer.detokenizer import Detokenizer


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
