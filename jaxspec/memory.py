"""Memory that pools and programs need, and memory that a device has free."""

import math
import os
from pathlib import Path
from typing import Any

import jax

from jaxspec.functional import EngineParams, init_pool
from jaxspec.sharding import named_shardings
from jaxspec.state import Pool

USABLE = 0.9  # of the free memory; the rest is for what programs compute with
USABLE_MAPS = 0.5  # of the memory maps that Linux allows a process


def check_pool(params: EngineParams, num_pages: int, page_size: int, num_rows: int) -> None:
    """Raise ValueError if a pool (see functional.init_pool) needs more memory than is free.

    Nothing is allocated. The weights are on the devices already, so their memory is not free. There
    is no check on a device that does not report its memory.
    """
    device = next(iter(jax.tree.leaves(params)[0].devices()))
    free = free_bytes(device)
    if free is None:
        return
    free, shards = int(USABLE * free), params.data_parallel

    def needed(pages: int) -> int:
        return pool_bytes(params, pages, page_size, num_rows, together=device.platform == "cpu")

    total = needed(num_pages)
    if total <= free:
        return
    null = needed(shards)  # one page on each shard: the null page, which holds no tokens
    page = max(1, needed(2 * shards) - null)  # one more page on each shard
    fitting = shards * max(0, (free - null) // page)
    if fitting:
        advice = (
            f"num_pages={fitting} fits, which is {fitting * page_size} tokens of all sequences "
            "together: give that or less, shorter requests, or a smaller max_length"
        )
    else:
        most = free * page_size // (2 * page)
        advice = f"no page of {page_size} tokens fits: page_size must be at most {most}"
    raise ValueError(
        f"the cache's {num_pages} pages of {page_size} tokens need {total / 1e9:.2f} GB beside the "
        f"weights, and {device.device_kind} has {free / 1e9:.2f} GB free for them: {advice}"
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
