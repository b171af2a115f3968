"""Loading of EngineParams: a target and a drafter, by name or directory."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxspec.checkpoints.built_in import is_built_in
from jaxspec.checkpoints.hub import resolve_directory
from jaxspec.checkpoints.kv_scale_file import KVScaleFile
from jaxspec.checkpoints.load_drafter import (
    DraftedModel,
    choose_drafter,
    in_bits,
    load_drafter,
    platform_of,
    with_lm_head_in_bits,
    with_node_costs,
)
from jaxspec.checkpoints.load_options import LoadOptions, takes_fields_of
from jaxspec.checkpoints.safetensors_io import load_decoder, load_pipeline
from jaxspec.config.model import ModelConfig
from jaxspec.config.speculation import PLAIN, default_drafting_rows, default_speculation
from jaxspec.decoding.draft_bytes import draft_weight_bytes
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


@takes_fields_of(LoadOptions)
def load(options: LoadOptions) -> EngineParams:
    """Load a target and its drafter. The arguments are the fields of LoadOptions.

    Raises ValueError that names the file or option for what cannot be found, read or combined.
    """
    return load_params(options)


def load_params(options: LoadOptions, config: ModelConfig | None = None) -> EngineParams:
    """The parameters of an engine; see ``load``. ``config``: of the target, if it is not the one of
    its directory."""
    if isinstance(options.drafter, str | Path):
        check_name(options.drafter)
    else:
        check_drafter(options.drafter)
    scales = read_kv_scales(options.kv_dtype, options.kv_scales)
    meshes = stage_meshes(options.mesh, options.drafter_mesh)
    speculation, most_drafting_rows = options.speculation, None
    if speculation is None:
        platform = platform_of(meshes[-1])
        built_in = is_built_in(options.model, options.drafter)
        speculation = default_speculation(platform, built_in=built_in)
        most_drafting_rows = default_drafting_rows(platform)
    if options.stage_layers is not None and len(meshes) == 1:
        raise ValueError("stage_layers needs a mesh with stages: make_mesh(pipeline_parallel=...)")
    device = None if meshes[0] is None else meshes[0].devices.flat[0]
    kernels = Kernels.parse(options.kernels, device, devices_of_model(meshes[0]))
    dtype = resolve_dtype(options.dtype)
    directory = resolve_directory(options.model)
    config = load_model_config(directory) if config is None else config
    config.check_tree_depth(speculation.max_depth)
    if options.drafter == "none":
        speculation = speculation.with_shape(PLAIN)
    drafted = DraftedModel(directory, config, speculation, dtype, meshes[-1], options.shard_drafter)
    drafter = options.drafter
    if isinstance(drafter, str | Path):
        drafter = load_drafter(choose_drafter(options.model, drafter), drafted)
    drafter = in_bits(drafter, options.drafter_bits, meshes[-1])
    stages, target = _load_target(options, drafted, drafter, meshes)
    drafter = with_lm_head_in_bits(drafter, options.drafter_bits, target, meshes[-1])
    if not stages:  # the costs are of a target whose layers are all here
        drafter = with_node_costs(drafter, target, speculation.max_depth, kernels)
    params = EngineParams(
        drafter=drafter,
        target=target,
        speculation=speculation,
        kernels=kernels,
        mesh=meshes[-1],
        stages=stages,
        most_drafting_rows=most_drafting_rows,
        default_tree=options.speculation is None,
    )
    return with_kv_dtype(params if scales is None else _scaled(params, scales), options.kv_dtype)


def _load_target(
    options: LoadOptions,
    drafted: DraftedModel,
    drafter: Drafter,
    meshes: Sequence[Any],
) -> tuple[tuple[Stage, ...], Decoder]:
    """The stages before the last of a pipeline, and the rest of the target."""
    directory, config, dtype = drafted.directory, drafted.config, drafted.dtype
    if options.target is not None:
        _check_target(options.target, config, dtype, meshes, options.kv_dtype)
        return (), options.target
    if len(meshes) == 1:
        return (), load_decoder(directory, config, dtype, options.mesh)
    layers = options.stage_layers
    if layers is None:
        lm_head = _lm_head_bytes(config, dtype, options.drafter_bits) // meshes[-1].size
        read = draft_weight_bytes(drafter, drafted.speculation.max_depth, lm_head)
        drafter_has_devices = options.drafter_mesh is not None
        layers = chosen_layers(config, dtype, meshes, read, drafter_has_devices=drafter_has_devices)
    check_layers(layers, config, len(meshes))
    return load_pipeline(directory, config, dtype, meshes, layers)


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
    untied = dataclasses.replace(config, tie_word_embeddings=False)  # see tied_head.py
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
    """The scales that are asked for. Raises ValueError for options that do not go together, and for
    a bad file."""
    check_kv_dtype(kv_dtype)
    if path is None:
        return None
    if kv_dtype is None:
        raise ValueError(f'kv_scales is for caches of 8 bits: give kv_dtype="{FP8}", too')
    return path if isinstance(path, KVScaleFile) else KVScaleFile.read(path)


def _scaled(params: EngineParams, scales: KVScaleFile) -> EngineParams:
    """The parameters with these scales; a file without a drafter leaves the drafter's at 1.

    Raises ValueError for scales of other layers or heads.
    """
    parts, rest = [], list(scales.target)
    for part in (*params.stages, params.target):
        count = count_attentions(part)
        parts.append((part, rest[:count]))
        rest = rest[count:]
    if rest or any(len(layers) != count_attentions(part) for part, layers in parts):
        raise ValueError(
            f"kv_scales has {len(scales.target)} layers of the target, which has "
            f"{sum(count_attentions(part) for part, _ in parts)}"
        )
    *stages, target = (
        with_kv_scales(part, layers, getattr(part, "mesh", params.mesh)) for part, layers in parts
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
        raise ValueError(
            "kv_dtype is for layers that keep keys and values of each head, and this model has "
            "none: leave it"
        )
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
