"""The least number of bytes that a round must read, or write, on each device."""

import dataclasses
import math
from typing import Any

import jax

from jaxspec.cache import Geometry
from jaxspec.draft_reads import draft_weight_bytes, head_passes
from jaxspec.exchanges import without_exchanges
from jaxspec.functional import EngineParams
from jaxspec.memory import local_bytes
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import BlockHead, DraftHead
from jaxspec.models.mixers import Attention, GatedDelta, LatentAttention
from jaxspec.models.mlps import Experts
from jaxspec.parallel import WHOLE
from jaxspec.quantization.float8 import Float8Linear
from jaxspec.quantization.grouped import GroupedLinear
from jaxspec.speculation.drafters import BlockDrafter, EagleDrafter, NoDrafter
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
    params: EngineParams, batch: int, context: float, committed: float = 1.0
) -> FloorBytes:
    """For one round over ``batch`` sequences with ``context`` committed tokens on average, which
    commits so many more of each.

    The drafter runs one pass over the newly committed tokens, and one for each further level; a
    block head runs once (see ``draft_weight_bytes``). Of embedding tables only a few rows are
    gathered, so a table counts only if it is also the LM head. Devices that share sequences each
    read their part. Of experts those count that are chosen (see ``_unread_experts``).
    """
    target, drafter = params.target, params.drafter
    rows = batch // params.data_parallel / params.sequence_parallel
    weights = local_bytes(without_exchanges(target))
    weights -= _unread_experts(target, batch // params.data_parallel * _verified(params))
    if target.lm_head is not None:
        weights -= local_bytes(target.embed)
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
        read, counts = 0, head_passes(len(drafter.heads), steps)
        for head, (passes, _) in zip(drafter.heads, counts, strict=True):
            draft_weights -= passes * _unread_experts(head, batch // params.data_parallel)
            read += passes * _kv_bytes(head, context)
    return FloorBytes(weights, kv, draft_weights, round(rows * read), state)


def _verified(params: EngineParams) -> int:
    """Tokens of a row in one pass of the target."""
    drafts = not isinstance(params.drafter, NoDrafter)
    return params.speculation.num_nodes if drafts else 1


def _unread_experts(model: Decoder | DraftHead, tokens: int) -> int:
    """Bytes of the experts that none of so many tokens chooses, if every token chooses alike often
    and independently. Real tokens choose more alike, so they read less."""
    total = 0.0
    for layer in model.layers:
        if isinstance(layer.mlp, Experts):
            routing = layer.mlp.config.routing
            unread = (1 - routing.top_k / routing.num_experts) ** tokens
            total += unread * local_bytes((layer.mlp.gate_up, layer.mlp.down))
    return round(total)


def _kv_bytes(model: Decoder | DraftHead | BlockHead, context: float) -> int:
    """Bytes of keys and values that one pass reads for one sequence."""
    mixers = (layer.mixer for layer in model.layers)
    paged = (mixer for mixer in mixers if isinstance(mixer, Attention | LatentAttention))
    return sum(_cached_bytes(mixer, context) for mixer in paged)


def _state_bytes(model: Decoder, committed: float) -> int:
    """Bytes of recurrent states that a round reads and writes for one sequence."""
    mixers = (layer.mixer for layer in model.layers)
    return round(sum(_moved(mixer, committed) for mixer in mixers if isinstance(mixer, GatedDelta)))


def _moved(mixer: GatedDelta, committed: float) -> float:
    """The state is read once, and written when as many tokens as its window holds are folded into
    it. Of the window half is read, and what is committed is written. The convolution's last inputs
    are read and written."""
    state = jax.eval_shape(lambda: mixer.init_state(Geometry(0, 1, 1), WHOLE))
    s, window, channels = (
        sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))
        for part in (state.s, state.window, state.channels)
    )
    folds = committed / mixer.config.folded
    share = _local_heads(mixer.qkvz) / mixer.config.num_key_heads
    return share * (s * (1 + folds) + window * (0.5 + folds) + 2 * channels)


def _local_heads(qkv: Any) -> int:
    """KV heads of a device, or key heads."""
    if isinstance(qkv, GroupedLinear | Float8Linear):
        return qkv.values.sharding.shard_shape(qkv.values.shape)[0]
    return qkv.weight.sharding.shard_shape(qkv.weight.shape)[1]


def _cached_bytes(attention: Attention | LatentAttention, context: float) -> int:
    if isinstance(attention, LatentAttention):  # one vector of a token, on every device
        return round(context * attention.config.stored_dim * attention.kv_in.dtype.itemsize)
    config, kv_heads = attention.config, _local_heads(attention.qkv)
    size = attention.qkv.dtype.itemsize if attention.kv_scales is None else BYTES.itemsize
    slot = 2 * kv_heads * config.head_dim * size
    return round(min(context, config.window or math.inf) * slot)
