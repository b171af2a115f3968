"""How arrays are split over a mesh: a Layout, and the partition specs derived from it."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.pytree import is_static

Axes = tuple[str, ...]  # mesh axes, the outermost first; (): not split

DATA_AXIS = "data"
SEQUENCE_AXIS = "sequence"  # of meshes for sequence parallelism only
MODEL_AXIS = "model"
HIDDEN_AXIS = "hidden"  # of meshes for 2-D tensor parallelism only

# Devices that share a model: a number, or the sizes (x, y) of a grid. In a grid, the hidden
# dimension of weights is split over x devices, and their heads or hidden units of MLPs over y.
TensorParallel = int | tuple[int, int]

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
        "hidden": "hidden",
        "peers": "heads",  # devices that add up a row-parallel product
        "slot": "sequence",  # of every page
    }
)

# Logical axes that are never split. ``whole_hidden``: a hidden state outside of the layers.
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
        *("length", "nodes", "rounds", "stops", "table", "two", "whole_hidden", "words"),
    )
)


class ProductAxes(NamedTuple):
    """The mesh axes over which devices exchange the input and the output of a product.

    Attributes:
      gathered: each device gathers its part of the input from these.
      summed: the product is summed over these, and every device has the sum.
      scattered: it is summed over these, too, and each device keeps its part of the sum.
      dimension: the output's dimension that is scattered.
    """

    gathered: Axes
    summed: Axes
    scattered: Axes
    dimension: int


UNSPLIT = ProductAxes((), (), (), 0)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh axes that each kind of dimension is split over.

    Attributes:
      batch: rows of the engine's state, and the pages of their pool.
      vocab: the vocabulary of embeddings and logits.
      heads: query and KV heads.
      ff: hidden units of MLPs.
      hidden: hidden states between the blocks of a layer (2-D tensor parallelism). These mesh axes
        are the last ones of vocab, heads and ff, too. Weights that have both dimensions are split
        by them along ``hidden`` only.
      sequence: the slots of every page of the KV cache: each device has a part of each sequence.
      tokens: in one forward pass, its tokens between the blocks of a layer (see split_tokens).
      experts, stages: experts of an MLP, layers of a model. Splitting these is not supported yet.

    Raises ValueError for a split that is not supported, if a mesh axis splits two of the batch,
    the sequence and the model, and if ``hidden`` is not at the end of vocab, heads and ff.
    """

    batch: Axes = ()
    vocab: Axes = ()
    heads: Axes = ()
    ff: Axes = ()
    hidden: Axes = ()
    experts: Axes = ()
    sequence: Axes = ()
    tokens: Axes = ()
    stages: Axes = ()

    def __post_init__(self):
        for name in ("experts", "stages"):
            if getattr(self, name):
                raise ValueError(
                    f"a layout that splits {name} is not supported yet: split heads, ff, vocab, "
                    "sequence and batch"
                )

        model = {*self.vocab, *self.heads, *self.ff}
        shared = set(self.batch) & model
        if shared:
            raise ValueError(
                f"mesh axes {sorted(shared)} split both the batch and the model: sums over the "
                "model's would mix rows"
            )
        if set(self.sequence) & {*self.batch, *model}:
            raise ValueError(f"the sequence needs mesh axes of its own, not {self.sequence}")
        for name in ("vocab", "heads", "ff"):
            axes = getattr(self, name)
            if self.hidden and axes[-len(self.hidden) :] != self.hidden:
                raise ValueError(
                    f"a layout that splits hidden over {self.hidden} must split {name} over them, "
                    f"too, and over them last; it is split over {axes}"
                )

    def axes(self, logical: str) -> Axes:
        """Mesh axes of an array's logical axis. Raises ValueError for an unknown name."""
        if logical in WHOLE_AXES:
            return ()
        if logical not in LOGICAL_AXES:
            raise ValueError(f"{logical!r} is not a logical axis: add it to jaxspec/sharding.py")
        return getattr(self, LOGICAL_AXES[logical])

    def splits(self, logical: tuple[str, ...]) -> list[Axes]:
        """The mesh axes of each dimension of an array. Those of ``hidden`` split no other dimension
        of an array that has it.

        Raises ValueError for an array with two of them, if they are split.
        """
        if self.hidden and logical.count("hidden") > 1:
            raise ValueError(
                f"an array with axes {logical} cannot be split along both hidden dimensions: take "
                "a number of devices, no grid"
            )
        taken = self.hidden if "hidden" in logical else ()
        return [
            self.axes(name) if name == "hidden" else _without(self.axes(name), taken)
            for name in logical
        ]

    def spec(self, logical: tuple[str, ...]) -> P:
        """The partition spec of an array with these logical axes."""
        entries = self.splits(logical)
        return P(*(axes[0] if len(axes) == 1 else axes or None for axes in entries))

    def product(self, logical: tuple[str, ...]) -> ProductAxes:
        """What devices exchange for a product with a weight: ``logical`` are the axes of its input,
        then those of its output. The input and the product are split as ``axes`` says."""
        own, *outputs = self.splits(logical)
        wanted = [self.axes(name) for name in logical[1:]]
        parts = [_without(axes, had) for axes, had in zip(wanted, outputs, strict=True)]
        dimension = next((index for index, axes in enumerate(parts) if axes), 0)
        scattered = parts[dimension]
        return ProductAxes(
            gathered=_without(self.axes(logical[0]), own),
            summed=_without(own, scattered),
            scattered=scattered,
            dimension=dimension,
        )

    @property
    def one_dimensional(self) -> "Layout":
        """The same devices, with whole hidden states."""
        return dataclasses.replace(self, hidden=())

    @property
    def split_tokens(self) -> "Layout":
        """The layout of a pass over many tokens where sequences are split: norms, residuals and
        products outside of attention are of each device's own tokens. Devices of one line gather
        them before a product, and scatter its sum after it (Korthikanti et al., arXiv 2205.05198).
        """
        model = self.heads if self.heads == self.ff == self.vocab and not self.hidden else ()
        return dataclasses.replace(self, tokens=self.sequence + model) if self.sequence else self


def _without(axes: Axes, others: Axes) -> Axes:
    return tuple(axis for axis in axes if axis not in others)


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

    @property
    def one_dimensional(self) -> "Shards":
        """The same devices, with whole hidden states."""
        return dataclasses.replace(self, layout=self.layout.one_dimensional)


ONE_SHARD = Shards()


def make_mesh(
    tensor_parallel: TensorParallel = 1,
    data_parallel: int = 1,
    devices: Sequence[Any] | None = None,
    *,
    sequence_parallel: int = 1,
) -> Mesh:
    """A ``(data, model)`` mesh over the first of these devices; None: of all.

    ``tensor_parallel`` (x, y) with x above 1 gives a ``(data, model, hidden)`` mesh of y devices
    along ``model`` and x along ``hidden``, for 2-D tensor parallelism. ``sequence_parallel`` above
    1 adds an axis ``sequence`` before ``model``: its devices share each sequence.

    Raises ValueError for sizes below 1, and if there are fewer devices than needed.
    """
    (x, y), devices = grid_of(tensor_parallel), devices or jax.devices()
    _check_sizes(tensor_parallel, data_parallel, sequence_parallel, len(devices))
    sizes = {DATA_AXIS: data_parallel, SEQUENCE_AXIS: sequence_parallel, MODEL_AXIS: y}
    sizes[HIDDEN_AXIS] = x
    kept = {name: n for name, n in sizes.items() if n > 1 or name in (DATA_AXIS, MODEL_AXIS)}
    grid = np.array(devices[: math.prod(kept.values())])
    return Mesh(grid.reshape(*kept.values()), tuple(kept))


def _check_sizes(tp: TensorParallel, dp: int, sp: int, devices: int) -> None:
    """Raises ValueError for sizes below 1, and for more devices than there are."""
    shown = f"tp {shown_size(tp)}, dp {dp}, sp {sp}"
    if min(*grid_of(tp), dp, sp) < 1:
        raise ValueError(f"parallel sizes must be >= 1, got {shown}")
    others = dp * math.prod(grid_of(tp))
    if others * sp > devices:
        fits = f"; sp {devices // others} fits" if devices >= others else ""
        raise ValueError(f"{shown} needs {others * sp} devices, this process has {devices}{fits}")


def devices_of_model(mesh: Mesh | None) -> int:
    """Number of devices that share a model, or its sequences."""
    return 1 if mesh is None else mesh.size // mesh.shape[DATA_AXIS]


def grid_of(tensor_parallel: TensorParallel) -> tuple[int, int]:
    """The sizes (x, y) of the grid of devices."""
    return (1, tensor_parallel) if isinstance(tensor_parallel, int) else tensor_parallel


def shown_size(tensor_parallel: TensorParallel) -> str:
    """As ``--tp`` takes it: ``4``, ``2x2``."""
    x, y = grid_of(tensor_parallel)
    return str(y) if isinstance(tensor_parallel, int) else f"{x}x{y}"


def replica_meshes(
    replicas: int, tensor_parallel: TensorParallel = 1, sequence_parallel: int = 1
) -> list[Mesh | None]:
    """The devices of engines side by side; None: the default device. Each has
    ``tensor_parallel`` times ``sequence_parallel``.

    Raises ValueError for sizes below 1, and if there are fewer devices than needed.
    """
    devices = jax.devices()
    _check_sizes(tensor_parallel, replicas, sequence_parallel, len(devices))
    size = math.prod(grid_of(tensor_parallel)) * sequence_parallel
    if replicas * size == 1:
        return [None]
    groups = [devices[start : start + size] for start in range(0, replicas * size, size)]
    return [
        make_mesh(tensor_parallel, devices=group, sequence_parallel=sequence_parallel)
        for group in groups
    ]


def mesh_layout(mesh: Mesh | None, *, split_model: bool = True) -> Layout:
    """The layout of a model on a mesh from make_mesh. Axes of one device are left out.

    ``split_model`` False: every device along the model axes holds the whole model. Sequences are
    split all the same.

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
    sequence = (SEQUENCE_AXIS,) if mesh.shape.get(SEQUENCE_AXIS, 1) > 1 else ()
    if not split_model:
        return Layout(batch=batch, sequence=sequence)
    model = (MODEL_AXIS,) if mesh.shape[MODEL_AXIS] > 1 else ()
    hidden = (HIDDEN_AXIS,) if mesh.shape.get(HIDDEN_AXIS, 1) > 1 else ()
    every = model + hidden
    return Layout(batch, every, every, every, hidden, sequence=sequence)


def check_divides(what: str, size: int, devices: int) -> None:
    """Raises ValueError if ``size`` cannot be split evenly; ``what`` is its name."""
    if size % devices:
        raise ValueError(
            f"{what} {size} cannot be split over {devices} devices; {fitting(size, devices)}"
        )


def fitting(size: int, devices: int, fits: Callable[[int], bool] | None = None) -> str:
    """The end of an error: numbers of devices that would do, of those up to twice ``devices``."""
    fits = fits or (lambda count: size % count == 0)
    counts = [str(count) for count in range(1, 2 * devices + 1) if fits(count)]
    return f"it can over {', '.join(counts)}"


def axes_size(mesh: Mesh | None, axes: Axes) -> int:
    """Number of devices along ``axes`` of a mesh; 1 for no axes, and without a mesh."""
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in axes)


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
