"""Any pytree of arrays, sharded or not, to disk and back with orbax.

The values of the tree's static fields are stored too, and checked when a snapshot is restored: a
head that reads certain layers is not restored as a head that reads others.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from jaxspec.checkpoints.snapshots import CHOICES
from jaxspec.config.checks import first_of
from jaxspec.parallel import Layout
from jaxspec.parallel.pytree import is_static
from pallas_kernels.selection import Kernels

WHERE_IT_RUNS = (Layout, Mesh, Kernels)  # types of static fields that may differ when restoring
MOST_LISTED = 5


def save_pytree(directory: str | Path, tree: Any) -> None:
    """Write a pytree to a new directory: its arrays and the values of its static fields."""
    path = Path(directory).absolute()
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{path} is not empty: give a new directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, _stored(named_leaves(tree)), force=path.exists())
    (path / CHOICES).write_text(json.dumps(static_choices(tree), indent=1) + "\n")


def restore_pytree(directory: str | Path, like: Any, *, check_choices: bool = True) -> Any:
    """Read a pytree of the structure, shapes, dtypes, shardings and static fields of ``like``.

    ``like`` holds arrays or ShapeDtypeStructs; its shardings may differ from the saved ones.
    ``check_choices``: whether its static fields must equal the saved ones. A field that the
    snapshot does not know, because it was added to jaxspec later, must have its default.

    Raises ValueError that lists what is missing, surplus or misshapen on disk, or which static
    fields differ; also for a snapshot without static fields, as written by jaxspec 0.1 and earlier.
    """
    path = Path(directory).absolute()
    leaves = named_leaves(like)
    wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, _stored(leaves))
    with ocp.StandardCheckpointer() as checkpointer:
        _check(path, wanted, checkpointer)
        if check_choices:
            _check_choices(path, like)
        arrays = checkpointer.restore(path, wanted)
    filled = [
        arrays[name]
        if name in arrays
        else jnp.zeros(leaf.shape, leaf.dtype, device=getattr(leaf, "sharding", None))
        for name, leaf in leaves.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), filled)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their path, in order: a plain dict, so that orbax does not see our classes."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _stored(leaves: dict[str, Any]) -> dict[str, Any]:
    """The leaves that are not empty: orbax refuses empty arrays, and they hold no data."""
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


def static_choices(tree: Any) -> dict[str, str]:
    """The static fields of a tree as text, by path; configs field by field."""
    return {path: said for path, said, _ in _choices(tree, "", inside_static=False)}


def _choices(
    value: Any, path: str, *, inside_static: bool, default: bool = False
) -> Iterator[tuple[str, str, bool]]:
    """(path, text, whether a field has its default) of each choice."""
    if isinstance(value, WHERE_IT_RUNS):
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield path or "the tree", type(value).__name__, default
        for field in dataclasses.fields(value):
            content, static = getattr(value, field.name), inside_static or is_static(field)
            yield from _choices(
                content,
                f"{path}.{field.name}",
                inside_static=static,
                default=static
                and field.default is not dataclasses.MISSING
                and content == field.default,
            )
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _choices(item, f"{path}[{key!r}]", inside_static=inside_static)
    elif isinstance(value, (tuple, list)) and not (inside_static and all(map(_is_plain, value))):
        for index, item in enumerate(value):
            yield from _choices(item, f"{path}[{index}]", inside_static=inside_static)
    elif inside_static:
        yield path, _said(value), default


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _said(value: Any) -> str:
    """A value as text that is the same in every process."""
    if type(value).__repr__ is object.__repr__ or callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return repr(value)


def _check_choices(path: Path, like: Any) -> None:
    file = path / CHOICES
    if not file.is_file():
        raise ValueError(
            f"{path} has no {CHOICES}: what its static fields were is not known. Restore it with "
            "check_choices=False if you are sure that they are the same, and save it anew"
        )
    saved = json.loads(file.read_text())
    choices = list(_choices(like, "", inside_static=False))
    wanted = {name: said for name, said, default in choices if name in saved or not default}
    problems = [
        f"{name} was {saved.get(name, 'not there')}, not {wanted.get(name, 'there')}"
        for name in {**wanted, **saved}
        if saved.get(name) != wanted.get(name)
    ]
    if problems:
        shown = first_of(problems, MOST_LISTED, "; ")
        raise ValueError(f"{path} was saved with other choices: {shown}")
