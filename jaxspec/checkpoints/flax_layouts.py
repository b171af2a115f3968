"""How an array of a flax tree becomes the tensor of a checkpoint, which is [out, in] or a vector.

A name states a layout where flax has a convention: an array called ``kernel`` has its inputs first,
one called ``embedding`` is a table of rows, and the dimensions of a ``bias`` follow each other. Any
other array has the tensor's layout, unless its axes are stated: the words ``in`` and ``out``, with
any others for the dimensions of the side that is not named. ``heads dim out`` is the projection of
attention's outputs, of which each head's are the inputs.
"""

import math

Shape = tuple[int, ...]
Order = tuple[int, ...]  # a permutation of an array's axes, before it is reshaped


def order_of_axes(path: str, shape: Shape, wanted: Shape, axes: str | None) -> Order:
    """How the axes of the array at ``path`` must be ordered, so that it can be reshaped into a
    tensor of shape ``wanted``. ``axes``: as stated for it, None for its name's.

    Raises ValueError for another shape than the layout's, and for a square matrix without one.
    """
    name = path.split(".")[-1].split("[")[0]
    order = _by_name(name, shape, wanted) if axes is None else _stated(shape, wanted, axes)
    if order is not None:
        return order
    if axes is not None:
        raise ValueError(f"{path} is {list(shape)}, with the axes {axes!r}")
    why = ", and a kernel has its inputs first" if name == "kernel" else ""
    if shape == wanted and not why:
        why = ", square, and its name states no layout"
    raise ValueError(f"{path} is {list(shape)}{why}")


def _stated(shape: Shape, wanted: Shape, axes: str) -> Order | None:
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
