"""The least number of bytes that a round must read, or write, on each device."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxspec.cache import Geometry
from jaxspec.decoding.all_reduce_buffers import without_exchanges
from jaxspec.decoding.draft_bytes import draft_weight_bytes, head_passes
from jaxspec.decoding.drafters import BlockDrafter, EagleDrafter, NoDrafter, ParallelEagleDrafter
from jaxspec.decoding.functional import EngineParams
from jaxspec.evaluation.benchmarks.chosen_experts import (
    ChosenExperts,
    expected_choice,
    layers_of_experts,
    unread_bytes,
)
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import BlockHead, DraftHead
from jaxspec.models.mixers import (
    Attention,
    BlockSparseAttention,
    EntryAttention,
    GatedDelta,
    IndexedAttention,
    KimiDelta,
    LatentAttention,
    Mamba2,
    ShortConv,
)
from jaxspec.models.nodes import nodes_of
from jaxspec.models.quantized.float4 import Float4Linear
from jaxspec.models.quantized.float8 import Float8Linear
from jaxspec.models.quantized.grouped import GroupedLinear
from jaxspec.parallel import WHOLE
from jaxspec.parallel.bytes import local_bytes
from pallas_kernels.float8 import BYTES


@dataclasses.dataclass(frozen=True)
class FloorBytes:
    """Bytes that a round must read: weights once per pass, keys and values of the context. Of
    recurrent layers also what it must write."""

    target_weights: int
    target_kv: int
    draft_weights: int
    draft_kv: int
    target_state: int = 0

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def floor_bytes(
    params: EngineParams,
    batch: int,
    context: float,
    committed: float = 1.0,
    chosen: ChosenExperts | None = None,
) -> FloorBytes:
    """For one round over ``batch`` sequences with ``context`` committed tokens on average, which
    commits so many more of each.

    The drafter runs one pass over the newly committed tokens, and one for each further level; a
    block head runs once (see ``draft_weight_bytes``). Of embedding tables only a few rows are
    gathered, so a table counts only if it is also the LM head. Devices that share sequences each
    read their part. Of experts those count that are chosen: ``chosen``, or as many as
    ``expected_choice`` says.
    """
    target, drafter = params.target, params.drafter
    rows = batch // params.data_parallel / params.sequence_parallel
    weights = local_bytes(without_exchanges(target))
    numbers = None if chosen is None else chosen.target
    weights -= _unread_experts(target, batch // params.data_parallel * verified(params), numbers)
    if target.lm_head is not None:
        weights -= local_bytes(target.embed)
    if target.tokens is not None:
        weights -= local_bytes(target.tokens.embed)
    kv = round(rows * _kv_bytes(target, context))
    state = round(rows * _state_bytes(target, committed))
    if not isinstance(drafter, EagleDrafter | BlockDrafter):
        return FloorBytes(weights, kv, 0, 0, state)
    steps = params.speculation.max_depth
    lm_head = local_bytes(target.embed if target.lm_head is None else target.lm_head)
    draft_weights = draft_weight_bytes(drafter, steps, lm_head)
    if isinstance(drafter, BlockDrafter):
        read = _kv_bytes(drafter.head, context)
    else:
        steps = 1 if isinstance(drafter, ParallelEagleDrafter) else steps
        read, counts = 0, head_passes(len(drafter.heads), steps)
        numbers = None if chosen is None or drafter.later else chosen.draft
        for head, (passes, _) in zip(drafter.heads, counts, strict=True):
            draft_weights -= _unread_experts(head, batch // params.data_parallel, numbers, passes)
            read += passes * _kv_bytes(head, context)
    return FloorBytes(weights, kv, draft_weights, round(rows * read), state)


def verified(params: EngineParams) -> int:
    """Tokens of a row in one pass of the target."""
    drafts = not isinstance(params.drafter, NoDrafter)
    return params.speculation.num_nodes if drafts else 1


def _unread_experts(
    model: Decoder | DraftHead, tokens: int, chosen: Sequence[float] | None, passes: int = 1
) -> int:
    """Bytes of the experts that no token chooses, in so many passes of ``tokens`` each: but for
    ``chosen`` in each layer of each pass; None: but for as many as are expected."""
    experts = list(layers_of_experts(model.layers))
    if chosen is None:
        chosen = [expected_choice(layer, tokens) for layer in experts] * passes
    return unread_bytes(experts, chosen)


def _kv_bytes(model: Decoder | DraftHead | BlockHead, context: float) -> int:
    """Bytes of keys and values that one pass reads for one sequence."""
    layers = model.layers
    sources = [layer if layer.source is None else layers[layer.source] for layer in layers]
    kinds = Attention, BlockSparseAttention, EntryAttention, IndexedAttention, LatentAttention
    paged = nodes_of([layer.mixer for layer in sources], *kinds)
    return sum(_cached_bytes(mixer, context) for mixer in paged)


def _state_bytes(model: Decoder, committed: float) -> int:
    """Bytes of recurrent states that a round reads and writes for one sequence."""
    recurrent = nodes_of(model.layers, GatedDelta, KimiDelta, Mamba2, ShortConv)
    return round(sum(_moved(mixer, committed) for mixer in recurrent))


def _moved(mixer: GatedDelta | KimiDelta | Mamba2 | ShortConv, committed: float) -> float:
    """Inputs of a short convolution are read and written."""
    if not isinstance(mixer, ShortConv):
        return _moved_by_delta(mixer, committed)
    taps, channels = mixer.taps.sharding.shard_shape(mixer.taps.shape)
    return 2 * (taps - 1) * channels * 4  # float32


def _moved_by_delta(mixer: GatedDelta | KimiDelta | Mamba2, committed: float) -> float:
    """The state is read once, and written when as many tokens as its window holds are folded into
    it. Of the window half is read, and what is committed is written. The convolution's last inputs
    are read and written."""
    state = jax.eval_shape(lambda: mixer.init_state(Geometry(0, 1, 1), WHOLE))
    s, window, channels = (
        sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))
        for part in (state.s, state.window, state.channels)
    )
    folds = committed / mixer.config.folded
    groups = mixer.taps.shape[1]
    share = mixer.taps.sharding.shard_shape(mixer.taps.shape)[1] / groups
    return share * (s * (1 + folds) + window * (0.5 + folds) + 2 * channels)


def _local_heads(qkv: Any) -> int:
    """KV heads of a device."""
    if isinstance(qkv, GroupedLinear | Float4Linear | Float8Linear):
        return qkv.values.sharding.shard_shape(qkv.values.shape)[0]
    return qkv.weight.sharding.shard_shape(qkv.weight.shape)[1]


def _cached_bytes(
    attention: Attention
    | BlockSparseAttention
    | EntryAttention
    | IndexedAttention
    | LatentAttention,
    context: float,
) -> int:
    if isinstance(attention, BlockSparseAttention | IndexedAttention):
        return _indexed_bytes(attention, context)
    if isinstance(attention, EntryAttention | LatentAttention):  # on every device
        return round(attention.config.entries_read(context) * attention.kv_in.dtype.itemsize)
    config, kv_heads = attention.config, _local_heads(attention.qkv)
    size = attention.qkv.dtype.itemsize if attention.kv_scales is None else BYTES.itemsize
    slot = 2 * kv_heads * config.head_dim * size
    seen = min(context, config.window or math.inf, config.chunk or math.inf)
    return round(seen * slot)


def _indexed_bytes(attention: BlockSparseAttention | IndexedAttention, context: float) -> int:
    """Bytes of index keys, which every device has all of, and of what is chosen by them."""
    inner = attention.attention
    if isinstance(attention, BlockSparseAttention):
        index, keys = attention.config.index, context
    else:
        index = attention.config.indexer
        keys = context / index.span  # of whole spans
    size = round(keys * index.head_dim * inner.qkv.dtype.itemsize)
    return size + _cached_bytes(inner, min(context, index.most))
