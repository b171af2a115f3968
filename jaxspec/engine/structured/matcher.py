"""Where requests stand in their grammars, and which tokens may follow each node of their trees."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint32]

ALL_TOKENS = np.uint32(0xFFFFFFFF)


class GrammarError(RuntimeError):
    """A request cannot go on: its grammar exceeds a limit, or its tokens do not match it."""


class GrammarLimit(GrammarError):
    """The grammar exceeds a limit of llguidance."""


class Matcher:
    """The tokens that one request has committed, as its grammar sees them.

    Masks are uint32 words: bit ``t % 32`` of word ``t // 32`` says whether token ``t`` may be next.
    Made by GrammarCompiler. One thread at a time may use it.
    """

    def __init__(self, grammar: Any, num_words: int, stop_token_ids: frozenset[int]):
        """``grammar`` is an llguidance.LLMatcher, which this object owns; ``stop_token_ids`` are
        those that it was compiled with."""
        self._grammar = grammar
        self._num_words = num_words
        self._stops = stop_token_ids
        self._further: Words | None = None  # a mask of stop tokens that the grammar does not know
        self._finished = False
        self._length = 0  # tokens consumed

    @property
    def finished(self) -> bool:
        """Whether the output has ended with a stop token of the grammar."""
        return self._finished

    @property
    def complete(self) -> bool:
        """Whether the output so far matches the whole grammar. More may follow."""
        return self._finished or self._grammar.is_accepting()

    def copy(self) -> "Matcher":
        """A matcher of its own that stands at the same place. Takes time in proportion to the
        tokens so far: about 4 us each 100."""
        other = Matcher(self._grammar.deep_copy(), self._num_words, self._stops)
        other._finished, other._length = self._finished, self._length
        other._further = self._further
        return other

    def ending_at(self, token_ids: Sequence[int]) -> "Matcher":
        """This matcher: these tokens, too, may end the output, where it is complete."""
        further = sorted(set(token_ids) - self._stops)
        if further:
            mask = np.zeros(self._num_words, np.uint32)
            if self._further is not None:
                mask |= self._further
            for token in further:
                mask[token // 32] |= np.uint32(1) << np.uint32(token % 32)
            self._further, self._stops = mask, self._stops | set(further)
        return self

    def advance(self, tokens: Sequence[int]) -> None:
        """Take committed tokens. The last one may be a stop token of the grammar.

        Raises GrammarError for a token that may not come next.
        """
        tokens = [int(token) for token in tokens]
        if self._finished and tokens:
            raise GrammarError(f"token {tokens[0]} comes after the end of a structured output")
        end = next((i for i, token in enumerate(tokens) if token in self._stops), len(tokens))
        taken = self._grammar.try_consume_tokens(tokens[:end])
        self._length += taken
        if taken < end:
            raise self._refusal(tokens[taken])
        if end < len(tokens):  # not consumed: see _walk
            if not self._grammar.is_accepting():
                raise self._refusal(tokens[end])
            self._finished = True
            self.advance(tokens[end + 1 :])

    def mask(self) -> Words:
        """The tokens that may be next: uint32 [W]. Raises GrammarError as ``masks``."""
        return self.masks([0], [-1], 1)[0][0]

    def masks(
        self,
        tokens: ArrayLike,
        parents: ArrayLike,
        num_nodes: int,
        out: Words | None = None,
    ) -> tuple[Words, NDArray[np.bool_]]:
        """The tokens that may follow each node of a draft tree.

        Args:
          tokens, parents: [N]; node 0, the root, is the last committed token, whatever its value.
            A parent comes before its children.
          num_nodes: nodes from here on are padding.
          out: uint32 [N, W], C-contiguous, to write to; None: a new array.

        Returns the masks, uint32 [N, W], and whether each node's path is legal, bool [N]. The mask
        of an illegal node, of a stop token and of padding is all ones: its value is never used. The
        acceptance rule reaches a node only if the token was sampled at its parent, under the
        parent's mask; and nothing follows a stop token.

        Raises GrammarLimit if the grammar exceeds a limit of llguidance; the matcher is then of no
        more use. Raises ValueError for another ``out``.
        """
        tokens_: list[int] = np.asarray(tokens).tolist()
        shape = (len(tokens_), self._num_words)
        masks = np.empty(shape, np.uint32) if out is None else out
        # llguidance writes to the address of the array.
        if masks.shape != shape or masks.dtype != np.uint32 or not masks.flags.c_contiguous:
            raise ValueError(f"out must be uint32 {list(shape)}, C-contiguous")
        masks.fill(ALL_TOKENS)
        legal = np.zeros(len(tokens_), bool)
        if not self._finished:
            children = _children(np.asarray(parents).tolist(), int(num_nodes))
            legal[self._walk(tokens_, children, masks)] = True
            self._check()
        return masks, legal

    def _walk(self, tokens: list[int], children: list[list[int]], masks: Words) -> list[int]:
        """Fill the masks of all legal nodes, depth first; returns these nodes."""
        grammar, stops, legal = self._grammar, self._stops, []
        address, size = masks.ctypes.data, 4 * self._num_words

        def visit(node: int) -> None:  # the grammar has consumed the path to this node
            legal.append(node)
            grammar.unsafe_compute_mask_ptr(address + node * size, size)
            if self._further is not None and grammar.is_accepting():
                masks[node] |= self._further
            for child in children[node]:
                token = tokens[child]
                if token in stops:
                    # Never consumed: once only a stop token may follow, llguidance takes none, and
                    # a rollback would remove a token of the text.
                    if grammar.is_accepting():
                        legal.append(child)
                elif grammar.try_consume_tokens([token]):  # 0, and unchanged, for an illegal token
                    visit(child)
                    grammar.rollback(1)

        visit(0)
        return legal

    def _check(self) -> None:
        if self._grammar.is_error():
            raise GrammarLimit(f"the grammar gave up: {one_line(self._grammar.get_error())}")

    def _refusal(self, token: int) -> GrammarError:
        """Why it does not take the token. Near its limits llguidance may refuse one that its own
        mask allows."""
        self._check()
        mask = np.zeros(self._num_words, np.uint32)
        self._grammar.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        if mask[token // 32] >> np.uint32(token % 32) & np.uint32(1):
            return GrammarLimit(
                f"the grammar gave up: it allows token {token} and does not take it"
            )
        return GrammarError(f"token {token} does not match the grammar after {self._length} tokens")


def tree_masks(
    matchers: Sequence[Matcher | None],
    tokens: ArrayLike,
    parents: ArrayLike,
    num_nodes: ArrayLike,
    num_words: int,
) -> tuple[Words, dict[int, GrammarError]]:
    """What may follow each node of each row's tree (see Matcher.masks).

    The calling thread walks them one after the other. Two threads were not faster on two cores: a
    node takes about 9 us, and Python's lock is held for most of it.

    Args:
      matchers: of B rows, each its own; None: the row is not restricted.
      tokens, parents: int32 [B, N], and num_nodes [B], of a DraftTree.
      num_words: GrammarCompiler.num_words.

    Returns the masks, uint32 [B, N, W], all ones for rows without a matcher; and the errors of rows
    whose grammar gave up: these requests cannot go on.
    """
    tokens_, parents_, sizes = np.asarray(tokens), np.asarray(parents), np.asarray(num_nodes)
    masks = np.full((*tokens_.shape, num_words), ALL_TOKENS, np.uint32)
    errors: dict[int, GrammarError] = {}
    for row, matcher in enumerate(matchers):
        if matcher is None:
            continue
        try:
            matcher.masks(tokens_[row], parents_[row], sizes[row], masks[row])
        except GrammarError as error:
            masks[row] = ALL_TOKENS
            errors[row] = error
    return masks, errors


def _children(parents: list[int], num_nodes: int) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in range(num_nodes)]
    for node in range(1, num_nodes):
        children[parents[node]].append(node)
    return children


def one_line(message: str) -> str:
    """A message of llguidance in one line, without the lines that only point at a place."""
    lines = (line.strip() for line in message.splitlines())
    text = " ".join(line for line in lines if line.strip("^~ |") and line != "<non-verbose/>")
    return text if len(text) <= 300 else f"{text[:297]}..."
