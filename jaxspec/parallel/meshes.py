"""Meshes of devices, and the layout of a model on each."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxspec.parallel.layout import WHOLE, Layout

DATA_AXIS = "data"
STAGE_AXIS = "stage"  # of meshes for pipelines only
SEQUENCE_AXIS = "sequence"  # of meshes for sequence parallelism only
MODEL_AXIS = "model"
HIDDEN_AXIS = "hidden"  # of meshes for 2-D tensor parallelism only

# Devices that share a model: a number, or the sizes (x, y) of a grid. In a grid, the hidden
# dimension of weights is split over x devices, and their heads or hidden units of MLPs over y.
TensorParallel = int | tuple[int, int]


def make_mesh(
    tensor_parallel: TensorParallel = 1,
    data_parallel: int = 1,
    devices: Sequence[Any] | None = None,
    *,
    sequence_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> Mesh:
    """A ``(data, model)`` mesh over the first of these devices; None: of all.

    ``tensor_parallel`` (x, y) with x above 1 gives a ``(data, model, hidden)`` mesh of y devices
    along ``model`` and x along ``hidden``, for 2-D tensor parallelism. ``sequence_parallel`` above
    1 adds an axis ``sequence`` before ``model``: its devices share each sequence.
    ``pipeline_parallel`` above 1 adds an axis ``stage``: each part of it has some of the layers
    (see stage_meshes).

    Raises ValueError for sizes below 1, if there are fewer devices than needed, and for a pipeline
    beside rows, sequences or a hidden dimension that are split.
    """
    (x, y), devices = grid_of(tensor_parallel), devices or jax.devices()
    sp, pp = sequence_parallel, pipeline_parallel
    _check_sizes(tensor_parallel, data_parallel, sp, pp, len(devices))
    if pp > 1 and max(data_parallel, sp, x) > 1:
        raise ValueError(
            f"pp {pp} goes with tp N alone: leave out sp and a grid; engines side by side (dp) "
            "have a mesh each"
        )
    sizes = {DATA_AXIS: data_parallel, STAGE_AXIS: pp, SEQUENCE_AXIS: sp}
    sizes |= {MODEL_AXIS: y, HIDDEN_AXIS: x}
    kept = {name: n for name, n in sizes.items() if n > 1 or name in (DATA_AXIS, MODEL_AXIS)}
    grid = np.array(devices[: math.prod(kept.values())])
    return Mesh(grid.reshape(*kept.values()), tuple(kept))


def _check_sizes(tp: TensorParallel, dp: int, sp: int, pp: int, devices: int) -> None:
    """Raises ValueError for sizes below 1, and for more devices than there are."""
    last = {"sp": sp} if pp == 1 else {"pp": pp}  # the one that is advised
    shown = f"tp {shown_size(tp)}, dp {dp}" + "".join(f", {name} {n}" for name, n in last.items())
    if min(*grid_of(tp), dp, sp, pp) < 1:
        raise ValueError(
            f"parallel sizes must be >= 1, got tp {shown_size(tp)}, dp {dp}, sp {sp}, pp {pp}"
        )
    others, (name, size) = dp * math.prod(grid_of(tp)), next(iter(last.items()))
    if others * sp * pp > devices:
        fits = f"; {name} {devices // others} fits" if devices >= others and size > 1 else ""
        raise ValueError(
            f"{shown} needs {others * sp * pp} devices, this process has {devices}{fits}"
        )


def stage_meshes(mesh: Mesh | None, drafter_mesh: Mesh | None = None) -> tuple[Any, ...]:
    """The mesh of each stage of a pipeline, in order; the mesh itself if it has no ``stage``.

    ``drafter_mesh`` is a last stage. None as ``mesh`` then means one device.

    Raises ValueError for a drafter_mesh beside rows, sequences or a hidden dimension that are
    split, for one that shares devices with the mesh, and for what is no mesh of make_mesh.
    """
    check_is_mesh("mesh", mesh)
    check_is_mesh("drafter_mesh", drafter_mesh)
    stages: tuple[Mesh | None, ...] = (mesh,)
    if mesh is not None and STAGE_AXIS in mesh.shape:
        names = tuple(name for name in mesh.axis_names if name != STAGE_AXIS)
        parts = np.moveaxis(mesh.devices, mesh.axis_names.index(STAGE_AXIS), 0)
        stages = tuple(Mesh(devices, names) for devices in parts)
    if drafter_mesh is None:
        return stages
    meshes = [make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh for mesh in stages]
    if any(mesh.size != mesh.shape[MODEL_AXIS] for mesh in (*meshes, drafter_mesh)):
        raise ValueError("drafter_mesh goes with tp N and pp alone: leave out dp, sp and a grid")
    shared = {device.id for mesh in meshes for device in mesh.devices.flat}
    shared &= {device.id for device in drafter_mesh.devices.flat}
    if shared:
        raise ValueError(f"drafter_mesh has devices {sorted(shared)} of the target: give others")
    return (*meshes, drafter_mesh)


def check_is_mesh(name: str, mesh: Any) -> None:
    """Raise ValueError for what is no mesh, nor None, and for a mesh without the axes of
    make_mesh."""
    if mesh is None:
        return
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            f"{name} must be a mesh, such as jaxspec.make_mesh(tensor_parallel=2), not {mesh!r}"
        )
    if not {DATA_AXIS, MODEL_AXIS} <= set(mesh.shape):
        raise ValueError(
            f"the {name} has axes {list(mesh.shape)}, and needs {DATA_AXIS!r} and {MODEL_AXIS!r}: "
            "make it with jaxspec.make_mesh"
        )


def devices_of_model(mesh: Mesh | None) -> int:
    """Number of devices that share a model, or its sequences."""
    return 1 if mesh is None else mesh.size // mesh.shape[DATA_AXIS]


def grid_of(tensor_parallel: TensorParallel) -> tuple[int, int]:
    """The sizes (x, y) of the grid of devices. Raises ValueError for what is none."""
    match (1, tensor_parallel) if isinstance(tensor_parallel, int) else tensor_parallel:
        case [int() as x, int() as y]:
            return x, y
    raise ValueError(
        f"tensor_parallel must be an int, or two such as (2, 4), got {tensor_parallel!r}"
    )


def shown_size(tensor_parallel: TensorParallel) -> str:
    """The text that ``--tp`` takes: ``4``, ``2x2``."""
    x, y = grid_of(tensor_parallel)
    return str(y) if isinstance(tensor_parallel, int) else f"{x}x{y}"


def replica_meshes(
    replicas: int,
    tensor_parallel: TensorParallel = 1,
    sequence_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> list[Mesh | None]:
    """The devices of engines side by side; None: the default device. Each has as many as the other
    sizes multiply to.

    Raises ValueError for sizes below 1, and if there are fewer devices than needed.
    """
    devices = jax.devices()
    sizes = {"sequence_parallel": sequence_parallel, "pipeline_parallel": pipeline_parallel}
    _check_sizes(tensor_parallel, replicas, sequence_parallel, pipeline_parallel, len(devices))
    size = math.prod(grid_of(tensor_parallel)) * math.prod(sizes.values())
    if replicas * size == 1:
        return [None]
    groups = [devices[start : start + size] for start in range(0, replicas * size, size)]
    return [make_mesh(tensor_parallel, devices=group, **sizes) for group in groups]


def mesh_layout(mesh: Mesh | None, *, split_model: bool = True) -> Layout:
    """The layout of a model on a mesh from make_mesh. Axes of one device are left out.

    ``split_model`` False: every device along the model axes holds the whole model. Sequences are
    split all the same.

    Raises ValueError for a mesh without those axes, and for one with stages.
    """
    check_is_mesh("mesh", mesh)
    if mesh is None:
        return WHOLE
    if STAGE_AXIS in mesh.shape:
        raise ValueError("each stage of a pipeline has a layout of its own: see stage_meshes")
    batch = (DATA_AXIS,) if mesh.shape[DATA_AXIS] > 1 else ()
    sequence = (SEQUENCE_AXIS,) if mesh.shape.get(SEQUENCE_AXIS, 1) > 1 else ()
    if not split_model:
        return Layout(batch=batch, sequence=sequence)
    model = (MODEL_AXIS,) if mesh.shape[MODEL_AXIS] > 1 else ()
    hidden = (HIDDEN_AXIS,) if mesh.shape.get(HIDDEN_AXIS, 1) > 1 else ()
    every = model + hidden
    return Layout(batch, every, every, every, hidden, experts=every, sequence=sequence)
