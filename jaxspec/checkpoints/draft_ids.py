"""Tables of a reduced draft vocabulary: which ids of the target a head drafts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoints.safetensors_io import load_tree, placements
from jaxspec.models.tensors import CheckpointTensor
from jaxspec.parallel.memory_format import put_weight

ID_TABLES = ("d2t", "t2d")
MARK_DTYPES = ("BOOL", "U8", "I8", "I32", "I64")  # accepted for t2d


def ids_are_equal(stored: Mapping[str, CheckpointTensor]) -> bool:
    """Whether a head's tensors say nothing else than that draft ids are the target's."""
    return "d2t" not in stored or not stored["d2t"].read().any()


def read_token_ids(
    directory: Path, stored: Mapping[str, CheckpointTensor], draft_vocab: int, target_vocab: int
) -> np.ndarray:
    """Target ids of the draft ids, int32 [W], from d2t; t2d must agree with it if present."""
    table, marks = stored.get("d2t"), stored.get("t2d")
    if table is None or table.shape != (draft_vocab,) or table.dtype not in ("I32", "I64"):
        raise ValueError(
            f"{directory} needs a tensor d2t of [{draft_vocab}] integers, draft-to-target ids"
        )
    offsets = table.read().astype(np.int64)
    ids = np.arange(draft_vocab) + offsets
    if ids.min() < 0 or ids.max() >= target_vocab or np.unique(ids).size != draft_vocab:
        raise ValueError(f"{directory}: d2t does not map to distinct target ids < {target_vocab}")
    used = None if marks is None or marks.dtype not in MARK_DTYPES else marks.read()
    agrees = used is not None and np.array_equal(np.flatnonzero(used), np.sort(ids))
    if not offsets.any() and not agrees:
        raise ValueError(
            f"{directory}: d2t is all zeros, as in a table that was never filled in. If the head "
            f"drafts the first {draft_vocab} target ids, store a t2d that marks them"
        )
    if marks is not None and (marks.shape != (target_vocab,) or not agrees):
        raise ValueError(f"{directory}: t2d does not mark the {draft_vocab} target ids of d2t")
    return ids.astype(np.int32)


def load_head(
    directory: Path,
    stored: Mapping[str, CheckpointTensor],
    shapes: Any,
    splits: Any,
    mesh: Mesh | None,
    target_vocab: int,
    harmless: set[str],
) -> Any:
    """A head that is read into ``shapes``, with ``token_ids`` [W] from d2t if it has some.

    See safetensors_io.load_tree. Raises ValueError for tables of ids that contradict each other, or
    a head that drafts all ids.
    """
    shardings, like = placements(shapes, mesh), shapes.token_ids
    arrays = shapes.replace(token_ids=None), splits, shardings.replace(token_ids=None)
    head = load_tree(stored, *arrays, harmless)
    if like is None:
        _check_all_marked(directory, stored.get("t2d"))
        return head
    token_ids = read_token_ids(directory, stored, like.shape[0], target_vocab)
    return head.replace(token_ids=put_weight(token_ids, shardings.token_ids))


def _check_all_marked(directory: Path, marks: CheckpointTensor | None) -> None:
    """Raise ValueError for a t2d that marks only some ids, though draft ids are the target's ids.
    A table of zeros was never filled in."""
    used = np.zeros(0) if marks is None else marks.read()
    if used.any() and not used.all():
        raise ValueError(
            f"{directory}: t2d marks {np.count_nonzero(used)} of {used.size} target ids, but the "
            "head drafts all of them: it has no d2t that says otherwise"
        )


def id_tables(token_ids: np.ndarray, target_vocab: int) -> dict[str, np.ndarray]:
    """The tensors that say which target ids the draft ids [W] are."""
    return {
        "d2t": token_ids.astype(np.int64) - np.arange(token_ids.size),
        "t2d": np.isin(np.arange(target_vocab), token_ids),
    }
