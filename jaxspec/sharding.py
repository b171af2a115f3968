"""Logical axis names -> mesh axes, in one table, and the partition specs that follow from it."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DATA_AXIS = "data"
MODEL_AXIS = "model"

# Column-parallel weights are sharded on kv_heads or ff of their output, row-parallel ones on
# heads or ff of their input; every logical axis not named here is replicated.
DATA_PARALLEL = {"batch": DATA_AXIS, "pages": DATA_AXIS}
TENSOR_PARALLEL = DATA_PARALLEL | {
    "vocab": MODEL_AXIS,
    "kv_heads": MODEL_AXIS,
    "heads": MODEL_AXIS,
    "ff": MODEL_AXIS,
}


def make_mesh(tensor_parallel: int = 1, data_parallel: int = 1) -> Mesh:
    """A ``(data, model)`` mesh over the first devices.

    Raises ValueError if fewer devices are present than asked for.
    """
    if tensor_parallel < 1 or data_parallel < 1:
        raise ValueError(
            f"parallel sizes must be >= 1, got tp {tensor_parallel}, dp {data_parallel}"
        )
    needed, devices = tensor_parallel * data_parallel, jax.devices()
    if needed > len(devices):
        raise ValueError(
            f"tensor x data parallel needs {needed} devices, this process has {len(devices)}"
        )
    grid = np.array(devices[:needed]).reshape(data_parallel, tensor_parallel)
    return Mesh(grid, (DATA_AXIS, MODEL_AXIS))


def model_size(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.shape[MODEL_AXIS]


def data_size(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.shape[DATA_AXIS]


def partition_specs(tree: Any, rules: dict[str, str] = TENSOR_PARALLEL) -> Any:
    """The tree with every array replaced by its PartitionSpec under ``rules``.

    Arrays outside a field that declares axes (see pytree.array) are replicated. A pytree that has
    a ``partition_rules`` attribute chooses the rules of its own subtree.
    """
    if tree is None:
        return None
    if isinstance(tree, tuple):
        return tuple(partition_specs(item, rules) for item in tree)
    if not dataclasses.is_dataclass(tree) or isinstance(tree, type):
        return P()
    rules = getattr(tree, "partition_rules", None) or rules
    specs = {}
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        if field.metadata.get("static"):
            continue
        axes = field.metadata.get("axes")
        if axes is None or value is None:
            specs[field.name] = partition_specs(value, rules)
        else:
            specs[field.name] = P(*(rules.get(axis) for axis in axes))
    return dataclasses.replace(tree, **specs)


def named_shardings(mesh: Mesh, tree: Any, rules: dict[str, str] = TENSOR_PARALLEL) -> Any:
    """As partition_specs, with each spec bound to ``mesh``.

    Specs are written as jax writes those of a program's results (no axes of one device, no None at
    the end), so that a state just made and one that comes back share a compiled program.
    """

    def bind(spec: P) -> NamedSharding:
        names = [name if name and mesh.shape[name] > 1 else None for name in spec]
        while names and names[-1] is None:
            names.pop()
        return NamedSharding(mesh, P(*names))

    specs = partition_specs(tree, rules)
    return jax.tree.map(bind, specs, is_leaf=lambda leaf: isinstance(leaf, P))
