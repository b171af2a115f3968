"""Block sizes of all kernels, in one place, with the devices they were measured on."""

import dataclasses
import functools
import logging
import os
from typing import Literal

import jax

logger = logging.getLogger(__name__)

# Device kinds, as jax names them, whose kernels and block sizes were measured.
MEASURED_DEVICES = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
MULTIPROCESSORS = 132

Implementation = Literal["auto", "mosaic_gpu", "reference"]


# An operation named here (a comma list, or "all") runs its jnp reference: for comparisons.
REFERENCE_VARIABLE = "JAXSPEC_REFERENCE"


@functools.cache
def use_kernel(operation: str) -> bool:
    """Whether an operation's kernel is the choice on the default device: one it was measured on.

    Another GPU runs the references, and the log says so.
    """
    named = os.environ.get(REFERENCE_VARIABLE, "").split(",")
    if operation in named or "all" in named:
        return False
    device = jax.devices()[0]
    known = device.device_kind in MEASURED_DEVICES
    if device.platform == "gpu" and not known:
        logger.warning(
            "%s was not measured on %s: its plain XLA reference runs there (the kernel is for %s)",
            operation,
            device.device_kind,
            ", ".join(MEASURED_DEVICES),
        )
    return known


@dataclasses.dataclass(frozen=True)
class AttentionTuning:
    """How paged attention divides its work.

    Attributes:
      block: context slots of one step.
      stages: blocks in flight.
      warpgroups: compute warpgroups of a CTA; they share its keys and values.
      splits: CTAs that share one context.
      registers: a compute thread's, taken from the producer; None leaves them as compiled.
    """

    block: int
    stages: int
    warpgroups: int = 1
    splits: int = 1
    registers: int | None = None


def attention_tuning(pairs: int, row_tiles: int, slots: int) -> AttentionTuning:
    """For ``pairs`` of sequence and KV head, each with ``row_tiles`` tiles of 64 query rows.

    ``slots`` is the longest context that the page table could hold.
    """
    if row_tiles > 1:
        row_blocks = -(-row_tiles // 2)
        splits = _splits(pairs * row_blocks, MULTIPROCESSORS, slots // 256)
        return AttentionTuning(block=128, stages=2, warpgroups=2, splits=splits, registers=240)
    splits = _splits(pairs, 2 * MULTIPROCESSORS, slots // 128)
    stages = 2 if pairs * splits > MULTIPROCESSORS else 5  # two CTAs a multiprocessor, or one
    return AttentionTuning(block=64, stages=stages, splits=splits)


def _splits(blocks: int, room: int, most: int) -> int:
    """Largest power of two, 8 at most (a cluster), that keeps all CTAs resident."""
    splits = 1
    while splits < 8 and 2 * splits * blocks <= room and 2 * splits <= most:
        splits *= 2
    return splits
