"""Memory that pools and programs need, and memory that a device has free."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax

from jaxspec.cache import pages_for
from jaxspec.config.cache import CacheConfig
from jaxspec.functional import EngineParams, init_pool
from jaxspec.parallel import named_shardings
from jaxspec.state import Pool

USABLE = 0.9  # of the free memory; the rest is for what programs compute with
USABLE_MAPS = 0.5  # of the memory maps that Linux allows a process


def num_pages(params: EngineParams, cache: CacheConfig, num_rows: int) -> int:
    """Pages of a pool for ``num_rows`` rows, null pages included.

    As many as ``cache`` says; by default as the longest rows need, or as fit, if fewer fit.
    Nothing is allocated.

    Raises ValueError if ``cache.num_pages`` do not fit, or not even one of the longest rows does.
    """
    shards, room = params.data_parallel, _Room.of(params, cache.page_size, num_rows)
    longest = pages_for(cache.max_length + params.speculation.scratch_slots, cache.page_size)
    if cache.num_pages is not None:
        wanted = shards * (-(-cache.num_pages // shards) + 1)
        room.check(wanted)
        return wanted
    wanted = num_rows * longest + shards
    if cache.memory is not None:
        wanted = min(wanted, room.within(cache.memory, longest))
    if room.holds(wanted):
        return wanted
    least = shards * (longest + 1)
    room.check(least)
    return max(least, shards * (room.fitting // shards + 1))


@dataclasses.dataclass(frozen=True)
class _Room:
    """What a device has room for.

    Attributes:
      free: bytes beside the weights, which are on the device already; None: it does not say, and
        is trusted.
      null: bytes of a pool without pages, and ``page`` of a page on each shard.
    """

    params: EngineParams
    page_size: int
    device: Any
    free: int | None
    null: int
    page: int

    @classmethod
    def of(cls, params: EngineParams, page_size: int, num_rows: int) -> "_Room":
        sharding = jax.tree.leaves(params)[0].sharding
        device = min(sharding.addressable_devices, key=lambda one: one.id)
        free, shards = free_bytes(device), params.data_parallel
        null, one = (
            pool_bytes(params, pages, page_size, num_rows, together=device.platform == "cpu")
            for pages in (shards, 2 * shards)
        )
        usable = None if free is None else int(USABLE * free)
        return cls(params, page_size, device, usable, null, max(1, one - null))

    def needed(self, pages: int) -> int:
        """Bytes of a pool of ``pages``, null pages included."""
        return self.null + self.page * (pages // self.params.data_parallel - 1)

    def holds(self, pages: int) -> bool:
        return self.free is None or self.needed(pages) <= self.free

    @property
    def fitting(self) -> int:
        """Pages that fit, null pages not counted."""
        assert self.free is not None
        return self.params.data_parallel * max(0, (self.free - self.null) // self.page)

    def within(self, memory: int, longest: int) -> int:
        """Pages that fit so many bytes, null pages included. Raises ValueError if they are fewer
        than the ``longest`` row needs."""
        shards = self.params.data_parallel
        pages = shards * (max(0, memory - self.null) // self.page + 1)
        least = shards * (longest + 1)
        if pages < least:
            raise ValueError(
                f"a cache of {memory} bytes is too small: the longest request needs "
                f"{self.needed(least)}; give it that, or a smaller max_length"
            )
        return pages

    def check(self, pages: int) -> None:
        """Raise ValueError for a pool that does not fit."""
        if self.free is None or self.holds(pages):
            return
        if self.fitting:
            advice = (
                f"num_pages={self.fitting} fits, which is {self.fitting * self.page_size} tokens "
                "of all sequences together: give that or less, shorter requests, or a smaller "
                "max_length"
            )
        else:
            most = self.free * self.page_size // (2 * self.page)
            advice = f"no page of {self.page_size} tokens fits: page_size must be at most {most}"
        raise ValueError(
            f"the cache's {pages} pages of {self.page_size} tokens need "
            f"{self.needed(pages) / 1e9:.2f} GB beside the weights, and {self.device.device_kind} "
            f"has {self.free / 1e9:.2f} GB free for them: {advice}"
        )


def check_program(program: jax.stages.Compiled, name: str, advice: str) -> None:
    """Raise ValueError if a compiled program's temporaries need more memory than is free.

    Args:
      name: name of the program in the message.
      advice: what the message says should be made smaller.
    """
    analysis, device = program.memory_analysis(), jax.local_devices()[0]
    free = free_bytes(device)
    if analysis is None or free is None or analysis.temp_size_in_bytes <= free:
        return
    raise ValueError(
        f"{name} needs {analysis.temp_size_in_bytes / 1e9:.2f} GB, and {device.device_kind} has "
        f"{free / 1e9:.2f} GB free: {advice}"
    )


def pool_bytes(
    params: EngineParams, num_pages: int, page_size: int, num_rows: int, *, together: bool
) -> int:
    """Bytes of a pool on each device, or (``together``) on all devices of the mesh."""
    pool: Pool = jax.eval_shape(lambda: init_pool(params, num_pages, page_size, num_rows))
    shapes: Any = [leaf.shape for leaf in jax.tree.leaves(pool)]
    devices = 1
    if params.mesh is not None:
        shardings = jax.tree.leaves(named_shardings(params.mesh, pool, params.layout))
        pairs = zip(shardings, shapes, strict=True)
        shapes = [sharding.shard_shape(shape) for sharding, shape in pairs]
        devices = params.mesh.size if together else 1
    leaves = zip(shapes, jax.tree.leaves(pool), strict=True)
    return devices * sum(math.prod(shape) * leaf.dtype.itemsize for shape, leaf in leaves)


def free_bytes(device: Any) -> int | None:
    """Free bytes of a device; of a CPU, of the host. None: the device does not report them."""
    if device.platform == "cpu":
        return _host_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _host_bytes() -> int | None:
    """Available memory of the host, reclaimable file cache included."""
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def maps_are_scarce() -> bool:
    """Whether this process has used up half of the memory maps that Linux allows it.

    A compiled CPU program holds hundreds of them, and XLA aborts the process when there are none.
    """
    maps, limit = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
    if not (maps.exists() and limit.exists()):
        return False
    with maps.open() as lines:
        return sum(1 for _ in lines) > USABLE_MAPS * int(limit.read_text())
