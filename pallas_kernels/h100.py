"""Choices made for an H100: rows of a pass, and thread blocks that share a row.

The tuning of attention is in paged_attention/tuning.py, that of matrix products in split_k.py.
"""

from collections.abc import Callable

from pallas_kernels.selection import Kernels

MULTIPROCESSORS = 132  # of an H100
MAX_CLUSTER = 8  # thread blocks in a cluster


def fewest_rows(kernels: Kernels) -> int:
    """The fewest rows that a target pass should have, padding included.

    Split-K needs at least two rows (see products.split_k_product). Padding the row there would cost
    an extra launch wherever a kernel produced that row; padding the draft tree by a node costs
    nothing. Single-row drafting steps are left as they are.
    """
    return 2 if "add_rms_norm" in kernels or "rope_kv_write" in kernels else 1


def top_k_shares(size: int) -> int:
    """Thread blocks that share one row of ``size`` entries in top_k, at most 8 (one cluster).

    The fewest that leave each block 4096 entries or fewer. A block holds them in registers: 32 a
    thread, 64 in the longest rows.
    """
    return largest_fitting(lambda shares: shares * 4096 < 2 * size)


def truncate_shares(size: int) -> int:
    """Thread blocks that share one row of ``size`` logits in truncate, at most 8 (one cluster).

    Depends on the size only: the rounding of a row's sums must not depend on the number of rows.
    """
    return largest_fitting(lambda shares: shares * 2048 <= size)


def largest_fitting(fits: Callable[[int], bool]) -> int:
    """The last of 1, 2, 4, 8 before the first that does not fit; 1 always fits."""
    number = 1
    while number < MAX_CLUSTER and fits(2 * number):
        number *= 2
    return number
