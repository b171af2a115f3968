"""Loading of EngineParams: a target and a drafter, by name or directory."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.built_in import BUILT_IN_HEAD, BUILT_IN_MODEL
from jaxspec.config.model import ModelConfig
from jaxspec.config.speculation import PLAIN, SpeculationConfig, default_speculation
from jaxspec.draft_reads import draft_weight_bytes
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.models.hf_config import load_model_config
from jaxspec.models.hf_values import read_json, shown
from jaxspec.models.pipeline import check_layers, chosen_layers
from jaxspec.models.stages import Stage
from jaxspec.parallel import devices_of_model, mesh_layout, stage_meshes
from jaxspec.quantization.kv_cache import (
    FP8,
    check_kv_dtype,
    count_attentions,
    has_float8_cache,
    with_float8_cache,
    with_kv_scales,
)
from jaxspec.quantization.kv_scales import KVScaleFile
from jaxspec.quantization.lm_head_copy import with_lm_head_copy
from jaxspec.quantization.scaled import in_eight_bits
from jaxspec.quantization.schemes import in_four_bits, to_four_bits
from jaxspec.speculation.drafters import (
    BlockDrafter,
    Drafter,
    DraftModelDrafter,
    EagleDrafter,
    MixedDrafter,
    NoDrafter,
)
from jaxspec.speculation.drafters.names import lookup_drafter, mixed_lookup, split_mixed
from jaxspec.speculation.expand import check_top_k
from jaxspec.weights.block import holds_block_head, load_block_head
from jaxspec.weights.eagle import head_method, load_eagle_head
from jaxspec.weights.hub import resolve_directory
from jaxspec.weights.mtp import (
    MtpChoice,
    has_mtp_layers,
    holds_only_mtp_layers,
    load_mtp_heads,
)
from jaxspec.weights.safetensors_io import load_decoder, load_pipeline
from pallas_kernels.selection import Kernels

MIXED = "ngram+"  # and the drafter that n-gram lookup is mixed with


def load(
    model: str | Path = BUILT_IN_MODEL,
    drafter: str | Path | Drafter = "auto",
    *,
    speculation: SpeculationConfig | None = None,
    dtype: str | None = None,
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
        prediction; ``mtp:before`` and ``mtp:after`` replace the choice of MtpConfig.normed, and a
        number, as in ``mtp:1`` and ``mtp:after:1``, uses that many layers instead of all), or a
        directory or hub id of an EAGLE head, of MTP layers, of a block head (DFlash, DSpark) or of
        a draft model;
        ``ngram+`` and such a directory or id: n-gram lookup in rows where it finds a long match,
        the head or model in the others (see drafters.MixedDrafter); ``suffix+`` likewise;
        ``suffix:65536`` and ``suffix:65536+``: so many tokens of past outputs are looked up, too
        (see drafters.SuffixDrafter); ``auto``: see choose_drafter.
        A Drafter object is used as given.
      speculation: the draft tree and the acceptance rule; by default
        config.speculation.default_speculation.
      dtype: ``float32`` or ``bfloat16``; by default float32 on CPU and bfloat16 elsewhere.
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
    speculation = speculation or default_speculation(jax.default_backend())
    scales = read_kv_scales(kv_dtype, kv_scales)
    meshes = stage_meshes(mesh, drafter_mesh)
    if stage_layers is not None and len(meshes) == 1:
        raise ValueError("stage_layers needs a mesh with stages: make_mesh(pipeline_parallel=...)")
    device = None if meshes[0] is None else meshes[0].devices.flat[0]
    chosen = Kernels.parse(kernels, device, devices_of_model(meshes[0]))
    resolved = resolve_dtype(dtype)
    directory = resolve_directory(model)
    config = load_model_config(directory)
    config.check_tree_depth(speculation.max_depth)
    if drafter == "none":
        speculation = speculation.with_shape(PLAIN)
    if isinstance(drafter, str | Path):
        name = choose_drafter(model, drafter)
        own = (meshes[-1], shard_drafter)
        drafter = _load_drafter(name, directory, config, speculation, resolved, *own)
    drafter = _in_bits(drafter, drafter_bits, meshes[-1])
    stages: tuple[Stage, ...] = ()
    if target is not None:
        _check_target(target, config, resolved, meshes, kv_dtype)
    elif len(meshes) == 1:
        target = load_decoder(directory, config, resolved, mesh)
    else:
        split = stage_layers
        if split is None:
            lm_head = _lm_head_bytes(config, resolved, drafter_bits) // meshes[-1].size
            drafted = draft_weight_bytes(drafter, speculation.max_depth, lm_head)
            split = chosen_layers(config, resolved, meshes, drafted, apart=drafter_mesh is not None)
        check_layers(split, config, len(meshes))
        stages, target = load_pipeline(directory, config, resolved, meshes, split)
    drafter = _with_lm_head_copy(drafter, drafter_bits, target, meshes[-1])
    params = EngineParams(
        drafter=drafter,
        target=target,
        speculation=speculation,
        kernels=chosen,
        mesh=meshes[-1],
        stages=stages,
    )
    return with_kv_dtype(params if scales is None else _scaled(params, scales), kv_dtype)


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
    if target.config != config:
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
    if rest or any(len(own) != count_attentions(part) for part, own in parts):
        raise ValueError(
            f"kv_scales has {len(scales.target)} layers of the target, which has "
            f"{sum(count_attentions(part) for part, _ in parts)}"
        )
    *stages, target = (
        with_kv_scales(part, own, getattr(part, "mesh", params.mesh)) for part, own in parts
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
    """Of the target's LM head as a draft head reads it; without the scales of a copy in
    ``drafter_bits``."""
    return config.vocab_size * config.hidden_size * (drafter_bits or 8 * dtype.itemsize) // 8


def _in_bits(drafter: Drafter, bits: int | None, mesh: Mesh | None) -> Drafter:
    if bits is None:
        return drafter
    if bits not in (4, 8):
        raise ValueError(
            f"drafter_bits must be 4 or 8, or None for the weights as loaded, got {bits}"
        )
    if not jax.tree.leaves(drafter):
        raise ValueError("drafter_bits needs a drafter with weights: a head or a draft model")
    if bits == 8:
        return in_eight_bits(drafter)
    return in_four_bits(drafter, mesh)


def _with_lm_head_copy(
    drafter: Drafter, bits: int | None, target: Decoder, mesh: Mesh | None
) -> Drafter:
    if bits is None:
        return drafter

    rounding = to_four_bits if bits == 4 else in_eight_bits
    return with_lm_head_copy(drafter, target, rounding, mesh)


def choose_drafter(model: str | Path, drafter: str | Path) -> str | Path:
    """Replaces ``auto``: lookup and the built-in head for the built-in model, the MTP layers of a
    checkpoint that has some, else ``ngram``. ``mtp`` becomes the kind that the config says, with
    the number of layers where there are several."""
    if drafter == "auto":
        if Path(model).resolve() == BUILT_IN_MODEL.resolve():
            return f"{MIXED}{BUILT_IN_HEAD}"
        directory = resolve_directory(model)
        drafter = "mtp" if has_mtp_layers(directory, load_model_config(directory)) else "ngram"
    mixed, own = split_mixed(drafter)
    choice = MtpChoice.parse(own)
    if choice is None or not isinstance(drafter, str):
        return drafter
    mtp = load_model_config(resolve_directory(model)).mtp
    return drafter if mtp is None else f"{mixed}{choice.name(mtp)}"


def resolve_dtype(name: str | None) -> jnp.dtype:
    """The dtype of weights and caches for a name, or for the default device if None."""
    if name is None:
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be float32 or bfloat16, got {name!r}")
    return jnp.dtype(name)


def _load_drafter(
    drafter: str | Path,
    model_directory: Path,
    target: ModelConfig,
    speculation: SpeculationConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None,
    sharded: bool,
) -> Drafter:
    if drafter == "none":
        return NoDrafter()
    choice = MtpChoice.parse(drafter)
    if choice is not None:
        return _mtp_drafter(model_directory, target, speculation, dtype, mesh, sharded, choice)
    mixture, mixed = split_mixed(drafter)
    if mixture:
        own = mixed_lookup(mixture)
        if mixed in ("", "none", "auto") or split_mixed(mixed)[0] or lookup_drafter(mixed):
            raise ValueError(
                f"drafter {drafter!r}: after {mixture} give mtp, or the directory or hub id of a "
                "head or a draft model"
            )
        rest = (model_directory, target, speculation, dtype, mesh, sharded)
        return MixedDrafter(model=_load_drafter(mixed, *rest), lookup=own)
    lookup = lookup_drafter(drafter)
    if lookup is not None:
        return lookup
    directory = resolve_directory(drafter)
    if holds_only_mtp_layers(directory):
        return _mtp_drafter(directory, target, speculation, dtype, mesh, sharded, MtpChoice())
    if holds_block_head(directory):
        block_head = load_block_head(directory, target, dtype, mesh, sharded)
        block_head.check_depth(speculation.max_depth)
        check_top_k(speculation, target.vocab_size)
        return BlockDrafter(head=block_head)
    if head_method(directory) is not None:
        head = load_eagle_head(directory, target, dtype, mesh, sharded)
        ids = target.vocab_size if head.token_ids is None else head.token_ids.size
        check_top_k(speculation, ids)
        return EagleDrafter(head=head)
    config = load_model_config(directory, "draft model")
    _check_same_tokenizer(directory, config, model_directory, target)
    config.check_tree_depth(speculation.max_depth)
    check_top_k(speculation, config.vocab_size)
    model = load_decoder(directory, config, dtype, mesh, sharded=sharded)
    return DraftModelDrafter(model=model)


def _mtp_drafter(
    directory: Path,
    target: ModelConfig,
    speculation: SpeculationConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None,
    sharded: bool,
    choice: MtpChoice,
) -> EagleDrafter:
    check_top_k(speculation, target.vocab_size)
    steps = speculation.max_depth
    head, *later = load_mtp_heads(
        directory, target, dtype, mesh, sharded, choice=choice, steps=steps
    )
    return EagleDrafter(head=head, later=tuple(later))


def _check_same_tokenizer(
    directory: Path, config: ModelConfig, target_directory: Path, target: ModelConfig
) -> None:
    """Raise ValueError if a draft model's token ids stand for other text; padding may differ."""
    draft, wanted = _vocabulary(directory), _vocabulary(target_directory)
    if draft is None or wanted is None:
        draft, wanted = config.vocab_size, target.vocab_size
    if draft != wanted:
        raise ValueError(
            f"draft model {directory} has another vocabulary than the target {target_directory}: "
            "they must share a tokenizer"
        )


def _vocabulary(directory: Path) -> dict[str, int] | None:
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    model = read_json(path).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # of [token, score]
        return {str(entry): i for i, entry in enumerate(vocabulary)}
    if not isinstance(vocabulary, dict):
        raise ValueError(
            f"{path}: model.vocab must be an object or a list, got {shown(vocabulary)}"
        )
    return vocabulary
