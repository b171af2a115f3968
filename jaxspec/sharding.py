"""How arrays are split over a mesh: a Layout, and the partition specs derived from it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as DeviceLayout
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxspec.pytree import is_static

Axes = tuple[str, ...]  # mesh axes, the outermost first; (): not split

DATA_AXIS = "data"
MODEL_AXIS = "model"

# Logical axis of an array -> the field of Layout that says how it is split. Column-parallel weights
# are split along kv_heads or ff of their outputs, row-parallel ones along heads or ff of their
# inputs.
LOGICAL_AXES: Mapping[str, str] = MappingProxyType(
    {
        "batch": "batch",
        "pages": "batch",
        "vocab": "vocab",
        "heads": "heads",
        "kv_heads": "heads",
        "ff": "ff",
        "experts": "experts",
        "peers": "heads",  # devices that add up a row-parallel product
    }
)

# Logical axes that are never split.
WHOLE_AXES = frozenset(
    (
        *(
            "alternatives",
            "cells",
            "depth",
            "draft_ids",
            "embed_rows",
            "features",
            "group",
            "head_dim",
        ),
        *("hidden", "length", "nodes", "rounds", "slot", "stops", "table", "two", "words"),
    )
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh axes that each kind of dimension is split over.

    Attributes:
      batch: rows of the engine's state, and the pages of their pool.
      vocab: the vocabulary of embeddings and logits.
      heads: query and KV heads.
      ff: hidden units of MLPs.
      experts, sequence, stages: experts of an MLP, positions of a sequence, layers of a model.
        Splitting these is not supported yet.

    Raises ValueError for a split that is not supported, and if a mesh axis splits both the batch
    and the model.
    """

    batch: Axes = ()
    vocab: Axes = ()
    heads: Axes = ()
    ff: Axes = ()
    experts: Axes = ()
    sequence: Axes = ()
    stages: Axes = ()

    def __post_init__(self):
        for name in ("experts", "sequence", "stages"):
            if getattr(self, name):
                raise ValueError(
                    f"a layout that splits {name} is not supported yet: split heads, ff, vocab "
                    "and batch"
                )

        shared = set(self.batch) & {*self.vocab, *self.heads, *self.ff}
        if shared:
            raise ValueError(
                f"mesh axes {sorted(shared)} split both the batch and the model: sums over the "
                "model's would mix rows"
            )

    def axes(self, logical: str) -> Axes:
        """Mesh axes of an array's logical axis. Raises ValueError for an unknown name."""
        if logical in WHOLE_AXES:
            return ()
        if logical not in LOGICAL_AXES:
            raise ValueError(f"{logical!r} is not a logical axis: add it to jaxspec/sharding.py")
        return getattr(self, LOGICAL_AXES[logical])

    def spec(self, logical: tuple[str, ...]) -> P:
        """The partition spec of an array with these logical axes."""
        entries = [self.axes(name) for name in logical]
        return P(*(axes[0] if len(axes) == 1 else axes or None for axes in entries))


WHOLE = Layout()


@dataclasses.dataclass(frozen=True)
class Shards:
    """A layout and the sizes of its mesh axes: what shapes of weights depend on.

    Attributes:
      sizes: (name, number of devices) of each mesh axis.
    """

    layout: Layout = WHOLE
    sizes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def over(cls, mesh: Mesh | None, layout: Layout) -> "Shards":
        """The shards of ``layout`` on a mesh; None: one device."""
        return cls(layout, tuple(mesh.shape.items()) if mesh is not None else ())

    def of(self, logical: str) -> int:
        """Number of devices that a logical axis is split over."""
        sizes = dict(self.sizes)
        return math.prod(sizes[axis] for axis in self.layout.axes(logical))


ONE_SHARD = Shards()


def make_mesh(
    tensor_parallel: int = 1,
    data_parallel: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A ``(data, model)`` mesh over the first of these devices; None: of all.

    Raises ValueError for sizes below 1, and if there are fewer devices than needed.
    """
    if tensor_parallel < 1 or data_parallel < 1:
        raise ValueError(
            f"parallel sizes must be >= 1, got tp {tensor_parallel}, dp {data_parallel}"
        )
    needed, devices = tensor_parallel * data_parallel, devices or jax.devices()
    if needed > len(devices):
        raise ValueError(
            f"tensor x data parallel needs {needed} devices, this process has {len(devices)}"
        )
    grid = np.array(devices[:needed]).reshape(data_parallel, tensor_parallel)
    return Mesh(grid, (DATA_AXIS, MODEL_AXIS))


def replica_meshes(replicas: int, tensor_parallel: int = 1) -> list[Mesh | None]:
    """The devices of engines side by side, ``tensor_parallel`` each; None: the default device.

    Raises ValueError for sizes below 1, and if there are fewer devices than needed.
    """
    if replicas < 1 or tensor_parallel < 1:
        raise ValueError(f"parallel sizes must be >= 1, got tp {tensor_parallel}, dp {replicas}")
    needed, devices = replicas * tensor_parallel, jax.devices()
    if needed > len(devices):
        raise ValueError(
            f"dp {replicas} x tp {tensor_parallel} needs {needed} devices, this process has "
            f"{len(devices)}"
        )
    if needed == 1:
        return [None]
    starts = range(0, needed, tensor_parallel)
    groups = [devices[start : start + tensor_parallel] for start in starts]
    return [make_mesh(tensor_parallel, devices=group) for group in groups]


def mesh_layout(mesh: Mesh | None, *, split_model: bool = True) -> Layout:
    """The layout of a model on a mesh from make_mesh. Axes of one device are left out.

    ``split_model`` False: every device along the model axis holds the whole model.

    Raises ValueError for a mesh without those axes.
    """
    if mesh is None:
        return WHOLE
    if not {DATA_AXIS, MODEL_AXIS} <= set(mesh.shape):
        raise ValueError(
            f"the mesh has axes {list(mesh.shape)}, and needs {DATA_AXIS!r} and {MODEL_AXIS!r}: "
            "make it with jaxspec.sharding.make_mesh"
        )
    batch = (DATA_AXIS,) if mesh.shape[DATA_AXIS] > 1 else ()
    model = (MODEL_AXIS,) if split_model and mesh.shape[MODEL_AXIS] > 1 else ()
    return Layout(batch=batch, vocab=model, heads=model, ff=model)


def axes_size(mesh: Mesh | None, axes: Axes) -> int:
    """Number of devices along ``axes`` of a mesh; 1 for no axes."""
    sizes = dict(mesh.shape) if mesh is not None else {}
    return math.prod(sizes[name] for name in axes)


def partition_specs(tree: Any, layout: Layout = WHOLE, undeclared: tuple[str, ...] = ()) -> Any:
    """The tree with every array replaced by its PartitionSpec under ``layout``.

    An array's logical axes are declared with its field (see pytree.array), or returned by the
    method ``logical_axes`` of its pytree. Arrays without a declaration have the leading axes
    ``undeclared``, or the ``undeclared_axes`` of a pytree around them. A pytree with a field
    ``layout`` is split by that layout instead.
    """
    if not dataclasses.is_dataclass(tree) or isinstance(tree, type):
        return jax.tree.map(
            lambda node: (
                partition_specs(node, layout, undeclared)
                if dataclasses.is_dataclass(node)
                else layout.spec(undeclared)
            ),
            tree,
            is_leaf=dataclasses.is_dataclass,
        )
    layout = getattr(tree, "layout", layout)
    undeclared = getattr(tree, "undeclared_axes", undeclared)
    give_axes = getattr(tree, "logical_axes", dict)
    own_axes = give_axes()
    specs = {}
    for field in dataclasses.fields(tree):
        if is_static(field):
            continue
        value = getattr(tree, field.name)
        axes = own_axes.get(field.name, field.metadata.get("axes"))
        if axes is None or value is None:
            specs[field.name] = partition_specs(value, layout, undeclared)
        else:
            specs[field.name] = layout.spec(axes)
    return dataclasses.replace(tree, **specs)


def named_shardings(mesh: Mesh, tree: Any, layout: Layout = WHOLE) -> Any:
    """As partition_specs, with each spec bound to ``mesh``.

    Trailing Nones are removed from specs, as jax does for the results of a program. Otherwise a new
    state and a returned one would not share a compiled program.
    """

    def bind(spec: P) -> NamedSharding:
        names = list(spec)
        while names and names[-1] is None:
            names.pop()
        return NamedSharding(mesh, P(*names))

    specs = partition_specs(tree, layout)
    return jax.tree.map(bind, specs, is_leaf=lambda leaf: isinstance(leaf, P))


def weight_place(shape: tuple[int, ...], sharding: Sharding) -> Sharding | Format:
    """Where a weight goes, for ``jax.device_put`` and the like: its sharding, on a TPU with the
    layout in which products read it.

    A TPU stores an array in tiles of its last two dimensions. By default weights [in, *out] with
    several output dimensions would have tiles over a short one (two, or the heads of a group), and
    every program would first copy all of them into a layout with tiles over the input.
    """
    if {device.platform for device in sharding.device_set} != {"tpu"} or len(shape) < 3:
        return sharding
    return Format(product_layout(len(shape)), sharding)


def product_layout(num_dims: int) -> DeviceLayout:
    """The layout of a weight [in, *out] whose input stands before the last dimension."""
    return DeviceLayout((*range(1, num_dims - 1), 0, num_dims - 1))
