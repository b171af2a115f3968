"""Arrays that move to other devices, or are divided otherwise, without a detour by the host."""

from typing import Any

import jax
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

COPIES = "copies"


def moved(array: Array, place: Any) -> Array:
    """The array at ``place``, a sharding or a Format of one.

    ``device_put`` alone reads an array on the host if a device wants a part of it that none has. So
    it is divided first as it will be, on the devices where it is or on those where it goes,
    whichever are more. Where neither number divides the other, each device has all of it for a
    moment. Inside of ``jit`` it is a constraint.
    """
    target = place if isinstance(place, Sharding) else place.sharding
    on_host = not isinstance(array, Array)
    if on_host or isinstance(array, Tracer) or array.sharding.is_equivalent_to(target, array.ndim):
        return jax.device_put(array, place)
    here, there = _devices(array.sharding), _devices(target)
    if len(here) % len(there) == 0 and (twin := _like(target, here)) is not None:
        return jax.device_put(with_sharding_constraint(array, twin), place)
    twin = _like(array.sharding, there) if len(there) % len(here) == 0 else None
    if twin is None:
        array, twin = with_sharding_constraint(array, _whole(here)), _whole(there)
    array = with_sharding_constraint(jax.device_put(array, twin), target)
    return jax.device_put(array, place)


def without_explicit_axes(array: Array) -> Array:
    """The same parts on the same devices, so that operations on it choose how their results are
    divided. Axes of meshes that are ``Explicit`` would have to be named in each. Copies nothing."""
    sharding = None if isinstance(array, Tracer) else getattr(array, "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    if not isinstance(sharding, NamedSharding) or not isinstance(mesh, Mesh):
        return array
    if AxisType.Explicit not in mesh.axis_types:
        return array
    automatic = Mesh(mesh.devices, mesh.axis_names)
    return jax.device_put(array, NamedSharding(automatic, sharding.spec))


def _devices(sharding: Sharding) -> list[Any]:
    """In the order in which a program on them has them."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return list(sharding.mesh.devices.flat)
    return sorted(sharding.device_set, key=lambda device: device.id)


def _like(sharding: Sharding, devices: list[Any]) -> NamedSharding | None:
    """The same parts on other devices, of which there are a multiple; None: it has no mesh."""
    if len(sharding.device_set) == 1:
        return _whole(devices)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    if not isinstance(mesh, Mesh) or not isinstance(sharding, NamedSharding):
        return None
    grid = np.array(devices).reshape(-1, *mesh.devices.shape)
    return NamedSharding(Mesh(grid, (COPIES, *mesh.axis_names)), sharding.spec)


def _whole(devices: list[Any]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), (COPIES,)), PartitionSpec())
