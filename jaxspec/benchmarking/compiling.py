"""Compiling everything before anything is timed."""

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
    """``compile_one`` of every item in threads, in the items' order, each as soon as it is there.

    Nothing may be timed before the last: XLA tries products out on the device while it compiles,
    one program at a time. ``report`` is told how many ``what`` there are.
    """
    jobs = min(most_jobs, os.cpu_count() or 1)
    report(f"compiling {len(items)} {what}, {jobs} at a time")
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(compile_one, items)
