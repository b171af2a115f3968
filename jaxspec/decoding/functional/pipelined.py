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
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jaxspec.cache import CommittedPath, Geometry, ModelState
from jaxspec.config.speculation import TreeShape
from jaxspec.decoding.drafters.paged import causal_attend
from jaxspec.decoding.functional.constrained import draft_rows, one_round
from jaxspec.decoding.functional.params import EngineParams, Integers, on_mesh
from jaxspec.decoding.functional.prefill import next_tokens, read_chunk
from jaxspec.decoding.functional.refusals import refuse_rows, rows_to_decode
from jaxspec.decoding.functional.subset import choose_rows, put_chosen
from jaxspec.decoding.round import tree_attend, verify_tree
from jaxspec.decoding.round_options import Call
from jaxspec.decoding.state import Emitted, EngineState, Status
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.models import decoder
from jaxspec.models.pipeline_stage import Passage, Stage, captured_here, run_stage
from jaxspec.parallel import partition_specs
from pallas_kernels.selection import Kernels

Opened = tuple[DraftTree, Passage]  # a round's tree, and its nodes before the first stage


def open_round(
    params: EngineParams,
    state: EngineState,
    rows: Integers,
    *,
    shape: TreeShape | None = None,
    columns: int | None = None,
    greedy: bool = False,
    controls: bool = False,
    confidence: bool = False,
) -> tuple[EngineState, Opened]:
    """Draft a tree for rows [B]: as functional.draft, with the passage of its nodes.

    ``confidence``: as of decode; close_round emits it.
    """
    params.check(state, controls=controls)
    call = params.call(shape, greedy=greedy, controls=controls, confidence=confidence)
    function = functools.partial(_open_round, call, columns)
    return _with_found_specs(function, params, state, (jnp.asarray(rows, jnp.int32),))


def _open_round(
    call: Call, columns: int | None, params: EngineParams, state: EngineState, rows: Array
) -> tuple[EngineState, Opened]:
    after, tree = draft_rows(call, columns, params, state, rows)
    chosen, _ = choose_rows(params, after, rows, columns)
    attend = tree_attend(rows_to_decode(call, chosen), tree, call)
    return after, (tree, decoder.enter(params.target, tree.tokens, attend))


def close_round(
    params: EngineParams,
    state: EngineState,
    tree: DraftTree,
    passage: Passage,
    rows: Integers,
    masks: Array | None = None,
    *,
    shape: TreeShape | None = None,
    columns: int | None = None,
    greedy: bool = False,
    controls: bool = False,
    logprobs: bool = False,
    top_logprobs: int = 0,
    trees: bool = False,
) -> tuple[EngineState, tuple[Emitted, CommittedPath]]:
    """Verify the trees of open_round, with their passage after the last stage, and commit.

    The arguments are those of functional.verify_drafts; ``masks`` None: no restriction.

    Returns the state, what the rows emitted, and the path for commit_stage.
    """
    params.check(state, controls=controls)
    call = params.call(
        shape,
        greedy=greedy,
        controls=controls,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        trees=trees,
    )
    function = functools.partial(_close_round, call, columns)
    arguments = tree, passage, jnp.asarray(rows, jnp.int32), masks
    return _with_found_specs(function, params, state, arguments)


def _close_round(
    call: Call,
    columns: int | None,
    params: EngineParams,
    state: EngineState,
    tree: DraftTree,
    passage: Passage,
    rows: Array,
    masks: Array | None,
) -> tuple[EngineState, tuple[Emitted, CommittedPath]]:
    chosen, index = choose_rows(params, state, rows, columns)
    after, output = verify_tree(
        params.target, params.drafter, call, chosen, tree, masks, before=passage
    )
    emitted = one_round(after, output)
    after, emitted = put_chosen(params, state, rows, index, after, emitted)
    return after, (emitted, output.committed)


def open_read(
    params: EngineParams,
    state: EngineState,
    rows: Integers,
    counts: Integers,
    offset: ArrayLike,
    *,
    width: int,
    columns: int | None = None,
    order_invariant: bool = False,
) -> Passage:
    """The passage of the next prompt tokens of rows [B], ``offset`` tokens after those that were
    read; the state stays as it is. The other arguments are those of prefill."""
    params.check(state)
    function = functools.partial(_open_read, params.call(order_invariant=order_invariant), width)
    function = functools.partial(function, columns)
    arguments = (jnp.asarray(rows, jnp.int32), jnp.asarray(counts, jnp.int32), jnp.asarray(offset))
    return _with_found_specs(function, params, state, arguments)[1]


def _open_read(
    call: Call,
    width: int,
    columns: int | None,
    params: EngineParams,
    state: EngineState,
    rows: Array,
    counts: Array,
    offset: Array,
) -> tuple[EngineState, Passage]:
    chosen, _ = choose_rows(params, state, rows, columns)
    later = chosen.rows.replace(context_lens=chosen.rows.context_lens + offset)
    chosen = chosen.replace(rows=later)
    run, _ = next_tokens(chosen, width, counts)
    attend = causal_attend(chosen, run, order_invariant=call.order_invariant)
    return state, decoder.enter(params.target, run.tokens, attend)


def close_read(
    params: EngineParams,
    state: EngineState,
    passage: Passage,
    rows: Integers,
    counts: Integers,
    masks: Array | None = None,
    *,
    width: int,
    columns: int | None = None,
    greedy: bool = False,
    controls: bool = False,
    logprobs: bool = False,
    top_logprobs: int = 0,
    prompt_logprobs: bool = False,
    order_invariant: bool = False,
) -> tuple[EngineState, Emitted]:
    """Finish the read whose passage left the last stage. The arguments are those of prefill."""
    params.check(state, controls=controls)
    call = params.call(
        greedy=greedy,
        controls=controls,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
        order_invariant=order_invariant,
    )
    function = functools.partial(_close_read, call, width, columns)
    arguments = passage, jnp.asarray(rows, jnp.int32), jnp.asarray(counts, jnp.int32), masks
    return _with_found_specs(function, params, state, arguments)


def _close_read(
    call: Call,
    width: int,
    columns: int | None,
    params: EngineParams,
    state: EngineState,
    passage: Passage,
    rows: Array,
    counts: Array,
    masks: Array | None,
) -> tuple[EngineState, Emitted]:
    chosen, index = choose_rows(params, state, rows, columns)
    chosen = refuse_rows(call, chosen, Status.READING)
    read, emitted = read_chunk(call, width, params, chosen, counts, masks, passage)
    return put_chosen(params, state, rows, index, read, emitted)


def _with_found_specs(
    function: Callable[..., Any], params: EngineParams, state: EngineState, arguments: tuple
) -> Any:
    """on_mesh, where the function decides the structure of its second result."""
    specs = partition_specs(arguments, params.layout)
    run = functools.partial(on_mesh, function, params, state, arguments, specs)
    if params.mesh is None:
        return run(None)
    _, structure = jax.eval_shape(lambda: run(P()))  # one spec for all serves to see it
    return run(partition_specs(structure, params.layout))


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
    apart: bool = False,
) -> tuple[ModelState, Passage]:
    """A stage's part of a round or a read; see models.stages.run_stage."""

    def run(stage: Stage, states: ModelState, passage: Passage) -> tuple[ModelState, Passage]:
        layers, after = run_stage(
            stage, states.layers, passage, capture, kernels, isolate_blocks=apart
        )
        return states.replace(layers=layers), after

    captured = (*passage.captured, *captured_here(stage, capture))
    after = passage.replace(captured=captured)
    return _on_stage(run, stage, states, (passage,), after)


def commit_stage(
    stage: Stage, states: ModelState, path: CommittedPath, *, kernels: Kernels
) -> ModelState:
    """Keep the accepted nodes of a round in the states of a stage."""

    def run(stage: Stage, states: ModelState, path: CommittedPath) -> ModelState:
        return states.commit(path, kernels)

    return _on_stage(run, stage, states, (path,))


def reset_stage(stage: Stage, states: ModelState, rows: Array) -> ModelState:
    """Clear what the states of a stage hold of rows [B]; indices out of range are ignored."""
    return _on_stage(lambda _, states, rows: states.reset(rows), stage, states, (rows,))


def copy_stage_pages(
    stage: Stage, states: ModelState, source: Array, destination: Array
) -> ModelState:
    """As functional.copy_pages, in the states of a stage."""

    def run(stage: Stage, states: ModelState, source: Array, destination: Array) -> ModelState:
        none = jnp.zeros(0, jnp.int32)  # no rows
        return states.put(states.take(source, none), destination, none)

    return _on_stage(run, stage, states, (source, destination))


def save_from_stage(
    stage: Stage, states: ModelState, row: Array, pages: Array
) -> tuple[ModelState, ModelState]:
    """The states as they are, and what they hold of a row [1] and its pages [n]."""

    def run(stage: Stage, states: ModelState, row: Array, pages: Array) -> Any:
        return states, states.take(pages, row)

    return _on_stage(run, stage, states, (row, pages), states)


def restore_to_stage(
    stage: Stage, states: ModelState, saved: ModelState, row: Array, pages: Array
) -> ModelState:
    """Put what save_from_stage returned into a row [1] and pages [n]."""

    def run(stage: Stage, states: ModelState, saved: ModelState, row: Array, pages: Array) -> Any:
        return states.put(saved, pages, row)

    return _on_stage(run, stage, states, (saved, row, pages))


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
