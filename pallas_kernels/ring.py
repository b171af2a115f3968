"""How many blocks of weights fit the shared memory of a thread block, for kernels whose producer
copies them there ahead of the warpgroups that multiply."""

SHARED_BYTES = 227 << 10  # of a multiprocessor, 1 KiB for each CTA taken off
BARRIER_BYTES = 2048


def ring_stages(ctas: int, stage: int, results: int, most: int) -> int:
    """Blocks of ``stage`` bytes, at most ``most``, that fit the shared memory of a CTA beside its
    results, where so many CTAs share a multiprocessor and its memory.

    Raises ValueError if it cannot hold two.
    """
    free = SHARED_BYTES // ctas - BARRIER_BYTES - results
    if free < 2 * stage:
        raise ValueError(f"two blocks of {stage} bytes do not fit {free} bytes: {ctas} CTAs")
    return min(free // stage, most)
