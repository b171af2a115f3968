"""Geometry of the paged KV cache."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Geometry of the paged KV cache.

    Attributes:
      page_size: slots of a page.
      max_length: most tokens of a sequence, prompt included.
      num_pages: pages of all sequences together. Sequences that do not fit wait for the next batch.
        None: as many as the engine's rows can need.
      memory: bytes that the pages may take, of all devices together on CPUs and of each elsewhere;
        instead of num_pages. None: no limit but the device's.
    """

    page_size: int = 16
    max_length: int = 1024
    num_pages: int | None = None
    memory: int | None = None

    def __post_init__(self):
        if self.page_size < 1 or self.max_length < 2:
            raise ValueError(
                f"page_size must be >= 1 and max_length >= 2, got {self.page_size} and "
                f"{self.max_length}"
            )
        if self.num_pages is not None and self.num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {self.num_pages}")
        if self.memory is not None and (self.memory < 1 or self.num_pages is not None):
            raise ValueError(
                f"memory must be at least 1 byte, and goes without num_pages, got {self.memory}"
            )


def pages_for(num_slots: int, page_size: int) -> int:
    """Number of pages that hold ``num_slots`` slots."""
    return -(-num_slots // page_size)
