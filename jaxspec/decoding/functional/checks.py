"""Checks of what callers of the pure functions give: every fault is told, in their words.

Shapes and dtypes are always checked. Values are checked where they are known: not in a caller's
``jit`` or ``vmap``, where rows end with an error instead (see state.Ending). The programs of an
engine are traced, so nothing here reads from a device while it serves.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxspec.config.checks import first_of
from jaxspec.decoding.functional.params import EngineParams
from jaxspec.decoding.sampling import Sampling
from jaxspec.decoding.state import EngineState, Status
from jaxspec.models.decoder import Decoder
from jaxspec.parallel import mesh_layout
from jaxspec.parallel.array_checks import ArrayProblems, Integers, integers, known

PADDING = -1  # an index of no row
MOST_SHOWN = 4  # rows or values that an error lists
BUSY = (Status.READING, Status.DECODING)


def check_params(params: EngineParams) -> None:
    """Raise ValueError for what cannot make a state."""
    if not isinstance(params, EngineParams):
        raise ValueError(f"params must be EngineParams, as jaxspec.load gives, not {_kind(params)}")
    if not isinstance(params.target, Decoder):
        raise ValueError(
            f"params.target must be a Decoder, not {_kind(params.target)}: put your function into "
            "a layer's mixer (docs/extending.md)"
        )
    if params.mesh is not None and params.target.layout != mesh_layout(params.mesh):
        raise ValueError(
            "params.target is not split as params.mesh says: load it with jaxspec.load(mesh=mesh)"
        )


def check_state(params: EngineParams, state: EngineState, *, controls: bool = False) -> None:
    """Raise ValueError for what is not parameters and a state made with them."""
    found = (isinstance(params, EngineParams), isinstance(state, EngineState))
    if not all(found):
        swapped = isinstance(params, EngineState) and isinstance(state, EngineParams)
        cure = "swap them" if swapped else "see jaxspec.load and jaxspec.init_state"
        raise ValueError(
            "the first arguments must be params and state, EngineParams and EngineState, not "
            f"{_kind(params)} and {_kind(state)}: {cure}"
        )
    params.check(state, controls=controls)


def _kind(value: Any) -> str:
    if callable(value) and hasattr(value, "__name__"):
        return f"the function or class {value.__name__}"
    return type(value).__name__


def check_rows(rows: Integers, num_rows: int) -> Array | np.ndarray:
    """Row indices [B] as integers.

    Raises ValueError for indices that are neither rows nor padding, for a row that is listed twice,
    and for padding alone.
    """
    array = integers("rows", rows, "[B]")
    values, problems = known(array), ArrayProblems()
    if values is not None:
        _check_indices(problems, values, num_rows)
    problems.raise_all()
    return array


def _check_indices(problems: ArrayProblems, values: np.ndarray, num_rows: int) -> None:
    """Values of row indices; see check_rows."""
    rule = f"the state has rows 0 to {num_rows - 1}, and {PADDING} is padding"
    problems.within("rows", values, lambda x: (x >= PADDING) & (x < num_rows), rule)
    listed, times = np.unique(values[values != PADDING], return_counts=True)
    if (times > 1).any():
        problems.add(f"rows lists row {listed[times > 1][0]} twice: list each once")
    if not len(listed):
        problems.add("rows lists no row, only padding")


def check_order(state: EngineState, rows: Integers | None, *, decodes: bool = False) -> None:
    """Raise ValueError for a call that can do nothing for its rows: none has a prompt, or, if it
    ``decodes``, none has read all of it and some have not. Traced states are not checked."""
    all_rows, index = state.rows, None if rows is None else known(rows)
    fields = [known(x) for x in (all_rows.status, all_rows.context_lens, all_rows.prompt_lens)]
    if any(field is None for field in fields) or (rows is not None and index is None):
        return
    numbers = np.arange(len(all_rows.status)) if index is None else index[index != PADDING]
    status, read, lens = (np.asarray(field)[numbers] for field in fields)
    if (status == Status.EMPTY).all():
        raise ValueError("no row of this call has a prompt: admit first")
    reading = status == Status.READING
    if decodes and reading.any() and not (status == Status.DECODING).any():
        pairs = zip(numbers[reading], read[reading], lens[reading], strict=True)
        unread = [f"row {row} has read {some} of {most} prompt tokens" for row, some, most in pairs]
        raise ValueError(f"{first_of(unread, MOST_SHOWN)}: call prefill again, or prefill_all")


def check_policy(policy_logprobs: bool, **changes: bool) -> None:
    """Raise ValueError for log-probabilities of a policy beside what changes logits otherwise than
    its temperature and truncation do."""
    found = [name for name, used in changes.items() if used]
    if policy_logprobs and found:
        raise ValueError(
            f"policy_logprobs cannot be with {found[0]}: they are of temperature, top-k, top-p and "
            "min-p alone"
        )


def check_sizes(**sizes: int | None) -> None:
    """Raise ValueError for sizes of a call's program, each an int of at least 1 or None."""
    problems = ArrayProblems()
    for name, value in sizes.items():
        if value is not None:
            problems.whole(name, value, 1)
    problems.raise_all()


def check_counts(counts: Integers, batch: int, width: int) -> None:
    """Raise ValueError for what cannot be tokens to read of each row [B]."""
    array, problems = integers("counts", counts, "[B]"), ArrayProblems()
    if len(array) != batch:
        raise ValueError(f"counts has {len(array)} entries for {batch} rows: give one for each")
    rule = f"it must be 0 to width, {width}"
    problems.within("counts", array, lambda x: (x >= 0) & (x <= width), rule)
    problems.raise_all()


def check_admission(
    params: EngineParams, state: EngineState, rows: Array | np.ndarray, arrived: dict[str, Any]
) -> None:
    """Raise ValueError for what check_rows refuses, and what the rows cannot be given; ``arrived``
    are the arrays of admit.

    Values of padding are not checked.
    """
    problems, present = ArrayProblems(), state.rows
    batch, length = rows.shape[0], present.tokens.shape[1]
    _check_shapes(problems, arrived, batch, present.page_table.shape[1])
    problems.raise_all()
    index = known(rows)
    if index is None:
        return
    num_rows = present.status.shape[0]
    _check_indices(problems, index, num_rows)
    places = np.flatnonzero(index != PADDING)
    status = known(present.status)
    if status is not None:
        listed = [row for row in index[places].tolist() if 0 <= row < num_rows]
        busy = [row for row in listed if status[row] in BUSY]
        names = [f"row {row} is {Status(int(status[row])).name}" for row in busy]
        if busy:
            shown = first_of(names, MOST_SHOWN)
            problems.add(f"{shown}: release it, or admit to another")

    def check(name: str, is_ok: Callable[[np.ndarray], Any], rule: str) -> None:
        values = None if arrived[name] is None else known(arrived[name])
        if values is not None:
            wanted = np.isin(np.arange(batch), places)
            wanted = wanted.reshape(-1, *(1,) * (values.ndim - 1))
            problems.within(name, values, lambda x: is_ok(x) | ~wanted, rule)

    width, vocab = arrived["prompts"].shape[1], params.target.config.vocab_size
    most = min(width, length - 1)
    check(
        "prompt_lens",
        lambda x: (x >= 1) & (x <= most),
        f"it must be 1 to {most}, as prompts has {width} columns and a row {length} tokens, the "
        "first generated one included",
    )
    lens = known(arrived["prompt_lens"])
    if lens is not None:
        inside = np.arange(width) < lens[:, None]
        rule = f"token ids are 0 to {vocab - 1}"
        check("prompts", lambda x: (x >= 0) & (x < vocab) | ~inside, rule)
        rule = "it must be 0 to the row's prompt_lens"
        check("cached_lens", lambda x: (x >= 0) & (x <= lens), rule)
    rule = f"it must be 1 to {length}, the max_length of the state"
    check("max_lens", lambda x: (x >= 1) & (x <= length), rule)
    rule = f"it must be a token id, 0 to {vocab - 1}, or -1 as padding"
    check("stop_token_ids", lambda x: (x >= -1) & (x < vocab), rule)
    pages = state.pool.num_pages // params.data_parallel
    check("page_table", lambda x: (x >= 0) & (x < pages), f"pages are 0 to {pages - 1}")
    problems.raise_all()


def _check_shapes(
    problems: ArrayProblems, arrived: dict[str, Any], batch: int, columns: int
) -> None:
    """The shapes of the arrays of admit, and the size of its sampling."""
    for name in ("prompts", "prompt_lens", "max_lens", "cached_lens", "stop_token_ids"):
        array = arrived[name]
        if array is not None and len(array) != batch:
            cure = ": give one for each of rows"
            problems.add(f"{name} has {len(array)} entries, rows has {batch}{cure}")
    table, sampling = arrived["page_table"], arrived["sampling"]
    if table is not None and tuple(table.shape) != (batch, columns):
        problems.add(
            f"a page_table for {batch} rows must be {[batch, columns]}, not {list(table.shape)}"
        )
    if not isinstance(sampling, Sampling):
        problems.add(f"sampling must be what make_sampling gives, not {_kind(sampling)}")
        return
    sizes = {leaf.shape for leaf in jax.tree.leaves(sampling)}
    if sizes != {(batch,)}:
        shown = sorted(map(list, sizes - {(batch,)}))[0]
        problems.add(f"sampling has shape {shown} for {batch} rows: make_sampling({batch}, ...)")


def check_table(params: EngineParams, state: EngineState, table: Array, batch: int) -> None:
    """Raise ValueError for what cannot be the page tables of ``batch`` rows."""
    wanted = (batch, state.rows.page_table.shape[1])
    if table.shape != wanted:
        raise ValueError(
            f"a page_table for {batch} rows must be {list(wanted)}, not {list(table.shape)}"
        )
    check_pages(params, state, page_table=table)


def check_pages(params: EngineParams, state: EngineState, **arrays: Array) -> None:
    """Raise ValueError for pages that the pool, or a device's part of it, does not have."""
    problems, pages = ArrayProblems(), state.pool.num_pages // params.data_parallel
    for name, array in arrays.items():
        rule = f"pages are 0 to {pages - 1}"
        problems.within(name, array, lambda x: (x >= 0) & (x < pages), rule)
    problems.raise_all()


def check_rounds(num_rounds: Any, max_rounds: int | None) -> None:
    """Raise ValueError for a number of rounds that is no integer, negative, or more than
    ``max_rounds``."""
    check_sizes(max_rounds=max_rounds)
    array, problems = integers("num_rounds", num_rounds, "[]"), ArrayProblems()
    if max_rounds is None:
        if known(array) is None:
            raise ValueError("num_rounds is traced: give max_rounds, an int, as well")
        problems.within("num_rounds", array, lambda x: x >= 0, "it must be at least 0")
    else:
        rule = f"it must be 0 to max_rounds, {max_rounds}"
        problems.within("num_rounds", array, lambda x: (x >= 0) & (x <= max_rounds), rule)
    problems.raise_all()
