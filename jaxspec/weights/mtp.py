"""Loading and saving the layers for multi-token prediction (MTP) of checkpoints, as draft heads."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.config.model import ModelConfig
from jaxspec.models.heads import DraftHead, MtpFront, head_shapes, mtp_head_config
from jaxspec.models.hf_config import load_model_config, with_mtp_layer
from jaxspec.models.mtp_names import mtp_tensors
from jaxspec.parallel import Shards, mesh_layout
from jaxspec.quantization.kv_cache import without_kv_scales
from jaxspec.tensors import choosing, splitting
from jaxspec.weights.checkpoint_files import scan
from jaxspec.weights.fused_experts import unfused
from jaxspec.weights.safetensors_io import (
    check_not_quantized,
    load_tree,
    open_checkpoint,
    placements,
    save_tree,
)

# Ends of the names of what joins an MTP layer's inputs.
_JOINS = (".eh_proj.weight", ".input_proj.weight", "mtp.fc.weight")


def has_mtp_layers(directory: str | Path, config: ModelConfig) -> bool:
    """Whether a checkpoint with this config has the tensors of its MTP layers, too."""
    return bool(mtp_tensors(config, scan(directory)))


def holds_only_mtp_layers(directory: str | Path) -> bool:
    """Whether a checkpoint has MTP layers and no model, as ``save_mtp_head`` writes them."""
    names = scan(directory)
    if any(name.endswith("embed_tokens.weight") for name in names):
        return False
    return any(name.endswith(_JOINS) for name in names)


def load_mtp_head(
    directory: str | Path,
    target: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    sharded: bool = False,
    *,
    normed: bool | None = None,
) -> DraftHead:
    """Read the first MTP layer of a checkpoint, onto ``mesh`` or the default device.

    Args:
      directory: the target's own, or one of MTP layers alone.
      sharded: split it over the mesh's model axis; otherwise it is replicated.
      normed: replaces the config's choice (see MtpConfig.normed).

    Raises ValueError for a checkpoint without MTP layers, and for one that does not fit the target.
    """
    directory = Path(directory)
    mtp = load_model_config(directory, "MTP layer").mtp
    if mtp is None:
        raise ValueError(
            f"{directory} has no layers for multi-token prediction: its config.json has no "
            "num_nextn_predict_layers or mtp_num_hidden_layers above 0; choose another drafter"
        )
    if normed is not None:
        mtp = dataclasses.replace(mtp, normed=normed)
    head = mtp_head_config(target, mtp)
    assert head.mtp is not None
    shards = Shards.over(mesh, mesh_layout(mesh, split_model=sharded))
    stored, kind = open_checkpoint(directory, shards, None)
    own = {name: one for name, one in stored.items() if head.mtp.have(name)}
    own = unfused(own, head.model)
    if not own:
        raise ValueError(
            f"{directory} has no tensors {head.mtp.prefix}*, though its config.json says that it "
            "has layers for multi-token prediction: choose another drafter"
        )
    first_layer = head.mtp.layer.removesuffix(".")
    shapes = head_shapes(head, target, dtype, shards).filled(first_layer, choosing(kind))
    return load_tree(
        own,
        shapes,
        shapes.filled(first_layer, splitting()),
        placements(shapes, mesh),
        {f"{head.mtp.prefix}{name}" for name in head.mtp.copies},
    )


def save_mtp_head(head: DraftHead, directory: str | Path, hf_config: Mapping[str, Any]) -> None:
    """Write an MTP layer by itself, named as its front says.

    ``hf_config``: the contents of its target's ``config.json``.

    Raises ValueError for a quantized one.
    """
    check_not_quantized(head)
    head, front = without_kv_scales(head), head.front
    assert isinstance(front, MtpFront)
    config = with_mtp_layer(hf_config) | {"torch_dtype": jnp.dtype(head.dtype).name}
    splits = head.filled(front.names.layer.removesuffix("."), splitting())
    save_tree(directory, head, splits, config)
