"""Compiles all programs before any is timed."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor


def compile_side_by_side[S, T](
    compile_one: Callable[[S], T],
    items: Sequence[S],
    what: str,
    most_jobs: int,
    report: Callable[[str], None],
) -> Iterator[T]:
    """Run ``compile_one`` on every item in threads, and yield the results in order.

    Nothing may be timed before the last result: while XLA compiles, it times matrix products on the
    device (autotuning), for one program at a time. ``report`` gets a line with the number of items,
    which ``what`` names.
    """
    jobs = min(most_jobs, os.cpu_count() or 1)
    report(f"compiling {len(items)} {what}, {jobs} at a time")
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(compile_one, items)
