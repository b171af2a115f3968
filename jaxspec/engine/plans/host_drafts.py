"""Writes what a host drafter drafts into the trees of a round."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.speculation import PLAIN, TreeShape
from jaxspec.decoding.trees.tree import DraftTree, make_tree
from jaxspec.engine.host_drafter import HostDrafter
from jaxspec.engine.plans.sequences import generation_of
from jaxspec.scheduling import sequence as scheduling


class HostDrafts:
    """Asks a host drafter for the tokens of a round's rows; without one, trees stay as they are."""

    def __init__(self, drafter: HostDrafter | None):
        self._drafter = drafter

    def shape(self, shape: TreeShape) -> TreeShape:
        """The shape of the next round's trees: none while the host has nothing to draft with."""
        return shape if self._drafter is None or self._drafter.is_ready else PLAIN

    def forget(self, request_id: str) -> None:
        if self._drafter is not None:
            self._drafter.forget(request_id)

    def fill(
        self,
        tree: DraftTree,
        rows: Sequence[int],
        sequences: Sequence[scheduling.Sequence | None],
        first_tokens: Mapping[int, list[int]],
    ) -> DraftTree:
        """The trees [B], of their roots alone, with the tokens that the host drafts behind them.

        Args:
          rows: of the trees; ``sequences`` are in them, or None for padding.
          first_tokens: of rows whose prompts the same plan has read, by row.
        """
        if self._drafter is None or not tree.max_depth:
            return tree
        texts: dict[str, list[int]] = {}
        for row, sequence in zip(rows, sequences, strict=True):
            if sequence is not None and not generation_of(sequence).done:
                texts[sequence.request_id] = [*sequence.tokens, *first_tokens.get(row, [])]
        drafts = self._drafter.draft(texts, tree.max_depth) if texts else {}
        drafted = np.zeros((len(sequences), tree.max_depth), np.int32)
        num_nodes = np.ones(len(drafted), np.int32)
        for place, sequence in enumerate(sequences):
            chain = () if sequence is None else drafts.get(sequence.request_id, ())
            chain = chain[: tree.max_depth]
            drafted[place, : len(chain)], num_nodes[place] = chain, 1 + len(chain)
        tokens = jnp.concatenate([tree.tokens[:, :1], drafted], axis=1)
        filled = make_tree(tokens, tree.parents, num_nodes, tree.max_depth, is_chain=True)
        # Placed as the device's own tree is: else the program that verifies would compile twice.
        return jax.device_put(filled, jax.tree.map(lambda leaf: leaf.sharding, tree))
