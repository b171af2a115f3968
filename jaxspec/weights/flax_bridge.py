"""Targets and draft heads from flax parameter trees, for RL and distillation loops.

    table = {
        "model.embed_tokens.weight": "embed.embedding",
        "model.layers.{i}.self_attn.q_proj.weight": "layers_{i}.attention.q.kernel",
        ...
    }
    target = target_from_flax(engine.params.target, params, table)
    engine.use_target(target)

The arrays are transposed and concatenated on the device; nothing goes through the host or a file.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx, traverse_util
from jax import Array

from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import DraftHead
from jaxspec.quantization.kv_cache import with_scales_of, without_kv_scales
from jaxspec.tensors import joining, splitting, tensor_shapes
from jaxspec.weights.in_place import place_of

Names = Mapping[str, str]  # checkpoint tensor name -> flax path; {i} stands for a layer's index


def target_from_flax(like: Decoder, params: Any, names: Names) -> Decoder:
    """A target with the shapes, dtypes and shardings of ``like`` from a flax tree.

    Args:
      params: a linen dict of parameters (with or without its ``params`` level) or an nnx.State.
      names: the flax path of each tensor of a Hugging Face checkpoint. An array whose path ends in
        ``kernel`` has flax's layout: [in, out], or with separate heads [in, heads, dim] and
        [heads, dim, out]. Any other has the checkpoint's layout.

    Raises ValueError that lists missing and misshapen tensors, and arrays of the flax tree that no
    name refers to.
    """
    bare = without_kv_scales(like)
    splits = bare.filled(splitting(like.config.vocab_size))
    tensors = _tensors(_leaves(bare, splits), params, names)
    return with_scales_of(like, _in_place(bare, bare.filled(joining(tensors))))


def head_from_flax(
    like: DraftHead, params: Any, names: Names, *, first_layer: str = "midlayer"
) -> DraftHead:
    """The same as target_from_flax for a draft head, with the tensor names of its checkpoint.

    The table of draft ids (``token_ids``) is taken from ``like``.
    """
    bare = without_kv_scales(like)
    without_ids = bare.replace(token_ids=None)
    splits = without_ids.filled(first_layer, splitting())
    tensors = _tensors(_leaves(without_ids, splits), params, names)
    joined = without_ids.filled(first_layer, joining(tensors))
    return with_scales_of(like, _in_place(bare, joined.replace(token_ids=like.token_ids)))


def _leaves(tree: Any, splits: Any) -> list[tuple[Any, Any]]:
    return list(zip(jax.tree.leaves(tree), jax.tree.leaves(splits), strict=True))


def _in_place[T](like: T, new: T) -> T:
    return jax.tree.map(lambda old, leaf: jax.device_put(leaf, place_of(old)), like, new)


class _Tensors(Mapping[str, Array]):
    """A checkpoint's tensors, [out, in], converted from a flax tree one at a time on access.

    Converting all at once would need the memory of a second model.
    """

    def __init__(self, arrays: Mapping[str, Array], paths: Mapping[str, str], shapes: Mapping):
        self._arrays, self._paths, self._shapes = arrays, paths, shapes

    def __getitem__(self, name: str) -> Array:
        path = self._paths[name]
        return _as_tensor(self._arrays[path], self._shapes[name], path.endswith("kernel"))

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def _tensors(leaves: list[tuple[Any, Any]], params: Any, names: Names) -> _Tensors:
    """Every tensor that the (array, Split) pairs are made of, from the flax tree."""
    shapes = {name: tensor.shape for name, tensor in tensor_shapes(leaves).items()}
    arrays, problems = _flat(params), []
    paths: dict[str, str] = {}
    for name, shape in shapes.items():
        path = _path_of(name, names)
        if path is None:
            problems.append(f"no path is given for {name}")
        elif path not in arrays:
            problems.append(f"{name} should be at {path}, which is not there")
        elif math.prod(arrays[path].shape) != math.prod(shape):
            problems.append(f"{path} is {list(arrays[path].shape)}, {name} needs {list(shape)}")
        else:
            paths[name] = path
    unused = sorted(set(arrays) - set(paths.values()))
    problems += [f"{path} is no tensor of the model" for path in unused]
    if problems:
        raise ValueError(f"the flax tree does not fit: {'; '.join(problems)}")
    return _Tensors(arrays, paths, shapes)


def _as_tensor(array: Array, shape: tuple[int, ...], is_kernel: bool) -> Array:
    if not is_kernel:
        return array.reshape(shape)
    out_size, in_size = shape
    return array.reshape(in_size, out_size).T


def _path_of(name: str, names: Names) -> str | None:
    """The flax path of a tensor: that of its full name, or of its name with {i} for the layer."""
    if name in names:
        return names[name]
    index = re.search(r"\.(\d+)\.", name)
    if index is None:
        return None
    pattern = f"{name[: index.start()]}.{{i}}.{name[index.end() :]}"
    return names[pattern].replace("{i}", index[1]) if pattern in names else None


def _flat(params: Any) -> dict[str, Array]:
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
