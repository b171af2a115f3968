"""The benchmark's inputs and its arithmetic; its timings are for a GPU."""

import dataclasses
import math
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxspec.commands.bench import engine as bench_engine
from jaxspec.commands.bench import serving as bench_serving
from jaxspec.config.blocks import BlockIndexConfig
from jaxspec.config.layer import LayerConfig
from jaxspec.config.mixers import BlockSparseConfig
from jaxspec.config.mtp import AFTER, MtpConfig
from jaxspec.config.quantization import ExpertFormat, Scheme
from jaxspec.decoding.drafters import EagleDrafter
from jaxspec.evaluation.benchmarks.ahead_of_time import Job, decode_program
from jaxspec.evaluation.benchmarks.floors import FloorBytes, floor_bytes
from jaxspec.evaluation.benchmarks.modes import make_params, parse_mode
from jaxspec.evaluation.benchmarks.random_params import (
    decoder_in_schemes,
    random_decoder,
    random_draft_head,
    with_packed_experts,
)
from jaxspec.evaluation.benchmarks.rounds import Bench, Workload
from jaxspec.evaluation.benchmarks.shapes import SHAPES, model_shape
from jaxspec.models.decoder import decoder_shapes
from jaxspec.parallel import Shards, mesh_layout
from jaxspec.parallel.meshes import make_mesh
from pallas_kernels.selection import Kernels
from tests.helpers.sizes import decoder_of_zeros, head_of_zeros

TINY, BFLOAT16 = SHAPES["tiny"], jnp.dtype("bfloat16")


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.554),
        ("llama-3.3-70b", 70.554),
        ("llama-3.2-1b", 1.236),
        ("qwen3-8b", 8.191),
        ("qwen3-30b-a3b", 30.532),
        ("qwen2.5-7b", 7.616),
        ("mistral-7b", 7.248),
        ("qwen3.5-9b", 8.954),
        ("deepseek-v3", 671.026),
    ],
)
def test_shapes_have_the_published_number_of_parameters(shape: str, billions: float):
    leaves = jax.tree.leaves(decoder_shapes(SHAPES[shape], BFLOAT16))
    assert sum(math.prod(leaf.shape) for leaf in leaves) / 1e9 == pytest.approx(billions, abs=1e-3)


@pytest.mark.parametrize(
    ("text", "name", "most_tokens", "rounds"),
    [
        ("plain", "plain", 1, 256),
        ("chain:3", "chain:3@3", 4, 85),
        ("chain:5", "chain:5@3.5", 4, 73),
        ("chain:4@2.5", "chain:4@2.5", 3, 102),
        ("tree:60:7:10", "tree:60:7:10@4", 5, 64),
        ("tree:60:7:10@8", "tree:60:7:10@8", 8, 32),
        ("60:7:10@8", "60:7:10@8", 8, 32),
        ("chain:5+int8", "chain:5@3.5+int8", 4, 73),
        ("chain:4@2.5+int8", "chain:4@2.5+int8", 3, 102),
    ],
)
def test_modes_are_parsed(text: str, name: str, most_tokens: int, rounds: int):
    mode = parse_mode(text)
    assert (mode.name, mode.most_tokens, mode.rounds(256)) == (name, most_tokens, rounds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain@2",
        "plain+int8",
        "plain:1",
        "chain",
        "chain:4",
        "chain:3@5",
        "chain:x",
        "tree:60:7",
        "60:7",
        "chain:3@x",
        "tree:3:7:2",
    ],
)
def test_other_modes_are_refused(text: str):
    with pytest.raises(ValueError, match="mode"):
        parse_mode(text)


@pytest.mark.slow
def test_random_weights_are_all_different_and_of_a_sane_size():
    target = random_decoder(TINY, BFLOAT16, None, seed=0)
    head = random_draft_head(TINY, BFLOAT16, None, seed=1)
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves((target, head))]
    assert len({array.tobytes() for array in arrays}) == len(arrays)
    assert {array.dtype for array in arrays} == {BFLOAT16, np.dtype("int32")}
    mlp: Any = target.layers[1].mlp
    gate_up = np.asarray(mlp.gate_up.weight, np.float32)
    assert abs(gate_up.mean()) < 0.01
    assert gate_up.std() == pytest.approx(TINY.hidden_size**-0.5, rel=0.05)
    assert len(set(np.asarray(head.token_ids).tolist())) == TINY.vocab_size


def test_the_floor_of_a_chain():
    target = decoder_of_zeros(TINY, BFLOAT16)
    head = head_of_zeros(TINY, BFLOAT16)
    params = make_params(parse_mode("chain:3"), target, head, None, Kernels())
    hidden, ff, vocab, layers = 64, 128, 1000, 4  # tiny's; 8 query and 4 KV heads of 16
    layer = hidden * (256 + 128 + 3 * ff) + 2 * hidden
    draft = 2 * hidden * 256 + hidden * (128 + 3 * ff) + 2 * hidden  # qkv reads twice the width
    draft += 2 * hidden + hidden * vocab
    slot = 2 * 4 * 16
    assert floor_bytes(params, batch=5, context=100) == FloorBytes(
        target_weights=2 * (layers * layer + hidden + hidden * vocab),
        target_kv=2 * 5 * 100 * layers * slot,
        draft_weights=2 * (3 * hidden * hidden + 3 * draft),
        draft_kv=2 * 3 * 5 * 100 * slot,
    )


@pytest.mark.parametrize(("mode", "tokens"), [("plain", 1), ("chain:3", 4)])
def test_of_experts_those_count_that_are_chosen(mode: str, tokens: int):
    config = SHAPES["tiny-experts"]
    target = decoder_of_zeros(config, BFLOAT16)
    head = head_of_zeros(config, BFLOAT16)
    params = make_params(parse_mode(mode), target, head, None, Kernels())
    hidden, width, vocab, layers = 64, 64, 1000, 4
    rest = layers * (hidden * (256 + 128 + 8) + 2 * hidden) + hidden + hidden * vocab
    chosen = 8 * (1 - (1 - 2 / 8) ** (5 * tokens))  # of 8 experts, 2 by each token of 5 rows
    expected = 2 * (rest + layers * chosen * 3 * hidden * width)
    assert floor_bytes(params, batch=5, context=100).target_weights == pytest.approx(expected)


@pytest.mark.parametrize("mode", ["plain", "chain:3"])
def test_the_floor_of_recurrent_layers_and_an_mtp_layer(mode: str):
    config = SHAPES["tiny-hybrid"]
    target = decoder_of_zeros(config, BFLOAT16)
    head = head_of_zeros(config, BFLOAT16)
    params = make_params(parse_mode(mode), target, head, None, Kernels())
    found = floor_bytes(params, batch=5, context=100, committed=2)
    keys, values, width, folded, recurrent = 4, 8, 16, 16, 3
    state = 4 * values * width * width  # bytes: read, and written every 16 tokens
    window = 4 * folded * (keys * width + values * (width + 2))
    channels = 2 * 3 * (2 * keys + values) * width
    once = state * (1 + 2 / 16) + window * (0.5 + 2 / 16) + 2 * channels
    assert found.target_state == pytest.approx(5 * recurrent * once)
    assert found.target_kv == 2 * 5 * 100 * 2 * 4 * 16  # one layer of four
    if mode == "plain":
        assert found.draft_weights == 0
        return
    hidden, vocab, experts, units = 64, 1000, 8, 64
    attention = hidden * (2 * 128 + 128) + 128 * hidden + 2 * 16  # queries and their gates
    chosen = experts * (1 - (1 - 2 / 8) ** 5)  # of 5 rows in a drafting step
    mlp = hidden * (experts + 1) + 3 * hidden * units * (1 + chosen)
    norms = 5 * hidden
    each = 2 * (2 * hidden * hidden + attention + mlp + norms + hidden * vocab)
    assert found.draft_weights == pytest.approx(3 * each)
    assert found.draft_kv == 3 * found.target_kv


def test_keys_and_values_of_chosen_blocks_are_read_and_all_index_keys():
    index = BlockIndexConfig(head_dim=24, size=3, top_k=4)

    def choosing(layer: LayerConfig) -> LayerConfig:
        return dataclasses.replace(layer, mixer=BlockSparseConfig(layer.attention, index))

    target = decoder_of_zeros(TINY.map_layers(choosing), BFLOAT16)
    params = make_params(parse_mode("plain"), target, None, None, Kernels())
    slot, layers = 2 * 4 * 16, 4  # 4 KV heads of 16
    expected = 5 * 2 * layers * (100 * 24 + 4 * 3 * slot)
    assert floor_bytes(params, batch=5, context=100).target_kv == expected


def test_latents_of_the_context_are_read_once_for_all_heads():
    config = dataclasses.replace(SHAPES["deepseek-v3"], vocab_size=1000, hidden_size=64, mtp=None)
    layer = config.layers[0]  # without experts
    mixer: Any = layer.mixer
    layer = dataclasses.replace(layer, mixer=dataclasses.replace(mixer, num_heads=4))
    config = dataclasses.replace(config, layers=(layer, layer))
    target = decoder_of_zeros(config, BFLOAT16)
    params = make_params(parse_mode("plain"), target, None, None, Kernels())
    assert floor_bytes(params, batch=5, context=100).target_kv == 5 * 100 * 2 * (512 + 64) * 2


def test_the_floor_of_several_mtp_layers():
    config = dataclasses.replace(TINY, mtp=MtpConfig("deepseek", 3, AFTER))
    target = decoder_of_zeros(config, BFLOAT16)
    head = head_of_zeros(config, BFLOAT16)
    params = make_params(parse_mode("chain:5"), target, head, None, Kernels())
    drafter = EagleDrafter(head=head, later=(head, head))
    found = floor_bytes(params.replace(drafter=drafter), batch=5, context=100)
    hidden, ff, vocab = 64, 128, 1000
    writes = 2 * hidden * hidden + 2 * hidden + hidden * 256  # fc, its norms, qkv
    each = writes + hidden * (128 + 3 * ff) + 3 * hidden
    assert found.draft_weights == 2 * (6 * each + 2 * writes + 5 * hidden * vocab)
    assert found.draft_kv == 2 * 6 * 5 * 100 * 2 * 4 * 16
    one = floor_bytes(params, batch=5, context=100)
    assert one.draft_weights == 2 * 5 * (each + hidden * vocab)


def test_a_round_of_recurrent_layers_is_lowered_for_gpus():
    config = SHAPES["qwen3.5-9b"]
    config = dataclasses.replace(config, layers=config.layers[2:4])
    workload = Workload(batch=2, context=64, rounds=2, page_size=16, repeats=1)
    job = Job(config, parse_mode("chain:3"), workload, kernels="none")
    program = decode_program(job, jax.devices())
    lowered = program.function.trace(*program.arguments).lower(lowering_platforms=("cuda",))
    assert "2x16x2x128x128xf32" in lowered.as_text(), "the states of two rows"


def test_random_experts_keep_the_size_of_a_row():
    target: Any = random_decoder(SHAPES["tiny-experts"], jnp.dtype("float32"), None, seed=0)
    mlp = target.layers[0].mlp
    for linear in (mlp.gate_up, mlp.down):
        assert jnp.std(linear.weight) == pytest.approx(linear.weight.shape[1] ** -0.5, rel=0.05)


@pytest.mark.parametrize(("form", "experts"), [("fp8", 257), ("mxfp4", 256)])
def test_split_experts_have_the_shared_one_beside_them(form: ExpertFormat, experts: int):
    """Devices divide the others evenly, but not these and one more."""
    config = model_shape("qwen3.6-35b-a3b", 1)
    for mesh in (None, make_mesh(2)):
        shapes = decoder_shapes(config, BFLOAT16, Shards.over(mesh, mesh_layout(mesh)))
        shapes = with_packed_experts(shapes, form)
        mlp: Any = decoder_in_schemes(shapes, "fp8-block", None, mesh).layers[0].mlp
        assert mlp.gate_up.num_experts == (experts if mesh is None else 256)
        assert mlp.shared_is_last == (mesh is None)


@pytest.mark.slow
def test_a_head_of_eight_bits_has_about_half_the_floor():
    target = random_decoder(TINY, BFLOAT16, None, seed=0)
    head = random_draft_head(TINY, BFLOAT16, None, seed=1)
    own, scaled = (
        floor_bytes(make_params(parse_mode(mode), target, head, None, Kernels()), 5, 100)
        for mode in ("chain:3", "chain:3+int8")
    )
    assert 0.5 < scaled.draft_weights / own.draft_weights < 0.6  # scales and norms stay
    assert (scaled.target_weights, scaled.draft_kv) == (own.target_weights, own.draft_kv)


@pytest.mark.parametrize(("scheme", "bits"), [("w4a16", 4), ("nvfp4", 4), ("w8a16", 8), ("fp8", 8)])
def test_the_floor_counts_a_quantized_lm_head(scheme: Scheme, bits: int):
    plain, config = parse_mode("plain"), dataclasses.replace(TINY, hidden_size=128)
    own, made = (
        random_decoder(config, BFLOAT16, None, seed=0, lm_head_quantization=name)
        for name in (None, scheme)
    )
    before, after = (
        floor_bytes(make_params(plain, target, None, None, Kernels()), 5, 100).target_weights
        for target in (own, made)
    )
    saved = config.hidden_size * config.vocab_size * (16 - bits) // 8
    assert before - after == pytest.approx(saved, rel=0.1), "but for scales"
    assert jax.tree.structure(made.layers) == jax.tree.structure(own.layers), "only the LM head"


def test_an_embedding_table_is_no_lm_head_to_quantize():
    tied = dataclasses.replace(TINY, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="leave out --lm-head-quantization"):
        random_decoder(tied, BFLOAT16, None, seed=0, lm_head_quantization="w4a16")


class StateMadeError(Exception):
    """Ends a benchmark before it compiles anything."""


@pytest.mark.parametrize("command", ["bench engine", "bench serving"])
def test_programs_that_are_compiled_side_by_side_make_one_state_at_a_time(command, monkeypatch):
    making, most = [], []

    def new_state(bench: Bench, repeat: int = 0) -> None:
        making.append(bench)
        most.append(len(making))
        time.sleep(0.05)
        making.remove(bench)
        raise StateMadeError

    monkeypatch.setattr(Bench, "new_state", new_state)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    target, plain = random_decoder(TINY, BFLOAT16, None, seed=0), parse_mode("plain")
    with pytest.raises(StateMadeError):
        if command == "bench engine":
            workload = Workload(batch=1, context=16, rounds=2, page_size=16, repeats=1)
            chosen = [(workload, plain)] * 4
            bench_engine.compile_all(chosen, target, None, None, Kernels(), Console(quiet=True))
        else:
            options = ["--shape", "tiny", "--requests", "1,2,3,4", "--new-tokens", "2"]
            args = bench_serving.make_parser().parse_args(options)
            params = make_params(plain, target, None, None, Kernels())
            bench_serving.bare_rounds(args, params, plain, Console(quiet=True))
    assert len(most) > 1 and max(most) == 1
