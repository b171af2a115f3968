"""The memory in which devices leave rows for each other.

**Packets.** A row travels as packets of 16 bytes: 4 bytes of data, a flag, 4 bytes of data, the
flag again (the "low latency" protocol of NCCL). A packet is one store and one load; its halves of 8
bytes each arrive whole. A thread that waits for a packet reads it until both flags are the number
of this exchange. So the data needs no fence, no signal after it, and no clearing: one way over
NVLink is all that a row takes.

**Threads.** A block of a kernel has an *area* of the exchange, and each of its threads its own
packets there: thread ``t`` of block ``b`` exchanges packets only with thread ``t`` of block ``b``
of the other devices, whatever the rows' number. Each thread has a counter of the exchanges that it
has finished. All devices run the same program, so a thread's counters are equal on all devices.

**Nobody overwrites what is not yet read.** Packets of odd and even exchanges have separate places.
When a thread writes its packet of exchange j + 2, it has finished exchange j + 1. For that it has
received a packet of j + 1 from every other device. That packet's sender had finished exchange j
before it sent it: it had read all packets of exchange j, whose places are now overwritten. This
holds within a kernel and from kernel to kernel, so no call begins with a handshake.

**Why it is an argument and lives as long as the engine.** The semaphores that a Mosaic kernel
allocates are set to zero by an operation before it on the same device. A peer may be ahead: its
signal would be lost. XLA therefore launches a barrier of all devices before each kernel that
reaches other devices. Buffers that XLA places are no better: the peer's earlier operations may
still use the memory. An argument that is never donated stays where it is from program to program,
as weights do, is made and cleared before the first program runs, and needs no barrier
(``skip_device_barrier``).
"""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.selection import is_hopper

DEVICES = (2, 4, 8)
MAX_WIDTH = 8192  # widest row that fits the registers of a warpgroup
MAX_ROWS = 512  # of a call; with more, bandwidth counts, and half of each packet is flags
BLOCKS = 264  # two on each multiprocessor, which always fit
THREADS = 128  # of a warpgroup, that is of a block
PACKET = 16  # bytes
PACKET_ENTRIES = 4  # entries of 2 bytes that a packet carries
WIDTH_STEP = THREADS * PACKET_ENTRIES  # a row's width is a multiple: the same number per thread
WORD = 4  # bytes of a flag


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a kernel exchanges rows.

    Attributes:
      one_shot_rows: calls with at most so many rows are *one-shot*: each device sends its rows to
        all devices, and each adds up all. With more rows they are *two-shot*: each device adds up
        one part of the columns, and sends the sums to all. That sends less (7/4 rows in place of
        7, of 8 devices), but takes two ways over NVLink.
      one_shot_blocks, two_shot_blocks: the most blocks of a call, each for one row at a time.
      packets: packets that a thread waits for at a time; each takes four registers.
      most_rows: of a call.
    """

    one_shot_rows: int
    one_shot_blocks: int
    two_shot_blocks: int
    packets: int = 16
    most_rows: int = MAX_ROWS

    @classmethod
    def of(cls, devices: int, width: int) -> Self:
        """The tuning for rows of ``width`` on so many devices."""
        blocks = BLOCKS
        if devices == 2:  # both ways send the same
            return cls(MAX_ROWS, blocks, 0)
        if (width // WIDTH_STEP) % devices:  # columns cannot be divided
            return cls(MAX_ROWS, blocks, 0)
        rows = 32 // devices
        return cls(rows, rows, blocks)

    @classmethod
    def forced(cls, devices: int, width: int, most_rows: int, *, one_shot: bool) -> Self | None:
        """A tuning in which all calls of up to ``most_rows`` rows go one way; None for two-shot
        where the columns cannot be divided among the devices."""
        if one_shot:
            return cls(most_rows, BLOCKS, 0, most_rows=most_rows)
        if (width // WIDTH_STEP) % devices:
            return None
        return cls(0, 0, BLOCKS, most_rows=most_rows)

    def one_shot_words(self, devices: int, width: int) -> int:
        """Words of a block's area: counters, then twice the packets of all devices' rows."""
        return THREADS + 2 * devices * packet_words(width)

    def two_shot_words(self, width: int) -> int:
        """Words of a block's area: counters, then twice the packets of the parts and the sums."""
        return THREADS + 2 * 2 * packet_words(width)

    def words(self, devices: int, width: int) -> int:
        """Words of a device's exchange: one-shot areas, then two-shot areas."""
        one_shot = self.one_shot_blocks * self.one_shot_words(devices, width)
        return one_shot + self.two_shot_blocks * self.two_shot_words(width)

    def sent_bytes(self, devices: int, rows: int, width: int) -> int:
        """Bytes that each device sends to the others in one call, flags included."""
        whole = rows * packet_words(width) * WORD * (devices - 1)
        return whole if rows <= self.one_shot_rows else 2 * whole // devices


def packet_words(width: int) -> int:
    """Words of the packets of one row."""
    return width // PACKET_ENTRIES * PACKET // WORD


def exchange_shape(
    mesh: Mesh, axis: str, width: int, tuning: Tuning | None = None
) -> jax.ShapeDtypeStruct | None:
    """The exchange for rows of ``width``: int32 [devices, words], split over ``axis``.

    ``tuning``: of the calls that will use it; None: Tuning.of.

    None where the kernel cannot be used: if the devices are not Hopper GPUs of one process, are not
    the first ones in order (as Mosaic requires), or if their number or the width does not fit.
    """
    devices = mesh.shape[axis]
    if not reachable(mesh) or devices not in DEVICES or width % WIDTH_STEP or width > MAX_WIDTH:
        return None
    words = (tuning or Tuning.of(devices, width)).words(devices, width)
    return jax.ShapeDtypeStruct((devices, words), jnp.int32, sharding=NamedSharding(mesh, P(axis)))


def make_exchange(mesh: Mesh, axis: str, width: int, tuning: Tuning | None = None) -> Array | None:
    """An exchange as ``exchange_shape`` describes it, cleared; None where that is None."""
    shape = exchange_shape(mesh, axis, width, tuning)
    if shape is None:
        return None
    clear = jax.jit(lambda: jnp.zeros(shape.shape, shape.dtype), out_shardings=shape.sharding)
    return jax.block_until_ready(clear())  # on all devices before any of them sends


def reachable(mesh: Mesh) -> bool:
    """Whether the devices can write to each other's memory, from a Mosaic kernel."""
    devices: list[Any] = list(mesh.devices.flat)
    return (
        all(is_hopper(device) for device in devices)
        and len({device.process_index for device in devices}) == 1
        and [device.id for device in devices] == list(range(math.prod(mesh.devices.shape)))
    )
