"""MiniMax M3 in engines: pages of odd sizes and of 8 bits, bfloat16 in deterministic mode, and MTP
layers on devices that share the model. test_families_under_load.py has the other cases."""

import functools
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.mtp import AFTER_BEFORE
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.quantized.kv_cache import with_float8_cache
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

FAMILY = "minimax_m3"


@functools.cache
def target() -> Decoder:
    return random_alias(FAMILY)


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
def test_pages_of_8_bits_have_one_text():
    """Their keys and values are rounded, so it is another one; index keys are not."""
    model = with_float8_cache(target(), None)
    expected = texts(model)
    assert texts(model, TREE, page_size=7) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "count"), [("tp2", 1), ("tp2x2", 2)])
def test_mtp_layers_draft_on_a_mesh(mesh: str, count: int, tmp_path: Path):
    model, raw = target(), raw_config(FAMILY)
    raw["text_config"]["num_mtp_modules"] = count
    save_tree(tmp_path / "model", model, model.mapped(splitting()), raw)
    stored = load_file(tmp_path / "model/model.safetensors")
    for index in range(count):
        head = mtp_head(model, layout="minimax_m3", states=AFTER_BEFORE, index=index)
        layer = f"model.mtp.layers.{index}.transformer_layer"
        save_tree(tmp_path / f"{index}", head, head.mapped(layer, splitting()), raw)
        stored |= load_file(tmp_path / f"{index}/model.safetensors")
    whole = save_tensors(tmp_path / "whole", stored, raw)
    how: Any = {"speculation": TREE, "mesh": make_mesh(**on_meshes.MESHES[mesh])}
    assert on_meshes.run(load(whole, "mtp", **how)) == on_meshes.plain(FAMILY)
