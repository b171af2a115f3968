"""Draft heads of random weights in benchmarks: sizes, modes and the bytes of a round."""

import jax
import jax.numpy as jnp
import pytest

from jaxspec.decoding.drafters import BlockDrafter
from jaxspec.evaluation.benchmarks.ahead_of_time import Job, decode_program
from jaxspec.evaluation.benchmarks.draft_heads import (
    TRAINED_MTP,
    BlockKind,
    HeadKind,
    block_head_config,
    head_config,
    head_shapes_for,
    mtp_config,
)
from jaxspec.evaluation.benchmarks.floors import floor_bytes
from jaxspec.evaluation.benchmarks.modes import make_params, parse_mode
from jaxspec.evaluation.benchmarks.random_params import random_decoder, random_head
from jaxspec.evaluation.benchmarks.rounds import Workload
from jaxspec.evaluation.benchmarks.shapes import SHAPES
from jaxspec.models.from_config.model import parse_model_config, with_mtp_layer
from jaxspec.models.heads import BlockHead, MarkovConfig
from jaxspec.parallel.bytes import local_bytes
from pallas_kernels.selection import NO_KERNELS

TINY, FLOAT32 = SHAPES["tiny"], jnp.dtype("float32")
SIZES = {"num_hidden_layers": 2, "num_experts": 8, "hidden_size": 64, "vocab_size": 100}


def test_block_heads_have_published_sizes():
    """config/dflash and config/dspark of deepseek-ai/DeepSpec: target_layer_ids [1, 9, 17, 25, 33],
    of which each is the output of a layer counted from 0."""
    target = SHAPES["qwen3-8b"]
    dflash, dspark = (block_head_config(target, kind) for kind in ("dflash", "dspark"))
    assert dflash.capture == dspark.capture == (2, 10, 18, 26, 34)
    assert dflash.model.num_layers == 5 and dflash.model.layers[0].attention.qk_norm
    assert (dspark.block_size, dspark.predicts_next) == (7, True)
    assert dspark.correction == MarkovConfig(256) and dflash.correction is None


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


@pytest.mark.parametrize("kind", ["auto", "mtp", "dflash", "dspark"])
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
