"""Memory that pools and programs need, and memory that a device has free."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.cache import Geometry
from jaxspec.config.cache import CacheConfig, pages_for
from jaxspec.decoding.functional import EngineParams, init_pool
from jaxspec.decoding.functional.pipelined import init_stage
from jaxspec.parallel import Layout, named_shardings
from jaxspec.parallel.bytes import gigabytes

USABLE = 0.9  # of the free memory; the rest is for what programs compute with
USABLE_MAPS = 0.5  # of the memory maps that Linux allows a process


def num_pages(params: EngineParams, cache: CacheConfig, num_rows: int) -> int:
    """Pages of a pool for ``num_rows`` rows, null pages included.

    As many as ``cache`` says; by default as the longest rows need, or as fit, if fewer fit.
    Nothing is allocated.

    Raises ValueError if ``cache.num_pages`` do not fit, or not even one of the longest rows does.
    """
    shards, devices = params.data_parallel, _device_memories(params, cache.page_size, num_rows)
    longest = pages_for(cache.max_length + params.speculation.scratch_slots, cache.page_size)
    if cache.num_pages is not None:
        wanted = shards * (-(-cache.num_pages // shards) + 1)
        for device in devices:
            device.check(wanted)
        return wanted
    wanted = num_rows * longest + shards
    if cache.memory is not None:
        wanted = min(wanted, *(device.within(cache.memory, longest) for device in devices))
    least = shards * (longest + 1)
    for device in devices:
        if not device.holds(wanted):
            device.check(least)
            wanted = max(least, shards * (device.fitting // shards + 1))
    return wanted


def most_tokens(
    params: EngineParams, page_size: int, num_rows: int, kv_memory: int | None
) -> int | None:
    """The most tokens that a request of an engine can have, if it has all pages that fit; None:
    devices do not say how much memory they have.

    Args:
      kv_memory: see CacheConfig.memory.
    """
    found = []
    for device in _device_memories(params, page_size, num_rows):
        if kv_memory is not None:
            free = kv_memory if device.free is None else min(device.free, kv_memory)
            device = dataclasses.replace(device, free=free)
        if device.free is not None:
            found.append(device.fitting // params.data_parallel * page_size)
    return max(0, min(found) - params.speculation.scratch_slots) if found else None


def _device_memories(params: EngineParams, page_size: int, num_rows: int) -> list["_DeviceMemory"]:
    """One for each stage, as no two share a device; on a CPU, whose devices share its memory, one
    for all."""
    stages: list[tuple[Any, Callable[..., Any]]] = [(stage, init_stage) for stage in params.stages]
    shards, found = params.data_parallel, []
    for stage, init in [*stages, (params.last_stage, init_pool)]:
        devices = jax.tree.leaves(stage)[0].sharding.addressable_devices
        device = min(devices, key=lambda device: device.id)
        on_cpu = device.platform == "cpu"
        make = functools.partial(init, stage, page_size=page_size, num_rows=num_rows)
        null, more = (
            _bytes(functools.partial(make, pages), stage.layout, stage.mesh, together=on_cpu)
            for pages in (shards, 2 * shards)
        )
        free = free_bytes(device)
        usable = None if free is None else int(USABLE * free)
        found.append(_DeviceMemory(shards, page_size, device, usable, null, max(1, more - null)))
    if found[0].device.platform == "cpu":
        null, page = (sum(getattr(each, name) for each in found) for name in ("null", "page"))
        return [dataclasses.replace(found[0], null=null, page=page)]
    return found


@dataclasses.dataclass(frozen=True)
class _DeviceMemory:
    """How many pages a device can hold.

    Attributes:
      free: bytes beside the weights, which are on the device already; None: it does not say, and
        is trusted.
      null: bytes of a pool without pages, and ``page`` of a page on each shard.
    """

    shards: int
    page_size: int
    device: Any
    free: int | None
    null: int
    page: int

    def needed(self, pages: int) -> int:
        """Bytes of a pool of ``pages``, null pages included."""
        return self.null + self.page * (pages // self.shards - 1)

    def holds(self, pages: int) -> bool:
        return self.free is None or self.needed(pages) <= self.free

    @property
    def fitting(self) -> int:
        """Pages that fit, null pages not counted."""
        assert self.free is not None
        return self.shards * max(0, (self.free - self.null) // self.page)

    def within(self, memory: int, longest: int) -> int:
        """Pages that fit so many bytes, null pages included. Raises ValueError if they are fewer
        than the ``longest`` row needs."""
        shards = self.shards
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
            f"{gigabytes(self.needed(pages))} beside the weights, and {self.device.device_kind} "
            f"has {gigabytes(self.free)} free for them: {advice}"
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
        f"{name} needs {gigabytes(analysis.temp_size_in_bytes)}, and {device.device_kind} has "
        f"{gigabytes(free)} free: {advice}"
    )


def bytes_of_token(params: EngineParams) -> tuple[float, float]:
    """Bytes that the caches of target and drafter keep for a token, on each device. What a row
    keeps, however long it is, does not count."""
    shards, page_size = params.data_parallel, 16 * params.sequence_parallel

    def grown(init_pool: Callable[[Geometry], Any]) -> float:
        """Bytes by which a page on each shard makes the cache larger, for each of its tokens."""
        few, more = (
            _bytes(
                lambda pages=pages: init_pool(Geometry(pages, page_size, shards, params.mesh)),
                params.layout,
                params.mesh,
                together=False,
            )
            for pages in (shards, 2 * shards)
        )
        return (more - few) / page_size

    return grown(params.target.init_state), grown(params.drafter.init_pool)


def _bytes(make: Callable[[], Any], layout: Layout, mesh: Mesh | None, *, together: bool) -> int:
    """Bytes of what ``make`` would return."""
    state = jax.eval_shape(make)
    shapes: Any = [leaf.shape for leaf in jax.tree.leaves(state)]
    devices = 1
    if mesh is not None:
        shardings = jax.tree.leaves(named_shardings(mesh, state, layout))
        pairs = zip(shardings, shapes, strict=True)
        shapes = [sharding.shard_shape(shape) for sharding, shape in pairs]
        devices = mesh.size if together else 1
    leaves = zip(shapes, jax.tree.leaves(state), strict=True)
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


def maps_are_scarce(usable: float = USABLE_MAPS) -> bool:
    """Whether this process has used up a share of the memory maps that Linux allows it.

    A compiled CPU program holds hundreds of them, and XLA aborts the process when there are none.
    """
    maps, limit = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
    if not (maps.exists() and limit.exists()):
        return False
    with maps.open() as lines:
        return sum(1 for _ in lines) > usable * int(limit.read_text())
