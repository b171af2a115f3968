"""The programs of an engine whose model is a pipeline of stages.

Each stage's devices run programs of their own, which the host launches in the order in which they
can run. Rows are read and decoded in groups, so that every stage has work while others have theirs:
while the last stage drafts for one group, the stages before verify another. The last stage has the
rows, the drafter, embeddings and LM head, and the last layers, if any: with none, it is the
drafter's own group of devices. Every device runs its programs in the order they were launched, so
nothing is waited for.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.cache import ModelState
from jaxspec.decoding.functional import EngineParams, SavedRow, pipelined
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import Emitted, EngineState
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.engine.programs.pipeline.results import joined_reads, joined_rounds
from jaxspec.engine.programs.pipeline.stage_programs import StagePrograms
from jaxspec.engine.programs.pipeline.use import PipelineUse
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.programs.sizes import RoundsKey, Sizes
from jaxspec.engine.programs.xla_options import compiler_options, passage_options
from jaxspec.models.pipeline_stage import Passage

LEAST_PIECE = 128  # prompt tokens of a row that are worth a pass of their own


class OpenRound(NamedTuple):
    """The trees of a group of rows, on their way through the stages."""

    tree: DraftTree
    passage: Passage

    @property
    def tokens(self) -> jax.Array:
        return self.tree.tokens

    @property
    def parents(self) -> jax.Array:
        return self.tree.parents

    @property
    def num_nodes(self) -> jax.Array:
        return self.tree.num_nodes


class SavedParts(NamedTuple):
    """A row of all stages, see functional.save_row."""

    last: SavedRow
    stages: tuple[ModelState, ...]


class Composed:
    """Programs of all stages, called as the one program of Programs whose place they take."""

    def __init__(self, run: Callable[..., Any], *programs: Any):
        self._run, self._programs = run, programs

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._run(*arguments, **options)

    def clear_cache(self) -> None:
        for program in self._programs:
            program.clear_cache()


class PipelinePrograms(Programs):
    """Programs that visit the stages before the last.

    Attributes:
      stages: those before the last.
    """

    compiles_early = compiles_beside = False

    def __init__(self, params: EngineParams, sizes: Sizes, max_programs: int):
        super().__init__(params, sizes, max_programs)
        self.stages = [StagePrograms(stage, params, sizes) for stage in self.params.stages]
        self.params = self.params.last_stage
        self.pipeline = self._use = PipelineUse(len(self.stages) + 1)
        fixed = params.speculation.verify_width is not None
        xla = functools.partial(compiler_options, params.target.embed, deterministic=fixed)
        whole = passage_options(params.target.embed)
        jit = functools.partial(jax.jit, compiler_options=xla() | whole)
        run = functools.partial(jit, static_argnums=2)  # of (params, state, RoundOptions, ...)
        reads = functools.partial(run, compiler_options=xla(reads=True) | whole)
        self.open_round = run(pipelined.open_round, donate_argnums=1)
        self.close_round = run(pipelined.close_round, donate_argnums=1)
        self.open_read = reads(pipelined.open_read)
        self.close_read = reads(pipelined.close_read, donate_argnums=1)
        self._join = jit(joined_rounds)
        self._join_reads = jit(joined_reads, static_argnames="width")
        last = dict(self.small) | {"admit": self.admit_rows}
        self.admit_rows = Composed(functools.partial(self._admit_all, last["admit"]), last["admit"])
        self.prefill = Composed(self._run_reads, self.open_read, self.close_read, *self.stages)
        parts = self.open_round, self.close_round, self._join, self._join_reads
        self.decode = Composed(self._run_rounds, *parts)
        self.draft, self.verify = Composed(self._run_draft), Composed(self._run_verify)
        for name, on_all_stages in (
            ("copy_pages", self._copy_all),
            ("save_row", self._save_all),
            ("restore_row", self._restore_all),
        ):
            self.small[name] = Composed(functools.partial(on_all_stages, last[name]), last[name])

    def check_weights(self, params: EngineParams) -> None:
        if params.target is not self.params.target:
            raise ValueError("a pipeline cannot replace its target's weights: make a new engine")

    def reset(self) -> None:
        super().reset()
        for stage in self.stages:
            stage.restart()

    # Rounds.

    def _run_rounds(
        self,
        params: EngineParams,
        state: EngineState,
        options: RoundOptions,
        limit: Any,
        rows: np.ndarray,
    ) -> tuple[EngineState, Emitted]:
        """Do what decode_rows does, without its check that prompts were read."""
        assert not options.checked
        groups, places = self._groups(rows)
        rounds = options.max_rounds if options.fixed else int(limit)
        opened, emitted = {}, [[] for _ in groups]
        for index, group in enumerate(groups):
            state, opened[index] = self._run_draft(params, state, options, group)
        for later in reversed(range(rounds)):
            for index, group in enumerate(groups):
                state, output = self._run_verify(params, state, options, group, opened[index])
                emitted[index].append(output)
                if later:
                    state, opened[index] = self._run_draft(params, state, options, group)
        if (rows < self.sizes.num_rows).any():  # else a program was compiled
            self._use.add(len(groups), rounds)
        return state, self._join(self._for_all_groups(emitted), places)

    def _for_all_groups(self, emitted: list[list[Emitted]]) -> list[list[Emitted]]:
        """The lists with an entry for each group that was left out, so that one program joins any
        number of groups."""
        return [*emitted, *[emitted[-1]] * (len(self.stages) + 1 - len(emitted))]

    def _groups(self, rows: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Groups of rows [B] for the stages to work on in turn, all of one size, without those that
        are padding only; and the place of each of the B rows in the groups, one after the other."""
        count = len(self.stages) + 1
        size = -(-len(rows) // count)
        padded = np.append(rows, np.full(size * count - len(rows), self.sizes.num_rows, np.int32))
        order = padded.reshape(size, count).T  # rows come first, padding last
        kept = (order < self.sizes.num_rows).any(axis=1)
        kept[0] = True  # a program that is compiled runs on nothing
        index = np.arange(len(rows))
        group = np.maximum(np.cumsum(kept)[index % count] - 1, 0)  # of padding: any
        return list(order[kept]), (group * size + index // count).astype(np.int32)

    def _run_draft(
        self, params: EngineParams, state: EngineState, options: RoundOptions, rows: np.ndarray
    ) -> tuple[EngineState, OpenRound]:
        """Do what draft_rows does; the trees then visit the stages."""
        state, (tree, passage) = self.open_round(params, state, options, rows)
        for stage in self.stages:
            passage = stage(stage.run_round, passage)
        return state, OpenRound(tree, self._on_last_stage(passage))

    def _run_verify(
        self,
        params: EngineParams,
        state: EngineState,
        options: RoundOptions,
        rows: np.ndarray,
        opened: OpenRound,
        masks: np.ndarray | None = None,
    ) -> tuple[EngineState, Emitted]:
        """Do what verify_rows does; ``masks`` None: no restriction."""
        state, (emitted, path) = self.close_round(
            params, state, options, rows, tuple(opened), masks
        )
        for stage in self.stages:
            stage.commit_path(path)
        return state, emitted

    def stage_seconds(self, key: RoundsKey, rows: Sequence[int], rounds: int) -> list[float]:
        """Seconds that each stage takes for a round of a group of rows that decode, alone.

        For measurements: each stage's programs are launched ``rounds`` times, one after the other,
        the last stage's with the same results of the stages before. So what is generated has no
        meaning.
        """
        params, options = self.params, self.options(key)
        [group, *_], _ = self._groups(self.sizes.listed(rows, key.rows))
        state, (tree, passage) = self.open_round(params, self.state, options, group)
        seconds, after = [], passage
        for stage in self.stages:
            passage = jax.block_until_ready(stage.placed(passage))
            started = time.perf_counter()
            for _ in range(rounds):
                after = stage(stage.run_round, passage)
            passage = jax.block_until_ready(after)
            seconds.append((time.perf_counter() - started) / rounds)
        opened = jax.block_until_ready(OpenRound(tree, self._on_last_stage(passage)))
        started = time.perf_counter()
        for _ in range(rounds):
            state, _ = self._run_verify(params, state, options, group, opened)
            state, (tree, _) = self.open_round(params, state, options, group)
            opened = opened._replace(tree=tree)
        self.state = jax.block_until_ready(state)
        return [*seconds, (time.perf_counter() - started) / rounds]

    def _on_last_stage(self, passage: Passage) -> Passage:
        """The passage on the last stage's devices. How it attends is known there."""
        mesh, embed = self.params.mesh, self.params.target.embed
        place = embed.sharding if mesh is None else NamedSharding(mesh, P())
        return passage.replace(states=jax.device_put(passage.states, place), tokens=None)

    # Reads.

    def _run_reads(
        self,
        params: EngineParams,
        state: EngineState,
        options: RoundOptions,
        rows: np.ndarray,
        counts: np.ndarray,
        masks: np.ndarray | None = None,
    ) -> tuple[EngineState, Emitted]:
        """Do what read_rows does. The tokens of a single row are read in pieces, in order."""
        groups, places = self._groups(rows)
        by_row = dict(zip(rows.tolist(), counts.tolist(), strict=True))
        limits = [np.array([by_row.get(row, 0) for row in g.tolist()], np.int32) for g in groups]
        opened = self._open_reads(params, state, options, groups, limits)
        allowed = {} if masks is None else dict(zip(rows.tolist(), masks, strict=True))
        emitted: list[list[Emitted]] = []
        for group, pieces in zip(groups, opened, strict=True):
            listed = None
            if masks is not None:
                listed = [allowed.get(row, self.all_tokens()) for row in group.tolist()]
                listed = np.stack(listed)
            outputs: list[Emitted] = []
            for part, width, passage in pieces:
                whole = dataclasses.replace(options, width=width)
                state, output = self.close_read(params, state, whole, group, part, passage, listed)
                if output.prompt is None:
                    outputs.clear()  # the last piece has the row's token
                outputs.append(output)
            emitted.append(outputs)
        every = self._for_all_groups(emitted)
        return state, self._join_reads(every, places, width=options.width)

    def _open_reads(
        self,
        params: EngineParams,
        state: EngineState,
        options: RoundOptions,
        groups: list[np.ndarray],
        limits: list[np.ndarray],
    ) -> list[list[tuple[np.ndarray, int, Passage]]]:
        """Send the next ``limits`` prompt tokens of each group's rows through the stages.

        Returns the pieces of each group: tokens of each row, the program's width, and the passage.
        """
        # Programs that open a read do not depend on what the rows ask for.
        plain = RoundOptions(
            options.speculation,
            options.kernels,
            columns=options.columns,
            order_invariant=options.order_invariant,
        )
        opened: list[list[tuple[np.ndarray, int, Passage]]] = []
        for group, most in zip(groups, limits, strict=True):
            width = self._piece(options.width, single=len(groups) == 1 and len(group) == 1)
            opening, pieces = dataclasses.replace(plain, width=width), []
            for start in range(0, max(1, int(most.max())), width):
                part = np.clip(most - start, 0, width)
                passage = self.open_read(params, state, opening, group, part, np.int32(start))
                for stage in self.stages:
                    passage = stage(stage.run_read, passage)
                pieces.append((part, width, self._on_last_stage(passage)))
            opened.append(pieces)
        return opened

    def _piece(self, width: int, *, single: bool) -> int:
        """Tokens of a row that travel together: a part of a single row's."""
        if not single or width < 2 * LEAST_PIECE:
            return width
        return max(LEAST_PIECE, width // (2 * (len(self.stages) + 1)))

    # What rows hold.

    def _admit_all(
        self,
        admit: Any,
        params: EngineParams,
        state: EngineState,
        rows: Any,
        *rest: Any,
        **options: Any,
    ) -> EngineState:
        for stage in self.stages:
            stage(stage.reset_rows, rows)
        return admit(params, state, rows, *rest, **options)

    def _copy_all(
        self, copy: Any, params: EngineParams, state: EngineState, *pages: np.ndarray
    ) -> EngineState:
        for stage in self.stages:
            stage(stage.copy_pages, *pages)
        return copy(params, state, *pages)

    def _save_all(
        self, save: Any, params: EngineParams, state: EngineState, *place: np.ndarray
    ) -> tuple[EngineState, SavedParts]:
        parts = tuple(stage(stage.save, *place) for stage in self.stages)
        state, last = save(params, state, *place)
        return state, SavedParts(last, parts)

    def _restore_all(
        self,
        restore: Any,
        params: EngineParams,
        state: EngineState,
        saved: SavedParts,
        row: np.ndarray,
        pages: np.ndarray,
        table: np.ndarray,
    ) -> EngineState:
        for stage, part in zip(self.stages, saved.stages, strict=True):
            stage(stage.restore, part, row, pages)
        return restore(params, state, saved.last, row, pages, table)


def single_process_programs(params: EngineParams, sizes: Sizes, max_programs: int) -> Programs:
    """The programs of an engine of one process."""
    kind = PipelinePrograms if params.stages else Programs
    return kind(params, sizes, max_programs)
