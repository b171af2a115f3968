"""Masks of the trees of a batch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from jaxspec.engine.structured.matcher import ALL_TOKENS, GrammarError, Matcher, Words


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
