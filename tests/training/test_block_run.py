"""Training block heads: they learn, resume exactly, and draft from what was exported."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams, SpeculationConfig
from jaxspec.checkpoints.block import load_block_head, save_block_head
from jaxspec.commands import train_drafter
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.heads import BlockHead, block_layers, default_block_capture
from jaxspec.models.json.values import read_json
from jaxspec.training.heads import step as draft_step
from jaxspec.training.heads.block_init import default_mask, init_block_head, new_block_config
from jaxspec.training.heads.block_loss import BlockLoss
from jaxspec.training.heads.data import Examples
from jaxspec.training.heads.loss import DraftBatch
from jaxspec.training.heads.run import DraftData, DraftTraining
from jaxspec.training.heads.states import StoredStates, capture_states
from jaxspec.training.heads.step import DraftTrainConfig
from jaxspec.training.precision import cast_weights
from jaxspec.training.schedule import Schedule
from tests.helpers.block_heads import KINDS, arrays_equal
from tests.helpers.checkpoints import tiny_byte_llama
from tests.helpers.marks import slow
from tests.helpers.random_models import random_target, tiny_config

TARGET = random_target(tiny_config(num_layers=4))
METHODS = pytest.mark.parametrize("method", ["dspark", slow("dflash")])
SCHEDULE = Schedule(
    steps=12, steps_per_call=4, seconds_per_call=math.inf, evaluate_every=6, save_every=4
)


def random_examples(rows: int, seed: int) -> Examples:
    random = np.random.default_rng(seed)
    tokens = random.integers(TARGET.config.vocab_size, size=(rows, 16)).astype(np.int32)
    return Examples(tokens, random.random((rows, 16)) < 0.9, np.full(rows, 4))


TRAIN, HELD_OUT = random_examples(40, 1), random_examples(8, 2)


def make_head(method: Any) -> BlockHead:
    config = new_block_config(
        TARGET.config,
        block_layers(TARGET.config, 1, 40),
        method,
        block_size=4,
        mask_token=95,
        markov_rank=8 if method == "dspark" else 0,
    )
    return init_block_head(TARGET, config)


def config_of(method: Any, **changes: Any) -> DraftTrainConfig:
    config = DraftTrainConfig(
        loss=BlockLoss.for_method(method, make_head(method).max_depth, 6),
        batch_size=8,
        learning_rate=1e-2,
        warmup_steps=2,
        compute_dtype="float32",
    )
    return dataclasses.replace(config, **changes)


def start(method: str, directory: Path, *, states: StoredStates | None = None, **options: Any):
    return DraftTraining(
        make_head(method), TARGET, config_of(method), DraftData(TRAIN, HELD_OUT, states), SCHEDULE,
        directory, **options,
    )  # fmt: skip


def batch_of(method: Any, learned: np.ndarray | None = None) -> DraftBatch:
    marks = TRAIN.learned[:8] if learned is None else learned
    batch = DraftBatch(tokens=jnp.asarray(TRAIN.tokens[:8]), learned=jnp.asarray(marks))
    drawn = config_of(method).loss.drawn(batch, np.random.default_rng(0))
    return jax.tree.map(jnp.asarray, drawn)


@METHODS
def test_a_step_learns(method: str):
    state = draft_step.init_state(make_head(method), config_of(method))
    batches = [batch_of(method)] * 20
    state, first = draft_step.train_steps(state, TARGET, batches[:1], 100, config_of(method))
    state, _ = draft_step.train_steps(state, TARGET, batches, 100, config_of(method))
    _, last = draft_step.train_steps(state, TARGET, batches[:1], 100, config_of(method))
    assert last["total_loss"] < 0.9 * first["total_loss"]
    assert last["accuracy"][0] > first["accuracy"][0]
    depths = 4 if method == "dspark" else 3
    assert all(last[name].shape == (depths,) for name in ("loss", "accuracy", "overlap"))


@pytest.mark.slow
@METHODS
def test_a_killed_run_resumes_on_the_same_curve(method: str, tmp_path: Path):
    whole = start(method, tmp_path / "whole")
    list(whole.run())
    list(itertools.islice(start(method, tmp_path / "cut").run(), 3))
    resumed = start(method, tmp_path / "cut", resume=True)
    assert 0 < resumed.step < 12
    list(resumed.run())
    assert arrays_equal(resumed.head, whole.head)
    curves = [
        [(r.step, r.held_out_loss, r.held_out_confidence) for r in run.records if r.held_out_loss]
        for run in (whole, resumed)
    ]
    assert curves[0] == curves[1] and len(curves[0]) == 3
    assert (whole.records[-1].held_out_confidence is not None) == (method == "dspark")


@pytest.mark.slow
def test_devices_share_a_batch_and_states_may_be_stored(tmp_path: Path):
    capture = make_head("dspark").capture
    states = capture_states(
        TARGET, TRAIN, capture, dense_causal_attend, tmp_path / "states", batch_size=8
    )
    runs = [
        start("dspark", tmp_path / "one"),
        start("dspark", tmp_path / "many", data_parallel=4),
        start("dspark", tmp_path / "stored", states=states),
    ]
    losses = []
    for run in runs:
        list(run.run())
        losses.append([record.total_loss for record in run.records if record.total_loss])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-3)


@pytest.mark.slow
@METHODS
def test_micro_batches_weigh_by_their_learned_tokens(method: str):
    learned = np.tile(np.arange(8)[:, None] < 2, 16) & TRAIN.learned[:8]
    learned[7, -3:] = True  # parts learn very different numbers of tokens
    found = []
    for count in (1, 4):
        config = config_of(method, accumulation=count)
        state = draft_step.init_state(make_head(method), config)
        batch = batch_of(method, learned)
        _, metrics = draft_step.train_steps(state, TARGET, [batch], 100, config)
        found.append([metrics["total_loss"], metrics["grad_norm"], *metrics["accuracy"]])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


@pytest.mark.parametrize("method", KINDS)
def test_a_trained_head_is_read_as_it_was_written(method: str, tmp_path: Path):
    head = cast_weights(make_head(method), jnp.bfloat16)
    save_block_head(head, tmp_path, cast_weights(TARGET, jnp.bfloat16))
    loaded = load_block_head(tmp_path, TARGET.config, jnp.dtype("bfloat16"))
    assert arrays_equal(loaded, head)
    assert loaded.method == method and loaded.capture == (2,)


def test_what_block_heads_read():
    assert default_block_capture(36) == (2, 10, 18, 26, 34)  # as DeepSpec's Qwen3-4B heads
    assert default_block_capture(16) == (2, 5, 8, 11, 14)
    assert default_block_capture(8) == (2, 3, 4, 5, 6)
    assert [default_block_capture(layers) for layers in (1, 2, 3)] == [(0,), (1,), (2,)]


def test_the_mask_is_a_token_that_no_text_has_before_a_draft():
    config = tiny_config(stop_token_ids=(7, 9))
    assert default_mask(config, 90) == 90
    assert default_mask(config, 96) == 7
    with pytest.raises(ValueError, match="give a mask token"):
        default_mask(tiny_config(stop_token_ids=()), 96)


BAD = [
    (["--method", "dflash", "--unroll", "3", "--draft-vocab", "9"],
     "--method dflash does not take --draft-vocab and --unroll"),
    (["--method", "dflash", "--markov-rank", "8"], "dflash does not take --markov-rank"),
    (["--method", "eagle1", "--anchors", "8"], "--method eagle1 does not take --anchors"),
    (["--method", "dflash", "--block-size", "1"], "block_size must be an integer from 2"),
    (["--method", "dspark", "--anchors", "0"], "one or more places of a row"),
    (["--method", "dspark", "--markov-rank", "-1"], "is at least 0, got -1"),
    (["--method", "dspark", "--mask-token", "4096"], "4096 is no id of the target's 4096 tokens"),
    (["--method", "dflash", "--capture", "4", "8"], r"increasing layers from -1 to 6, got [3, 7]"),
    (["--method", "dflash", "--block-size", "65"], "leave nothing to learn to 64 steps"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    sources: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    fixed = [
        *("--data", str(sources), "--out", str(tmp_path / "o"), "--steps", "1"),
        *("--work", str(tmp_path / "w"), "--ff", "64", "--length", "64", "--batch", "4"),
    ]
    assert train_drafter.main([*fixed, *arguments]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert message in line


@pytest.mark.slow
@METHODS
def test_the_script_trains_exports_and_goes_on(
    method: str, sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = tiny_byte_llama(tmp_path / "model")
    arguments = [
        *("--model", str(model), "--data", str(sources), "--steps", "4", "--method", method),
        *("--work", str(tmp_path / "work"), "--length", "32", "--batch", "8", "--anchors", "6"),
        *("--regenerate", "--keep-text", "--regenerate-rows", "6", "--prompt-tokens", "8"),
        *("--block-size", "5", "--layers", "1", "--ff", "32", "--store-states"),
    ]
    out = tmp_path / "head"
    assert train_drafter.main([*arguments, "--out", str(out)]) == 0, capsys.readouterr().err
    card = (out / "README.md").read_text()
    assert f"parameter {method.upper()} draft head" in card and "at up to 6 places of a row" in card
    assert ("| confidence |" in card) == (method == "dspark")
    assert (out / "training.png").stat().st_size > 10_000
    assert read_json(out / "config.json")["block_size"] == 5
    again = tmp_path / "again"
    assert train_drafter.main([*arguments, "--resume", "--out", str(again)]) == 0
    weights = "model.safetensors"
    assert (again / weights).read_bytes() == (out / weights).read_bytes()
    llm = LLM(model, out, speculation=SpeculationConfig.chain(3), max_length=64)
    plain = LLM(model, "none", max_length=64)
    texts = [each.generate(["def f(x):"], SamplingParams(max_tokens=20)) for each in (llm, plain)]
    assert texts[0][0].token_ids == texts[1][0].token_ids


@pytest.mark.slow
@METHODS
def test_a_head_of_the_built_in_model_drafts_better_than_at_the_start(
    method: str, sources: Path, tmp_path: Path
):
    arguments = [
        *("--data", str(sources), "--method", method, "--work", str(tmp_path / "work")),
        *("--length", "64", "--batch", "8", "--block-size", "4", "--anchors", "16", "--ff", "128"),
        *("--layers", "1", "--warmup", "5", "--lr", "3e-3"),
    ]
    prompt = (sources / "a.py").read_text()[:100]
    lengths = []
    for steps in ("1", "60"):
        out = tmp_path / steps
        assert train_drafter.main([*arguments, "--steps", steps, "--out", str(out)]) == 0
        llm = LLM(drafter=out, speculation=SpeculationConfig.chain(3), max_length=128)
        [completion] = llm.generate([prompt], SamplingParams(max_tokens=40))
        lengths.append(completion.acceptance_length)
    assert lengths[1] > max(1.5, lengths[0])
