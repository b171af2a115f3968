"""LM heads and embeddings that are stored where they should be copies of others."""

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.tensors import CheckpointTensor

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUANTIZED_HEAD = "lm_head.values"  # see quantization.formats
CHUNK_ELEMENTS = 4 << 20  # most elements of a tensor that are compared at a time


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
    """Whether there is no LM head, or one that repeats the embeddings."""
    if QUANTIZED_HEAD in stored:
        return False
    head, embeddings = stored.get(HEAD), stored.get(EMBEDDINGS)
    return head is None or embeddings is None or same_values(head, embeddings)


def warn_of_changed_copies(
    copies: Mapping[str, CheckpointTensor], stored: Mapping[str, CheckpointTensor], stacklevel: int
) -> None:
    """Warn of a draft head's copies of its target's embeddings or LM head that have other values:
    the target's are read in their place.

    Args:
      copies: the head's, by the name that the target has for each.
      stored: the target's tensors. What it does not have, or has quantized, is not compared.
      stacklevel: as of warnings.warn, from the caller on.

    Raises ValueError for a copy of another shape.
    """
    for name, copy in copies.items():
        is_tied = name == HEAD and HEAD not in stored and QUANTIZED_HEAD not in stored
        target = stored.get(EMBEDDINGS if is_tied else name)
        if target is None:
            continue
        if copy.shape != target.shape:
            raise ValueError(
                f"{copy.name} is {copy.shape}, {target.name} {target.shape}: choose another drafter"
            )
        if not same_values(copy, target, rounded=True):  # a head may have fewer bits
            warnings.warn(
                f"{copy.name} differs from {target.name}, which is read in its place: fewer "
                "drafts may be accepted",
                stacklevel=stacklevel + 1,
            )


def same_values(
    first: CheckpointTensor, second: CheckpointTensor, *, rounded: bool = False
) -> bool:
    """Whether two matrices are equal, read some rows at a time up to the first difference.

    ``rounded``: the second's values are rounded to the first's dtype before.
    """
    if first.shape != second.shape:
        return False
    size, step = first.shape[0], max(1, CHUNK_ELEMENTS // max(1, first.shape[-1]))
    for start in range(0, size, step):
        rows = slice(start, min(start + step, size))
        left, right = first.read(rows, slice(None)), second.read(rows, slice(None))
        if not _equal(left, right.astype(left.dtype) if rounded else right):
            return False
    return True


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    if first.dtype == second.dtype:  # bytes are compared several times faster than bfloat16
        first, second = (np.ascontiguousarray(part).view(np.uint8) for part in (first, second))
        return np.array_equal(first, second)
    return np.array_equal(first.astype(np.float64), second.astype(np.float64))
