"""Sequences spread over devices: the engine computes what it computes on one, and sends little."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxspec import functional
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.evaluation.benchmarks.collective_volume import parse_collectives, totals
from jaxspec.parallel import MODEL_AXIS, SEQUENCE_AXIS, Layout, make_mesh, mesh_layout
from jaxspec.parallel.collectives import shard_offset
from pallas_kernels.paged_attention.cases import (
    TEST_CASES,
    Case,
    make_arguments,
    parts_of,
    poisoned,
)
from pallas_kernels.paged_attention.partial import partial_attention
from pallas_kernels.paged_attention.parts import (
    PartialAttention,
    merge_partials,
    partial_attention_reference,
)
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.pages import LayerPages, QueryContext
from pallas_kernels.selection import Kernels
from tests.helpers.kernels import run_reference
from tests.helpers.layouts import on_mesh
from tests.helpers.marks import first_is_fast, slow, slow_by_name
from tests.helpers.programs import FAST_COMPILE, decode_hlo, new_jit, prefill_hlo
from tests.helpers.random_models import make_params, random_target, tiny_config
from tests.helpers.sampling_reference import reference_texts
from tests.parallel.test_tensor_parallel import (
    BATCH,
    TARGET,
    check_changes_nothing,
    empty_state,
    one_device,
)

TREE = SpeculationConfig(num_nodes=6, max_depth=2, top_k=3)
SPLIT_CASES = [case for case in TEST_CASES if case.page_size % 2 == 0]


@pytest.mark.parametrize("block", [8, slow(None)])
@first_is_fast(SPLIT_CASES, 2)
def test_merged_parts_are_the_whole_softmax(case: Case, block: int | None):
    """The two halves of every page, read in blocks."""
    arguments = make_arguments(case)
    expected = run_reference(*arguments, options=case.options)
    options = {"options": case.options, "page_size": case.page_size, "block": block}

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def merged(parts: Any) -> Any:
        found = [partial_attention_reference(*part, **options) for part in parts]
        return merge_partials(PartialAttention(*map(jnp.stack, zip(*found, strict=True))))

    found = merged(list(parts_of(poisoned(case, arguments, np.nan), 2)))
    np.testing.assert_allclose(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "implementation",
    [
        "reference",
        pytest.param("mosaic_gpu", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("tree", [slow(False), True], ids=["causal", "tree"])
def test_devices_merge_their_parts(tree: bool, implementation: Any):
    if len(jax.devices()) < 2:
        pytest.skip("one device")
    case = Case("", (70, 3), 40, 4, 1, 64, 32, tree=tree)
    mesh = make_mesh(sequence_parallel=2)

    def attend(q: jax.Array, pages: LayerPages, context: QueryContext) -> jax.Array:
        offset = shard_offset(case.page_size // 2, (SEQUENCE_AXIS,))
        options: Any = {"page_size": case.page_size, "implementation": implementation}
        part = partial_attention(q, pages, context, offset, **options)
        parts = [jax.lax.all_gather(x, SEQUENCE_AXIS) for x in part]
        return merge_partials(PartialAttention(*parts))

    pages = PartitionSpec(None, None, SEQUENCE_AXIS)
    specs = (PartitionSpec(), pages, PartitionSpec())
    spread = jax.shard_map(
        attend, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
    )
    arguments = make_arguments(case, jnp.bfloat16)
    found = np.asarray(jax.jit(spread)(*arguments))
    whole = paged_attention_reference(*arguments, options=case.options, order_invariant=False)
    expected = np.asarray(whole).astype(np.float32)
    assert np.linalg.norm(found - expected) < 8e-3 * np.linalg.norm(expected)


# Prompts of 9 tokens are padded for 2 and 4 devices. Pages of 2 and 4 slots are one slot a device.
@pytest.mark.parametrize(
    ("name", "sequence", "model", "data", "shard_drafter", "page_size"),
    slow_by_name(
        {
            "eagle3 tree": [
                (2, 1, 1, False, 16),
                (2, 1, 1, False, 2),
                (4, 1, 1, False, 4),
                (4, 1, 1, False, 64),
                (8, 1, 1, False, 16),
                (2, 2, 1, True, 16),
                (2, 2, 2, False, 4),
                (2, 1, 2, False, 16),
                (2, (2, 2), 1, True, 16),
            ],
            "none": [(2, 1, 1, False, 2), (4, 1, 1, False, 64)],
            "ngram": [(2, 1, 1, False, 16), (4, 1, 1, False, 4)],
            "eagle3": [(2, 1, 1, False, 64), (4, 1, 1, False, 16), (2, 2, 1, False, 16)],
            "eagle3 rejection": [(2, 1, 1, False, 16)],
            "eagle1": [(2, 1, 1, False, 16), (4, 1, 1, False, 4), (2, 4, 1, True, 16)],
            "draft_model": [
                (2, 1, 1, False, 2),
                (4, 1, 1, False, 16),
                (2, 2, 1, True, 16),
                (4, 2, 1, False, 4),
            ],
            "draft_model rejection": [(2, 1, 1, False, 64)],
            "mixed": [(2, 1, 1, False, 16), (4, 1, 1, False, 4)],
            "mixed rejection": [(2, 2, 1, True, 16)],
            "dflash tree": [(2, 1, 1, False, 4)],
            "dflash": [(4, 1, 1, False, 16)],
            "dspark tree": [(2, 2, 1, True, 4)],
            "dspark rejection": [(2, 1, 1, False, 2)],
        }
    ),
)
def test_spreading_sequences_changes_nothing(
    name: str, sequence: int, model: Any, data: int, shard_drafter: bool, page_size: int
):
    check_changes_nothing(name, model, data, shard_drafter, page_size, sequence)


LONG, CHUNK = 700, 128


def read_long_prompts(params: Any, state: Any, prompts: Any) -> Any:
    lengths = np.array([LONG, 333], np.int32)
    state = functional.admit(params, state, np.arange(2), prompts, lengths)
    for _ in range(0, LONG, CHUNK):
        state, _ = functional.prefill(params, state, width=CHUNK)
    return functional.decode(params, state, 20)[0]


@functools.cache
def tokens_after_long_prompts(sequence: int, model: Any) -> Any:
    params = one_device("eagle3")
    if (sequence, model) != (1, 1):
        mesh = make_mesh(model, sequence_parallel=sequence)
        params = on_mesh(params, mesh, shard_drafter=False)
    prompts = np.random.default_rng(0).integers(98, size=(2, LONG), dtype=np.int32)
    state = functional.init_state(params, 2, LONG + 20, page_size=16)
    return jax.device_get(new_jit(read_long_prompts)(params, state, prompts).rows.tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("sequence", "model"), [(8, 1), (4, 2), (2, 4), (2, (2, 2))])
def test_long_prompts_are_read_in_parts_by_eight_devices(sequence: int, model: Any):
    found = tokens_after_long_prompts(sequence, model)
    np.testing.assert_array_equal(found, tokens_after_long_prompts(1, 1))


def read_and_decode(params: Any, state: Any, prompts: Any) -> Any:
    lengths = np.array([9, 4], np.int32)
    state = functional.admit(params, state, np.arange(2), prompts, lengths)
    state, _ = functional.prefill(params, state, width=9, greedy=True)
    return functional.decode(params, state, 30, greedy=True)[0]


def test_trees_on_two_devices_give_the_tokens_of_plain_decoding_on_one():
    target = random_target(tiny_config(num_layers=1))
    prompts = np.random.default_rng(0).integers(96, size=(2, 9), dtype=np.int32)
    params = make_params("eagle1", TREE, target)
    params = on_mesh(params, make_mesh(sequence_parallel=2), shard_drafter=False)
    state = functional.init_state(params, 2, 24, page_size=4)
    rows = new_jit(read_and_decode)(params, state, prompts).rows
    assert rows.stats.accepted[:, 1].sum() > 0
    found, greedy = np.asarray(rows.tokens).tolist(), [SamplingParams(max_tokens=24)] * 2
    read = [prompts[0], prompts[1, :4]]
    assert found == reference_texts(target, read, greedy, 24, found)


FLOAT32 = 4
LAYERS, HIDDEN = TARGET.num_layers, TARGET.hidden_size
MIXER = TARGET.layers[0].attention
HEADS, KV_HEADS, HEAD_DIM = MIXER.num_heads, MIXER.num_kv_heads, MIXER.head_dim


@functools.cache
def spread(name: str, model: int = 1) -> functional.EngineParams:
    mesh = make_mesh(model, sequence_parallel=2)
    return on_mesh(one_device(name), mesh, shard_drafter=False)


def test_the_collectives_of_a_round():
    params = spread("none")
    found = totals(parse_collectives(decode_hlo(params, empty_state(params), greedy=True)))
    # Each layer gathers the weighted values and two sums of each head.
    sums = BATCH * HEADS * (HEAD_DIM + 2) * FLOAT32
    assert found == {"all-gather": (LAYERS, LAYERS * sums)}


@pytest.mark.parametrize("model", [1, slow(2)])
def test_the_collectives_of_reading_a_prompt(model: int):
    params, width = spread("none", model), 16
    state = empty_state(params)
    found = totals(parse_collectives(prefill_hlo(params, state, width=width, greedy=True)))
    tokens = BATCH * width * FLOAT32
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM / model
    parts = HEADS * (HEAD_DIM + 2) / model
    hidden = HIDDEN * (1 - 1 / (2 * model))  # gathered at the end from all devices
    assert found["all-to-all"] == (LAYERS, tokens * LAYERS * parts / 2)
    if model == 1:
        assert set(found) == {"all-to-all", "all-gather"}
        assert found["all-gather"] == (LAYERS + 1, tokens * (LAYERS * qkv / 2 + hidden))
        return
    # Tensor parallelism gathers before qkv and gate_up, and scatters sums after o and down.
    assert found["reduce-scatter"] == (2 * LAYERS + 1, tokens / 2 * (2 * LAYERS + 1) * HIDDEN / 2)
    assert found["all-gather"] == (
        3 * LAYERS + 1,
        tokens * (LAYERS * qkv / 2 + 2 * LAYERS * HIDDEN / 2 / 2 + hidden),
    )
    count, sent = found["all-reduce"]  # of the choice of the next token only
    assert count <= 3 and sent <= 8 * BATCH * FLOAT32


@pytest.mark.slow
def test_accepted_nodes_move_between_devices_in_one_collective_of_all_layers():
    params = spread("eagle3 tree")
    found = totals(parse_collectives(decode_hlo(params, empty_state(params), greedy=True)))
    depth = params.speculation.max_depth + 1
    rows = BATCH * depth * LAYERS * 2 * KV_HEADS * HEAD_DIM * FLOAT32
    assert found["all-reduce"] == (1, rows)


def test_pages_are_split_by_slots_and_rows_are_not():
    params = spread("eagle3 tree")
    state = empty_state(params, 16)
    for model in (state.pool.target, state.pool.draft):
        for layer in model.layers:
            whole = layer.k.shape
            assert whole[2] == 16
            assert layer.k.sharding.shard_shape(whole) == (*whole[:2], 8, whole[3])
    assert state.rows.page_table.sharding.is_fully_replicated
    for leaf in jax.tree.leaves(params):
        assert leaf.sharding.is_fully_replicated


@pytest.mark.parametrize("drafter", ["none", slow("eagle1")])
def test_on_gpus_attention_to_parts_of_pages_is_a_kernel(drafter: str):
    target = random_target(tiny_config(hidden_size=64, head_dim=64, num_layers=1))
    params = make_params(
        drafter, TREE if drafter == "eagle1" else SpeculationConfig.chain(1), target
    )
    params = on_mesh(params, make_mesh(sequence_parallel=2), shard_drafter=False)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    params = params.replace(kernels=Kernels(frozenset({"partial_attention"})))
    state = functional.init_state(params, 2, 24, page_size=16)

    def generate(params: Any, state: Any) -> Any:
        state, _ = functional.prefill(params, state, width=4)
        return functional.decode(params, state, 2)

    lowered = jax.jit(generate).trace(params, state).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "call @partial_attention_mosaic" in text
    assert "partial_attention_reference" not in text


def test_what_cannot_be_spread():
    params = spread("none")
    with pytest.raises(ValueError, match="page_size 1 cannot be split over 2 devices; it can over"):
        empty_state(params, 1)
    with pytest.raises(ValueError, match="sp 1, or leave out deterministic and verify_width"):
        read = functools.partial(functional.prefill, width=4, order_invariant=True)
        jax.eval_shape(read, params, empty_state(params))
    fixed = dataclasses.replace(params.speculation, verify_width=8)
    with pytest.raises(ValueError, match="verify_width needs whole sequences on a device"):
        empty_state(params.replace(speculation=fixed))
    with pytest.raises(ValueError, match=r"tp 2, dp 1, sp 8 needs 16 devices.*; sp 4 fits"):
        make_mesh(2, sequence_parallel=8)
    with pytest.raises(ValueError, match="must be >= 1, got tp 1, dp 1, sp 0"):
        make_mesh(sequence_parallel=0)
    with pytest.raises(ValueError, match="the sequence needs mesh axes of its own"):
        Layout(heads=("x",), sequence=("x",))


def test_the_tokens_of_a_pass_are_split_over_all_devices_of_a_line():
    layout = mesh_layout(make_mesh(2, sequence_parallel=2))
    assert layout.tokens == () and layout.split_tokens.tokens == (SEQUENCE_AXIS, MODEL_AXIS)
    grid = mesh_layout(make_mesh((2, 2), sequence_parallel=2))
    assert grid.split_tokens.tokens == (SEQUENCE_AXIS,)
    assert mesh_layout(make_mesh(2)).split_tokens.tokens == ()
