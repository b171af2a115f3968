"""Python's garbage collector, at times when there is nothing for it."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Let Python not look for garbage while modules load and programs are traced: what they make is
    kept, or goes without a search. Looking takes a sixth of an import, a tenth of a start."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
