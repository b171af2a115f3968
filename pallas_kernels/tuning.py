"""Block sizes of all kernels, in one place, with the devices they were measured on."""

import dataclasses
import functools
import logging
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import jax

logger = logging.getLogger(__name__)

# Device kinds, as jax names them, on which an operation's kernel was measured inside the engine;
# elsewhere its jnp reference runs. None yet: on an H100 the attention kernel was right and faster
# than XLA by itself, but the whole engine has not run with it there.
MEASURED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"paged_attention": (), "add_rms_norm": ()}
)
KERNELS_VARIABLE = "JAXSPEC_KERNELS"  # "all", "none" or a comma list of operations: overrides it
MULTIPROCESSORS = 132

Implementation = Literal["auto", "mosaic_gpu", "reference"]


@functools.cache
def use_kernel(operation: str) -> bool:
    """Whether an operation's kernel is the choice on the default device.

    Raises ValueError if the environment variable names an operation that has no kernel.
    """
    chosen = os.environ.get(KERNELS_VARIABLE)
    if chosen is not None:
        names = {"all": list(MEASURED), "none": []}.get(chosen, chosen.split(","))
        if unknown := sorted(set(names) - set(MEASURED)):
            raise ValueError(
                f"{KERNELS_VARIABLE}: no kernel is called {unknown[0]!r}: it takes all, none, or a "
                f"comma list of {', '.join(MEASURED)}"
            )
        return operation in names
    device = jax.devices()[0]
    measured = MEASURED[operation]
    if device.platform == "gpu" and measured and device.device_kind not in measured:
        logger.warning(
            "%s: its kernel was not measured on %s, plain XLA runs instead (%s=all tries it)",
            operation,
            device.device_kind,
            KERNELS_VARIABLE,
        )
    return device.device_kind in measured


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

    ``slots`` is the longest context that the page table could hold. Measured on an H100 (one CTA a
    multiprocessor in all of these): 8 sequences of 8k and 8 queries, 5 stages in 2 splits 103 us
    against 122 us with 2 stages in 4 splits; of 1k, no split 23.3 us against 24.0 us in two.
    """
    if row_tiles > 1:
        blocks = pairs * -(-row_tiles // 2)
        splits = _splits(blocks, slots // 512)
        return AttentionTuning(block=128, stages=2, warpgroups=2, splits=splits, registers=240)
    splits = _splits(pairs, slots // (1024 if 2 * pairs > MULTIPROCESSORS // 2 else 128))
    # Beyond one CTA a multiprocessor, two of two stages overlap better than one of five.
    return AttentionTuning(block=64, stages=5 if pairs <= MULTIPROCESSORS else 2, splits=splits)


def _splits(blocks: int, most: int) -> int:
    """Largest power of two, 8 at most (a cluster), that gives no multiprocessor a second CTA."""
    splits = 1
    while splits < 8 and 2 * splits * blocks <= MULTIPROCESSORS and 2 * splits <= most:
        splits *= 2
    return splits
