"""Compiles for TPUs on a machine without one.

libtpu, Google's compiler and driver of TPUs, compiles for a topology by its name, such as `v6e:2x2`
(four chips of v6e). It comes from a wheel that is unpacked into a folder but not installed: if it
were installed, jax would look for a TPU whenever it starts.
"""

import collections
import contextlib
import dataclasses
import fnmatch
import importlib.metadata
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxspec.evaluation.benchmarks.ahead_of_time import FACTS, PROGRAM, PROGRAMS, Job, compile_ahead
from jaxspec.evaluation.benchmarks.hlo import count_by_scope

_COLLECTIVE = re.compile(
    r"= .*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_KERNEL = re.compile(r'%?([\w\-]+?)[.\d]* = .*custom_call_target="tpu_custom_call"')


@dataclasses.dataclass(frozen=True)
class TpuProgram:
    """A program compiled for TPUs, on one of its devices. The body of a loop counts once.

    Attributes:
      argument_bytes: size of weights and state.
      temporary_bytes: memory in addition to arguments and results.
      code_bytes: size of the program itself.
      collectives: their number by kind and scope, for example ``all-reduce verify/mlp``.
      kernels: calls of our own kernels, by name.
      weight_copies, page_copies: copies of a layer's weights, or of KV pages, into another layout.
      flops, bytes_accessed: by the compiler's own estimate, which counts kernels as nothing.
    """

    argument_bytes: int
    temporary_bytes: int
    code_bytes: int
    collectives: Mapping[str, int]
    kernels: Mapping[str, int]
    weight_copies: int
    page_copies: int
    flops: float
    bytes_accessed: float


def libtpu_requirement() -> str:
    """The version of libtpu that goes with this jax, as jax itself says, such as ``0.0.48.*``."""
    for line in importlib.metadata.requires("jax") or ():
        if found := re.match(r"libtpu\s*==\s*([\w.*]+)", line):
            return found[1]
    raise ValueError("this jax does not say which libtpu it needs")


def install_command(folder: Path) -> str:
    """The command that fills a folder with libtpu."""
    wanted = shlex.quote(f"libtpu=={libtpu_requirement()}")
    return f"pip install --target {shlex.quote(str(folder))} --no-deps {wanted}"


def check_libtpu(folder: Path) -> None:
    """Raises FileNotFoundError without libtpu, ValueError if it is not for this jax."""
    found = importlib.metadata.distributions(path=[str(folder)])
    versions = [wheel.version for wheel in found if wheel.metadata["Name"].lower() == "libtpu"]
    if not versions:
        raise FileNotFoundError(f"{folder} lacks libtpu; run: {install_command(folder)}")
    if not fnmatch.fnmatch(versions[0], libtpu_requirement()):
        raise ValueError(
            f"{folder} has libtpu {versions[0]}, but this jax needs {libtpu_requirement()}; empty "
            f"it, then run: {install_command(folder)}"
        )


def libtpu_environment(folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment for a process that compiles."""
    return {
        **inherited,
        "TPU_LIBRARY_PATH": str(folder.resolve() / "libtpu/libtpu.so"),
        "TPU_SKIP_MDS_QUERY": "1",  # asks no metadata server which TPU this is
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile: none holds a TPU
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }


def make_devices(topology: str, count: int) -> list[Any]:
    """The first ``count`` devices of a topology: they can be compiled for, but run nothing.

    Raises ValueError for an unknown topology, and if it has fewer devices.
    """
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"no topology {topology!r}, such as v5e:2x2 or v6e:2x2: {error}"
        ) from error
    if count > len(found):
        raise ValueError(f"{topology} has {len(found)} devices, {count} are needed")
    return list(found)[:count]


def target_devices(devices: Any) -> contextlib.AbstractContextManager[Any]:
    """Within it kernels are traced for these devices, and not for the default one."""
    return jax.sharding.use_abstract_mesh(Mesh(np.array(devices[:1]), ("x",)).abstract_mesh)


def compile_program(name: str, job: Job, topology: str, folder: Path) -> None:
    """Compile "decode" or "prefill", and write its text and facts to a folder.

    The process must run in the ``libtpu_environment``.
    """
    jax.devices()  # makes the CPU the backend before libtpu is loaded
    devices = make_devices(topology, job.num_devices)
    program = PROGRAMS[name](job, devices)
    with target_devices(devices) if len(devices) == 1 else contextlib.nullcontext():
        compiled = compile_ahead(program.function, program.arguments, "tpu")
    memory, text, cost = compiled.memory_analysis(), compiled.as_text(), compiled.cost_analysis()
    (folder / PROGRAM).write_text(text)
    facts = TpuProgram(
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        collectives=count_collectives(text),
        kernels=count_kernels(text),
        weight_copies=count_copies(text, program.weight_shapes),
        page_copies=count_copies(text, program.page_shapes),
        flops=cost["flops"],
        bytes_accessed=cost["bytes accessed"],
    )
    (folder / FACTS).write_text(json.dumps(dataclasses.asdict(facts)))


def read_program(folder: Path) -> TpuProgram:
    """What ``compile_program`` wrote to a folder."""
    return TpuProgram(**json.loads((folder / FACTS).read_text()))


def count_collectives(text: str) -> dict[str, int]:
    """Number of collectives in a program's text, by kind, phase and part of the round."""
    return count_by_scope(text, _COLLECTIVE)


def count_kernels(text: str) -> dict[str, int]:
    """Number of calls of each Mosaic kernel in a program's text."""
    found = [_KERNEL.search(line) for line in text.splitlines()]
    return dict(sorted(collections.Counter(match[1] for match in found if match).items()))


def count_copies(text: str, shapes: Iterable[tuple[int, ...]]) -> int:
    """Number of copies and transposes of arrays of these shapes.

    (Asynchronous copies, which move an array to VMEM ahead of its use, do not count.)
    """
    dimensions = "|".join(",".join(map(str, shape)) for shape in sorted(set(shapes)))
    copy = re.compile(rf"= \w+\[(?:{dimensions})\]\S* (?:copy|transpose)\(")
    return sum(copy.search(line) is not None for line in text.splitlines())
