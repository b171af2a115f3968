"""Targets and draft heads from flax parameter trees, for RL and distillation loops.

    table = {
        "model.embed_tokens.weight": "embed.embedding",
        "model.layers.{i}.self_attn.q_proj.weight": "layers_{i}.attention.q.kernel",
        "model.layers.{i}.self_attn.k_proj.weight": ("layers_{i}.attention.k.w", "in heads dim"),
        ...
    }
    target = target_from_flax(engine.params.target, params, table)
    engine.use_target(target)

The arrays are transposed and concatenated on the device; nothing goes through the host or a file.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax import Array, lax

from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import DraftHead
from jaxspec.models.quantized.kv_cache import has_float8_cache, with_scales_of, without_kv_scales
from jaxspec.models.tensors import joining, splitting, tensor_shapes
from jaxspec.parallel.moving import moved
from jaxspec.parallel.placement import place_of

# The path of an array that stacks several, whole axes before the one of the stack, and an index.
ROW = re.compile(r"(.*)\[((?::, ?)*)(\d+)\]")

Shape = tuple[int, ...]
Order = tuple[int, ...]  # a permutation of an array's axes, before it is reshaped
# Checkpoint tensor name -> flax path, alone or with the array's axes; {i} is a layer's index.
Names = Mapping[str, str | tuple[str, str]]

STATE_AXES = (
    "state the axes of arrays whose names do not, as in (path, 'in out'), (path, 'in heads dim') "
    "or (path, 'heads dim out')"
)


def target_from_flax(like: Decoder, params: Any, names: Names) -> Decoder:
    """A target with the shapes, dtypes and shardings of ``like`` from a flax tree.

    Args:
      like: of arrays, or of jax.ShapeDtypeStructs as ``decoder_shapes`` makes them. Where these
        have no sharding, arrays stay on the devices of the tree's.
      params: a linen dict of parameters (with or without its ``params`` level) or an nnx.State.
      names: the flax path of each tensor of a Hugging Face checkpoint. An array called ``kernel``
        has flax's layout: [in, out], or with separate heads [in, heads, dim] and [heads, dim, out].
        Any other has the checkpoint's, [out, in], unless its path stands beside its axes:
        ``("layers.{i}.q.w", "in heads dim")``. See order_of_axes. ``kv.w[0]`` is the first of the
        arrays that ``kv.w`` stacks along its first axis; of scanned layers ``q.kernel[{i}]``, or
        ``q.kernel[:,{i}]`` where they are stacked along the second.

    Raises ValueError that lists missing and misshapen tensors, square matrices of which nothing
    states the layout, arrays that two tensors refer to, and arrays of the flax tree that none does.
    """
    _check_scales(like)
    bare = without_kv_scales(like)
    splits = bare.mapped(splitting(like.config.vocab_size))
    tensors = _tensors(_leaves(bare, splits), params, names)
    return with_scales_of(like, _in_place(bare, bare.mapped(joining(tensors))))


def head_from_flax(
    like: DraftHead, params: Any, names: Names, *, first_layer: str = "midlayer"
) -> DraftHead:
    """The same as target_from_flax for a draft head, with the tensor names of its checkpoint.

    The table of draft ids (``token_ids``) is taken from ``like``, which must have it as an array.
    """
    _check_scales(like)
    if isinstance(like.token_ids, jax.ShapeDtypeStruct):
        raise ValueError(
            "like: the head's token_ids are a shape alone, and their values are taken from it: put "
            "an array there"
        )
    bare = without_kv_scales(like)
    without_ids = bare.replace(token_ids=None)
    splits = without_ids.mapped(first_layer, splitting())
    tensors = _tensors(_leaves(without_ids, splits), params, names)
    joined = without_ids.mapped(first_layer, joining(tensors))
    return with_scales_of(like, _in_place(bare, joined.replace(token_ids=like.token_ids)))


def _leaves(tree: Any, splits: Any) -> list[tuple[Any, Any]]:
    return list(zip(jax.tree.leaves(tree), jax.tree.leaves(splits), strict=True))


def _check_scales(like: Any) -> None:
    """Raise ValueError for scales of 8-bit caches that are shapes alone."""
    leaves = jax.tree.leaves(like)
    if has_float8_cache(like) and any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise ValueError(
            "like: the scales of an 8-bit cache are taken from it, and shapes have none: give "
            "arrays, or shapes without 8-bit caches"
        )


def _in_place[T](like: T, new: T) -> T:
    def placed(old: Any, leaf: Array) -> Array:
        return leaf if old.sharding is None else moved(leaf, place_of(old))

    return jax.tree.map(placed, like, new)


class _Row(NamedTuple):
    """One of the arrays that another stacks along an axis."""

    stack: Array
    index: int
    axis: int

    @property
    def shape(self) -> Shape:
        return self.stack.shape[: self.axis] + self.stack.shape[self.axis + 1 :]

    @property
    def array(self) -> Array:
        return self.stack[(*(slice(None),) * self.axis, self.index)]

    @property
    def dtype(self) -> np.dtype:
        return self.stack.dtype


class _Tensors(Mapping[str, Array]):
    """A checkpoint's tensors, [out, in], converted from a flax tree one at a time on access.

    Converting all at once would need the memory of a second model.
    """

    def __init__(self, sources: Mapping[str, tuple[Array | _Row, Order, Shape]]):
        self._sources = sources

    def __getitem__(self, name: str) -> Array:
        array, order, shape = self._sources[name]
        if isinstance(array, _Row):
            array = array.array
        return lax.reshape(array, shape, dimensions=order)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _tensors(leaves: list[tuple[Any, Any]], params: Any, names: Names) -> _Tensors:
    """Every tensor that the (array, Split) pairs are made of, from the flax tree."""
    tensors, problems = tensor_shapes(leaves), []
    named = {name: _path_of(name, names) for name in tensors}
    arrays = _with_rows(
        flat_arrays(params), [path for path, _ in named.values() if path is not None]
    )
    sources: dict[str, tuple[Array | _Row, Order, Shape]] = {}
    users: dict[str, str] = {}  # of a path
    cure = ""
    for name, (path, axes) in named.items():
        tensor = tensors[name]
        if path is None:
            problems.append(f"no path is given for {name}")
            continue
        if path in users:
            problems.append(f"{path} is given for both {users[path]} and {name}")
        users[path] = name
        if path not in arrays:
            problems.append(f"{name} should be at {path}, which is not there")
            continue
        found, wanted = arrays[path].dtype, tensor.dtype
        if jnp.issubdtype(wanted, jnp.floating) and not jnp.issubdtype(found, jnp.floating):
            problems.append(
                f"{path} is {found}, {name} needs floats: give the values that it stands for"
            )
            continue
        try:
            order = order_of_axes(path, arrays[path].shape, tensor.shape, axes)
        except ValueError as error:
            problems.append(f"{error}, {name} needs {_described(tensor.shape)}")
            cure = f"; {STATE_AXES}" if len(tensor.shape) == 2 else cure
            continue
        sources[name] = (arrays[path], order, tensor.shape)
    unused = sorted(set(arrays) - set(users))
    problems += [f"{path} is no tensor of the model" for path in unused]
    if problems:
        raise ValueError(f"the flax tree does not fit: {'; '.join(problems)}{cure}")
    return _Tensors(sources)


def _with_rows(arrays: Mapping[str, Array], paths: Iterable[str]) -> dict[str, Array | _Row]:
    """The arrays; those that a path gives an index of are replaced by their rows."""
    found = (ROW.fullmatch(path) for path in paths)
    stacks = {(match[1], match[2]) for match in found if match is not None and match[1] in arrays}
    rows = {
        f"{path}[{before}{i}]": _Row(arrays[path], i, axis)
        for path, before in stacks
        if arrays[path].ndim > (axis := before.count(":")) and arrays[path].ndim > 1
        for i in range(arrays[path].shape[axis])
    }
    split = {path.split("[")[0] for path in rows}
    return {path: array for path, array in arrays.items() if path not in split} | rows


def _described(shape: Shape) -> str:
    return f"{list(shape)} (out, in)" if len(shape) == 2 else f"{list(shape)}"


def _path_of(name: str, names: Names) -> tuple[str | None, str | None]:
    """The flax path of a tensor, and its axes if they are stated: those of its full name, or of its
    name with {i} for the layer."""
    found, index = names.get(name), re.search(r"\.(\d+)\.", name)
    if found is None and index is not None:
        found = names.get(f"{name[: index.start()]}.{{i}}.{name[index.end() :]}")
    path, axes = (found, None) if found is None or isinstance(found, str) else _stated(name, found)
    layer = index[1] if index is not None else "{i}"
    return None if path is None else path.replace("{i}", layer), axes


def _stated(name: str, found: Any) -> tuple[str, str]:
    match found:
        case [str() as path, str() as axes]:
            return path, axes
    raise ValueError(
        f"names[{name!r}] is {found!r}: give a path, or a path and its axes as text, such as "
        "('q.w', 'in out')"
    )


def flat_arrays(params: Any) -> dict[str, Array]:
    """The arrays of a flax tree by their dotted paths."""
    tree = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    if not isinstance(tree, Mapping):
        raise ValueError(f"a flax tree is a dict or an nnx.State, not a {type(params).__name__}")
    if set(tree) == {"params"}:
        tree = tree["params"]
    flat: dict[Any, Any] = traverse_util.flatten_dict(dict(tree))
    return {".".join(map(str, path)): array for path, array in flat.items() if _is_array(array)}


def _is_array(value: Any) -> bool:
    return isinstance(value, (Array, np.ndarray))


def order_of_axes(path: str, shape: Shape, wanted: Shape, axes: str | None) -> Order:
    """How the axes of the array at ``path`` must be ordered, so that it can be reshaped into a
    tensor of shape ``wanted``, [out, in] or a vector. ``axes``: as stated for it, None for its
    name's.

    A name states a layout where flax has a convention: an array called ``kernel`` has its inputs
    first, one called ``embedding`` is a table of rows, and the dimensions of a ``bias`` follow each
    other. Any other array has the tensor's layout, unless its axes are stated: the words ``in`` and
    ``out``, with any others for the dimensions of the side that is not named. ``heads dim out`` is
    the projection of attention's outputs, of which each head's are the inputs.

    Raises ValueError for another shape than the layout's, and for a square matrix without one.
    """
    name = path.split(".")[-1].split("[")[0]
    order = _by_name(name, shape, wanted) if axes is None else _by_axes(shape, wanted, axes)
    if order is not None:
        return order
    if axes is not None:
        raise ValueError(f"{path} is {list(shape)}, with the axes {axes!r}")
    why = ", and a kernel has its inputs first" if name == "kernel" else ""
    if shape == wanted and not why:
        why = ", square, and its name states no layout"
    raise ValueError(f"{path} is {list(shape)}{why}")


def _by_axes(shape: Shape, wanted: Shape, axes: str) -> Order | None:
    words = axes.split()
    sides = [word for word in words if word in ("in", "out")]
    if len(wanted) != 2 or len(words) != len(shape) or len(set(words)) != len(words) or not sides:
        return None
    if len(sides) == 2 and len(words) > 2:
        return None  # the others could belong to either
    named = words.index(sides[0])
    rest = tuple(axis for axis in range(len(shape)) if axis != named)
    outputs, inputs = ((named,), rest) if sides[0] == "out" else (rest, (named,))
    return _if_sized(shape, wanted, outputs, inputs)


def _by_name(name: str, shape: Shape, wanted: Shape) -> Order | None:
    same = tuple(range(len(shape)))
    if name == "kernel":
        return _of_kernel(shape, wanted)
    if len(wanted) == 1 and name == "bias":
        return same if math.prod(shape) == wanted[0] else None
    if shape != wanted:
        return None
    is_square = len(wanted) == 2 and wanted[0] == wanted[1]
    return None if is_square and name != "embedding" else same


def _of_kernel(shape: Shape, wanted: Shape) -> Order | None:
    """flax's order: the inputs of a dense layer first, of a convolution last but one."""
    axes = tuple(range(len(shape)))
    if len(wanted) != 2:
        return axes[::-1] if shape[::-1] == wanted else None
    orders = (_if_sized(shape, wanted, axes[split:], axes[:split]) for split in axes[1:])
    return next((order for order in orders if order is not None), None)


def _if_sized(shape: Shape, wanted: Shape, outputs: Order, inputs: Order) -> Order | None:
    """The outputs before the inputs, if they are as many as wanted."""
    sizes = [math.prod(shape[axis] for axis in side) for side in (outputs, inputs)]
    return (*outputs, *inputs) if sizes == list(wanted) else None
