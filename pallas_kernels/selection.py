"""Which operations run as Mosaic kernels: chosen once, by what the device supports."""

import dataclasses
import importlib
from types import ModuleType
from typing import Any, Literal, Self

import jax

OPERATIONS = (
    "paged_attention",
    "rope_kv_write",
    "add_rms_norm",
    "reduce_add_rms_norm",
    "kv_compact",
    "top_k",
    "truncate",
)

# Compiled for Hopper GPUs, but not yet run on several of them: "auto" leaves these out.
NOT_YET_MEASURED = frozenset({"reduce_add_rms_norm"})

Implementation = Literal["auto", "mosaic_gpu", "reference"]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The operations that run as Mosaic kernels where their arguments fit; others are plain XLA.

    Hashable, because it is a static argument of compiled programs.

    Raises ValueError for an unknown operation.
    """

    operations: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if unknown := sorted(self.operations - set(OPERATIONS)):
            raise _no_kernel(unknown[0])

    @classmethod
    def for_device(cls, device: Any = None) -> Self:
        """Those measured on a Hopper GPU, none elsewhere. ``device`` None: jax's default device."""
        if is_hopper(_default_device() if device is None else device):
            return cls(frozenset(OPERATIONS) - NOT_YET_MEASURED)
        return cls()

    @classmethod
    def parse(cls, text: str, device: Any = None) -> Self:
        """Parse "auto" (see ``for_device``), "all", "none", or a comma list of operations.

        Raises ValueError for an unknown operation, and for any kernel on a device that is not a
        Hopper GPU.
        """
        if text == "auto":
            return cls.for_device(device)
        if text == "none":
            return cls()
        names = OPERATIONS if text == "all" else [name.strip() for name in text.split(",")]
        kernels = cls(frozenset(names))
        device = _default_device() if device is None else device
        if not is_hopper(device):
            raise ValueError(f"the kernels are for Hopper GPUs, not for {device.device_kind}")
        return kernels

    def implementation(self, operation: str) -> Implementation:
        """The ``implementation`` argument for the operation: "auto" or "reference".

        Raises ValueError for an unknown operation.
        """
        if operation not in OPERATIONS:
            raise _no_kernel(operation)
        return "auto" if operation in self else "reference"

    def __contains__(self, operation: str) -> bool:
        return operation in self.operations

    def __str__(self) -> str:
        return ",".join(sorted(self.operations)) or "none"


def is_hopper(device: Any) -> bool:
    """Whether a jax.Device is a Hopper GPU: compute capability 9, so any H100, H200 or GH200."""
    capability = str(getattr(device, "compute_capability", ""))
    return device.platform == "gpu" and capability.startswith("9.")


def kernel_module(
    operation: str, implementation: Implementation, misfit: str | None
) -> ModuleType | None:
    """``pallas_kernels.<operation>.mosaic_gpu`` if the kernel is to run, None for the reference.

    The module is imported on first use: loading Mosaic takes 1.7 s, nearly as long as the rest of
    jaxspec.

    Args:
      misfit: why the kernel cannot take the arguments; None if it can.

    Raises ValueError if ``implementation`` asks for the kernel and it cannot take the arguments.
    """
    if implementation == "mosaic_gpu" and misfit is not None:
        raise ValueError(f"the kernel cannot take {misfit}")
    if implementation == "reference" or misfit is not None:
        return None
    return importlib.import_module(f"pallas_kernels.{operation}.mosaic_gpu")


def _no_kernel(name: str) -> ValueError:
    return ValueError(
        f"no kernel is called {name!r}: choose auto, all, none, or a comma list of "
        f"{', '.join(OPERATIONS)}"
    )


def _default_device() -> Any:
    chosen = jax.config.jax_default_device
    if chosen is None or isinstance(chosen, str):
        return jax.devices(chosen)[0]
    return chosen


NO_KERNELS = Kernels()
