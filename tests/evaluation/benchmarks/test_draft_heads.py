"""Draft heads of random weights in benchmarks: sizes, modes and the bytes of a round."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.decoding.drafters import BlockDrafter, ParallelEagleDrafter
from jaxspec.evaluation.benchmarks.ahead_of_time import Job, decode_program
from jaxspec.evaluation.benchmarks.draft_heads import (
    TRAINED_MTP,
    BlockKind,
    HeadKind,
    block_head_config,
    head_config,
    head_shapes_for,
    mtp_config,
    p_eagle_config,
    windowed_eagle3_config,
)
from jaxspec.evaluation.benchmarks.floors import floor_bytes
from jaxspec.evaluation.benchmarks.modes import make_params, parse_mode
from jaxspec.evaluation.benchmarks.random_params import random_decoder, random_head
from jaxspec.evaluation.benchmarks.rounds import Workload
from jaxspec.evaluation.benchmarks.shapes import SHAPES
from jaxspec.models.decoder import decoder_shapes
from jaxspec.models.from_config.block_head import block_config
from jaxspec.models.from_config.eagle_head import eagle_head_config
from jaxspec.models.from_config.model import parse_model_config, with_mtp_layer
from jaxspec.models.heads import BlockHead
from jaxspec.models.json.values import read_json
from jaxspec.models.quantized.grouped import GroupedLinear
from jaxspec.parallel.bytes import local_bytes
from pallas_kernels.selection import NO_KERNELS

PUBLISHED = Path(__file__).parents[2] / "models/published"
TINY, FLOAT32 = SHAPES["tiny"], jnp.dtype("float32")
SIZES = {"num_hidden_layers": 2, "num_experts": 8, "hidden_size": 64, "vocab_size": 100}


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("dflash", "specforge/qwen3-8b-dflash"),
        ("dspark", "specforge/qwen3-8b-dspark"),
        ("domino", "specforge/qwen3-8b-domino"),
        ("xpress", "quoted/UIUC-SSAIL--Qwen3-8B-XPress-b16"),
    ],
)
def test_block_heads_have_published_sizes(kind: BlockKind, file: str):
    target = SHAPES["qwen3-8b"]
    published = block_config(read_json(PUBLISHED / f"{file}.json"), target)
    ours = block_head_config(target, kind)
    assert ours.model.layers == published.model.layers
    kept: Any = {name: getattr(published, name) for name in ("model", "mask_token", "confidence")}
    assert dataclasses.replace(ours, **kept) == published


def test_a_larger_models_heads_have_the_same_corrections():
    """DFlash 2 and DFlash with windows are published for models of which no shape is here."""
    target = dataclasses.replace(SHAPES["qwen3-8b"], vocab_size=248_320, hidden_size=5120)
    target = dataclasses.replace(target, layers=2 * target.layers[:32])
    of_2 = block_config(read_json(PUBLISHED / "quoted/z-lab--Qwen3.8-27B-DFlash2.json"), target)
    windowed = block_config(read_json(PUBLISHED / "specforge/qwen3.6-27b-dflash.json"), target)
    both = block_head_config(target, "dflash2"), block_head_config(target, "dflash-windowed")
    for ours, published in zip(both, (of_2, windowed), strict=True):
        assert ours.causal == published.causal and ours.predicts_next == published.predicts_next
        windows = [layer.attention.window for layer in published.model.layers]
        assert [layer.attention.window for layer in ours.model.layers] == windows
    assert (both[0].correction, both[0].convolution) == (of_2.correction, of_2.convolution)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_block_head_is_read_once_a_round(kind: BlockKind):
    target = random_decoder(TINY, FLOAT32, None, 0)
    head = random_head(TINY, FLOAT32, None, seed=1, kind=kind)
    assert isinstance(head, BlockHead) and target.lm_head is not None
    params = make_params(parse_mode("chain:5@3"), target, head, None, NO_KERNELS)
    assert isinstance(params.drafter, BlockDrafter)
    expected = local_bytes((head, target.lm_head))
    if head.markov is not None:  # one table at each of five levels; of the other few rows
        expected += 4 * local_bytes(head.markov.after) - local_bytes(head.markov.before)
    context, heads, head_dim = 100, 4, 16
    found = floor_bytes(params, batch=2, context=context)
    assert found.draft_weights == expected
    assert found.draft_kv == 2 * context * 5 * 2 * heads * head_dim * 4


def test_a_tree_deeper_than_a_block_is_refused():
    target = random_decoder(TINY, FLOAT32, None, 0)
    head = random_head(TINY, FLOAT32, None, seed=1, kind="dspark")
    with pytest.raises(ValueError, match="choose one of at most 7"):
        make_params(parse_mode("chain:8@3"), target, head, None, NO_KERNELS)


def test_an_mtp_layer_for_any_shape_is_the_one_that_is_trained():
    """A copy of the last layer, so with experts; a shape's own MTP layer stays."""
    target = SHAPES["qwen3-30b-a3b"]
    assert target.mtp is None
    head = mtp_config(target)
    assert head.model.layers == target.layers[-1:]
    trained = parse_model_config(with_mtp_layer({"model_type": "qwen3_moe", **SIZES})).mtp
    assert trained == TRAINED_MTP
    hybrid = SHAPES["qwen3.5-9b"]
    assert mtp_config(hybrid) == head_config(hybrid)
    assert head_config(target).method == "eagle3", "auto stays"


def test_a_head_that_drafts_in_one_pass_has_the_published_sizes():
    target = SHAPES["qwen3-8b"]
    published = eagle_head_config(read_json(PUBLISHED / "specforge/qwen3-8b-peagle.json"), target)
    ours = p_eagle_config(target)
    assert ours.model.layers == published.model.layers
    assert ours.draft_vocab_size == published.draft_vocab_size == 32_000
    shapes = head_shapes_for(target, FLOAT32, None, kind="p-eagle")
    whole = decoder_shapes(target, FLOAT32)
    params = make_params(parse_mode("chain:15@5"), whole, shapes, None, NO_KERNELS)
    assert isinstance(params.drafter, ParallelEagleDrafter)


def test_corrections_are_not_rounded():
    """As loaders leave them; 5 inputs of LiLiCorr's are no group of 128."""
    how: Any = {"target": SHAPES["tiny-wide"], "dtype": FLOAT32, "mesh": None, "kind": "lilicorr"}
    plain, rounded = (head_shapes_for(**how, quantization=scheme) for scheme in (None, "w4a16"))
    assert isinstance(plain, BlockHead) and isinstance(rounded, BlockHead)
    assert isinstance(rounded.fc, GroupedLinear)
    assert jax.tree.structure(rounded.correction) == jax.tree.structure(plain.correction)


def test_a_windowed_head_is_that_of_a_published_file_for_longer_texts():
    raw = read_json(PUBLISHED / "specforge/llama3-8B-eagle3.json")
    target = SHAPES["llama-3.1-8b"]
    [said] = eagle_head_config(raw, target).model.layers
    [layer] = windowed_eagle3_config(target).model.layers
    assert layer.attention.window == said.attention.window == 2048


@pytest.mark.parametrize("kind", ["auto", "mtp", "dflash", "dspark", "dflash2"])
def test_what_is_compiled_ahead_has_the_shapes_of_what_is_timed(kind: HeadKind):
    """A rounded copy of the target's LM head included, for heads that read the target's."""
    how = (SHAPES["tiny-wide"], FLOAT32, None)
    shapes = head_shapes_for(*how, kind=kind, quantization="w8a16")
    head = random_head(*how, seed=1, kind=kind, quantization="w8a16")
    assert jax.tree.structure(head) == jax.tree.structure(shapes)
    made, compiled = jax.tree.leaves(head), jax.tree.leaves(shapes)
    assert [(x.shape, x.dtype) for x in made] == [(x.shape, x.dtype) for x in compiled]
    assert (shapes.lm_head_copy is None) == (kind == "auto"), "EAGLE-3 heads have their own"


def test_what_is_compiled_ahead_has_the_quantized_head():
    workload = Workload(batch=1, context=16, rounds=2, page_size=16, repeats=1)
    shape, mode = SHAPES["tiny-wide"], parse_mode("chain:3")
    job = Job(shape, mode, workload, drafter_quantization="w8a16", head="dflash")
    weights = decode_program(job, jax.devices()).arguments[0]
    bfloat16 = jnp.dtype("bfloat16")
    head = head_shapes_for(shape, bfloat16, None, kind="dflash", quantization="w8a16")
    assert jax.tree.structure(weights.drafter.head) == jax.tree.structure(head)
