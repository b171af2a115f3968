"""The gated delta rule of a prompt, of a draft tree, and the commit of its accepted path."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from pallas_kernels.delta_rule.reference import (
    delta_commit_reference,
    delta_read_reference,
    delta_run_reference,
)
from pallas_kernels.delta_rule.tokens import BLOCK, LayerRows, RowStates, Tokens
from pallas_kernels.selection import Implementation, kernel_module

__all__ = [
    "LayerRows",
    "RowStates",
    "Tokens",
    "delta_commit",
    "delta_read",
    "delta_run",
    "misfit",
    "run_misfit",
]

KEY_DIM = 128  # of a head: the kernel was tested with it
VALUE_STEP = 64  # columns of a value head in a warpgroup
MAX_NODES = 64  # of a tree: what each writes is held in shared memory
MAX_PARTS = 8  # warpgroups that commit one key head's values


def delta_read(
    states: RowStates,
    q: Array,
    nodes: Tokens,
    ancestors: Array,
    depth: Array,
    implementation: Implementation = "reference",
) -> Array:
    """Outputs of a tree's nodes, each after the window, its ancestors and itself.

    Args:
      states: of the rows.
      q: float32 [B, N, G, Dk], queries.
      nodes: [B, N, ...]; a parent comes before its children.
      ancestors: bool [B, N, N], whether node j is node i or one of its ancestors.
      depth: int32 [B, N], of a root 0.
      implementation: see selection.Implementation; ``misfit`` says what the Hopper kernel takes.
        The reference keeps a state per node.

    Returns float32 [B, N, G, r, Dv].
    """
    problem = misfit(states.s, q.shape[1])
    mosaic = kernel_module("delta_rule", implementation, problem)
    read = delta_read_reference if mosaic is None else mosaic.delta_read_mosaic
    return read(states, q, nodes, ancestors, depth)


def delta_run(
    states: RowStates,
    counts: Array,
    q: Array,
    tokens: Tokens,
    implementation: Implementation = "reference",
) -> tuple[Array, Array]:
    """Outputs of consecutive tokens after the window, and the states at the last multiple of C.

    Args:
      states: of the rows. No two sequences with a count share a row.
      counts: int32 [B], tokens that are there; the others are padding.
      q: float32 [B, T, G, Dk], queries.
      tokens: [B, T, ...].
      implementation: see selection.Implementation; ``run_misfit`` says what the Hopper kernel
        takes.

    Returns float32 [B, T, G, r, Dv], zeros for padding, and s, written in place where the caller
    donates it: after the last token that makes held + tokens a multiple of C, if one does. The
    window stays as it is.
    """
    problem = run_misfit(states)
    mosaic = kernel_module("delta_rule", implementation, problem)
    run = delta_run_reference if mosaic is None else mosaic.delta_run_mosaic
    return run(states, counts, q, tokens)


def delta_commit(
    layers: Sequence[LayerRows],
    rows: Array,
    held: Array,
    path: Array,
    counts: Array,
    implementation: Implementation = "reference",
) -> list[tuple[Array, Tokens, Array]]:
    """Append accepted nodes to windows. A window that is full is applied to its state, in order.

    Args:
      layers: of equal shapes.
      rows: int32 [B], each sequence's entry of what layers keep. No two sequences share one.
      held: int32 [B], tokens in the windows.
      path: int32 [B, A], accepted nodes by depth.
      counts: int32 [B], how many of them; of 0 the row does not change.
      implementation: see selection.Implementation; ``misfit`` says what the Hopper kernel takes.

    Returns s, window and channels of each layer, written in place where the caller donates them.
    """
    problems = (misfit(layer.s, layer.nodes.k.shape[1]) for layer in layers)
    problem = next(filter(None, problems), None)
    mosaic = kernel_module("delta_rule", implementation, problem)
    if mosaic is not None:
        return mosaic.delta_commit_mosaic(layers, rows, held, path, counts)
    return [delta_commit_reference(layer, rows, held, path, counts) for layer in layers]


def misfit(s: Array, num_nodes: int) -> str | None:
    """Why the kernels cannot take these states and trees, None if they can."""
    _, _, values, v_dim, k_dim = s.shape
    if s.dtype != jnp.float32 or k_dim != KEY_DIM or v_dim % VALUE_STEP:
        return (
            f"{s.dtype} states of {k_dim} x {v_dim}: they must be float32, of {KEY_DIM} keys and a "
            f"multiple of {VALUE_STEP} values"
        )
    if values * v_dim % KEY_DIM or values * v_dim > MAX_PARTS * VALUE_STEP:
        return (
            f"{values} value heads of {v_dim} for a key head: {KEY_DIM} values or a multiple, at "
            f"most {MAX_PARTS * VALUE_STEP}"
        )
    if num_nodes > MAX_NODES:
        return f"trees of {num_nodes} nodes: at most {MAX_NODES}"
    return None


def run_misfit(states: RowStates) -> str | None:
    """Why the kernel cannot read prompts after these states, None if it can."""
    if (length := states.window.k.shape[1]) % BLOCK:
        return f"windows of {length} tokens: a multiple of {BLOCK}"
    return misfit(states.s, 1)
