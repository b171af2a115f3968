"""Loading of EngineParams: a target and a drafter, by name or directory."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxspec.checkpoints.built_in import BUILT_IN_MODEL, is_built_in
from jaxspec.checkpoints.draft_bytes import draft_weight_bytes
from jaxspec.checkpoints.hub import resolve_directory
from jaxspec.checkpoints.kv_scale_file import KVScaleFile
from jaxspec.checkpoints.load_drafter import (
    choose_drafter,
    in_bits,
    load_drafter,
    platform_of,
    with_lm_head_in_bits,
)
from jaxspec.checkpoints.safetensors_io import load_decoder, load_pipeline
from jaxspec.config.model import ModelConfig
from jaxspec.config.speculation import (
    PLAIN,
    SpeculationConfig,
    default_drafting_rows,
    default_speculation,
)
from jaxspec.decoding.drafters import Drafter
from jaxspec.decoding.drafters.checks import check_drafter
from jaxspec.decoding.drafters.names import check_name
from jaxspec.decoding.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import load_model_config
from jaxspec.models.pipeline_cut import check_layers, chosen_layers
from jaxspec.models.pipeline_stage import Stage
from jaxspec.models.quantized.kv_cache import (
    FP8,
    check_kv_dtype,
    count_attentions,
    has_float8_cache,
    with_float8_cache,
    with_kv_scales,
)
from jaxspec.parallel import devices_of_model, mesh_layout, stage_meshes
from pallas_kernels.selection import Kernels


def load(
    model: str | Path = BUILT_IN_MODEL,
    drafter: str | Path | Drafter = "auto",
    *,
    speculation: SpeculationConfig | None = None,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    shard_drafter: bool = False,
    drafter_bits: int | None = None,
    kv_dtype: str | None = None,
    kv_scales: str | Path | KVScaleFile | None = None,
    kernels: str = "auto",
    stage_layers: Sequence[int] | None = None,
    drafter_mesh: Mesh | None = None,
    target: Decoder | None = None,
) -> EngineParams:
    """Load a target and its drafter.

    Args:
      model: a Hugging Face model directory or hub id; the built-in model by default.
      drafter: ``none``, ``ngram``, ``suffix``, ``mtp`` (the model's own layers for multi-token
        prediction; ``mtp:before``, ``mtp:after``, ``mtp:before-after`` and
        ``mtp:after-before`` replace the family's choice of hidden states (see MtpStates.name), and
        a number, as in ``mtp:1`` and ``mtp:after:1``, uses that many layers instead of all), or a
        directory or hub id of an EAGLE head, of MTP layers, of a block head (DFlash, DSpark) or of
        a draft model;
        ``ngram+`` and such a directory or id: n-gram lookup in rows where it finds a long match,
        the head or model in the others (see drafters.MixedDrafter); ``suffix+`` likewise;
        ``suffix:65536`` and ``suffix:65536+``: so many tokens of past outputs are looked up, too
        (see drafters.SuffixDrafter); ``auto``: see choose_drafter.
        A Drafter object is used as given.
      speculation: the draft tree and the acceptance rule; by default
        config.speculation.default_speculation.
      dtype: ``float32`` or ``bfloat16``, by name or as jax.numpy has it; by default float32 on
        CPU and bfloat16 elsewhere.
      mesh: as made by sharding.make_mesh; None for the default device.
      shard_drafter: split the drafter's weights over the mesh too, instead of repeating them.
      drafter_bits: 4: the drafter's matrices as 4-bit integers, with a scale and a zero for up to
        64 inputs of each output. 8: as 8-bit integers, too, with a scale for each output, which
        halves what a draft step of up to 48 rows reads. A head that reads the target's LM head gets
        a copy of it in as many bits. None: only as loaded. The text does not depend on it.
      kv_dtype: ``fp8``: keys and values of target and drafter as 8-bit floats (e4m3), of which half
        as many bytes as of bfloat16 are kept and read; None: in the dtype of the weights. The
        text depends on it, and is the same with and without speculation.
      kv_scales: with ``fp8``, scales for its keys and values, or a file of them (see
        quantization.kv_scales, and ``jaxspec kv-scales``); None: scales of 1.
      kernels: operations that run as kernels: ``auto`` (all on a Hopper GPU, attention on a TPU
        v5e or v6e, none elsewhere), ``all``, ``none``, or a comma list of names.
      stage_layers: layers of each stage of a mesh with stages; None: so many that all take about as
        long for what they read in a round, the last one's drafting and LM head included.
      drafter_mesh: devices of their own for the drafter, the embeddings and the LM head: a last
        stage without layers.
      target: the model's weights, if another engine on the same devices has loaded them: both use
        the same memory.

    Raises ValueError that names the file or option for what cannot be found, read or combined.
    """
    if isinstance(drafter, str | Path):
        check_name(drafter)
    else:
        check_drafter(drafter)
    scales = read_kv_scales(kv_dtype, kv_scales)
    meshes = stage_meshes(mesh, drafter_mesh)
    most_drafting_rows = None
    if speculation is None:
        platform, built_in = platform_of(meshes[-1]), is_built_in(model, drafter)
        speculation = default_speculation(platform, built_in=built_in)
        most_drafting_rows = default_drafting_rows(platform)
    if stage_layers is not None and len(meshes) == 1:
        raise ValueError("stage_layers needs a mesh with stages: make_mesh(pipeline_parallel=...)")
    chosen = _choose_kernels(kernels, meshes[0])
    resolved = resolve_dtype(dtype)
    directory = resolve_directory(model)
    config = load_model_config(directory)
    config.check_tree_depth(speculation.max_depth)
    if drafter == "none":
        speculation = speculation.with_shape(PLAIN)
    if isinstance(drafter, str | Path):
        name = choose_drafter(model, drafter)
        placement = (meshes[-1], shard_drafter)
        drafter = load_drafter(name, directory, config, speculation, resolved, *placement)
    drafter = in_bits(drafter, drafter_bits, meshes[-1])
    stages: tuple[Stage, ...] = ()
    if target is not None:
        _check_target(target, config, resolved, meshes, kv_dtype)
    elif len(meshes) == 1:
        target = load_decoder(directory, config, resolved, mesh)
    else:
        if stage_layers is None:
            lm_head = _lm_head_bytes(config, resolved, drafter_bits) // meshes[-1].size
            drafted = draft_weight_bytes(drafter, speculation.max_depth, lm_head)
            drafter_has_devices = drafter_mesh is not None
            stage_layers = chosen_layers(
                config, resolved, meshes, drafted, drafter_has_devices=drafter_has_devices
            )
        check_layers(stage_layers, config, len(meshes))
        stages, target = load_pipeline(directory, config, resolved, meshes, stage_layers)
    params = EngineParams(
        drafter=with_lm_head_in_bits(drafter, drafter_bits, target, meshes[-1]),
        target=target,
        speculation=speculation,
        kernels=chosen,
        mesh=meshes[-1],
        stages=stages,
        most_drafting_rows=most_drafting_rows,
    )
    return with_kv_dtype(params if scales is None else _scaled(params, scales), kv_dtype)


def _choose_kernels(names: str, mesh: Mesh | None) -> Kernels:
    device = None if mesh is None else mesh.devices.flat[0]
    return Kernels.parse(names, device, devices_of_model(mesh))


def _check_target(
    target: Decoder,
    config: ModelConfig,
    dtype: jnp.dtype,
    meshes: Sequence[Mesh | None],
    kv_dtype: str | None,
) -> None:
    """Raise ValueError for weights that these options would not load."""
    if len(meshes) > 1:
        raise ValueError("target cannot be given for a pipeline, whose stages share a model")
    untied = dataclasses.replace(config, tie_word_embeddings=False)  # see weights/tied_head.py
    if target.config not in (config, untied):
        raise ValueError("target has the weights of another model")
    if target.embed.dtype != dtype:
        raise ValueError(f"target has weights in {target.embed.dtype}, not {dtype}")
    [mesh] = meshes
    devices = set(jnp.zeros(()).devices()) if mesh is None else set(mesh.devices.flat)
    if target.layout != mesh_layout(mesh) or target.embed.devices() != devices:
        raise ValueError("target lies on other devices: give the mesh that it was loaded with")
    if has_float8_cache(target) and kv_dtype is None:
        raise ValueError(f'target keeps 8-bit keys and values: give kv_dtype="{FP8}", too')


def read_kv_scales(
    kv_dtype: str | None, path: str | Path | KVScaleFile | None
) -> KVScaleFile | None:
    """Raises ValueError for options that do not go together, and for a bad file."""
    check_kv_dtype(kv_dtype)
    if path is None:
        return None
    if kv_dtype is None:
        raise ValueError(f'kv_scales is for caches of 8 bits: give kv_dtype="{FP8}", too')
    return path if isinstance(path, KVScaleFile) else KVScaleFile.read(path)


def _scaled(params: EngineParams, scales: KVScaleFile) -> EngineParams:
    """Raises ValueError for scales of other layers or heads. A file without a drafter leaves its
    scales at 1."""
    parts, rest = [], list(scales.target)
    for part in (*params.stages, params.target):
        count = count_attentions(part)
        parts.append((part, rest[:count]))
        rest = rest[count:]
    if rest or any(len(scales) != count_attentions(part) for part, scales in parts):
        raise ValueError(
            f"kv_scales has {len(scales.target)} layers of the target, which has "
            f"{sum(count_attentions(part) for part, _ in parts)}"
        )
    *stages, target = (
        with_kv_scales(part, scales, getattr(part, "mesh", params.mesh)) for part, scales in parts
    )
    drafter = params.drafter
    if scales.drafter and count_attentions(drafter):
        drafter = with_kv_scales(drafter, scales.drafter, params.mesh)
    return params.replace(stages=tuple(stages), target=target, drafter=drafter)


def with_kv_dtype(params: EngineParams, kv_dtype: str | None) -> EngineParams:
    """The parameters with caches of this dtype: see ``load``. None: as they are.

    Raises ValueError for another name than ``fp8``, and for a target without keys and values.
    """
    check_kv_dtype(kv_dtype)
    if kv_dtype is None:
        return params
    made = params.replace(
        target=with_float8_cache(params.target, params.mesh),
        drafter=with_float8_cache(params.drafter, params.mesh),
        stages=tuple(with_float8_cache(stage, stage.mesh) for stage in params.stages),
    )
    if not has_float8_cache((made.target, made.stages)):
        raise ValueError("kv_dtype is for layers of attention, and this model has none: leave it")
    return made


def _lm_head_bytes(config: ModelConfig, dtype: jnp.dtype, drafter_bits: int | None) -> int:
    """Bytes of the target's LM head as a draft head reads it; without the scales of a copy in
    ``drafter_bits``."""
    return config.vocab_size * config.hidden_size * (drafter_bits or 8 * dtype.itemsize) // 8


def resolve_dtype(dtype: DTypeLike | None) -> jnp.dtype:
    """The dtype of weights and caches, or that of the default device for None.

    Raises ValueError for another one than float32 and bfloat16.
    """
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    try:
        found = jnp.dtype(dtype)
    except TypeError:  # a name that numpy does not know
        found = None
    if found is None or found.name not in ("float32", "bfloat16"):
        name = repr(dtype) if found is None else found.name
        hint = ", whose range is too narrow: take bfloat16" if name == "float16" else ""
        raise ValueError(f"dtype must be float32 or bfloat16, got {name}{hint}")
    return found
