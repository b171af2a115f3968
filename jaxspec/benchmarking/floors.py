"""The least number of bytes that a round must read, or write, on each device."""

import dataclasses
import math
from typing import Any

import jax

from jaxspec.cache import Geometry
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
from jaxspec.quantization.scaled import only_eight_bits
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

    The drafter runs one pass over the newly committed tokens, and one for each further level. Of an
    EAGLE-3 head only the first reads ``fc``. Several heads: see ``head_passes``. A head without an
    LM head reads the target's. A block head runs once, and its Markov head once for each level. Of
    embedding tables only a few rows are gathered, so a table counts only if it is also the LM head.
    Of weights of 8 bits beside larger ones only these count. Devices that share sequences each read
    their part. Of experts those count that are chosen (see ``_unread_experts``).
    """
    target, drafter = params.target, params.drafter
    rows = batch // params.data_parallel / params.sequence_parallel
    weights = local_bytes(without_exchanges(target))
    weights -= _unread_experts(target, batch // params.data_parallel * _verified(params))
    if target.lm_head is not None:
        weights -= local_bytes(target.embed)
    kv = round(rows * _kv_bytes(target, context))
    state = round(rows * _state_bytes(target, committed))
    if isinstance(drafter, BlockDrafter):
        head = only_eight_bits(drafter.head)
        return FloorBytes(
            weights, kv, _block_bytes(head, params), round(rows * _kv_bytes(head, context)), state
        )
    if not isinstance(drafter, EagleDrafter):
        return FloorBytes(weights, kv, 0, 0, state)
    steps, draft_weights, draft_kv = params.speculation.max_depth, 0, 0
    counts = head_passes(len(drafter.heads), steps)
    for head, (passes, writes) in zip(map(only_eight_bits, drafter.heads), counts, strict=True):
        once = local_bytes(head.front.fc) if head.method == "eagle3" else 0
        each = local_bytes(without_exchanges(head)) - once
        each -= local_bytes((head.embed, head.token_ids, head.lm_head_copy))
        each -= _unread_experts(head, batch // params.data_parallel)
        draft_weights += once + passes * each + writes * _written_from(head)
        draft_kv += round(passes * rows * _kv_bytes(head, context))
    if drafter.head.lm_head is None:
        draft_weights += steps * _drafting_lm_head_bytes(drafter.head, target)
    return FloorBytes(weights, kv, draft_weights, draft_kv, state)


def _drafting_lm_head_bytes(head: DraftHead | BlockHead, target: Decoder) -> int:
    """Of the target's LM head, as a head reads it that has none of its own."""
    if head.lm_head_copy is not None:
        return local_bytes(only_eight_bits(head.lm_head_copy))
    return local_bytes(target.embed if target.lm_head is None else target.lm_head)


def _block_bytes(head: BlockHead, params: EngineParams) -> int:
    """Bytes of weights that a block drafter reads in a round: of its Markov head one table for each
    level, of the other table only a few rows."""
    layers = local_bytes(without_exchanges(head)) - local_bytes((head.markov, head.lm_head_copy))
    markov = 0 if head.markov is None else local_bytes(head.markov.after)
    levels = params.speculation.max_depth
    return layers + _drafting_lm_head_bytes(head, params.target) + levels * markov


def head_passes(heads: int, steps: int) -> list[tuple[int, int]]:
    """Of each of an EagleDrafter's heads: how often a round of so many draft steps needs what it
    computes, and how often no more than the keys and values that it writes.

    The first step reads committed tokens with all heads. The others read drafted ones, with the
    head of the step and those of later steps. What the last head computes of them before its own
    step is for nobody.
    """
    whole, written, used = [0] * heads, [0] * heads, min(heads, steps)
    for step in range(steps):
        first, last = (min(step, used - 1), used - 1) if step else (0, heads - 1)
        for head in range(first, last + 1):
            (written if head == last > first else whole)[head] += 1
    return list(zip(whole, written, strict=True))


def _written_from(head: DraftHead) -> int:
    """Bytes of weights that a head's keys and values are computed with."""
    qkv = [one.mixer.qkv for one in head.layers[:1] if isinstance(one.mixer, Attention)]
    return local_bytes((head.front, qkv))


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
