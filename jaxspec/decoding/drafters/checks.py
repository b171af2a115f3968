"""Checks of what a user's drafter is and returns, with errors that name the method.

They compare structures, shapes and dtypes, when a drafter is given and while a program is traced.
Nothing of them is left in compiled programs.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config.model import ModelConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters.base import (
    Drafter,
    DraftState,
    Proposed,
    StatelessDrafter,
    unchanged,
)
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.models.decoder import STREAMS, Decoder
from jaxspec.models.heads import BlockHead, DraftHead
from jaxspec.models.heads.assistant import Assistant
from jaxspec.parallel.pytree import array_text

_MEMBERS = [name for name in vars(Drafter) if not name.startswith("_")]


def check_drafter(drafter: object, name: str = "drafter") -> None:
    """Raise ValueError for what is no drafter: a class, an object without all methods and
    properties of Drafter, or one that is no pytree. ``name``: of the argument."""
    kind = drafter if isinstance(drafter, type) else type(drafter)
    if isinstance(drafter, type):
        raise ValueError(f"{name} is the class {kind.__name__}: give an object, {kind.__name__}()")
    if isinstance(drafter, Assistant):
        raise ValueError(f"{name} is an assistant: give AssistantDrafter(assistant=...)")
    if isinstance(drafter, DraftHead | BlockHead):
        wrapper = "EagleDrafter" if isinstance(drafter, DraftHead) else "BlockDrafter"
        raise ValueError(f"{name} is a draft head: give {wrapper}(head=...)")
    missing = [member for member in _MEMBERS if not _has(drafter, member)]
    if len(missing) == len(_MEMBERS):
        raise ValueError(
            f"{name} must be a name, a directory or an object with the methods of Drafter, such as "
            f"one of a subclass of StatelessDrafter that writes propose, got {kind.__name__}"
        )
    if missing:
        raise ValueError(
            f"{name} {kind.__name__} has no {', '.join(missing)}: write them, or subclass "
            "StatelessDrafter, which has all but propose"
        )
    if jax.tree_util.all_leaves([drafter]):
        raise ValueError(
            f"{name} {kind.__name__} is no pytree: put @pytree of jaxspec.parallel.pytree above "
            "the class"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(drafter):
        if not (hasattr(leaf, "dtype") or isinstance(leaf, int | float)):
            raise ValueError(
                f"{name} {kind.__name__}{jax.tree_util.keystr(path)} is {_described(leaf)}: give "
                "an object whose class is a pytree, or declare the field static()"
            )


def _check_capture(drafter: Drafter, config: ModelConfig) -> None:
    """Raise ValueError for hidden states that a target does not have."""
    asked, num_layers = tuple(drafter.capture), config.num_layers
    streams = {STREAMS} if config.has_streams else set[int]()
    if not {*asked} - streams <= {*range(-1, num_layers + 1)}:
        raise ValueError(
            f"{type(drafter).__name__}.capture is {asked}: the target has hidden states 0 to "
            f"{num_layers}, and -1, the one after the final norm"
        )


def _described(leaf: object) -> str:
    if isinstance(leaf, type):
        return f"the class {leaf.__name__}"
    return f"a {type(leaf).__name__}, which is no array"


def _has(drafter: object, member: str) -> bool:
    """Whether an object has a member of Drafter. Properties are not called."""
    found = inspect.getattr_static(drafter, member, None)
    if found is StatelessDrafter.propose:  # it only raises
        return False
    return found is not None and (_is_property(member) or callable(getattr(drafter, member)))


def _is_property(member: str) -> bool:
    return isinstance(vars(Drafter)[member], property)


def new_rows(drafter: Drafter, num_rows: int, target: Decoder, capacity: SpeculationConfig) -> Any:
    """What ``init_rows`` returns.

    Raises ValueError unless all arrays are [num_rows, ...], and if the target does not have the
    hidden states that the drafter captures.
    """
    _check_capture(drafter, target.config)
    rows = drafter.init_rows(num_rows, target, capacity)
    for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
        if jnp.shape(leaf)[:1] != (num_rows,):
            raise ValueError(
                f"{type(drafter).__name__}.init_rows must return arrays with an entry for each of "
                f"{num_rows} rows: {_place('rows', path)} is {array_text(leaf)}"
            )
    return rows


def checked_state(drafter: Drafter, method: str, state: EngineState, returned: Any) -> DraftState:
    """What a method returned, called with ``state``. Raises ValueError for another structure, or
    arrays of other shapes or dtypes, than ``init_pool`` and ``init_rows`` gave."""
    name = f"{type(drafter).__name__}.{method}"
    if not isinstance(returned, DraftState):
        raise ValueError(f"{name} must return a DraftState, got {_shown(returned)}")
    parts = (("pool", state.pool.draft, returned.pool), ("rows", state.rows.draft, returned.rows))
    problems = [text for part in parts if (text := _difference(*part))]
    if problems:
        raise ValueError(
            f"{name} must return what init_pool and init_rows gave, or changed values of it: "
            f"{' and '.join(problems)}; what does not change is state.pool.draft, state.rows.draft"
        )
    return returned


def reset_pool(drafter: Drafter, state: EngineState, rows: Array) -> Any:
    """What ``reset`` returns for rows [B]. Raises ValueError as checked_state."""
    after = unchanged(state).replace(pool=drafter.reset(state.pool.draft, rows))
    return checked_state(drafter, "reset", state, after).pool


def checked_proposal(
    drafter: Drafter, options: RoundOptions, state: EngineState, returned: Any
) -> Proposed:
    """What ``propose`` returned, called with ``state``; a confidence only if the call asks for it.

    Raises ValueError as checked_state, for what is no tree of the state's rows, and for a
    confidence that is missing or of another shape.
    """
    name, num_rows = f"{type(drafter).__name__}.propose", state.rows.status.shape[0]
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise ValueError(f"{name} must return a DraftTree and a DraftState, got {_shown(returned)}")
    tree, draft = returned
    if not isinstance(tree, DraftTree):
        raise ValueError(f"{name} must return a DraftTree first, got {_shown(tree)}")
    if tree.tokens.ndim != 2 or tree.tokens.shape[0] != num_rows:
        raise ValueError(
            f"{name} must return a tree for each of {num_rows} rows: its tokens are "
            f"{array_text(tree.tokens)}"
        )
    shape = None if tree.confidence is None else jnp.shape(tree.confidence)
    if options.confidence and shape != (num_rows, tree.max_depth):
        raise ValueError(
            f"{name} must return a tree with a confidence of {[num_rows, tree.max_depth]}, as "
            f"tells_confidence says: it is {None if shape is None else list(shape)}"
        )
    tree = tree if options.confidence else tree.replace(confidence=None)
    return tree, checked_state(drafter, "propose", state, draft)


def _difference(name: str, wanted: Any, got: Any) -> str | None:
    """How a part of a drafter's state differs from the one before; None: in values at most."""
    if jax.tree.structure(wanted) != jax.tree.structure(got):
        return f"{name} were {_shown(wanted)}, got {_shown(got)}"
    before, after = map(jax.tree_util.tree_leaves_with_path, (wanted, got))
    for (path, old), (_, new) in zip(before, after, strict=True):
        if array_text(old) != array_text(new):
            return f"{_place(name, path)} was {array_text(old)}, got {array_text(new)}"
    return None


def _place(name: str, path: Any) -> str:
    return f"{name}{jax.tree_util.keystr(path)}"


def _shown(tree: Any) -> str:
    """The type of a value, and the arrays in it."""
    if tree is None:
        return "None"
    leaves = jax.tree.leaves(tree)
    arrays = [array_text(leaf) for leaf in leaves if hasattr(leaf, "dtype")]
    return f"{type(tree).__name__}({', '.join(arrays)})" if arrays else type(tree).__name__
