"""Copies of a target's tables in the checkpoints of draft heads: are they the target's?"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxspec.tensors import CheckpointTensor
from jaxspec.weights.checkpoint_files import scan

EMBEDDINGS = "model.embed_tokens.weight"  # of a target
LM_HEAD = "lm_head.weight"
_COMPARED_ROWS = 64
_COMPARED_DTYPES = ("F32", "F16", "BF16")
# A head may be stored in another dtype than its target. bfloat16 keeps 8 bits; float16 keeps 11, of
# small numbers fewer.
_RELATIVE, _ABSOLUTE = 2.0**-8, 1e-6


def target_tables(
    stored: Mapping[str, CheckpointTensor],
) -> tuple[CheckpointTensor | None, CheckpointTensor | None]:
    """A target's embeddings and LM head, which are one table where they are tied."""
    embeddings = stored.get(EMBEDDINGS)
    return embeddings, stored.get(LM_HEAD, embeddings)


def differ(copy: CheckpointTensor, target: CheckpointTensor) -> bool:
    """Whether some of the compared rows differ by more than rounding to another dtype.

    Compared are rows that both have, as tables may be padded. Tables of other widths belong to
    heads of another hidden size, and quantized ones cannot be compared: they do not differ.
    """
    dtypes = {copy.dtype, target.dtype}
    if copy.shape[1:] != target.shape[1:] or not dtypes <= {*_COMPARED_DTYPES}:
        return False
    count = min(copy.shape[0], target.shape[0])
    for start in range(0, count, max(1, count // _COMPARED_ROWS)):
        rows = slice(start, start + 1), slice(None)
        both = (tensor.read(*rows).astype(np.float32) for tensor in (copy, target))
        if not np.allclose(*both, rtol=_RELATIVE, atol=_ABSOLUTE):
            return True
    return False


def warn_if_other(
    copy: CheckpointTensor | None, target: CheckpointTensor | None, *, is_read: bool
) -> None:
    """Warn if a head's copy of a target's table is that of another target. None: there is none.

    ``is_read``: the head reads its copy; otherwise it reads the target's table.
    """
    if copy is None or target is None or not differ(copy, target):
        return
    instead = "" if is_read else ", which is read in its place"
    files = "" if copy.file.parent == target.file.parent else f" of {target.file.parent}"
    warnings.warn(
        f"{copy.file.parent}: {copy.name} differs from {target.name}{files}{instead}: few drafts "
        "may be accepted, as of a head for another model",
        stacklevel=2,
    )


def warn_of_other_tables(head: str | Path, target: str | Path, *, are_read: bool) -> None:
    """Warn if the embeddings in a head's checkpoint are not its target's, nor the LM head in one
    that has copies which are not read (``are_read`` false)."""
    copies = scan(head)
    embeddings, lm_head = target_tables(scan(target))
    warn_if_other(copies.get("embed_tokens.weight"), embeddings, is_read=are_read)
    if not are_read:
        warn_if_other(copies.get(LM_HEAD), lm_head, is_read=False)
