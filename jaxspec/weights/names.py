"""Which Hugging Face tensors make up each of our arrays.

All supported families name their tensors alike; they store a weight as [out, in], one tensor a
projection. An array of ours is described by a Split: given a block of it (a NumPy array in our
layout) and where in the whole array the block starts, it returns views into the block, each in the
order of the Hugging Face rows that fill it. The same views serve reading and writing, and a block
may be any shard.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxspec.config import ModelConfig
from jaxspec.models.decoder import Decoder, Layer
from jaxspec.models.eagle import EagleHead


class Piece(NamedTuple):
    """A view that holds consecutive rows of a Hugging Face tensor.

    ``view`` is [rows, columns], its rows possibly over several axes; for a vector (``column`` is
    None) it is [rows]. ``row`` and ``column``: where in the tensor it starts.
    """

    name: str
    view: np.ndarray
    row: int
    column: int | None


Split = Callable[[np.ndarray, tuple[int, ...]], list[Piece]]


def same(name: str, num_rows: int | None = None) -> Split:
    """An array in the tensor's own layout. Rows past ``num_rows`` are padding of ours."""

    def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
        view = block if num_rows is None else block[: max(0, num_rows - start[0])]
        return [Piece(name, view, start[0], start[1] if block.ndim > 1 else None)]

    return split


def transposed(name: str, num_rows: int | None = None) -> Split:
    """[in, out] of a weight [out, in]. Columns of ours past ``num_rows`` are padding."""

    def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
        return same(name, num_rows)(block.T, start[::-1])

    return split


def gate_up(prefix: str, kind: str) -> Split:
    """[in, 2, F] of two weights [F, in]; [2, F] of two biases [F]."""

    def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
        rows, column = _rows_first(block, start, row_axes=2)
        return [
            Piece(f"{prefix}{name}.{kind}", rows[i], start[-1], column)
            for i, name in enumerate(("gate_proj", "up_proj"))
        ]

    return split


def qkv(prefix: str, kind: str, repeats: int) -> Split:
    """[in, G, R, D] of the q, k and v weights; [G, R, D] of their biases.

    ``repeats``: how many neighbouring groups share one of the checkpoint's KV heads.
    """

    def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
        rows, column = _rows_first(block, start, row_axes=3)
        groups, per_group, head_dim = rows.shape[:3]
        first = start[-3]
        queries = Piece(
            f"{prefix}q_proj.{kind}", rows[:, :-2], first * (per_group - 2) * head_dim, column
        )
        step = groups if repeats == 1 else 1
        return [queries] + [
            Piece(
                f"{prefix}{name}.{kind}",
                rows[i : i + step, member],
                (first + i) // repeats * head_dim,
                column,
            )
            for name, member in (("k_proj", -2), ("v_proj", -1))
            for i in range(0, groups, step)
        ]

    return split


def _rows_first(
    block: np.ndarray, start: tuple[int, ...], row_axes: int
) -> tuple[np.ndarray, int | None]:
    """The block with its input axis, if it has one, last; and that axis's start."""
    if block.ndim == row_axes:
        return block, None
    return np.moveaxis(block, 0, -1), start[0]


def decoder_splits(decoder: Decoder) -> Decoder:
    """``decoder`` (arrays or shapes) with a Split in the place of each array."""
    config = decoder.config
    splits = dataclasses.replace(
        decoder,
        embed=same("model.embed_tokens.weight", config.vocab_size),
        layers=tuple(
            _layer_splits(layer, config, f"model.layers.{i}.")
            for i, layer in enumerate(decoder.layers)
        ),
        norm=same("model.norm.weight"),
        lm_head=transposed("lm_head.weight", config.vocab_size),
    )
    return _where_present(splits, decoder)


def head_splits(head: EagleHead, first_layer: str) -> EagleHead:
    """As decoder_splits, for an EAGLE head whose layer 0 is named ``first_layer``.

    ``token_ids`` is left out: the checkpoint stores differences.
    """
    prefixes = [f"{first_layer}.", *(f"layers.{i}." for i in range(1, len(head.layers)))]
    splits = dataclasses.replace(
        head,
        fc=transposed("fc.weight"),
        fc_bias=same("fc.bias"),
        layers=tuple(
            _layer_splits(layer, head.config, prefix)
            for layer, prefix in zip(head.layers, prefixes, strict=True)
        ),
        hidden_norm=same(f"{first_layer}.hidden_norm.weight"),
        norm=same("norm.weight"),
        lm_head=transposed("lm_head.weight"),
        token_ids=None,
        embed=same("embed_tokens.weight"),
    )
    return _where_present(splits, head)


def _layer_splits(layer: Layer, config: ModelConfig, prefix: str) -> Layer:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    repeats = layer.qkv.shape[1] // config.num_kv_heads
    splits = dataclasses.replace(
        layer,
        input_norm=same(f"{prefix}input_layernorm.weight"),
        qkv=qkv(attention, "weight", repeats),
        qkv_bias=qkv(attention, "bias", repeats),
        q_norm=same(f"{attention}q_norm.weight"),
        k_norm=same(f"{attention}k_norm.weight"),
        o=transposed(f"{attention}o_proj.weight"),
        o_bias=same(f"{attention}o_proj.bias"),
        post_norm=same(f"{prefix}post_attention_layernorm.weight"),
        gate_up=gate_up(mlp, "weight"),
        gate_up_bias=gate_up(mlp, "bias"),
        down=transposed(f"{mlp}down_proj.weight"),
        down_bias=same(f"{mlp}down_proj.bias"),
    )
    return _where_present(splits, layer)


def _where_present[T: Decoder | EagleHead | Layer](splits: T, model: T) -> T:
    names = [field.name for field in dataclasses.fields(model)]
    absent: dict[str, Any] = {name: None for name in names if getattr(model, name) is None}
    return dataclasses.replace(splits, **absent)


def tensor_shapes(leaves: Iterable[tuple[Any, Split]]) -> dict[str, tuple[int, ...]]:
    """Shapes of the Hugging Face tensors behind (array or shape, Split) pairs."""
    shapes: dict[str, tuple[int, ...]] = {}
    for leaf, split in leaves:
        whole = np.broadcast_to(np.zeros((), bool), leaf.shape)
        for piece in split(whole, (0,) * len(leaf.shape)):
            rows, columns = piece.view.shape, ()
            if piece.column is not None:
                rows, columns = rows[:-1], rows[-1:]
            end = piece.row + math.prod(rows)
            shapes[piece.name] = (max(end, shapes.get(piece.name, (0,))[0]), *columns)
    return shapes
