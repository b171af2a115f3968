"""Which operations run as Mosaic kernels: chosen once, by what the device can do."""

import dataclasses
import importlib
from types import ModuleType
from typing import Any, Literal, Self

import jax

OPERATIONS = (
    "paged_attention",
    "rope_kv_write",
    "add_rms_norm",
    "kv_compact",
    "top_k",
    "truncate",
)

Implementation = Literal["auto", "mosaic_gpu", "reference"]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Which operations run as Mosaic kernels where their arguments fit; the rest is plain XLA.

    Hashable: part of what is compiled.

    Raises ValueError for a name that is no operation.
    """

    operations: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if unknown := sorted(self.operations - set(OPERATIONS)):
            raise _no_kernel(unknown[0])

    @classmethod
    def for_device(cls, device: Any = None) -> Self:
        """All on a Hopper GPU, none elsewhere. None: jax's default device."""
        if is_hopper(_default_device() if device is None else device):
            return cls(frozenset(OPERATIONS))
        return cls()

    @classmethod
    def parse(cls, text: str, device: Any = None) -> Self:
        """From "auto" (those of ``for_device``), "all", "none", or a comma list of operations.

        Raises ValueError for a name that is no operation, and for kernels on another device than a
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
        """What to call the operation with. Raises ValueError for a name that is no operation."""
        if operation not in OPERATIONS:
            raise _no_kernel(operation)
        return "auto" if operation in self else "reference"

    def __contains__(self, operation: str) -> bool:
        return operation in self.operations

    def __str__(self) -> str:
        return ",".join(sorted(self.operations)) or "none"


def is_hopper(device: Any) -> bool:
    """Whether a jax.Device is a GPU of the kind that the kernels are written for.

    That is compute capability 9: H100, H200 and GH200 in all their forms.
    """
    capability = str(getattr(device, "compute_capability", ""))
    return device.platform == "gpu" and capability.startswith("9.")


def kernel_module(
    operation: str, implementation: Implementation, misfit: str | None
) -> ModuleType | None:
    """``pallas_kernels.<operation>.mosaic_gpu`` if the kernel is to run, None for the reference.

    It is imported only then: loading Mosaic takes 1.7 s, nearly as long as all else of jaxspec.

    Args:
      misfit: why the kernel cannot take the arguments, None if it can.

    Raises ValueError if the kernel is named and cannot take them.
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
