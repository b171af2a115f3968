"""Rounds in whose middle the host is: it drafts, or restricts the tokens by a grammar."""

from typing import NamedTuple

import jax
import numpy as np

from jaxspec.config.speculation import TreeShape
from jaxspec.engine.emitted import row_outputs
from jaxspec.engine.generation import ErrorKind, Generation
from jaxspec.engine.plans.host_drafts import HostDrafts
from jaxspec.engine.plans.sequences import generation_of, kind_of
from jaxspec.engine.programs.call import LaunchedCall
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.programs.sizes import Load
from jaxspec.engine.programs.structured import Drafted, run_draft, run_verify
from jaxspec.engine.structured import GrammarError, GrammarLimit, Matcher, tree_masks
from jaxspec.scheduling.plan import Plan
from jaxspec.scheduling.sequence import Sequence


class StructuredRounds:
    """Drafts when a plan is launched, and verifies when all plans before it have been read.

    In the meantime the device runs the other rows' rounds, and the host computes the masks. What
    ``drafts`` drafts, it drafts then, too.
    """

    def __init__(self, programs: Programs, drafts: HostDrafts):
        self.programs, self.drafts = programs, drafts
        self._pending: _Pending | None = None
        self._failed: list[Generation] = []

    def take_failed(self) -> list[Generation]:
        """Requests that could not go on since this was last called; they have their error."""
        failed, self._failed = self._failed, []
        return failed

    def _fail(self, sequence: Sequence, error: GrammarError) -> None:
        generation = generation_of(sequence)
        too_large = isinstance(error, GrammarLimit)
        kind = ErrorKind.GRAMMAR_LIMIT if too_large else ErrorKind.GRAMMAR_MISMATCH
        generation.fail(kind, str(error))
        self._failed.append(generation)

    def first_masks(self, plan: Plan) -> dict[int, np.ndarray]:
        """Masks of the first tokens of rows that finish reading in a plan, which was just made."""
        masks = {}
        for read in plan.reads:
            sequence = plan.sequences[read.row]
            restricts = sequence.masked and generation_of(sequence).grammar is not None
            if restricts and sequence.read == sequence.goal:
                matcher = self._matcher(sequence, [])
                masks[read.row] = self.programs.all_tokens()
                try:
                    masks[read.row] = masks[read.row] if matcher is None else matcher.mask()
                except GrammarError as error:
                    self._fail(sequence, error)
        return masks

    def draft(self, plan: Plan, reads: list[LaunchedCall], load: Load, shape: TreeShape) -> None:
        """Launch the first half of the round of a plan's masked rows; ``reads`` are its calls."""
        sequences = [plan.sequences[row] for row in plan.masked_rows]
        drafted = run_draft(
            self.programs,
            plan.masked_rows,
            max(sequence.limit for sequence in sequences),
            load,
            shape=shape,
            kind=kind_of(sequences),
        )
        self._pending = _Pending(plan, reads, drafted)

    def verify(self) -> list[LaunchedCall]:
        """Launch the second half, if there is one."""
        if self._pending is None:
            return []
        (plan, reads, drafted), self._pending = self._pending, None
        # The token that each row has sampled at the end of its prompt, by row.
        outputs = row_outputs(jax.device_get(reads), plan.sequences)
        first_tokens = {output.row: output.tokens for output in outputs if output.counts.any()}
        rows = drafted.rows.tolist()
        sequences = [plan.sequences.get(row) for row in rows]  # None: padding
        tree = self.drafts.fill(drafted.tree, rows, sequences, first_tokens)
        tokens, parents, sizes = jax.device_get((tree.tokens, tree.parents, tree.num_nodes))
        matchers = [
            None if sequence is None else self._matcher(sequence, first_tokens.get(row, []))
            for row, sequence in zip(rows, sequences, strict=True)
        ]
        words = self.programs.all_tokens().size
        masks, errors = tree_masks(matchers, tokens, parents, sizes, words)
        for place, error in errors.items():
            sequence = sequences[place]
            assert sequence is not None
            self._fail(sequence, error)
        return [run_verify(self.programs, drafted._replace(tree=tree), masks)]

    def _matcher(self, sequence: Sequence, new_tokens: list[int]) -> Matcher | None:
        """The matcher after all tokens of a request, the new ones too; None if it has ended, or its
        tokens do not match."""
        generation = generation_of(sequence)
        if generation.done or generation.grammar is None:
            return None
        try:
            tokens = [*sequence.tokens[sequence.prompt_length :], *new_tokens]
            return generation.grammar.follow(tokens)
        except GrammarError as error:
            self._fail(sequence, error)
            return None


class _Pending(NamedTuple):
    """A plan whose masked rows have trees, and its calls that read prompts."""

    plan: Plan
    reads: list[LaunchedCall]
    drafted: Drafted
