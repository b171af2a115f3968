"""Which operations run as Mosaic kernels: chosen once, by what the device supports.

Hopper GPUs have a kernel for every operation, TPUs for some.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any, Literal, Self

import jax

from pallas_kernels.float8 import is_float8

OPERATIONS = (
    "paged_attention",
    "partial_attention",
    "latent_attention",
    "rope_kv_write",
    "add_rms_norm",
    "reduce_add_rms_norm",
    "kv_compact",
    "top_k",
    "truncate",
    "packed_product",
    "round_tokens",
    "expert_product",
    "packed_expert_product",
    "packed_float_product",
    "delta_rule",
    "delta_run",  # of delta_rule, where prompts are read
    "delta_inputs",
    "gated_norm",
    "o_gate_up_down",
    "expert_gate_up_down",
    "attention_sinks",  # paged_attention, where heads have a slot without a value
    "float8_layers",  # o_gate_up_down, where weights are 8-bit floats with a scale for each output
    "float8_group_layers",  # likewise, with a scale for each 128 inputs of an output
    "float8_pages",  # the kernels that read and write pages, where these hold 8-bit numbers
)

_ATTENTION = "paged_attention", "partial_attention", "latent_attention"
# What other kernels do beside their first form, and those kernels: none of these runs by itself.
FORMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention_sinks": ("paged_attention",),
        "float8_layers": ("o_gate_up_down",),
        "float8_group_layers": ("o_gate_up_down",),
        "float8_pages": (*_ATTENTION, "rope_kv_write", "kv_compact"),
    }
)

# "auto" leaves these out, unless so many devices share a model: for those numbers they were right
# on two machines. For other numbers they were compiled, but have not run yet, or on one machine, as
# those of one and two devices were on 4.
MEASURED_SHARING: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "reduce_add_rms_norm": (2, 4),
        "partial_attention": (2, 4),
        "latent_attention": (1, 2),
        "packed_product": (1, 2),
        "round_tokens": (1, 2),
        "expert_product": (1, 2),
        "packed_expert_product": (1,),
        "packed_float_product": (),  # right on two machines, not timed yet
        "delta_rule": (1, 2),
        "delta_run": (1, 2),
        "delta_inputs": (1,),
        "gated_norm": (1,),
        "o_gate_up_down": (1,),
        "expert_gate_up_down": (1,),
        "attention_sinks": (1,),
        "float8_layers": (1,),
        "float8_group_layers": (),  # right on one machine, not timed by itself yet
        "float8_pages": (1, 2),
    }
)

TPU_OPERATIONS = ("paged_attention",)
TPU_KINDS = ("TPU v5 lite", "TPU v6 lite")  # v5e and v6e: what the kernels were compiled for

Backend = Literal["mosaic_gpu", "mosaic_tpu"]
# How an operation runs. "auto" and "auto_tpu": by the kernel of that backend where it can take the
# arguments, else by the reference. "mosaic_gpu" and "mosaic_tpu": ValueError where it cannot.
Implementation = Literal["auto", "auto_tpu", "mosaic_gpu", "mosaic_tpu", "reference"]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The operations that run as Mosaic kernels where their arguments fit; others are plain XLA.

    Hashable, because it is a static argument of compiled programs.

    Attributes:
      backend: whose kernels they are.

    Raises ValueError for an operation that has no kernel on the backend.
    """

    operations: frozenset[str] = frozenset()
    backend: Backend = "mosaic_gpu"

    def __post_init__(self) -> None:
        if unknown := sorted(self.operations - set(_operations_of(self.backend))):
            raise _no_kernel(unknown[0], self.backend)

    @classmethod
    def for_device(cls, device: Any = None, sharing: int = 1) -> Self:
        """Those measured on a Hopper GPU, attention on a TPU, else none.

        Args:
          device: None: jax's default device.
          sharing: number of devices that share a model.
        """
        backend = backend_of(default_device() if device is None else device)
        if backend is None:
            return cls()
        unknown = {name for name, sizes in MEASURED_SHARING.items() if sharing not in sizes}
        return cls(frozenset(_operations_of(backend)) - unknown, backend)

    @classmethod
    def parse(cls, text: str, device: Any = None, sharing: int = 1) -> Self:
        """Parse "auto" (see ``for_device``), "all", "none", or a comma list of operations.

        Raises ValueError for an operation without a kernel on the device, for a form (see FORMS)
        without its kernel, and for any kernel on a device that is neither a Hopper GPU nor a TPU.
        """
        if text == "auto":
            return cls.for_device(device, sharing)
        if text == "none":
            return cls()
        device = default_device() if device is None else device
        backend = backend_of(device)
        has = _operations_of(backend or "mosaic_gpu")
        names = has if text == "all" else [name.strip() for name in text.split(",")]
        kernels = cls(frozenset(names), backend or "mosaic_gpu")
        forms = {form: of for form, of in FORMS.items() if form in kernels}
        alone = [form for form, of in forms.items() if kernels.operations.isdisjoint(of)]
        if alone:
            raise ValueError("; ".join(f"{form} is a form of {_both(form)}" for form in alone))
        if backend is None:
            raise ValueError(f"the kernels are for Hopper GPUs, not for {device.device_kind}")
        return kernels

    def implementation(self, operation: str) -> Implementation:
        """The ``implementation`` argument for the operation: "auto", "auto_tpu" or "reference".

        Raises ValueError for an unknown operation.
        """
        if operation not in OPERATIONS:
            raise _no_kernel(operation)
        if operation not in self:
            return "reference"
        return "auto_tpu" if self.backend == "mosaic_tpu" else "auto"

    def over_pages(self, operation: str, pages: jax.Array) -> Implementation:
        """The ``implementation`` of an operation over these pages: "reference" for bytes (see
        float8.py), unless "float8_pages" was chosen, too."""
        if is_float8(pages) and "float8_pages" not in self:
            return "reference"
        return self.implementation(operation)

    def __contains__(self, operation: str) -> bool:
        return operation in self.operations

    def __str__(self) -> str:
        return ",".join(sorted(self.operations)) or "none"


def _both(form: str) -> str:
    """A form's kernels, and what to do about the form that was named without them."""
    *others, last = FORMS[form]
    return (
        f"{', '.join(others)} and {last}: name one of those, too"
        if others
        else f"{last}: name both"
    )


def is_hopper(device: Any) -> bool:
    """Whether a jax.Device is a Hopper GPU: compute capability 9, so any H100, H200 or GH200."""
    capability = str(getattr(device, "compute_capability", ""))
    return device.platform == "gpu" and capability.startswith("9.")


def is_tpu(device: Any) -> bool:
    """Whether a jax.Device is a TPU of a kind that the kernels were compiled for."""
    return device.platform == "tpu" and device.device_kind in TPU_KINDS


def backend_of(device: Any) -> Backend | None:
    """Whose kernels a device can run; None: no one's."""
    if is_hopper(device):
        return "mosaic_gpu"
    return "mosaic_tpu" if is_tpu(device) else None


def _operations_of(backend: Backend) -> tuple[str, ...]:
    return TPU_OPERATIONS if backend == "mosaic_tpu" else OPERATIONS


def fewest_rows(kernels: Kernels) -> int:
    """The fewest rows that a target pass should have, padding included.

    Split-K needs at least two rows (see products.split_k_product). Padding the row there would cost
    an extra launch wherever a kernel produced that row; padding the draft tree by a node costs
    nothing. Single-row drafting steps are left as they are.
    """
    return 2 if "add_rms_norm" in kernels or "rope_kv_write" in kernels else 1


def wants_tpu(implementation: Implementation) -> bool:
    """Whether an ``implementation`` argument asks for a TPU kernel."""
    return implementation in ("auto_tpu", "mosaic_tpu")


def kernel_module(
    operation: str, implementation: Implementation, misfit: str | None
) -> ModuleType | None:
    """``pallas_kernels.<operation>.<backend>`` if the kernel is to run, None for the reference.

    The module is imported on first use: loading Mosaic takes 1.7 s, nearly as long as the rest of
    jaxspec.

    Args:
      misfit: why the kernel cannot take the arguments; None if it can.

    Raises ValueError if ``implementation`` asks for the kernel and it cannot take the arguments.
    """
    if implementation in ("mosaic_gpu", "mosaic_tpu") and misfit is not None:
        raise ValueError(f"the kernel cannot take {misfit}")
    if implementation == "reference" or misfit is not None:
        return None
    backend = "mosaic_tpu" if wants_tpu(implementation) else "mosaic_gpu"
    return importlib.import_module(f"pallas_kernels.{operation}.{backend}")


def _no_kernel(name: str, backend: Backend = "mosaic_gpu") -> ValueError:
    where = " for TPUs" if backend == "mosaic_tpu" else ""
    return ValueError(
        f"no kernel{where} is called {name!r}: choose auto, all, none, or a comma list of "
        f"{', '.join(_operations_of(backend))}"
    )


def default_device() -> Any:
    """The device on which jax puts arrays that name none."""
    chosen = jax.config.jax_default_device
    if chosen is None or isinstance(chosen, str):
        return jax.devices(chosen)[0]
    return chosen


NO_KERNELS = Kernels()
