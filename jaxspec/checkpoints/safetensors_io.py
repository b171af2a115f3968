"""Loading and saving decoders as Hugging Face safetensors directories, array by array."""

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from safetensors.numpy import save_file

from jaxspec.checkpoints.checkpoint_files import canonical_tensors, scan
from jaxspec.checkpoints.file_names import said_missing
from jaxspec.checkpoints.formats.to_linear import as_stored
from jaxspec.checkpoints.formats.widened import with_widened
from jaxspec.checkpoints.fused_experts import unfused
from jaxspec.checkpoints.gguf.packed import with_packed
from jaxspec.checkpoints.kernel_order import in_order, is_ordered
from jaxspec.checkpoints.read_arrays import copy_in_strips, read_side_by_side
from jaxspec.checkpoints.stored_ngrams import check_stored_ngrams, ngram_numbers
from jaxspec.checkpoints.stored_routes import with_stored_routes
from jaxspec.checkpoints.tied_head import HEAD, with_stored_head
from jaxspec.config.model import ModelConfig
from jaxspec.models.decoder import Decoder, decoder_shapes
from jaxspec.models.from_config.model import to_hf_config
from jaxspec.models.json.mtp_names import mtp_tensors
from jaxspec.models.json.values import shown_name
from jaxspec.models.mlps.expert_linear import AnyExpertLinear
from jaxspec.models.nodes import nodes_of
from jaxspec.models.pipeline_cut import Pipeline, as_one, cut, pipeline_shapes
from jaxspec.models.quantized.float4 import Float4Linear
from jaxspec.models.quantized.float8 import E4M3, Float8Linear
from jaxspec.models.quantized.grouped import GroupedLinear
from jaxspec.models.quantized.kv_cache import without_kv_scales
from jaxspec.models.quantized.scaled import ScaledLinear
from jaxspec.models.tensors import (
    CheckpointTensor,
    Source,
    Split,
    choosing,
    splitting,
    tensor_shapes,
)
from jaxspec.parallel import Shards, mesh_layout, named_shardings
from jaxspec.parallel.memory_format import default_place, weight_place

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
FLOATS = (jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("float16"))
EXACT_DTYPES = MappingProxyType(
    {
        "I4": jnp.dtype("int4"),
        "I8": np.dtype("int8"),
        "U8": np.dtype("uint8"),
        "I32": np.dtype("int32"),
        "F8_E4M3": E4M3,
    }
)
ROUNDED = (GroupedLinear, Float4Linear, Float8Linear, ScaledLinear)
MAX_FILE_BYTES = 4 << 30
MOST_PROBLEMS = 20  # most that are listed in an error


def load_decoder(
    directory: str | Path,
    config: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    *,
    sharded: bool = True,
    kind: Callable[[Any, Source], Any] | None = None,
) -> Decoder:
    """Read a model's weights, cast to ``dtype``, onto ``mesh`` or the default device.

    Args:
      sharded: False: the model is replicated over the mesh's model axis.
      kind: chooses the weight format of each projection. It is called with a ``Linear`` of shapes
        and its source, and returns that ``Linear`` or another format's shapes (see
        models.linear.AnyLinear). By default the formats are those that config.json names (see
        checkpoints.formats), or of a GGUF file those of its tensors (see gguf.packed).

    The result's config is ``config``, untied if the checkpoint has an LM head that is not a copy of
    its embeddings (see tied_head.with_stored_head, which warns).

    Raises ValueError that lists all missing, surplus and misshapen tensors, or names a broken file.
    """
    shards = Shards.over(mesh, mesh_layout(mesh, split_model=sharded))
    stored, kind = open_checkpoint(directory, dtype, shards, kind)
    config = with_stored_head(config, stored, directory)
    config = with_stored_routes(config, stored)
    check_stored_ngrams(config, stored)
    stored = unfused(stored, config)
    shapes = decoder_shapes(config, dtype, shards).mapped(choosing(kind))
    return load_tree(
        stored,
        shapes,
        shapes.mapped(splitting(config.vocab_size)),
        placements(shapes, mesh),
        _harmless(config, stored),
    )


def load_pipeline(
    directory: str | Path,
    config: ModelConfig,
    dtype: jnp.dtype,
    meshes: Sequence[Mesh],
    layers: Sequence[int],
) -> Pipeline:
    """load_decoder for a pipeline of so many layers on each mesh."""
    shards = Shards.over(meshes[0], mesh_layout(meshes[0]))  # of all stages with layers
    stored, kind = open_checkpoint(directory, dtype, shards, None)
    config = with_stored_head(config, stored, directory)
    config = with_stored_routes(config, stored)
    stored = unfused(stored, config)
    shapes = pipeline_shapes(config, dtype, meshes, layers)
    whole = as_one(shapes.parts).mapped(choosing(kind))
    shapes = cut(whole, shapes)
    places = [placements(part, mesh) for part, mesh in zip(shapes.parts, meshes, strict=True)]
    loaded = load_tree(
        stored,
        whole,
        whole.mapped(splitting(config.vocab_size)),
        as_one(places),
        _harmless(config, stored),
    )
    return cut(loaded, shapes)


def open_checkpoint(
    directory: str | Path,
    dtype: jnp.dtype,
    shards: Shards,
    kind: Callable[[Any, Source], Any] | None,
) -> tuple[dict[str, CheckpointTensor], Callable[[Any, Source], Any]]:
    """A checkpoint's tensors for a model of ``dtype``, and what chooses the format of each
    projection: ``kind``, or for None what config.json or the types of a GGUF file say.

    Raises ValueError for a quantization that is not supported.
    """
    if kind is not None:
        return dict(scan(directory)), kind
    stored = with_packed(canonical_tensors(directory), dtype)
    return stored, as_stored(stored, shards)


def _harmless(config: ModelConfig, names: Collection[str]) -> set[str]:
    """Tensors that a checkpoint may have, and that are not read. ``config``: as with_stored_head
    gives it, which has compared an LM head of a tied model with the embeddings."""
    head = {HEAD} if config.tie_word_embeddings else set()
    others = _keys_of_none(config) | _norms_of_none(config) | ngram_numbers(config).keys()
    return head | mtp_tensors(config, names) | others


def _keys_of_none(config: ModelConfig) -> set[str]:
    """Tensors of keys and values of layers that read those of another layer. Published files have
    them."""
    layers = (index for index, layer in enumerate(config.layers) if layer.source is not None)
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    return {f"model.layers.{layer}.self_attn.{name}.weight" for layer in layers for name in names}


def _norms_of_none(config: ModelConfig) -> set[str]:
    """Norms of what dense MLPs give, where only experts have one. Published files have them."""
    layers = enumerate(layer.norms for layer in config.layers)
    if not any(layer.norms == "both_of_mlp" for layer in config.layers):
        return set()
    dense = (index for index, norms in layers if norms == "before")
    return {f"model.layers.{layer}.post_feedforward_layernorm.weight" for layer in dense}


def save_decoder(
    decoder: Decoder, directory: str | Path, hf_config: Mapping[str, Any] | None = None
) -> None:
    """Write a decoder, however sharded, as a directory that transformers and load_decoder read.
    Scales of 8-bit caches are left out.

    ``hf_config``: the contents of its ``config.json``; None: ``to_hf_config`` of its own config.

    Raises ValueError for a quantized one, and for a config of a family that is not written.
    """
    check_not_quantized(decoder)
    decoder = without_kv_scales(decoder)
    config = to_hf_config(decoder.config) if hf_config is None else dict(hf_config)
    config |= {"torch_dtype": jnp.dtype(decoder.embed.dtype).name}
    save_tree(directory, decoder, decoder.mapped(splitting(decoder.config.vocab_size)), config)


def check_not_quantized(weights: Any) -> None:
    """Raise ValueError for weights that were rounded: files of these are written by quantizers."""
    experts = any(node.in_memory is None for node in nodes_of(weights, AnyExpertLinear))
    if experts or nodes_of(weights, *ROUNDED):
        raise ValueError("quantized weights are not saved: copy the checkpoint they were read from")


def placements(shapes: Any, mesh: Mesh | None) -> Any:
    """Where the arrays of a tree of shapes go: a tree of shardings by their logical axes, on TPUs
    with layouts (see memory_format.weight_place). ``mesh`` None: the default device."""
    if mesh is not None:
        shardings = named_shardings(mesh, shapes)
    else:
        device = default_place()
        shardings = jax.tree.map(lambda _: device, shapes)
    return jax.tree.map(lambda x, sharding: weight_place(x.shape, sharding), shapes, shardings)


def load_tree(
    stored: Mapping[str, CheckpointTensor],
    shapes: Any,
    splits: Any,
    shardings: Any,
    harmless: Collection[str] = (),
) -> Any:
    """Fill a tree of shapes with arrays. ``harmless`` tensors may be present and are not read.
    Weights may be stored as 4-bit floats."""
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(splits), strict=True)
    wanted_shapes = tensor_shapes(leaves)
    stored = with_widened(stored, wanted_shapes)
    check_tensors(stored, wanted_shapes, harmless)
    nodes, structure = jax.tree.flatten(shapes, is_leaf=is_ordered)
    wanted = zip(nodes, *map(structure.flatten_up_to, (splits, shardings)), strict=True)
    # A node at a time is put in order, so that no other is in memory twice.
    loaded = [in_order(node) for node in read_side_by_side(stored, wanted)]
    return jax.tree.unflatten(structure, loaded)


def check_tensors(
    stored: Mapping[str, CheckpointTensor],
    expected: Mapping[str, jax.ShapeDtypeStruct],
    harmless: Collection[str] = (),
) -> None:
    """Raise one ValueError that lists every tensor that is missing, surplus or misshapen, by the
    names in files."""
    problems = [*said_missing((name for name in expected if name not in stored), stored)]
    for name, tensor in stored.items():
        if name not in expected:
            if name not in harmless and not _has_no_effect(name, tensor):
                problems.append(f"{shown_name(tensor.name)} is not part of this model")
        elif tensor.shape != expected[name].shape:
            found, wanted = list(tensor.shape), list(expected[name].shape)
            problems.append(f"{tensor.name} is {found}, not {wanted}")
        elif tensor.dtype not in _readable_as(expected[name].dtype):
            problems.append(f"{tensor.name} has unsupported dtype {tensor.dtype}")
    problems = list(dict.fromkeys(problems))  # several may be parts of a stored one
    if problems:
        folders = sorted({str(tensor.file.parent) for tensor in stored.values()})
        where = ", ".join(folders) or "the checkpoint"
        if len(problems) > MOST_PROBLEMS:
            more = f"and {len(problems) - MOST_PROBLEMS} problems more"
            problems = [*problems[:MOST_PROBLEMS], more]
        raise ValueError(f"{where} does not fit its config.json: {'; '.join(problems)}")


def _has_no_effect(name: str, tensor: CheckpointTensor) -> bool:
    """Whether a tensor that the model does not have changes nothing: a table that is computed,
    what chose the kind of a projection (see checkpoints.formats), or a bias of zeros, which some
    quantizers write for every projection."""
    if name.endswith(("rotary_emb.inv_freq", ".groups", ".rounds")):
        return True
    return name.endswith(".bias") and len(tensor.shape) == 1 and not tensor.read().any()


def _readable_as(dtype: np.dtype) -> tuple[str, ...]:
    """Stored dtypes that may be read as ``dtype``: floats are cast, others must be the same."""
    if dtype in FLOATS:
        return FLOAT_DTYPES
    if dtype == np.int32:  # such as indices, which are small
        return ("I32", "I64")
    return tuple(name for name, supported in EXACT_DTYPES.items() if supported == dtype)


def save_tree(
    directory: str | Path,
    tree: Any,
    splits: Any,
    config: dict[str, Any],
    extra: dict[str, np.ndarray] | None = None,
) -> None:
    """Write a tree of arrays, further tensors given by name, and config.json."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    leaves = list(zip(jax.tree.leaves(tree), jax.tree.leaves(splits), strict=True))
    first, *others = _groups(leaves)
    parts = itertools.chain([(extra or {}) | _whole_tensors(first)], map(_whole_tensors, others))
    save_parts(directory, parts)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_parts(directory: Path, parts: Iterable[dict[str, np.ndarray]]) -> None:
    """Write tensors in a file for each part, with an index if there are several, in place of those
    that the directory has."""
    written, total = list[list[str]](), 0
    for tensors in parts:
        save_file(tensors, directory / f"part-{len(written)}.safetensors", {"format": "pt"})
        written.append([*tensors])
        total += sum(tensor.nbytes for tensor in tensors.values())
    index, count = directory / "model.safetensors.index.json", len(written)
    for stale in (*directory.glob("model*.safetensors"), index):
        stale.unlink(missing_ok=True)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(written):
        several = f"model-{i + 1:05}-of-{count:05}.safetensors"
        name = "model.safetensors" if count == 1 else several
        (directory / f"part-{i}.safetensors").rename(directory / name)
        weight_map |= dict.fromkeys(names, name)
    if count > 1:
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        index.write_text(json.dumps(content, indent=2) + "\n")


def _groups(leaves: list[tuple[Array, Split]]) -> list[list[tuple[Array, Split]]]:
    """Consecutive leaves, grouped so that each group fits in a file. Leaves of one tensor stay
    together."""
    groups, used = [[]], 0
    names: set[str] = set()
    for leaf, split in leaves:
        leaf_names = set(tensor_shapes([(leaf, split)]))
        if groups[-1] and used + leaf.nbytes > MAX_FILE_BYTES and not leaf_names & names:
            groups.append([])
            used = 0
        groups[-1].append((leaf, split))
        used, names = used + leaf.nbytes, leaf_names
    return groups


def _whole_tensors(leaves: list[tuple[Array, Split]]) -> dict[str, np.ndarray]:
    """Several leaves may be parts of one tensor."""
    shapes = tensor_shapes(leaves)
    tensors = {name: np.empty(shape.shape, shape.dtype) for name, shape in shapes.items()}
    for leaf, split in leaves:
        _fill(tensors, np.asarray(leaf), split)
    return tensors


def _fill(tensors: dict[str, np.ndarray], block: np.ndarray, split: Split) -> None:
    for piece in split(block, (0,) * block.ndim):
        count = math.prod(piece.row_shape)
        index = piece.of_tensor(slice(piece.row, piece.row + count))
        part = tensors[piece.name][(..., *index)]  # a view, of a number, too
        if piece.offset:
            piece = piece._replace(view=piece.view.astype(np.float32) - piece.offset)
        if piece.factor != 1:
            piece = piece._replace(view=piece.view.astype(np.float32) / np.float32(piece.factor))
        if piece.inputs_first:
            part[...] = piece.view.reshape(count, -1).T
        else:
            copy_in_strips(part.reshape(piece.view.shape), piece.view)
