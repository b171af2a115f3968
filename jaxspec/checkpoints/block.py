"""Loading, saving and recognizing block heads (DFlash, DSpark) in their published layouts."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoints.checkpoint_files import (
    StoredTensor,
    as_vector,
    canonical_tensors,
    quantization_of,
    scan,
)
from jaxspec.checkpoints.draft_ids import (
    ID_TABLES,
    id_tables,
    ids_are_equal,
    load_head,
)
from jaxspec.checkpoints.safetensors_io import check_not_quantized, save_tree
from jaxspec.checkpoints.tied_head import EMBEDDINGS, HEAD, warn_of_changed_copies
from jaxspec.checkpoints.torch_file import read_torch_file
from jaxspec.config.model import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.block_head import block_config, to_hf_block
from jaxspec.models.from_config.block_layouts import SPECULATORS, says_block
from jaxspec.models.from_config.block_spellings import is_of_torchspec
from jaxspec.models.heads import BlockConfig, BlockHead, block_head_shapes
from jaxspec.models.json.values import naming, read_json, shown
from jaxspec.models.linear import Linear
from jaxspec.models.quantized.kv_cache import without_kv_scales
from jaxspec.models.tensors import CheckpointTensor, splitting
from jaxspec.parallel import Shards, mesh_layout

MASK_FILE = "mask_embedding.pt"
# What TorchSpec, then ModelOpt's DSpark heads, then MiMo's call a tensor.
_ALIASES = MappingProxyType(
    {
        "context_proj": "fc",
        "context_norm": "hidden_norm",
        "final_norm": "norm",
        "markov_w1": "markov_head.markov_w1",
        "markov_w2": "markov_head.markov_w2",
        "gate_proj": "markov_head.gate_proj",
        "joint_proj": "markov_head.joint_proj",
        "confidence_proj": "confidence_head.proj",
        "attention_sink_bias": "sinks",
    }
)
# What the speculators library calls the tensors of XPress.
_REFINER_PREFIX = "refiner_head."
_REFINER = MappingProxyType(
    {
        "token_embed.weight": "w1.weight",
        "readout.weight": "w2.weight",
        "mix_l": "mix.L",
        "mlp_gate.weight": "mlp.gate_proj.weight",
        "mlp_up.weight": "mlp.up_proj.weight",
        "mlp_down.weight": "mlp.down_proj.weight",
    }
)
# DeepSpec's checkpoints have the target's own tables, which were not trained.
_COPIES = ("embed_tokens.weight", HEAD)


def holds_block_head(directory: str | Path) -> bool:
    """Whether a directory's config.json is a block head's, supported or not."""
    return says_block(read_json(Path(directory) / "config.json"))


def load_block_head(
    directory: str | Path,
    target: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    sharded: bool = False,
) -> BlockHead:
    """Read a block head for a target, cast to ``dtype``, onto ``mesh`` or the default device.

    ``sharded`` splits it over the mesh's model axis, a Markov head excepted; otherwise it is
    replicated. Copies of the target's tables are not read.

    Raises ValueError for a head that does not fit the target, and for one that is quantized.
    """
    directory = Path(directory)
    raw = read_json(directory / "config.json")
    stored = _renamed(directory, scan(directory))
    if quantization_of(directory, stored) is not None:
        raise ValueError(f"{directory} is a quantized block drafter, which is not supported")
    with naming(f"block drafter's {directory / 'config.json'}"):
        config = block_config(raw, target)
    if (mask := _mask_embedding(directory, config)) is not None:
        stored["mask_embedding"] = mask
    config = dataclasses.replace(config, mask_embedding="mask_embedding" in stored)
    shards = Shards.over(mesh, mesh_layout(mesh, split_model=sharded))
    shapes = block_head_shapes(config, target, dtype, shards)
    with_copies = config.predicts_next or SPECULATORS in raw or is_of_torchspec(raw)
    tables = ID_TABLES if SPECULATORS in raw or config.draft_vocab_size else ()
    harmless = {*(_COPIES if with_copies else ()), *tables}
    if shapes.token_ids is None and not ids_are_equal(stored):
        raise ValueError(
            f"{directory}: d2t says that draft ids are not the target's, and config.json has no "
            "draft_vocab_size of a reduced vocabulary"
        )
    splits = shapes.mapped(splitting())
    return load_head(directory, stored, shapes, splits, mesh, target.vocab_size, harmless)


def _mask_embedding(directory: Path, config: BlockConfig) -> CheckpointTensor | None:
    """The mask's embedding in the file that MiMo's heads have for it; None: there is no such file.

    Raises ValueError for another mask, and for what is no embedding of the head's width.
    """
    path = directory / MASK_FILE
    if not path.exists():
        return None
    found = read_torch_file(path)
    token, tensor = None, found
    if isinstance(found, dict):
        token, tensor = found.get("mask_token_id"), found.get("embedding")
    if token not in (None, config.mask_token):
        raise ValueError(
            f"{path} is of token {shown(token)}, and mask_token_id is {config.mask_token}"
        )
    width = config.model.hidden_size
    if not isinstance(tensor, StoredTensor) or tensor.shape not in ((width,), (1, width)):
        given = tensor.shape if isinstance(tensor, StoredTensor) else shown(tensor)
        raise ValueError(f"{path} must hold an embedding of {width} numbers, got {given}")
    return as_vector(tensor)


def _renamed(
    directory: Path, stored: Mapping[str, CheckpointTensor]
) -> dict[str, CheckpointTensor]:
    """The tensors without aliases. Raises ValueError for two of one name."""
    named: dict[str, CheckpointTensor] = {}
    for name, tensor in stored.items():
        module, dot, kind = name.rpartition(".")
        new = _ALIASES.get(module, module) + dot + _ALIASES.get(kind, kind)
        if name.startswith(_REFINER_PREFIX):
            refined = name.removeprefix(_REFINER_PREFIX)
            new = f"xpress_head.{_REFINER.get(refined, refined)}"
        if new in named:
            raise ValueError(
                f"{directory} has {named[new].name} and {name}, which are names of one tensor: "
                "remove the one that is not meant"
            )
        named[new] = tensor
    return named


def check_block_copies(directory: str | Path, model: str | Path) -> None:
    """Warn of a block head's tables that are not those of the target in the directory ``model``,
    which are read in their place. The LM head of a reduced vocabulary is not one of them.

    Raises ValueError for tables of another shape.
    """
    stored = scan(directory)
    if not ids_are_equal(stored) or _are_first_ids(stored, model):
        stored = {name: tensor for name, tensor in stored.items() if name != HEAD}
    copies = dict(zip((EMBEDDINGS, HEAD), map(stored.get, _COPIES), strict=True))
    found = {name: copy for name, copy in copies.items() if copy is not None}
    if found:
        warn_of_changed_copies(found, canonical_tensors(model), are_read=False, stacklevel=2)


def _are_first_ids(stored: Mapping[str, CheckpointTensor], model: str | Path) -> bool:
    """Whether draft ids are the target's, but not all of them."""
    table = stored.get("d2t")
    return (
        table is not None
        and len(table.shape) == 1
        and (table.shape[0] < canonical_tensors(model)[EMBEDDINGS].shape[0])
    )


def save_block_head(head: BlockHead, directory: str | Path, target: Decoder) -> None:
    """Write a head as a directory in its published layout: config.json and safetensors. DeepSpec's
    has copies of the target's embeddings and LM head.

    Raises ValueError for a quantized one, and for a quantized LM head that would be copied.
    """
    check_not_quantized(head)
    head = without_kv_scales(head)
    copies: dict[str, np.ndarray] = {}
    if head.predicts_next:
        copies |= zip(_COPIES, _tables(target), strict=True)
    if head.token_ids is not None:
        copies.pop(HEAD, None)
        copies |= id_tables(np.asarray(head.token_ids), target.config.vocab_size)
    config = to_hf_block(head, target.config)
    splits = head.mapped(splitting())
    save_tree(directory, head.replace(token_ids=None), splits, config, copies)


def _tables(target: Decoder) -> tuple[np.ndarray, np.ndarray]:
    """The target's embeddings and LM head as checkpoints have them, [V, H] each."""
    vocab = target.config.vocab_size
    embed = np.asarray(target.embed)[:vocab]
    if target.lm_head is None:
        return embed, embed.copy()
    check_not_quantized(target.lm_head)
    assert isinstance(target.lm_head, Linear)
    return embed, np.ascontiguousarray(np.asarray(target.lm_head.weight).T[:vocab])
