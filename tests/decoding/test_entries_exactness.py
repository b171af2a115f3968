"""DeepSeek-V4 in engines: pages of odd sizes, bfloat16 in deterministic mode, and its MTP layer on
devices that share the model. test_families_under_load.py has the other cases."""

import functools
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.mtp import BEFORE
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.tensors import splitting
from jaxspec.parallel import make_mesh
from tests.decoding import test_family_exactness as on_meshes
from tests.decoding.test_indexed_exactness import (
    CHAIN,
    TREE,
    assert_deterministic_in_bfloat16,
    texts,
)
from tests.helpers.alias_checkpoints import random_alias, raw_config
from tests.helpers.checkpoints import save_tensors
from tests.helpers.random_models import mtp_head


@functools.cache
def target() -> Decoder:
    return random_alias("deepseek_v4")


@functools.cache
def plain() -> list[list[int]]:
    return texts(target())


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "speculation"), [(1, TREE), (7, CHAIN), (13, TREE)])
def test_pages_of_odd_sizes_change_no_text(page_size: int, speculation: SpeculationConfig):
    assert texts(target(), speculation, page_size=page_size, prefill_budget=8) == plain()


@pytest.mark.slow
def test_texts_are_deterministic_in_bfloat16():
    assert_deterministic_in_bfloat16(target())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp2", "tp2x2"])
def test_an_mtp_layer_drafts_on_a_mesh(mesh: str, tmp_path: Path):
    family = "deepseek_v4-yarn"
    model, raw = random_alias(family), raw_config(family)
    head = mtp_head(model, layout="deepseek_v4", states=BEFORE)
    save_tree(tmp_path / "model", model, model.mapped(splitting()), raw)
    save_tree(tmp_path / "head", head, head.mapped("mtp.0", splitting()), raw)
    stored = [load_file(tmp_path / part / "model.safetensors") for part in ("model", "head")]
    whole = save_tensors(tmp_path / "whole", stored[0] | stored[1], raw)
    how: Any = {"speculation": TREE, "mesh": make_mesh(**on_meshes.MESHES[mesh])}
    assert on_meshes.run(load(whole, "mtp", **how)) == on_meshes.plain(family)
