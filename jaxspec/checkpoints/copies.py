"""Copies of a target's tables in the checkpoints of draft heads, compared with the target's."""

import warnings
from collections.abc import Mapping

from jaxspec.checkpoints.tied_head import EMBEDDINGS, HEAD, QUANTIZED_HEAD, same_values
from jaxspec.models.tensors import CheckpointTensor

COMPARED_DTYPES = {"F32", "F16", "BF16"}


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
        is_tied = name == HEAD and HEAD not in stored and QUANTIZED_HEAD not in stored
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
