"""Compiles all programs before any is timed."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor


def compile_side_by_side[S, T](
    compile_one: Callable[[S], T],
    items: Sequence[S],
    name: Callable[[S], str],
    most_jobs: int,
    report: Callable[[str], None],
) -> list[T]:
    """The results of ``compile_one`` for every item, in order; it runs in threads.

    Nothing may be timed before this returns: while XLA compiles, it times matrix products on the
    device (autotuning), for one program at a time. ``report`` gets a line with the
    ``name`` of each item.
    """
    jobs, results = min(most_jobs, os.cpu_count() or 1), []
    report(f"compiling {len(items)} programs, {jobs} at a time")
    with ThreadPoolExecutor(jobs) as pool:
        for item, result in zip(items, pool.map(compile_one, items), strict=True):
            results.append(result)
            report(f"compiled {len(results)}/{len(items)} {name(item)}")
    return results
