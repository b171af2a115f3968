"""Draft heads that read a copy of the target's LM head in fewer bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import load
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.evaluation.benchmarks.draft_heads import BlockKind
from jaxspec.evaluation.benchmarks.floors import floor_bytes
from jaxspec.evaluation.benchmarks.modes import make_params as bench_params
from jaxspec.evaluation.benchmarks.modes import parse_mode
from jaxspec.evaluation.benchmarks.random_params import random_decoder, random_head
from jaxspec.evaluation.benchmarks.shapes import SHAPES
from jaxspec.functional import EngineParams
from jaxspec.models import decoder
from jaxspec.models.heads.lm_head import target_logits
from jaxspec.models.linear import Linear
from jaxspec.models.quantized.float8 import Float8Linear
from jaxspec.models.quantized.grouped import GroupedLinear
from jaxspec.models.quantized.lm_head_copy import with_lm_head_copy
from jaxspec.models.quantized.scaled import ScaledLinear, in_eight_bits
from jaxspec.models.quantized.schemes import to_four_bits
from jaxspec.parallel import make_mesh
from jaxspec.parallel.bytes import local_bytes
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.block_checkpoints import published_head
from tests.helpers.checkpoints import tiny_llama
from tests.helpers.engines import CHAIN, sampled_texts
from tests.helpers.layouts import on_mesh
from tests.helpers.random_models import make_params

# In one program each, instead of one for each operation.
ROUNDINGS = {bits: jax.jit(function) for bits, function in ((4, to_four_bits), (8, in_eight_bits))}


def with_copy(bits: int, params: EngineParams) -> EngineParams:
    """Only the LM head in fewer bits."""
    drafter = with_lm_head_copy(params.drafter, params.target, ROUNDINGS[bits], params.mesh)
    return params.replace(drafter=drafter)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_rounded_lm_head(bits: int, tied: bool):
    params = make_params("dflash", CHAIN)
    target = params.target.replace(lm_head=None) if tied else params.target
    copied: Any = with_copy(bits, params.replace(target=target))
    copy = copied.drafter.head.lm_head_copy
    assert isinstance(copy.linear, GroupedLinear if bits == 4 else ScaledLinear)
    assert getattr(copy.linear, "loaded", None) is None or not tied  # no transposed table
    normed = jax.random.normal(jax.random.key(0), (3, target.config.hidden_size))
    weight = copy.linear.dense(jnp.dtype("float32")).T
    dense = target.replace(lm_head=Linear(weight=weight, axes=copy.linear.axes))
    found = target_logits(target, copy, normed, NO_KERNELS)
    np.testing.assert_allclose(found, decoder.logits(dense, normed), rtol=1e-4, atol=1e-4)
    exact = decoder.logits(target, normed)
    assert 0 < np.abs(found - exact).max() < (0.05 if bits == 8 else 1.0) * np.abs(exact).max()


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("drafter", ["dflash", "dspark", "mtp"])
def test_it_changes_no_text(drafter: str, bits: int):
    params = make_params(drafter, CHAIN)
    assert sampled_texts(with_copy(bits, params)) == sampled_texts(params)


@pytest.mark.slow
@pytest.mark.parametrize("shard_drafter", [True, False])
def test_over_a_mesh_it_is_split_as_the_target(shard_drafter: bool):
    params = make_params("dflash", CHAIN)
    split = with_copy(4, on_mesh(params, make_mesh(2, 1), shard_drafter=shard_drafter))
    drafter: Any = split.drafter
    lm_head: Any = split.target.lm_head
    values, weight = drafter.head.lm_head_copy.linear.values, lm_head.weight
    assert values.sharding.shard_shape(values.shape)[0] * 2 == weight.shape[1]
    assert sampled_texts(split) == sampled_texts(params)


def test_a_head_with_its_own_lm_head_and_a_quantized_target_have_no_copy():
    eagle = make_params("eagle3", CHAIN)
    assert with_copy(4, eagle).drafter is eagle.drafter
    block = make_params("dflash", CHAIN)
    lm_head: Any = block.target.lm_head
    quantized = block.replace(target=block.target.replace(lm_head=ROUNDINGS[4](lm_head)))
    assert with_copy(4, quantized).drafter is block.drafter


def test_load_makes_it(tmp_path):
    target = tiny_llama(tmp_path / "target")
    head = published_head(tmp_path / "head", target, "dflash")
    speculation = SpeculationConfig.parse("chain:3")
    whole: Any = load(target, head, speculation=speculation)
    small: Any = load(target, head, speculation=speculation, drafter_bits=4)
    assert whole.drafter.head.lm_head_copy is None
    assert isinstance(small.drafter.head.lm_head_copy.linear, GroupedLinear)
    assert isinstance(small.target.lm_head, Linear)  # the target reads its own


def test_floors_count_it_in_place_of_the_targets():
    target = random_decoder(SHAPES["tiny"], jnp.dtype("float32"), None, 0)
    head = random_head(SHAPES["tiny"], jnp.dtype("float32"), None, seed=1, kind="dflash")
    params = bench_params(parse_mode("chain:5@3"), target, head, None, NO_KERNELS)
    copied: Any = with_copy(4, params)
    before, after = (floor_bytes(one, 1, 10).draft_weights for one in (params, copied))
    saved = local_bytes(target.lm_head) - local_bytes(copied.drafter.head.lm_head_copy)
    assert before - after == saved > 0


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_random_heads_of_a_scheme_have_one(kind: BlockKind):
    head: Any = random_head(
        SHAPES["tiny"], jnp.dtype("bfloat16"), None, 1, kind=kind, quantization="fp8"
    )
    copy = head.lm_head_copy.linear
    assert isinstance(copy, Float8Linear) and copy.out_shape == (SHAPES["tiny"].vocab_size,)
