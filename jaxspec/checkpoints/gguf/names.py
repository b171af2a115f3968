"""Names of a GGUF file's tensors, and what their values are, in terms of Hugging Face's."""

import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxspec.checkpoints.gguf.metadata import Metadata, StoredBlocks, gguf

_OUTSIDE = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
_IN_LAYER = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
    }
)
_OF_EXPERTS = MappingProxyType(
    {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
)
# What architectures name otherwise.
_OTHERWISE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "phi3": {"ffn_up": "mlp.gate_up_proj"},  # gates first
        "gemma3": {
            "ffn_norm": "pre_feedforward_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    }
)
# Their rotations pair entries 2i and 2i + 1 of a head, where ours pair i and i + D / 2.
_PAIRED = frozenset({"llama", "mistral"})
_NORMS_PLUS_ONE = frozenset({"gemma3"})
ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LAYER = re.compile(r"blk\.(\d+)\.([a-z0-9_]+)")


class NamedBlocks(NamedTuple):
    """A tensor under Hugging Face's name.

    Attributes:
      heads: its rows are those of so many heads, each with the entries of a pair beside each other.
        0: they are in our order.
      shift: what is to be added to its values.
    """

    blocks: StoredBlocks
    heads: int = 0
    shift: int = 0


def named_tensors(metadata: Metadata) -> dict[str, NamedBlocks]:
    """All weights by the names of Hugging Face's checkpoints.

    Raises ValueError that lists the tensors which the architecture does not have.
    """
    found: dict[str, NamedBlocks] = {}
    unknown = []
    for name, blocks in metadata.tensors.items():
        if name in ROPE_TABLES:
            continue
        named = dict(_named(metadata, name, blocks))
        found |= named
        if not named:
            unknown.append(name)
    if unknown:
        raise ValueError(
            f"tensors that {metadata.architecture} does not have: {', '.join(unknown[:20])}"
        )
    return found


def _named(
    metadata: Metadata, name: str, blocks: StoredBlocks
) -> Iterator[tuple[str, NamedBlocks]]:
    """The tensor, or one for each expert. Nothing for a name that is not known."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTSIDE:
        yield f"{_OUTSIDE[stem]}.{kind}", NamedBlocks(blocks, shift=_shift(metadata, name))
        return
    if not (match := _LAYER.fullmatch(stem)):
        return
    layer, part = f"model.layers.{match[1]}", match[2]
    if part in _OF_EXPERTS:
        count, *shape = blocks.shape
        for index, expert in enumerate(_slabs(blocks, count, tuple(shape))):
            yield f"{layer}.mlp.experts.{index}.{_OF_EXPERTS[part]}.{kind}", NamedBlocks(expert)
        return
    names = _IN_LAYER | _OTHERWISE.get(metadata.architecture, {})
    if part in names:
        shift = _shift(metadata, name)
        yield f"{layer}.{names[part]}.{kind}", NamedBlocks(blocks, _heads(metadata, part), shift)


def _slabs(blocks: StoredBlocks, count: int, shape: tuple[int, ...]) -> Iterator[StoredBlocks]:
    """The experts of a tensor [E, out, in], which lie behind each other."""
    size = num_bytes(blocks.kind, shape)
    for index in range(count):
        yield blocks._replace(offset=blocks.offset + index * size, shape=shape)


def num_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of this type and shape."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return math.prod(shape) // values * size


def _heads(metadata: Metadata, part: str) -> int:
    if metadata.architecture not in _PAIRED or part not in ("attn_q", "attn_k"):
        return 0
    heads = metadata.get("attention.head_count")
    return heads if part == "attn_q" else metadata.get("attention.head_count_kv", heads)


def _shift(metadata: Metadata, name: str) -> int:
    return -(metadata.architecture in _NORMS_PLUS_ONE and name.endswith("norm.weight"))
