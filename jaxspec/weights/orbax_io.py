"""Any pytree of arrays, sharded or not, to disk and back with orbax."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp


def save_pytree(directory: str | Path, tree: Any) -> None:
    """Write the arrays of a pytree to a new directory. Static fields are not written."""
    path = Path(directory).absolute()
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{path} is not empty: give a new directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, _stored(named_leaves(tree)), force=path.exists())


def restore_pytree(directory: str | Path, like: Any) -> Any:
    """Read a pytree of the structure, shapes, dtypes, shardings and static fields of ``like``.

    ``like`` holds arrays or ShapeDtypeStructs.

    Raises ValueError that lists what is missing, surplus or misshapen on disk.
    """
    path = Path(directory).absolute()
    leaves = named_leaves(like)
    wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, _stored(leaves))
    with ocp.StandardCheckpointer() as checkpointer:
        _check(path, wanted, checkpointer)
        arrays = checkpointer.restore(path, wanted)
    filled = [
        arrays[name]
        if name in arrays
        else jnp.zeros(leaf.shape, leaf.dtype, device=getattr(leaf, "sharding", None))
        for name, leaf in leaves.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), filled)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their path, in order. Orbax then need not know our classes."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _stored(leaves: dict[str, Any]) -> dict[str, Any]:
    """Those with any elements: orbax refuses the others, which say nothing anyhow."""
    return {name: leaf for name, leaf in leaves.items() if math.prod(leaf.shape)}


def _check(path: Path, wanted: dict[str, Any], checkpointer: ocp.StandardCheckpointer) -> None:
    metadata = checkpointer.metadata(path).item_metadata if path.is_dir() else None
    if metadata is None:
        raise ValueError(f"{path} holds no checkpoint of save_pytree")
    stored = dict(metadata.tree)
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [f"{name} is not part of the model" for name in stored if name not in wanted]
    problems += [
        f"{name} is {stored[name].dtype}{list(stored[name].shape)}, not {leaf.dtype}"
        f"{list(leaf.shape)}"
        for name, leaf in wanted.items()
        if name in stored
        and (tuple(stored[name].shape), stored[name].dtype) != (tuple(leaf.shape), leaf.dtype)
    ]
    if problems:
        raise ValueError(f"{path} has another structure: {'; '.join(problems)}")
