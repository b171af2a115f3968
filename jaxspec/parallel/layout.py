"""What is split over which mesh axes: a Layout."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

Axes = tuple[str, ...]  # mesh axes, the outermost first; (): not split

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
        "channels": "heads",  # of a convolution
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
        *(
            "later",
            "length",
            "marker",
            "nodes",
            "past",
            "rounds",
            "routes",
            "sequences",
            "stops",
            "table",
            "two",
        ),
        *("units", "whole_hidden", "words"),
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
      heads: query and KV heads, and channels of convolutions.
      ff: hidden units of MLPs.
      hidden: hidden states between the blocks of a layer (2-D tensor parallelism). These mesh axes
        are the last ones of vocab, heads, ff and experts, too. Weights that have both dimensions
        are split by them along ``hidden`` only.
      sequence: the slots of every page of the KV cache: each device has a part of each sequence.
      tokens: in one forward pass, its tokens between the blocks of a layer (see split_tokens).
      experts: of an MLP. Each device has some of them, whole (see models/mlps/experts.py).

    Raises ValueError if a mesh axis splits two of the batch, the sequence and the model, and if
    ``hidden`` is not at the end of vocab, heads, ff and experts.
    """

    batch: Axes = ()
    vocab: Axes = ()
    heads: Axes = ()
    ff: Axes = ()
    hidden: Axes = ()
    experts: Axes = ()
    sequence: Axes = ()
    tokens: Axes = ()

    def __post_init__(self):
        model = {*self.vocab, *self.heads, *self.ff, *self.experts}
        shared = set(self.batch) & model
        if shared:
            raise ValueError(
                f"mesh axes {sorted(shared)} split both the batch and the model: sums over the "
                "model's would mix rows"
            )
        if set(self.sequence) & {*self.batch, *model}:
            raise ValueError(f"the sequence needs mesh axes of its own, not {self.sequence}")
        for name in ("vocab", "heads", "ff", "experts"):
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
            raise ValueError(
                f"{logical!r} is not a logical axis: add it to jaxspec/parallel/layout.py"
            )
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
        weight_inputs, *outputs = self.splits(logical)
        wanted = [self.axes(name) for name in logical[1:]]
        parts = [_without(axes, had) for axes, had in zip(wanted, outputs, strict=True)]
        dimension = next((index for index, axes in enumerate(parts) if axes), 0)
        scattered = parts[dimension]
        return ProductAxes(
            gathered=_without(self.axes(logical[0]), weight_inputs),
            summed=_without(weight_inputs, scattered),
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


def parallel_groups(name: str, heads: int, groups: int, devices: int) -> int:
    """Groups of heads as laid out over devices: the model's, or one per device if it has fewer.

    Raises ValueError for heads that cannot be split evenly; ``name`` says which.
    """

    def fits(devices: int) -> bool:
        parts = max(groups, devices)
        return parts % devices == 0 and parts % groups == 0 and heads % parts == 0

    if not fits(devices):
        others = fitting(heads, devices, fits)
        raise ValueError(f"{name} cannot be split over {devices} devices; {others}")
    return max(groups, devices)


def axes_size(mesh: Mesh | None, axes: Axes) -> int:
    """Number of devices along ``axes`` of a mesh; 1 for no axes, and without a mesh."""
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in axes)
