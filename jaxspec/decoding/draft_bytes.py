"""How many bytes of weights drafting reads in a round, on each device."""

from jaxspec.decoding.all_reduce_buffers import without_exchanges
from jaxspec.decoding.drafters import (
    AssistantDrafter,
    BlockDrafter,
    Drafter,
    DraftModelDrafter,
    EagleDrafter,
    MixedDrafter,
    ParallelEagleDrafter,
)
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import BlockHead, DraftHead
from jaxspec.models.heads.assistant import Assistant, OrderedHead
from jaxspec.models.mixers import Attention
from jaxspec.models.quantized.scaled import only_eight_bits
from jaxspec.parallel.bytes import local_bytes


def draft_weight_bytes(drafter: Drafter, steps: int, lm_head: int) -> int:
    """Bytes of weights that a round of so many draft steps reads, all experts included.

    Of an EAGLE-3 head only the first step reads ``fc``. Several heads: see ``head_passes``. A block
    head runs once, and its correction says what it reads. Of embedding tables only a few rows are
    gathered, so a table counts only if it is also the LM head. Of weights of 8 bits beside larger
    ones only these count. A mixture counts as a round in which its model drafts.

    Args:
      lm_head: bytes of the target's LM head, which a head reads that has neither an own one nor a
        copy.
    """
    if isinstance(drafter, MixedDrafter):
        return draft_weight_bytes(drafter.model, steps, lm_head)
    if isinstance(drafter, BlockDrafter):
        return _block_bytes(only_eight_bits(drafter.head), steps, lm_head)
    if isinstance(drafter, ParallelEagleDrafter):  # all steps are one pass
        return _heads_bytes(only_eight_bits(drafter.heads), 1, lm_head)
    if isinstance(drafter, EagleDrafter):
        return _heads_bytes(only_eight_bits(drafter.heads), steps, lm_head)
    if isinstance(drafter, AssistantDrafter):
        return steps * _assistant_bytes(only_eight_bits(drafter.assistant))
    if isinstance(drafter, DraftModelDrafter):
        return steps * _model_bytes(only_eight_bits(drafter.model))
    return steps * local_bytes(drafter)


def _heads_bytes(heads: tuple[DraftHead, ...], steps: int, lm_head: int) -> int:
    total = 0
    for head, (passes, writes) in zip(heads, head_passes(len(heads), steps), strict=True):
        once = local_bytes(head.front.fc) if head.method == "eagle3" else 0
        each = local_bytes(without_exchanges(head)) - once
        each -= local_bytes((head.embed, head.token_ids, head.lm_head_copy))
        total += once + passes * each + writes * _written_from(head)
    if heads[0].lm_head is None:
        total += steps * _shared_lm_head_bytes(heads[0], lm_head)
    return total


def _block_bytes(head: BlockHead, steps: int, lm_head: int) -> int:
    counted = head.correction, head.lm_head_copy, head.token_ids
    layers = local_bytes(without_exchanges(head)) - local_bytes(counted)
    corrections = 0 if head.correction is None else head.correction.bytes_read(steps)
    shared = _shared_lm_head_bytes(head, lm_head) if head.lm_head is None else 0
    return layers + shared + corrections


def _assistant_bytes(assistant: Assistant) -> int:
    """The bytes that a step reads: of an ordered LM head, rows of the groups that it chooses."""
    head, total = assistant.lm_head, local_bytes(assistant)
    if not isinstance(head, OrderedHead) or head.tokens is None:
        return total
    unread = 1 - head.chosen / len(head.tokens)
    return total - round(unread * local_bytes((head.embed, head.tokens)))


def _model_bytes(model: Decoder) -> int:
    gathered = 0 if model.lm_head is None else local_bytes(model.embed)
    gathered += 0 if model.tokens is None else local_bytes(model.tokens.embed)
    return local_bytes(without_exchanges(model)) - gathered


def _shared_lm_head_bytes(head: DraftHead | BlockHead, lm_head: int) -> int:
    return lm_head if head.lm_head_copy is None else local_bytes(head.lm_head_copy)


def head_passes(heads: int, steps: int) -> list[tuple[int, int]]:
    """For each of an EagleDrafter's heads, how often a round of so many draft steps needs what it
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
    qkv = [layer.mixer.qkv for layer in head.layers[:1] if isinstance(layer.mixer, Attention)]
    return local_bytes((head.front, qkv))
