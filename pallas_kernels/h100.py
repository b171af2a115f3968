"""Numbers of an H100, by which kernels divide their work.

What was measured is told in docs/results/kernels.md, and of split-K products in split_k.py.
"""

from collections.abc import Callable

MULTIPROCESSORS = 132
MAX_CLUSTER = 8  # thread blocks in a cluster


def largest_fitting(fits: Callable[[int], bool]) -> int:
    """The last of 1, 2, 4, 8 before the first that does not fit; 1 always fits."""
    number = 1
    while number < MAX_CLUSTER and fits(2 * number):
        number *= 2
    return number
