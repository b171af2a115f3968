"""Draft heads whose copies of the target's tables are another model's are reported."""

import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import SpeculationConfig
from jaxspec.checkpoints.load import resolve_dtype
from jaxspec.checkpoints.load_drafter import DraftedModel, load_drafter
from jaxspec.models.from_config.model import load_model_config
from tests.helpers.block_checkpoints import published_head
from tests.helpers.checkpoints import changed_copy, tiny_eagle1_head, tiny_eagle3_head, tiny_llama
from tests.helpers.eagle31_checkpoint import tiny_eagle31_head

EMBEDDINGS, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
HEADS = {"eagle1": tiny_eagle1_head, "eagle3": tiny_eagle3_head}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each kind that may have copies, with none or with the target's."""
    made = {kind: make(tmp_path_factory.mktemp(kind), target) for kind, make in HEADS.items()}
    made["dspark"] = published_head(tmp_path_factory.mktemp("dspark"), target, "dspark")
    return made


def tables(target: Path) -> dict[str, np.ndarray]:
    stored = load_file(target / "model.safetensors")
    return {EMBEDDINGS: stored["model.embed_tokens.weight"], LM_HEAD: stored["lm_head.weight"]}


def warnings_of(head: Path, target: Path, out: Path, new: dict[str, Any]) -> str:
    """What loading the head says, with other tensors."""
    directory = changed_copy(head, out, **new)
    chain = SpeculationConfig.chain(2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, dtype = load_model_config(target), resolve_dtype("float32")
        load_drafter(str(directory), DraftedModel(target, model, chain, dtype, None, False))
    return "\n".join(str(one.message) for one in said)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "dspark"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_targets_table_is_fine_in_any_dtype(
    kind: str, dtype: Any, heads: dict[str, Path], target: Path, tmp_path: Path
):
    own = tables(target)[EMBEDDINGS].astype(dtype)
    assert not warnings_of(heads[kind], target, tmp_path, {EMBEDDINGS: own})


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "dspark"])
@pytest.mark.parametrize("change", ["random", "fine-tuned", "shuffled"])
def test_other_embeddings_are_reported(
    kind: str, change: str, heads: dict[str, Path], target: Path, tmp_path: Path
):
    own, rng = tables(target)[EMBEDDINGS], np.random.default_rng(0)
    changed = {
        "random": 0.02 * rng.standard_normal(own.shape),
        "fine-tuned": own * (1 + 0.05 * rng.standard_normal(own.shape)),
        "shuffled": rng.permutation(own),
    }[change]
    said = warnings_of(heads[kind], target, tmp_path, {EMBEDDINGS: changed.astype(np.float32)})
    assert f"{tmp_path}: {EMBEDDINGS} differs from model.{EMBEDDINGS} of {target}" in said
    assert ("which is read in its place" in said) == (kind == "dspark")


def test_an_lm_head_that_is_trained_is_fine_and_a_copy_is_compared(
    heads: dict[str, Path], target: Path, tmp_path: Path
):
    other = {LM_HEAD: tables(target)[LM_HEAD] + 1}
    said = warnings_of(heads["dspark"], target, tmp_path, other)
    assert f"{LM_HEAD} differs from {LM_HEAD} of {target}, which is read in its place" in said
    assert not warnings_of(heads["eagle3"], target, tmp_path, {})


def test_embeddings_of_another_width_are_the_heads_own(target: Path, tmp_path: Path):
    sizes = {"hidden_size": 96, "head_dim": 16, "capture": (2, 3)}
    head = tiny_eagle31_head(tmp_path / "head", target, has_embeddings=True, **sizes)
    assert not warnings_of(head, target, tmp_path / "out", {})
