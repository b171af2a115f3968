"""The devices that a command's options ask for."""

import argparse

import jax
from jax.sharding import Mesh

from jaxspec.parallel import grid_of, make_mesh, replica_meshes


def engine_meshes(arguments: argparse.Namespace, replicas: int = 1) -> list[Mesh | None]:
    """The mesh of each of so many engines; None: the default device.

    Raises ValueError for sizes that do not go together, and for too few devices.
    """
    if arguments.drafter_devices and replicas > 1:
        raise ValueError("--drafter-devices goes without --dp")
    if arguments.drafter_devices < 0:
        raise ValueError(f"--drafter-devices must be at least 0, got {arguments.drafter_devices}")
    return replica_meshes(replicas, arguments.tp, arguments.sp, arguments.pp)


def drafter_mesh(arguments: argparse.Namespace) -> Mesh | None:
    """The devices after those of the target, for --drafter-devices; None: the target's.

    Raises ValueError for too few devices.
    """
    wanted = arguments.drafter_devices
    if not wanted:
        return None
    x, y = grid_of(arguments.tp)
    used, devices = x * y * arguments.sp * arguments.pp, jax.devices()
    if used + wanted > len(devices):
        raise ValueError(
            f"--drafter-devices {wanted} needs {used + wanted} devices with those of the target, "
            f"this process has {len(devices)}"
        )
    return make_mesh(wanted, devices=devices[used : used + wanted])
