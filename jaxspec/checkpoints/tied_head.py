"""LM heads and embeddings that are stored where they should be copies of others."""

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.models.tensors import CheckpointTensor

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUANTIZED_HEAD = ("lm_head.values", "lm_head.codes")  # see checkpoints.formats
CHUNK_ELEMENTS = 4 << 20  # most elements of a tensor that are compared at a time
COMPARED_DTYPES = {"F32", "F16", "BF16"}  # of copies in the checkpoints of draft heads


def with_stored_head(
    config: ModelConfig, stored: Mapping[str, CheckpointTensor], directory: str | Path
) -> ModelConfig:
    """The config, untied if the checkpoint has an LM head that is not a copy of its embeddings.

    ``stored`` has the tensors of quantization.formats. A quantized LM head is never a copy. Warns
    that the stored LM head is used, as transformers does.
    """
    if not config.tie_word_embeddings or _is_tied(stored):
        return config
    warnings.warn(
        f"{directory}: config.json ties the LM head to the embeddings (tie_word_embeddings), but "
        "the checkpoint has an lm_head of other values, which is used. Set tie_word_embeddings to "
        "false to say so",
        stacklevel=3,
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def _is_tied(stored: Mapping[str, CheckpointTensor]) -> bool:
    """Whether there is no LM head, or one that repeats the embeddings, perhaps padded with rows."""
    if any(name in stored for name in QUANTIZED_HEAD):
        return False
    head, embeddings = stored.get(HEAD), stored.get(EMBEDDINGS)
    if head is None or embeddings is None:
        return True
    is_whole = head.shape[0] >= embeddings.shape[0]
    return is_whole and same_values(head, embeddings, padded=True)


def warn_of_changed_copies(
    copies: Mapping[str, CheckpointTensor],
    stored: Mapping[str, CheckpointTensor],
    *,
    are_read: bool,
    stacklevel: int,
) -> None:
    """Warn of a head's copies of its target's tables that have other values, as those of a head
    for another model have.

    Args:
      copies: the head's, by the name that the target has for each.
      stored: the target's tensors. What it does not have, or has quantized, is not compared.
      are_read: the head reads its copies; otherwise it reads the target's tables. Tables that are
        read may be padded with rows, or have another width, if the head has.
      stacklevel: as of warnings.warn, from the caller on.

    Raises ValueError for a copy of another shape in whose place the target's table is read.
    """
    for name, copy in copies.items():
        is_tied = name == HEAD and not any(head in stored for head in (HEAD, *QUANTIZED_HEAD))
        target = stored.get(EMBEDDINGS if is_tied else name)
        if target is None or not {copy.dtype, target.dtype} <= COMPARED_DTYPES:
            continue
        if are_read and copy.shape[1:] != target.shape[1:]:
            continue
        if not are_read and copy.shape != target.shape:
            raise ValueError(
                f"{copy.name} is {copy.shape}, {target.name} {target.shape}: choose another drafter"
            )
        if not same_values(copy, target, rounded=True, padded=True):  # a head may have fewer bits
            instead = "" if are_read else ", which is read in its place"
            warnings.warn(
                f"{copy.file.parent}: {copy.name} differs from {target.name} of "
                f"{target.file.parent}{instead}: few drafts may be accepted, as of a head for "
                "another model",
                stacklevel=stacklevel + 1,
            )


def same_values(
    first: CheckpointTensor,
    second: CheckpointTensor,
    *,
    rounded: bool = False,
    padded: bool = False,
) -> bool:
    """Whether two matrices are equal, read some rows at a time up to the first difference.

    Args:
      rounded: the second's values are rounded to the first's dtype before.
      padded: rows that only one of them has do not count.
    """
    if first.shape[padded:] != second.shape[padded:]:
        return False
    size = min(first.shape[0], second.shape[0])
    step = max(1, CHUNK_ELEMENTS // max(1, first.shape[-1]))
    for start in range(0, size, step):
        rows = slice(start, min(start + step, size))
        left, right = first.read(rows, slice(None)), second.read(rows, slice(None))
        if not _equal(left, right.astype(left.dtype) if rounded else right):
            return False
    return True


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    if first.dtype == second.dtype:  # bytes are compared several times faster than bfloat16
        left, right = (np.ascontiguousarray(part).view(np.uint8) for part in (first, second))
        if np.array_equal(left, right):
            return True  # else they may still differ in the signs of zeros alone
    return np.array_equal(first.astype(np.float64), second.astype(np.float64))
