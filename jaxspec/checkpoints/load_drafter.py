"""Loading of drafters, by name or directory."""

import dataclasses
import functools
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.checkpoints.assistant import holds_assistant, load_assistant
from jaxspec.checkpoints.block import check_block_copies, holds_block_head, load_block_head
from jaxspec.checkpoints.built_in import head_of
from jaxspec.checkpoints.eagle import check_head_embeddings, head_method, load_eagle_head
from jaxspec.checkpoints.hub import resolve_directory
from jaxspec.checkpoints.mtp import MtpChoice, has_mtp_layers, holds_only_mtp_layers, load_mtp_heads
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.checkpoints.vocabularies import (
    LEAST_SHARED,
    Shared,
    shared_tokens,
    spelt_words,
    vocabulary,
)
from jaxspec.config.model import ModelConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import (
    AssistantDrafter,
    BlockDrafter,
    Drafter,
    DraftModelDrafter,
    EagleDrafter,
    MappedModelDrafter,
    MixedDrafter,
    NoDrafter,
    ParallelEagleDrafter,
    VocabularyMap,
)
from jaxspec.decoding.drafters.names import check_name, lookup_drafter, mixed_lookup, split_mixed
from jaxspec.decoding.prior_costs import prior_costs
from jaxspec.decoding.trees.grow import check_top_k
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import load_model_config
from jaxspec.models.heads import BlockHead, DraftHead
from jaxspec.models.heads.corrections import PairCorrection
from jaxspec.models.mlps import Experts
from jaxspec.models.nodes import map_nodes, nodes_of
from jaxspec.models.quantized.float4 import Float4Linear
from jaxspec.models.quantized.float8 import Float8Linear, as_linear
from jaxspec.models.quantized.lm_head_copy import with_lm_head_copy
from jaxspec.models.quantized.scaled import in_eight_bits
from jaxspec.models.quantized.schemes import in_four_bits, to_four_bits
from pallas_kernels.selection import Kernels, default_device

MIXED = "ngram+"  # and the drafter that n-gram lookup is mixed with
LEAST_PROBABILITY = 0.02  # of a head's chain on a CPU; see EagleDrafter and docs/benchmarks.md
# A head on a CPU listens (see EagleDrafter) if the target's vocabulary is so many times as large as
# its: else its logits, of every plain token, would cost more than they tell.
LEAST_REDUCTION = 4


def choose_drafter(model: str | Path, drafter: str | Path) -> str | Path:
    """The name of a drafter, with what ``auto`` and ``mtp`` stand for.

    ``auto`` is lookup and the head for a model whose head comes with the package, the MTP layers of
    a checkpoint that has some, else ``ngram``. ``mtp`` becomes the kind that the config says, with
    the number of layers where there are several. Raises ValueError for a slip in a name.
    """
    check_name(drafter)
    if drafter == "auto":
        if head := head_of(model):
            return f"{MIXED}{head}"
        directory = resolve_directory(model)
        drafter = "mtp" if has_mtp_layers(directory, load_model_config(directory)) else "ngram"
    mixture, mixed = split_mixed(drafter)
    choice = MtpChoice.parse(mixed)
    if choice is None or not isinstance(drafter, str):
        return drafter
    mtp = load_model_config(resolve_directory(model)).mtp
    return drafter if mtp is None else f"{mixture}{choice.name(mtp)}"


@dataclasses.dataclass(frozen=True, eq=False)
class DraftedModel:
    """The target that a drafter is loaded for, and how its weights are.

    Attributes:
      directory, config: of the target.
      speculation: the largest tree.
      dtype: of the drafter's weights.
      mesh, sharded: where these lie, and whether they are split over the mesh.
    """

    directory: Path
    config: ModelConfig
    speculation: SpeculationConfig
    dtype: jnp.dtype
    mesh: Mesh | None
    sharded: bool


def load_drafter(drafter: str | Path, drafted: DraftedModel) -> Drafter:
    """The drafter of any name but ``auto`` (see choose_drafter), for a target.

    Warns of a head whose embeddings are not the target's. Raises ValueError for what cannot be
    found, or does not fit the target.
    """
    if drafter == "none":
        return NoDrafter()
    if str(drafter).startswith("text:"):
        raise ValueError(
            f"drafter {str(drafter)!r}: drafts of text are made by an LLM, by itself: neither "
            "jaxspec.load nor a mixture has them"
        )
    choice = MtpChoice.parse(drafter)
    if choice is not None:
        return _mtp_drafter(drafted.directory, drafted, choice)
    mixture, mixed = split_mixed(drafter)
    if mixture:
        lookup = mixed_lookup(mixture)  # it refuses a wrong number before a head is looked for
        if mixed in ("", "none", "auto") or split_mixed(mixed)[0] or lookup_drafter(mixed):
            raise ValueError(
                f"drafter {drafter!r}: after {mixture} give mtp, or the directory or hub id of a "
                "head or a draft model"
            )
        skips = platform_of(drafted.mesh) != "gpu"  # there a round is one CUDA graph, or several
        return MixedDrafter(model=load_drafter(mixed, drafted), lookup=lookup, may_skip=skips)
    lookup = lookup_drafter(drafter)
    return _drafter_in(resolve_directory(drafter), drafted) if lookup is None else lookup


def _drafter_in(directory: Path, drafted: DraftedModel) -> Drafter:
    """The drafter that a directory holds, by its files."""
    if holds_only_mtp_layers(directory):
        return _mtp_drafter(directory, drafted, MtpChoice())
    if holds_assistant(directory):
        check_top_k(drafted.speculation, drafted.config.vocab_size)
        assistant = load_assistant(directory, drafted.config, drafted.dtype, drafted.mesh)
        return AssistantDrafter(assistant=assistant)
    if holds_block_head(directory):
        return _block_drafter(directory, drafted)
    if head_method(directory) is not None:
        return _eagle_drafter(directory, drafted)
    return _model_drafter(directory, drafted)


def _block_drafter(directory: Path, drafted: DraftedModel) -> BlockDrafter:
    weights = (drafted.dtype, drafted.mesh, drafted.sharded)
    head = load_block_head(directory, drafted.config, *weights)
    check_block_copies(directory, drafted.directory)
    head.check_depth(drafted.speculation.max_depth)
    check_top_k(drafted.speculation, _num_draft_ids(head, drafted))
    if isinstance(head.correction, PairCorrection):
        check_top_k(drafted.speculation, head.correction.candidates, "candidates")
    return BlockDrafter(head=head)


def _eagle_drafter(directory: Path, drafted: DraftedModel) -> EagleDrafter:
    weights = (drafted.dtype, drafted.mesh, drafted.sharded)
    head = load_eagle_head(directory, drafted.config, *weights)
    ids, on_cpu = _num_draft_ids(head, drafted), platform_of(drafted.mesh) == "cpu"
    check_top_k(drafted.speculation, ids)
    check_head_embeddings(directory, drafted.directory)
    if head.mask is not None:
        return ParallelEagleDrafter(head=head)
    if on_cpu and drafted.mesh is None:
        head = _widened(head, drafted.dtype)
    listens = on_cpu and LEAST_REDUCTION * ids <= drafted.config.vocab_size
    least = _least_probability(drafted.mesh)
    return EagleDrafter(head=head, least_probability=least, listens=listens)


def _num_draft_ids(head: DraftHead | BlockHead, drafted: DraftedModel) -> int:
    """The number of tokens that a head may draft."""
    return drafted.config.vocab_size if head.token_ids is None else head.token_ids.size


def _model_drafter(directory: Path, drafted: DraftedModel) -> DraftModelDrafter:
    config = load_model_config(directory, "draft model")
    shared = _shared_vocabulary(directory, config, drafted)
    config.check_tree_depth(drafted.speculation.max_depth)
    _warn_of_positions(directory, config, drafted.config)
    num_ids = config.vocab_size if shared is None else len(shared.shared)
    check_top_k(drafted.speculation, num_ids)
    model = load_decoder(directory, config, drafted.dtype, drafted.mesh, sharded=drafted.sharded)
    if shared is None:
        return DraftModelDrafter(model=model)
    place = None if drafted.mesh is None else NamedSharding(drafted.mesh, PartitionSpec())
    model_ids, ids, token_ids = jax.device_put(shared[:3], place)
    words = VocabularyMap(model_ids=model_ids, shared=ids, token_ids=token_ids)
    return MappedModelDrafter(model=model, vocabulary=words)


def _warn_of_positions(directory: Path, config: ModelConfig, target: ModelConfig) -> None:
    """Warn of a draft model for shorter texts than the target's. It gets no window as heads do: a
    model that no longer sees the beginning of its text fails (arXiv 2309.17453)."""
    if config.max_position < target.max_position:
        warnings.warn(
            f"draft model {directory} has {config.max_position} positions, and the target "
            f"{target.max_position}: in texts of more than {config.max_position} tokens few drafts "
            "may be accepted; ngram and suffix draft there, too",
            stacklevel=2,
        )


def platform_of(mesh: Mesh | None) -> str:
    """The platform of a mesh: ``cpu``, ``gpu`` or ``tpu``. None: of the default device."""
    device = default_device() if mesh is None else mesh.devices.flat[0]
    return device.platform


def _widened(head: DraftHead, dtype: jnp.dtype) -> DraftHead:
    """The head without floats of 8 and 4 bits: each program of a CPU would widen them anew."""
    return map_nodes(head, functools.partial(as_linear, dtype=dtype), Float8Linear, Float4Linear)


def _least_probability(mesh: Mesh | None) -> float:
    return LEAST_PROBABILITY if platform_of(mesh) == "cpu" else 0.0


def _mtp_drafter(directory: Path, drafted: DraftedModel, choice: MtpChoice) -> EagleDrafter:
    check_top_k(drafted.speculation, drafted.config.vocab_size)
    weights = (drafted.dtype, drafted.mesh, drafted.sharded)
    steps = drafted.speculation.max_depth
    head, *later = load_mtp_heads(directory, drafted.config, *weights, choice=choice, steps=steps)
    least = _least_probability(drafted.mesh)
    return EagleDrafter(head=head, later=tuple(later), least_probability=least)


def _shared_vocabulary(
    directory: Path, config: ModelConfig, drafted: DraftedModel
) -> Shared | None:
    """The tokens that a draft model shares with the target; None: its ids stand for the same text,
    but for padding.

    Raises ValueError if they share too few.
    """
    draft, wanted = vocabulary(directory), vocabulary(drafted.directory)
    if draft is None or wanted is None:
        draft, wanted = config.vocab_size, drafted.config.vocab_size
    if draft == wanted:
        return None
    spelt, target = spelt_words(directory), spelt_words(drafted.directory)
    found = None
    if spelt is not None and target is not None:
        found = shared_tokens(target, spelt, drafted.config.vocab_size, config.vocab_size)
    if found is None or found.share < LEAST_SHARED:
        share = f"they share {found.share:.0%} of their tokens" if found else ""
        raise ValueError(
            f"draft model {directory} has another vocabulary than the target {drafted.directory}, "
            f"and {share or 'their tokens cannot be compared'}: a draft model must share at least "
            f"{LEAST_SHARED:.0%}, or draft as text:{directory}"
        )
    if drafted.sharded and drafted.mesh is not None:
        raise ValueError(
            f"draft model {directory} has another vocabulary than the target: leave shard_drafter"
        )
    return found


def in_bits(drafter: Drafter, bits: int | None, mesh: Mesh | None) -> Drafter:
    """The drafter in so many bits: see LoadOptions.drafter_bits. None: as it is. Corrections of
    block heads are not rounded: they are small, and their publishers do not round them.

    Raises ValueError for other numbers, and for a drafter without weights.
    """
    if bits is None:
        return drafter
    if bits not in (4, 8):
        raise ValueError(
            f"drafter_bits must be 4 or 8, or None for the weights as loaded, got {bits}"
        )
    if not jax.tree.leaves(drafter):
        raise ValueError("drafter_bits needs a drafter with weights: a head or a draft model")
    if isinstance(drafter, MixedDrafter):
        return drafter.replace(model=in_bits(drafter.model, bits, mesh))
    rounded = in_eight_bits(drafter) if bits == 8 else in_four_bits(drafter, mesh)
    if isinstance(drafter, BlockDrafter) and isinstance(rounded, BlockDrafter):
        return rounded.replace(head=rounded.head.replace(correction=drafter.head.correction))
    return rounded


def with_lm_head_in_bits(
    drafter: Drafter, bits: int | None, target: Decoder, mesh: Mesh | None
) -> Drafter:
    """A drafter in so many bits, with its copy of the target's LM head if it reads that."""
    if bits is None:
        return drafter
    rounding = to_four_bits if bits == 4 else in_eight_bits
    return with_lm_head_copy(drafter, target, rounding, mesh)


def with_node_costs(drafter: Drafter, target: Decoder, depth: int, kernels: Kernels) -> Drafter:
    """The drafter, in which chains of a head with a confidence head end where the next token is not
    worth verifying (see BlockDrafter.costs): where a kernel reads only the experts that tokens
    choose. ``depth``: of its chains."""
    is_packed = any(layer.gate_up.packed is not None for layer in nodes_of(target.layers, Experts))
    if ("packed_expert_product" if is_packed else "expert_product") not in kernels:
        return drafter

    def changed(block: BlockDrafter) -> BlockDrafter:
        if block.head.confidence is None:
            return block
        return block.replace(costs=prior_costs(target, block).node_costs(depth))

    return map_nodes(drafter, changed, BlockDrafter)
