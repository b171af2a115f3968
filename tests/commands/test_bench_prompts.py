"""Timing of prompts on a tiny model; the figures are for a GPU."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.commands.bench import prompts as bench_prompts
from jaxspec.evaluation.benchmarks.modes import make_params, parse_mode
from jaxspec.evaluation.benchmarks.prompts import prompt_work
from jaxspec.evaluation.benchmarks.random_params import random_decoder
from jaxspec.evaluation.benchmarks.shapes import model_shape
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.json_lines import joined
from tests.helpers.sizes import decoder_of_zeros

TINY = ["--shape", "tiny", "--layers", "2", "--page-size", "16", "--dtype", "float32"]


@pytest.mark.parametrize("window", [None, 16])
def test_operations_are_those_of_the_shapes(window: int | None):
    config = model_shape("tiny", 2)
    attention = config.layers[0].attention
    if window is not None:
        config = config.map_layers(
            lambda layer: dataclasses.replace(
                layer, mixer=dataclasses.replace(layer.attention, window=window)
            )
        )
    weights = random_decoder(config, jnp.dtype("float32"), None, 0)
    params = make_params(parse_mode("plain"), weights, None, None, NO_KERNELS)
    heads, kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_dim
    mlp: Any = config.layers[0].mlp
    hidden, inner = config.hidden_size, mlp.intermediate_size
    layer = hidden * width * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    start, stop = 24, 40
    seen = [min(position + 1, window or 10**6) for position in range(start, stop)]
    found = prompt_work(params, start, stop)
    assert found.products == pytest.approx(2 * 2 * layer * 16, rel=0.01)  # and norms
    assert found.attention == 2 * 4 * heads * width * np.sum(seen)
    whole = prompt_work(params, 0, stop)
    assert whole.total == pytest.approx(prompt_work(params, 0, start).total + found.total)


@pytest.mark.parametrize("shape", ["tiny-deepseek-v4", "tiny-glm-5-next"])
def test_attention_is_to_what_is_chosen_and_to_entries(shape: str):
    """Layers of tiny-deepseek-v4 attend to 16 tokens; with entries of 4 tokens to 16 of these, with
    those of 32 to all. Layers of tiny-glm-5-next choose 4 pools of 4, and the unfinished one."""
    config = model_shape(shape)
    params = make_params(
        parse_mode("plain"), decoder_of_zeros(config, jnp.dtype("float32")), None, None, NO_KERNELS
    )
    start, stop = 60, 90
    seen = np.arange(start + 1, stop + 1)
    if shape == "tiny-deepseek-v4":
        near, heads, width = np.minimum(seen, 16), 8, 16 + 16
        attended = 4 * near + 2 * np.minimum(seen // 4, 16) + seen // 32
    else:
        heads, width = 4, 16 + 16
        attended = 2 * np.minimum(seen, 16 + 3)
    found = prompt_work(params, start, stop)
    assert found.attention == 2 * heads * width * attended.sum()


def test_prompts_without_a_position_for_a_token_are_named_in_one_error(capsys: Any):
    assert bench_prompts.main(["--prompts", "2048,131072,200000"]) == 2
    error = capsys.readouterr().err
    assert "--prompts 131072: the model has 131072 positions" in error
    assert "--prompts 200000" in error and "--prompts 2048" not in error


def test_a_chunk_is_no_longer_than_its_prompt():
    args = SimpleNamespace(prompts=(10, 40), chunk=(16, 64), page_size=16, repeats=1)
    chosen: Any = bench_prompts.choose(args, model_shape("tiny"))  # pyright: ignore
    assert [(r.tokens, r.chunk) for r in chosen] == [(10, 10), (40, 16), (40, 40)]
    assert chosen[1].last_chunk == (16, 32)


@pytest.mark.slow
def test_prompts_are_timed_beside_their_operations(capsys: Any):
    """Quick guards: the three above."""
    arguments = ["--prompts", "40,200", "--chunk", "16", "--repeats", "2", "--json"]
    assert bench_prompts.main([*TINY, *arguments]) == 0
    printed = capsys.readouterr()
    results = joined(printed.out, "timings")
    assert results["peak_rate"] > 0 and "TFLOP/s a device" in printed.err
    short, long = results["timings"]
    assert [short["tokens"], long["tokens"]] == [40, 200]
    for row in (short, long):
        assert len(row["all_ms"]) == 2 and row["first_chunk_ms"] > 0 and row["last_chunk_ms"] > 0
        rate = row["work"]["products"] + row["work"]["attention"]
        assert row["tflops"] == pytest.approx(rate / row["first_token_ms"] / 1e9)
    assert long["attention_tflop"] > 4 * short["attention_tflop"]
