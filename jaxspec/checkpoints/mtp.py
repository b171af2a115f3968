"""Loading and saving the layers for multi-token prediction (MTP) of checkpoints, as draft heads."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.checkpoints.checkpoint_files import scan
from jaxspec.checkpoints.fused_experts import unfused
from jaxspec.checkpoints.safetensors_io import (
    check_not_quantized,
    load_tree,
    open_checkpoint,
    placements,
    save_tree,
)
from jaxspec.checkpoints.tied_head import (
    COMPARED_DTYPES,
    EMBEDDINGS,
    HEAD,
    same_values,
    warn_of_changed_copies,
)
from jaxspec.config.model import ModelConfig
from jaxspec.config.mtp import ALL_MTP_STATES, MtpConfig, MtpStates
from jaxspec.models.from_config.model import load_model_config, with_mtp_layer
from jaxspec.models.heads import (
    DraftHead,
    MtpFront,
    head_shapes,
    mtp_head_config,
    mtp_states,
)
from jaxspec.models.json.mtp_names import mtp_names, mtp_tensors
from jaxspec.models.quantized.kv_cache import without_kv_scales
from jaxspec.models.tensors import CheckpointTensor, choosing, splitting
from jaxspec.parallel import Shards, mesh_layout

# Ends of the names of what joins an MTP layer's inputs.
_JOINS = (
    *(".eh_proj.weight", ".e_proj.weight", ".input_proj.weight", ".linear_proj.weight"),
    *("mtp.fc.weight", "mtp.fc_embedding.weight"),
)
# Layouts of which only the first layer can draft, and why.
_FIRST_ALONE = MappingProxyType(
    {
        "qwen": "that share a projection",
        "qwen4_exp": "that share a projection",
        "deepseek_v4": "of several residual streams",
    }
)
# The target's tensors that DeepSeek's layers have copies of.
_COPIED = MappingProxyType({"embed_tokens.weight": EMBEDDINGS, "shared_head.head.weight": HEAD})


def has_mtp_layers(directory: str | Path, config: ModelConfig) -> bool:
    """Whether a checkpoint with this config has MTP layers, and their tensors, too."""
    return config.mtp is not None and bool(mtp_tensors(config, scan(directory)))


def holds_only_mtp_layers(directory: str | Path) -> bool:
    """Whether a checkpoint has MTP layers and no model, as ``save_mtp_head`` writes them."""
    names = scan(directory)
    if any(name.endswith("embed_tokens.weight") for name in names):
        return False
    return any(name.endswith(_JOINS) for name in names)


@dataclasses.dataclass(frozen=True)
class MtpChoice:
    """How a checkpoint's MTP layers draft: ``mtp``, ``mtp:after``, ``mtp:3``,
    ``mtp:before-after:1``.

    Attributes:
      states: replaces the config's choice, as its name does (see MtpStates.name).
      count: how many of them, from the first; None: all, or the first of layers that share a
        projection.
    """

    states: MtpStates | None = None
    count: int | None = None

    @classmethod
    def parse(cls, name: str | Path) -> "MtpChoice | None":
        """None for a name of another drafter. Raises ValueError for one of no such form."""
        if not isinstance(name, str) or name.split(":")[0] != "mtp":
            return None
        names = [states.name for states in ALL_MTP_STATES]
        form = re.fullmatch(rf"mtp(?::({'|'.join(names)}))?(?::([1-9][0-9]*))?", name)
        if form is None:
            *first, last = (f":{name}" for name in names)
            raise ValueError(
                f"drafter {name!r}: after mtp may come {', '.join(first)} or {last}, and a number "
                "of layers, as in mtp:after:1"
            )
        states, count = form.groups()
        return cls(
            None if states is None else MtpStates.named(states),
            None if count is None else int(count),
        )

    def over(self, mtp: MtpConfig) -> MtpConfig:
        """The layers chosen of a checkpoint's.

        Raises ValueError for more than it has, and for several of a layout in which they share a
        projection, or have several residual streams.
        """
        count = self.count or (1 if mtp.layout in _FIRST_ALONE else mtp.num_layers)
        if count > mtp.num_layers:
            raise ValueError(
                f"{count} MTP layers are asked for, and the checkpoint has {mtp.num_layers}: "
                "choose a smaller number, or leave it out"
            )
        if count > 1 and mtp.layout in _FIRST_ALONE:
            raise ValueError(
                f"of {mtp.num_layers} MTP layers {_FIRST_ALONE[mtp.layout]} only the first can "
                "draft: choose it by the drafter mtp:1"
            )
        return dataclasses.replace(mtp, states=self.states or mtp.states, num_layers=count)

    def name(self, mtp: MtpConfig) -> str:
        """The name that says it all: with a number where the checkpoint has several layers.

        Raises ValueError as ``over``.
        """
        chosen = self.over(mtp)
        count = f":{chosen.num_layers}" if mtp.num_layers > 1 else ""
        return f"mtp:{chosen.states.name}{count}"


def load_mtp_heads(
    directory: str | Path,
    target: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    sharded: bool = False,
    *,
    choice: MtpChoice = MtpChoice(),
    steps: int | None = None,
) -> tuple[DraftHead, ...]:
    """Read a checkpoint's MTP layers, of which draft step ``j`` uses layer ``j``: see
    ``load_mtp_head``.

    Args:
      steps: most draft steps. Layers that none of them uses are not read; None: all are.

    Raises ValueError as ``load_mtp_head`` and MtpChoice.over, and for several layers of a target
    with recurrent layers.
    """
    mtp = choice.over(_mtp_config(Path(directory)))
    count = mtp.num_layers if steps is None else min(mtp.num_layers, max(1, steps))
    if count > 1 and target.is_recurrent:
        raise ValueError(
            f"{directory} has {mtp.num_layers} MTP layers, and for a model with recurrent layers "
            "only one can draft: choose the drafter mtp:1, or another one"
        )
    return tuple(
        load_mtp_head(directory, target, dtype, mesh, sharded, states=mtp.states, index=index)
        for index in range(count)
    )


def load_mtp_head(
    directory: str | Path,
    target: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    sharded: bool = False,
    *,
    states: MtpStates | None = None,
    index: int = 0,
) -> DraftHead:
    """Read MTP layer ``index`` of a checkpoint, onto ``mesh`` or the default device.

    Args:
      directory: the target's own, or one of MTP layers alone.
      sharded: split it over the mesh's model axis; otherwise it is replicated.
      states: replaces the config's choice.

    Raises ValueError for a checkpoint without MTP layers, and for one that does not fit the target.
    Warns of embeddings and of an LM head of the layer's own: the target's are read in their place.
    """
    directory = Path(directory)
    mtp = _mtp_config(directory)
    if states is not None:
        mtp = dataclasses.replace(mtp, states=states)
    shards = Shards.over(mesh, mesh_layout(mesh, split_model=sharded))
    stored, kind = open_checkpoint(directory, dtype, shards, None)
    has_lm_head = mtp.own_heads and _have_own_values(stored, mtp, target.num_layers)
    head = mtp_head_config(target, mtp, index, has_lm_head=has_lm_head)
    assert head.mtp is not None
    tensors = {name: tensor for name, tensor in stored.items() if head.mtp.have(name)}
    if not has_lm_head:
        tensors.pop(f"{head.mtp.prefix}{head.mtp.lm_head}.weight", None)
    named = {_COPIED[copy]: f"{head.mtp.prefix}{copy}" for copy in head.mtp.copies}
    copies = {name: stored[copy] for name, copy in named.items() if copy in stored}
    warn_of_changed_copies(copies, stored, are_read=False, stacklevel=3)
    tensors = unfused(tensors, head.model)
    if not tensors.keys() - {head.mtp.norm_name}:
        raise ValueError(
            f"{directory} has no tensors {head.mtp.prefix}*, though its config.json says that it "
            "has layers for multi-token prediction: choose another drafter"
        )
    first_layer = head.mtp.layer.removesuffix(".")
    shapes = head_shapes(head, target, dtype, shards).mapped(first_layer, choosing(kind))
    return load_tree(
        tensors,
        shapes,
        shapes.mapped(first_layer, splitting()),
        placements(shapes, mesh),
        {f"{head.mtp.prefix}{name}" for name in head.mtp.copies},
    )


def _have_own_values(
    stored: Mapping[str, CheckpointTensor], mtp: MtpConfig, num_layers: int
) -> bool:
    """Whether the LM head of an MTP layer is no copy of the target's. Then each layer reads its own
    one, else all read the target's."""
    layers = (mtp_names(mtp, num_layers, index) for index in range(mtp.num_layers))
    heads = (stored.get(f"{names.prefix}{names.lm_head}.weight") for names in layers)
    target = stored.get(HEAD, stored.get(EMBEDDINGS))

    def is_copy(head: CheckpointTensor) -> bool:
        if target is None or not {head.dtype, target.dtype} <= COMPARED_DTYPES:
            return False
        return same_values(head, target, rounded=True)

    return any(head is not None and not is_copy(head) for head in heads)


def _mtp_config(directory: Path) -> MtpConfig:
    mtp = load_model_config(directory, "MTP layer").mtp
    if mtp is None:
        raise ValueError(
            f"{directory} has no layers for multi-token prediction: its config.json has no "
            "num_nextn_predict_layers or mtp_num_hidden_layers above 0; choose another drafter"
        )
    return mtp


def save_mtp_head(head: DraftHead, directory: str | Path, hf_config: Mapping[str, Any]) -> None:
    """Write an MTP layer by itself, named as its front says. ``config.json`` has the states that
    it reads, too, as ``mtp_states``: it drafts with those that it was trained on.

    ``hf_config``: the contents of its target's ``config.json``.

    Raises ValueError for a quantized one.
    """
    check_not_quantized(head)
    head, front = without_kv_scales(head), head.front
    assert isinstance(front, MtpFront)
    config = with_mtp_layer(hf_config, mtp_states(head)) | {
        "torch_dtype": jnp.dtype(head.dtype).name
    }
    splits = head.mapped(front.names.layer.removesuffix("."), splitting())
    save_tree(directory, head, splits, config)
