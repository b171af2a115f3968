"""Compiles for H100s on a machine without a GPU.

XLA's CUDA plugin can compile for a GPU from a description of it. The plugin, ptxas and libdevice
come from wheels that are unpacked into a folder but not installed: if they were installed, jax
would look for a GPU whenever it starts. Matrix products are not autotuned, which needs the device,
so XLA may split some of them differently on a real GPU.
"""

import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding
from jaxlib.version import __version__ as JAXLIB_VERSION

from jaxspec.cache import PagedEntries, PagedKV, PagedLatent
from jaxspec.checkpoints.load import with_kv_dtype
from jaxspec.config.model import ModelConfig
from jaxspec.config.quantization import ExpertFormat, Scheme
from jaxspec.decoding import functional
from jaxspec.decoding.state import EngineState
from jaxspec.engine.programs.xla_options import compiler_options
from jaxspec.evaluation.benchmarks.collective_volume import (
    EXCHANGING,
    parse_collectives,
    parse_exchanges,
    totals,
)
from jaxspec.evaluation.benchmarks.compiled_round import (
    MOSAIC_CALL,
    CompiledRound,
    count_all_reduces,
    count_page_copies,
    parse_kernels,
    parse_launches,
)
from jaxspec.evaluation.benchmarks.draft_heads import HeadKind, head_shapes_for
from jaxspec.evaluation.benchmarks.modes import Mode, make_params
from jaxspec.evaluation.benchmarks.random_params import decoder_in_schemes, with_packed_experts
from jaxspec.evaluation.benchmarks.rounds import LARGEST_CHUNK, Workload
from jaxspec.models.decoder import decoder_shapes
from jaxspec.models.mlps.expert_linear import ExpertLinear
from jaxspec.models.nodes import nodes_of
from jaxspec.parallel import (
    Layout,
    Shards,
    TensorParallel,
    devices_of_model,
    grid_of,
    make_mesh,
    mesh_layout,
    named_shardings,
)
from jaxspec.parallel.memory_format import weight_place
from pallas_kernels.selection import Kernels

H100_SXM = Path(__file__).parent / "data/h100_sxm.txtpb"
VERSIONED_WHEELS = ("jax-cuda13-pjrt", "jax-cuda13-plugin")  # of the same version as jaxlib
WHEELS = (*VERSIONED_WHEELS, "nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")

# Files that the compiling process writes beside XLA's.
PROGRAM, FACTS = "program.txt", "facts.json"
LAUNCHES = {  # a program without CUDA graphs is not passed on
    "decode": "*.thunk_sequence_after_thunk_passes.txt",
    "prefill": "*.thunk_sequence.txt",
}


def install_command(folder: Path) -> str:
    """The command that fills a folder with the wheels."""
    versioned = [f"{name}=={JAXLIB_VERSION}" for name in VERSIONED_WHEELS]
    names = " ".join([*versioned, *WHEELS[len(versioned) :]])
    return f"pip install --target {shlex.quote(str(folder))} --no-deps {names}"


def check_wheels(folder: Path) -> None:
    """Raises FileNotFoundError if wheels are missing, ValueError if they are not for this jaxlib.

    (The compiler of another version would run, but its launches would match neither version.)
    """
    found = importlib.metadata.distributions(path=[str(folder)])
    versions = {wheel.metadata["Name"].lower().replace("_", "-"): wheel.version for wheel in found}
    if missing := [name for name in WHEELS if name not in versions]:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}; run: {install_command(folder)}"
        )
    for name in VERSIONED_WHEELS:
        if versions[name] != JAXLIB_VERSION:
            raise ValueError(
                f"{folder} has {name} {versions[name]}, but jaxlib is {JAXLIB_VERSION}; "
                f"empty it, then run: {install_command(folder)}"
            )


def compiler_environment(wheels: Path, dump: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment for a process that compiles and leaves XLA's files in ``dump``.

    XLA_FLAGS that are already set are kept and take precedence.
    """
    cuda = wheels.resolve() / "nvidia/cu13"
    flags = [
        f"--xla_dump_to={dump.resolve()}",
        f"--xla_gpu_cuda_data_dir={cuda}",
        "--xla_gpu_autotune_level=0",  # autotuning needs the device
        inherited.get("XLA_FLAGS", ""),
    ]
    paths = [str(wheels.resolve()), inherited.get("PYTHONPATH", "")]
    return {
        **inherited,
        "PATH": os.pathsep.join([str(cuda / "bin"), inherited.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "XLA_FLAGS": " ".join(filter(None, flags)),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program from the cache leaves no files
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }


def make_devices(count: int, target: Path = H100_SXM) -> list[Any]:
    """Descriptions of ``count`` GPUs of one host: they can be compiled for, but run nothing."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target.read_text(), topology=f"1x1x{count}"
    )
    return list(topology.devices)


def compile_ahead(function: Any, arguments: Sequence[Any], platform: str = "cuda") -> Any:
    """Compile a jitted function for the devices on which its ShapeDtypeStructs are placed."""
    return function.trace(*arguments).lower(lowering_platforms=(platform,)).compile()


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function, and its arguments as ShapeDtypeStructs placed on devices.

    Attributes:
      page_shapes: shapes of the layers' KV pages: one device's shard, and the whole array.
      weight_shapes: the same of the weights of the target's and the drafter's layers.
    """

    function: Any
    arguments: tuple[Any, ...]
    page_shapes: tuple[tuple[int, ...], ...]
    weight_shapes: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Job:
    """What is compiled.

    Attributes:
      config: of the target.
      head: the drafter's kind; see draft_heads.py.
      kernels, kv_dtype: see Kernels.parse and checkpoints.load.
      largest_chunk: most tokens of a row's prompt in a call.
      quantization: of the target but for its LM head; lm_head_quantization: of that;
        drafter_quantization: of the draft head; expert_format: of experts.
    """

    config: ModelConfig
    mode: Mode
    workload: Workload
    tensor_parallel: TensorParallel = 1
    sequence_parallel: int = 1
    kernels: str = "auto"
    largest_chunk: int = LARGEST_CHUNK
    kv_dtype: str | None = None
    quantization: Scheme | None = None
    lm_head_quantization: Scheme | None = None
    drafter_quantization: Scheme | None = None
    expert_format: ExpertFormat | None = None
    head: HeadKind = "auto"

    @property
    def num_devices(self) -> int:
        return math.prod(grid_of(self.tensor_parallel)) * self.sequence_parallel


def decode_program(job: Job, devices: Sequence[Any]) -> Program:
    """The decode program, sharded over ``job.num_devices`` devices.

    Raises ValueError for sizes that cannot be split evenly.
    """
    workload = job.workload
    greedy = workload.sampling == "greedy"
    decode = functools.partial(
        functional.decode, max_rounds=workload.rounds, greedy=greedy, checked=False
    )
    return _program(decode, job, devices, counted=True)


def prefill_program(job: Job, devices: Sequence[Any]) -> Program:
    """The program that reads a chunk of every row's prompt; see ``decode_program``."""
    width = min(job.workload.context, job.largest_chunk)
    greedy = job.workload.sampling == "greedy"
    prefill = functools.partial(functional.prefill, width=width, greedy=greedy)
    return _program(prefill, job, devices, counted=False)


def _program(function: Any, job: Job, devices: Sequence[Any], *, counted: bool) -> Program:
    """A function of the engine as a program. ``counted``: it takes a number of rounds, too.

    Only this function depends on the engine's functions.
    """
    config, mode, workload = job.config, job.mode, job.workload
    mesh = None
    if job.num_devices > 1:
        mesh = make_mesh(
            job.tensor_parallel, devices=devices, sequence_parallel=job.sequence_parallel
        )
    dtype, layout = jnp.dtype("bfloat16"), mesh_layout(mesh)
    shards = Shards.over(mesh, layout)
    target = decoder_shapes(config, dtype, shards)
    target = with_packed_experts(target, job.expert_format)
    target = decoder_in_schemes(target, job.quantization, job.lm_head_quantization, mesh)
    head = None
    if mode.speculation:
        scheme = job.drafter_quantization
        head = head_shapes_for(config, dtype, mesh, kind=job.head, quantization=scheme)
        if nodes_of(head, ExpertLinear):
            head = with_packed_experts(head, job.expert_format)
    kernels = Kernels.parse(job.kernels, devices[0], devices_of_model(mesh))
    params = with_kv_dtype(make_params(mode, target, head, mesh, kernels), job.kv_dtype)

    def new_state() -> EngineState:
        # The mesh's devices do not exist, so no array can be placed on them: only shapes are.
        whole = params.replace(mesh=None)
        length, page_size = workload.max_length(mode), workload.page_size
        return functional.init_state(whole, workload.batch, length, page_size=page_size)

    state = _place(jax.eval_shape(new_state), devices, mesh, layout)
    rounds = [jax.ShapeDtypeStruct((), jnp.int32)] if counted else []
    params = _place(params, devices, mesh, layout)
    # Weights have a layout, too, see memory_format.weight_place.
    weights = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=weight_place(x.shape, x.sharding)
        ),
        params,
    )
    return Program(
        function=jax.jit(
            function,
            donate_argnums=1,
            compiler_options=compiler_options(
                params.target.embed, deterministic=False, reads=not counted
            ),
        ),
        arguments=(weights, state, *_place(rounds, devices, mesh, layout)),
        page_shapes=_shapes(_pages(state)),
        weight_shapes=_shapes([x for x in jax.tree.leaves(params) if x.ndim > 1]),
    )


def _pages(state: Any) -> list[Any]:
    """The keys of all layers' pages, or else all that is kept in pages: latents, vectors, keys of
    indexers and what entries are made of."""
    keys = [kv.k for kv in nodes_of(state, PagedKV)]
    return [*keys, *jax.tree.leaves(nodes_of(state, PagedEntries, PagedLatent))]


def _place(tree: Any, devices: Sequence[Any], mesh: Mesh | None, layout: Layout) -> Any:
    """The tree of ShapeDtypeStructs, with a sharding added to each."""
    if mesh is None:
        whole = SingleDeviceSharding(devices[0])
        shardings = jax.tree.map(lambda _: whole, tree)
    else:
        shardings = named_shardings(mesh, tree, layout)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def _shapes(arrays: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the arrays: of one device's shards, and of the whole."""
    shapes = {shape for x in arrays for shape in (x.shape, x.sharding.shard_shape(x.shape))}
    return tuple(sorted(shapes))


PROGRAMS = {"decode": decode_program, "prefill": prefill_program}


def compile_program(name: str, job: Job, dump: Path) -> None:
    """Compile "decode" or "prefill", and write the files that ``read_round`` needs to ``dump``.

    The process must run in the ``compiler_environment`` of the same folder.
    """
    jax.devices()  # makes the CPU the backend before the plugin is loaded
    program = PROGRAMS[name](job, make_devices(job.num_devices))
    compiled = compile_ahead(program.function, program.arguments)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    (dump / PROGRAM).write_text(text)
    facts = {
        "program": name,
        "sharing": math.prod(grid_of(job.tensor_parallel)),
        "page_shapes": program.page_shapes,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }
    (dump / FACTS).write_text(json.dumps(facts))


def read_round(dump: Path, printed: str) -> CompiledRound:
    """Read the files of ``compile_program`` in a folder, and the output of its process.

    Raises ValueError if something is missing or has an unknown format.
    """
    text = (dump / PROGRAM).read_text()
    facts = json.loads((dump / FACTS).read_text())
    module = text.split(maxsplit=2)[1].rstrip(",")
    sequences = [
        path for path in dump.glob(LAUNCHES[facts["program"]]) if f".{module}." in path.name
    ]
    if len(sequences) != 1:
        raise ValueError(f"XLA left {len(sequences)} lists of launches of {module} in {dump}")
    page_shapes = [tuple(shape) for shape in facts["page_shapes"]]
    if not any(f"[{','.join(map(str, shape))}]" in text for shape in page_shapes):
        raise ValueError(f"no array of the program has the shape of KV pages: {page_shapes}")
    kernels = parse_kernels(printed)
    if MOSAIC_CALL in text and not kernels:
        raise ValueError("the program calls Mosaic kernels, but ptxas printed nothing of them")
    exchanges = parse_exchanges(text, facts["sharing"])
    if not exchanges and EXCHANGING in {kernel.name for kernel in kernels}:
        raise ValueError(f"the program has {EXCHANGING}, but no call of it could be read")
    return CompiledRound(
        launches=parse_launches(sequences[0].read_text(), of_loop=facts["program"] == "decode"),
        page_copies=count_page_copies(text, page_shapes),
        all_reduces=count_all_reduces(text),
        sent=totals([*parse_collectives(text), *exchanges]),
        argument_bytes=facts["argument_bytes"],
        temporary_bytes=facts["temporary_bytes"],
        kernels=kernels,
    )
