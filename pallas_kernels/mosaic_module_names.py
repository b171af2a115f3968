"""Names of Mosaic kernels that do not count what was lowered before.

In jaxlib 0.11.2 Mosaic writes a name into each kernel's module for its dumps: the function's name
and a number that runs through the process. The module is part of a program, so the same program
had other bytes whenever another one was lowered first: it was not found in jax's compilation cache,
and every program compiled kernels of its own. The function's name alone is the same everywhere.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir import ir

ATTRIBUTE = "mosaic_gpu.dump_basename"  # Mosaic numbers a module only if it has none


def fixed_name(interpret: Any = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of kernel bodies, which are then known by their function's name.

    ``interpret``: that of the kernel. The interpreter knows no inlined MLIR, and needs no name.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        if interpret is not None:
            return body

        def emit(context: Any) -> None:
            name = ir.StringAttr.get(body.__name__)
            context.module.operation.attributes[ATTRIBUTE] = name

        @functools.wraps(body)
        def named(*refs: Any, **scratch: Any) -> None:
            inlined: Any = plgpu.inline_mgpu()(emit)
            inlined()
            body(*refs, **scratch)

        return named

    return decorate
