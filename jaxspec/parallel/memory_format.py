"""Where the arrays of weights lie on devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as DeviceLayout
from jax.sharding import Sharding, SingleDeviceSharding


def default_place() -> SingleDeviceSharding:
    """The default device."""
    return SingleDeviceSharding(jnp.zeros(()).device)


def put_weight(array: np.ndarray | Array, place: Sharding | Format) -> Array:
    """A weight on the devices of ``place``.

    On the default device it is not committed to it. Arrays that a program computes of such weights
    are not either, nor is what ``jnp.zeros`` makes: a user's program that updates the weights, or
    takes a new optimizer's state beside them, is compiled once. An Engine commits what it is given.
    """
    if jax.config.jax_default_device is None and place == default_place():
        return jax.device_put(array)
    return jax.device_put(array, place)


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
