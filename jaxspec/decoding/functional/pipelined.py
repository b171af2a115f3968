"""Rounds and reads of a pipeline, cut where the tokens leave the decoder for the other stages.

``open_round`` drafts and gives the passage of a tree's nodes. It visits the stages (``pass_stage``,
each a program on the stage's own devices) and ``close_round`` verifies and commits; the stages
commit the same path (``commit_stage``). Together they are one round of ``decode``. ``open_read``
and ``close_read`` read a chunk of prompts likewise.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from jaxspec.cache import CommittedPath, Geometry, ModelState
from jaxspec.decoding.drafters.paged import causal_attend
from jaxspec.decoding.functional.constrained import draft_shard, verify_shard
from jaxspec.decoding.functional.params import EngineParams, with_found_specs
from jaxspec.decoding.functional.prefill import next_tokens, read_shard
from jaxspec.decoding.functional.refusals import rows_to_decode
from jaxspec.decoding.functional.subset import choose_rows
from jaxspec.decoding.round import tree_attend
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import Emitted, EngineState
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.models import decoder
from jaxspec.models.pipeline_stage import Passage, Stage, captured_here, run_stage
from jaxspec.parallel import partition_specs
from pallas_kernels.selection import Kernels

Opened = tuple[DraftTree, Passage]  # a round's tree, and its nodes before the first stage


def open_round(
    params: EngineParams, state: EngineState, options: RoundOptions, rows: Array
) -> tuple[EngineState, Opened]:
    """Draft trees for rows [B]: functional.draft, with the passage of their nodes."""
    return _on_last_stage(_open_round, options, params, state, (rows,))


def _open_round(
    options: RoundOptions, params: EngineParams, state: EngineState, rows: Array
) -> tuple[EngineState, Opened]:
    after, tree = draft_shard(options, params, state, rows)
    chosen, _ = choose_rows(params, after, rows, options.columns)
    attend = tree_attend(rows_to_decode(options, chosen), tree, options)
    return after, (tree, decoder.enter(params.target, tree.tokens, attend))


def close_round(
    params: EngineParams,
    state: EngineState,
    options: RoundOptions,
    rows: Array,
    opened: Opened,
    masks: Array | None = None,
) -> tuple[EngineState, tuple[Emitted, CommittedPath | None]]:
    """Verify the trees of open_round, with their passage after the last stage, and commit.

    ``masks`` are those of functional.verify_drafts; None: no restriction.

    Returns the state, what the rows emitted, and the path for commit_stage.
    """
    return _on_last_stage(_close_round, options, params, state, (rows, opened, masks))


def _close_round(
    options: RoundOptions,
    params: EngineParams,
    state: EngineState,
    rows: Array,
    opened: Opened,
    masks: Array | None,
) -> tuple[EngineState, tuple[Emitted, CommittedPath | None]]:
    tree, passage = opened
    return verify_shard(options, params, state, rows, tree, masks, passage)


def open_read(
    params: EngineParams,
    state: EngineState,
    options: RoundOptions,
    rows: Array,
    counts: Array,
    offset: Array,
) -> Passage:
    """The passage of the next prompt tokens of rows [B], ``offset`` (int32 []) tokens after those
    that were read, at most ``counts`` [B] each; the state stays as it is."""
    return _on_last_stage(_open_read, options, params, state, (rows, counts, offset))[1]


def _open_read(
    options: RoundOptions,
    params: EngineParams,
    state: EngineState,
    rows: Array,
    counts: Array,
    offset: Array,
) -> tuple[EngineState, Passage]:
    chosen, _ = choose_rows(params, state, rows, options.columns)
    later = chosen.rows.replace(context_lens=chosen.rows.context_lens + offset)
    chosen = chosen.replace(rows=later)
    run, _ = next_tokens(chosen, options.width, counts)
    attend = causal_attend(chosen, run, order_invariant=options.order_invariant)
    return state, decoder.enter(params.target, run.tokens, attend)


def close_read(
    params: EngineParams,
    state: EngineState,
    options: RoundOptions,
    rows: Array,
    counts: Array,
    passage: Passage,
    masks: Array | None = None,
) -> tuple[EngineState, Emitted]:
    """Finish the read whose passage left the last stage; ``masks`` are those of prefill."""
    return _on_last_stage(read_shard, options, params, state, (rows, counts, masks, passage))


def _on_last_stage(
    function: Callable[..., Any],
    options: RoundOptions,
    params: EngineParams,
    state: EngineState,
    arguments: tuple[Any, ...],
) -> Any:
    """``function(options, params, state, *arguments)``, on each of the last stage's devices."""
    params.check(state, controls=options.controls)
    specs = partition_specs(arguments, params.layout)
    return with_found_specs(functools.partial(function, options), params, state, arguments, specs)


# On the devices of a stage.


def init_stage(stage: Stage, num_pages: int, page_size: int, num_rows: int) -> ModelState:
    """Empty states of a stage's layers; the sizes are those of functional.init_pool."""
    return stage.init_state(Geometry(num_pages, page_size, num_rows, stage.mesh))


def pass_stage(
    stage: Stage,
    states: ModelState,
    passage: Passage,
    *,
    capture: tuple[int, ...],
    kernels: Kernels,
    isolate_blocks: bool = False,
) -> tuple[ModelState, Passage]:
    """A stage's part of a round or a read; see models.pipeline_stage.run_stage."""

    def run(stage: Stage, states: ModelState, passage: Passage) -> tuple[ModelState, Passage]:
        layers, after = run_stage(
            stage, states.layers, passage, capture, kernels, isolate_blocks=isolate_blocks
        )
        return states.replace(layers=layers), after

    captured = (*passage.captured, *captured_here(stage, capture))
    after = passage.replace(captured=captured)
    return _on_stage(run, stage, states, (passage,), after)


def commit_stage(
    stage: Stage, states: ModelState, path: CommittedPath, *, kernels: Kernels
) -> ModelState:
    """Keep the accepted nodes of a round in the states of a stage."""
    return _on_stage(lambda _, states, path: states.commit(path, kernels), stage, states, (path,))


def reset_stage(stage: Stage, states: ModelState, rows: Array) -> ModelState:
    """Clear what the states of a stage hold of rows [B]; indices out of range are ignored."""
    return _on_stage(lambda _, states, rows: states.reset(rows), stage, states, (rows,))


def copy_stage_pages(
    stage: Stage, states: ModelState, source: Array, destination: Array
) -> ModelState:
    """Does what functional.copy_pages does, in the states of a stage."""
    pages = source, destination
    return _on_stage(lambda _, states, *pages: states.with_copies(*pages), stage, states, pages)


def save_from_stage(
    stage: Stage, states: ModelState, row: Array, pages: Array
) -> tuple[ModelState, ModelState]:
    """The states as they are, and what they hold of a row [1] and its pages [n]."""

    def run(_: Stage, states: ModelState, row: Array, pages: Array) -> Any:
        return states, states.take(pages, row)

    return _on_stage(run, stage, states, (row, pages), states)


def restore_to_stage(
    stage: Stage, states: ModelState, saved: ModelState, row: Array, pages: Array
) -> ModelState:
    """Put what save_from_stage returned into a row [1] and pages [n]."""
    place = saved, pages, row
    return _on_stage(lambda _, states, *place: states.put(*place), stage, states, place)


def _on_stage(
    function: Callable[..., Any],
    stage: Stage,
    states: ModelState,
    arguments: tuple[Any, ...],
    like: Any = None,
) -> Any:
    """Call ``function(stage, states, *arguments)`` on each of the stage's devices.

    ``like``: a tree with the structure of the second result; None: there is none.
    """
    specs = partition_specs(states, stage.layout)
    outputs = specs if like is None else (specs, partition_specs(like, stage.layout))
    sharded = jax.shard_map(
        function,
        mesh=stage.mesh,
        in_specs=(partition_specs(stage), specs, *partition_specs(arguments, stage.layout)),
        out_specs=outputs,
        check_vma=False,
    )
    return sharded(stage, states, *arguments)
