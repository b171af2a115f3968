"""Training a head: it learns, resumes exactly, and comes back from its export."""

import dataclasses
import itertools
import math
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec import LLM, SamplingParams, SpeculationConfig
from jaxspec.checkpoints.eagle import load_eagle_head, save_eagle_head
from jaxspec.checkpoints.mtp import load_mtp_head, save_mtp_head
from jaxspec.commands import train_drafter
from jaxspec.config.mtp import AFTER, MtpConfig
from jaxspec.decoding.drafters import EagleDrafter
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.functional import EngineParams, admit, init_state, prefill
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.from_config.model import to_hf_config
from jaxspec.models.heads import DraftHead
from jaxspec.parallel import DATA_AXIS, make_mesh
from jaxspec.training.heads import states as draft_states
from jaxspec.training.heads import step as draft_step
from jaxspec.training.heads.data import Examples
from jaxspec.training.heads.loss import DraftBatch, LossConfig
from jaxspec.training.heads.report import plot_training
from jaxspec.training.heads.run import DraftData, DraftRecord, DraftTraining
from jaxspec.training.heads.states import StoredStates, capture_states
from jaxspec.training.heads.step import DraftTrainConfig, init_head, init_mtp_layer, train_step
from jaxspec.training.precision import cast_weights
from jaxspec.training.schedule import Schedule
from tests.helpers.checkpoints import tiny_byte_llama
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import CONFIG, random_target, tiny_config

TARGET = random_target()
HEAD_CONFIG = tiny_config(num_layers=1)
TRAIN_CONFIG = DraftTrainConfig(
    loss=LossConfig(steps=2),
    batch_size=8,
    learning_rate=1e-2,
    warmup_steps=2,
    compute_dtype="float32",
)
METHODS = pytest.mark.parametrize("method", ["eagle3", slow("eagle1"), slow("mtp")])
SCHEDULE = Schedule(
    steps=12, steps_per_call=4, seconds_per_call=math.inf, evaluate_every=6, save_every=4
)


def random_examples(rows: int, seed: int) -> Examples:
    tokens = np.random.default_rng(seed).integers(CONFIG.vocab_size, size=(rows, 16))
    learned = np.random.default_rng(seed).random((rows, 16)) < 0.7
    return Examples(tokens.astype(np.int32), learned, np.full(rows, 4))


TRAIN, HELD_OUT = random_examples(40, 1), random_examples(8, 2)


def make_head(method: str = "eagle3"):
    if method == "mtp":
        return init_mtp_layer(TARGET, MtpConfig("deepseek", num_layers=1, states=AFTER))
    ids = np.arange(0, CONFIG.vocab_size, 2, dtype=np.int32)
    return init_head(
        TARGET, HEAD_CONFIG, method,  # pyright: ignore[reportArgumentType]
        capture=(0, 1, 2) if method == "eagle3" else None,
        token_ids=ids if method == "eagle3" else None,
    )  # fmt: skip


def start(directory: Path, *, resume: bool = False, states: StoredStates | None = None, **changes):
    config = dataclasses.replace(TRAIN_CONFIG, **changes)
    return DraftTraining(
        make_head(), TARGET, config, DraftData(TRAIN, HELD_OUT, states), SCHEDULE, directory,
        resume=resume,
    )  # fmt: skip


def curve(records: list[DraftRecord]) -> list[tuple]:
    """The evaluations of a run. (A resumed run splits its first steps into other calls.)"""
    return [(r.step, r.held_out_loss, r.held_out_accuracy) for r in records if r.held_out_loss]


def total_losses(run: DraftTraining) -> list[float]:
    return [record.total_loss for record in run.records if record.total_loss]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> DraftTraining:
    run = start(tmp_path_factory.mktemp("run"))
    list(run.run())
    return run


@pytest.mark.slow
def test_the_loss_goes_down(uninterrupted):
    losses = [r.held_out_loss[0] for r in uninterrupted.records if r.held_out_loss]
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1, 2])
def test_a_killed_run_resumes_on_the_same_curve(uninterrupted, tmp_path, calls):
    killed = start(tmp_path)
    list(itertools.islice(killed.run(), 1 + calls))
    resumed = start(tmp_path, resume=True)
    list(resumed.run())
    assert curve(resumed.records) == curve(uninterrupted.records)
    assert len(curve(resumed.records)) == 3
    same = jax.tree.map(np.array_equal, resumed.head, uninterrupted.head)
    assert all(jax.tree.leaves(same))


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused(uninterrupted, tmp_path):
    list(itertools.islice(start(tmp_path).run(), 1))
    with pytest.raises(ValueError, match="another model, data or training configuration"):
        start(tmp_path, resume=True, learning_rate=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "eagle1"])
def test_micro_batches_weigh_by_their_learned_tokens(method):
    learned = np.tile(np.arange(8)[:, None] < 2, 16) & TRAIN.learned[:8]
    learned[7, -3:] = True  # parts learn very different numbers of tokens
    batch = DraftBatch(tokens=jnp.asarray(TRAIN.tokens[:8]), learned=jnp.asarray(learned))
    found = []
    for count in (1, 4):
        config = dataclasses.replace(
            TRAIN_CONFIG, accumulation=count, loss=LossConfig.for_method(method, 2)
        )
        state = draft_step.init_state(make_head(method), config)
        _, metrics = jax.jit(train_step, static_argnames="config")(
            state, TARGET, batch, 100, config=config
        )
        found.append([metrics["total_loss"], metrics["grad_norm"], *metrics["accuracy"]])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_each_device_has_rows_of_every_micro_batch():
    mesh = make_mesh(data_parallel=4)
    rows = jax.device_put(jnp.arange(16), NamedSharding(mesh, P(DATA_AXIS)))
    parts = jax.jit(draft_step._parts, static_argnums=1)(rows, 2)
    assert parts.sharding.shard_shape(parts.shape) == (2, 2)
    assert sorted(np.asarray(parts).ravel()) == list(range(16))


@pytest.mark.slow
def test_few_held_out_rows_are_evaluated_on_every_device(tmp_path):
    held_out = random_examples(3, 2)
    runs = [
        DraftTraining(
            make_head(), TARGET, TRAIN_CONFIG, DraftData(TRAIN, held_out), SCHEDULE,
            tmp_path / str(devices), data_parallel=devices,
        )
        for devices in (1, 4)
    ]  # fmt: skip
    losses = [next(run.run()).held_out_loss or [] for run in runs]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert losses[0]


@pytest.mark.slow
def test_held_out_batches_weigh_by_their_learned_tokens():
    part = random_examples(4, 3)
    learned = part.learned.copy()
    learned[:2, :-1] = False
    whole = DraftBatch(tokens=jnp.asarray(part.tokens), learned=jnp.asarray(learned))
    halves = jax.tree.map(lambda x: x.reshape(2, 2, 16), whole)
    together = draft_step.evaluate(
        make_head(), TARGET, jax.tree.map(lambda x: x[None], whole), TRAIN_CONFIG
    )
    apart = draft_step.evaluate(make_head(), TARGET, halves, TRAIN_CONFIG)
    np.testing.assert_allclose(apart["loss"], together["loss"], rtol=1e-5)


@pytest.mark.slow
def test_reordered_rows_and_scaled_weights_are_other_data(uninterrupted, tmp_path):
    list(itertools.islice(start(tmp_path).run(), 1))
    swapped = Examples(TRAIN.tokens[::-1].copy(), TRAIN.learned[::-1].copy(), TRAIN.prompt_lens)
    louder = jax.tree.map(lambda x: 2 * x, TARGET)
    for target, rows in ((TARGET, swapped), (louder, TRAIN)):
        with pytest.raises(ValueError, match="another model, data"):
            DraftTraining(
                make_head(),
                target,
                TRAIN_CONFIG,
                DraftData(rows, HELD_OUT),
                SCHEDULE,
                tmp_path,
                resume=True,
            )


@pytest.mark.slow
def test_a_log_cut_short_by_a_kill_is_mended(tmp_path):
    list(itertools.islice(start(tmp_path).run(), 3))
    log = tmp_path / "log.jsonl"
    lines = log.read_text()
    log.write_text(lines + '{"step": 8, "tot')
    assert len(start(tmp_path, resume=True).records) == 3
    assert log.read_text() == lines
    log.unlink()
    with pytest.raises(ValueError, match="without its log"):
        start(tmp_path, resume=True)


def test_captured_layers_are_exported_in_the_order_they_are_read(tmp_path):
    head = init_head(TARGET, HEAD_CONFIG, "eagle3", capture=(2, 0, 1))
    assert head.capture == (0, 1, 2)
    assert init_head(TARGET, HEAD_CONFIG, "eagle3", capture=(1,)).front.fc.in_size == 32
    for capture, message in (((0, 9), "distinct, of 0 to 2"), ((1, 1), "distinct")):
        with pytest.raises(ValueError, match=message):
            init_head(TARGET, HEAD_CONFIG, "eagle3", capture=capture)
    with pytest.raises(ValueError, match="EAGLE-1 head reads the last hidden state"):
        init_head(TARGET, HEAD_CONFIG, "eagle1", capture=(0, 1))


def test_rows_too_short_for_the_unrolled_steps_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="leave nothing to learn to 15 steps of a draft"):
        start(tmp_path, loss=LossConfig(steps=15))


@pytest.mark.slow
def test_stored_states_train_as_computed_ones_do(uninterrupted, tmp_path):
    states = capture_states(
        TARGET, TRAIN, make_head().capture, dense_causal_attend, tmp_path / "s", batch_size=16
    )
    run = start(tmp_path / "run", states=states)
    list(run.run())
    for record, expected in zip(run.records, uninterrupted.records, strict=True):
        if record.loss and expected.loss:
            np.testing.assert_allclose(record.loss, expected.loss, rtol=1e-3)
    with pytest.raises(ValueError, match="another model or other data"):
        capture_states(TARGET, HELD_OUT, (0, 1, 2), dense_causal_attend, tmp_path / "s",
                       batch_size=8)  # fmt: skip


def test_stored_states_beyond_the_disk_are_an_error_with_the_numbers(tmp_path, monkeypatch):
    row_bytes = 16 * 4 * CONFIG.hidden_size * 4  # tokens, 3 captured states and the final one
    free = types.SimpleNamespace(free=7 * row_bytes)
    monkeypatch.setattr(draft_states.shutil, "disk_usage", lambda path: free)
    message = r"of 40 rows need .* GB free, enough for 7 rows: leave out --store-states .* fewer or"
    with pytest.raises(ValueError, match=message):
        capture_states(TARGET, TRAIN, (0, 1, 2), dense_causal_attend, tmp_path, batch_size=8)


def test_stored_states_that_would_take_too_long_are_an_error(tmp_path):
    rows: list[tuple[int, int]] = []
    with pytest.raises(ValueError, match=r"of 24 more rows would take .* for 0 rows: leave out"):
        capture_states(
            TARGET, TRAIN, (0, 1, 2), dense_causal_attend, tmp_path, batch_size=8,
            deadline=time.monotonic(), report=lambda *counts: rows.append(counts),
        )  # fmt: skip
    assert rows == [(0, 40), (8, 40), (16, 40)], "progress shows after each batch"


@pytest.mark.slow
def test_devices_share_a_batch(uninterrupted, tmp_path):
    run = DraftTraining(
        make_head(),
        TARGET,
        TRAIN_CONFIG,
        DraftData(TRAIN, HELD_OUT),
        SCHEDULE,
        tmp_path,
        data_parallel=4,
    )
    list(run.run())
    np.testing.assert_allclose(total_losses(run), total_losses(uninterrupted), rtol=1e-3)


@METHODS
def test_a_step_is_a_pure_function_that_learns(method):
    config = dataclasses.replace(TRAIN_CONFIG, loss=LossConfig.for_method(method, 2))
    state = draft_step.init_state(make_head(method), config)
    batch = DraftBatch(tokens=jnp.asarray(TRAIN.tokens[:8]), learned=jnp.asarray(TRAIN.learned[:8]))
    step = jax.jit(train_step, static_argnames="config", compiler_options=FAST_COMPILE)
    _, before = step(state, TARGET, batch, 100, config=config)
    for _ in range(20):
        state, metrics = step(state, TARGET, batch, 100, config=config)
    assert metrics["total_loss"] < 0.8 * before["total_loss"]
    assert metrics["loss"].shape == metrics["accuracy"].shape == (2,)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "eagle1", "mtp"])
def test_an_exported_head_comes_back(method, tmp_path):
    head = cast_weights(make_head(method), jnp.bfloat16)
    if method == "mtp":
        save_mtp_head(head, tmp_path, to_hf_config(CONFIG))
        loaded = load_mtp_head(tmp_path, CONFIG, jnp.dtype(jnp.bfloat16))
    else:
        save_eagle_head(head, tmp_path, CONFIG)
        loaded = load_eagle_head(tmp_path, CONFIG, jnp.dtype(jnp.bfloat16))
    assert loaded.capture == head.capture
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(head), strict=True):
        np.testing.assert_array_equal(one, other)
    trees = [draft_tree(each) for each in (head, loaded)]
    assert trees[0].tokens.shape == (2, 20) and (trees[0].depth == 4).any()
    for one, other in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_array_equal(one, other)


def draft_tree(head: DraftHead) -> DraftTree:
    """What a head drafts after the prompts of two rows."""
    spec = SpeculationConfig(num_nodes=20, max_depth=4, top_k=4)
    drafter = EagleDrafter(head=head)
    params = EngineParams(target=TARGET, drafter=drafter, speculation=spec)
    state = init_state(params, 2, 32)
    state = admit(params, state, np.arange(2), TRAIN.tokens[:2], np.array([9, 16]))
    state, _ = jax.jit(prefill, static_argnames="width")(params, state, width=16)
    propose = jax.jit(drafter.propose, static_argnums=2)
    return propose(TARGET, state, params.round_options())[0]


@pytest.mark.slow
def test_the_plot_is_written(uninterrupted, tmp_path):
    plot_training(uninterrupted.records, tmp_path / "training.png")
    assert (tmp_path / "training.png").stat().st_size > 10_000


def test_too_few_rows_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="fewer than one batch"):
        start(tmp_path, batch_size=64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "/no/such/folder"], "no such file or folder"),
        (["--data", "{empty}"], "is empty"),
        (["--data", "{text}", "--length", "4096"], "--length 4096 exceeds the model's 2048"),
        (["--data", "{text}", "--draft-vocab", "5000"], "1 to 4096 tokens"),
        (["--data", "{text}", "--batch", "7", "--accumulation", "2"], "multiple of accumulation"),
        (["--data", "{text}", "--model", "/no/such/model"], "no directory"),
        (["--data", "{text}", "--resume"], "no checkpoint to resume from"),
        (["--data", "{text}", "--steps", "0"], "must be at least 1"),
        (["--data", "{text}", "--unroll", "0"], "steps must be at least 1"),
        (["--data", "{text}", "--layers", "0"], "num_layers must be above 0"),
        (["--data", "{text}", "--draft-vocab", "0"], "1 to 4096 tokens"),
        (["--data", "{text}", "--capture", "1", "99"], "distinct, of 0 to 8"),
        (["--data", "{text}", "--method", "eagle1", "--draft-vocab", "9"], "drafts every token"),
        (
            ["--data", "{text}", "--method", "mtp", "--ff", "9", "--layers", "2"],
            "--method mtp does not take --ff and --layers",
        ),
        (["--data", "{text}", "--answers", "."], "--answers would do nothing: add --regenerate"),
        (["--data", "{text}", "--block-size", "8"], "eagle3 does not take --block-size"),
        (["--data", "{text}", "--keep-text"], "--keep-text would do nothing: add --regenerate"),
        (["--data", "{text}", "--regenerate-rows", "0"], "--regenerate-rows would do nothing"),
        (["--data", "{text}", "--regenerate-batch", "8"], "--regenerate-batch would do nothing"),
        (
            ["--data", "{text}", "--prompt-tokens", "8", "--regenerate-temperatures", "0"],
            "--prompt-tokens and --regenerate-temperatures would do nothing",
        ),
        (["--data", "{text}", "--regenerate", "--regenerate-rows", "0"], "at least 1, got 0"),
        (["--data", "{text}", "--regenerate", "--regenerate-batch", "-1"], "at least 1, got -1"),
        (["--data", "{text}", "--regenerate", "--prompt-tokens", "0"], "at least 1, got 0"),
        (["--data", "{text}", "--length", "0"], "rows of 0 tokens hold no text"),
        (["--data", "{text}", "--attention", "cudnn"], "needs bfloat16 and a GPU"),
        (["--data", "{text}", "--out", "{empty}"], "File exists"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, sources, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    places = {"empty": tmp_path / "empty.jsonl", "text": sources}
    arguments = [argument.format(**places) for argument in arguments]
    fixed = ["--out", str(tmp_path / "o"), "--work", str(tmp_path / "w"), "--steps", "1"]
    fixed += ["--ff", "64"]
    sizes = [] if "--batch" in arguments else ["--batch", "8"]
    sizes += [] if "--length" in arguments else ["--length", "64"]
    assert train_drafter.main([*fixed, *sizes, *arguments]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert message in line


@pytest.mark.slow
def test_the_script_trains_exports_and_goes_on(sources, tmp_path, capsys):
    model = tiny_byte_llama(tmp_path / "model")
    arguments = [
        *("--model", str(model), "--data", str(sources), "--steps", "4"),
        *("--work", str(tmp_path / "work"), "--length", "32", "--batch", "8", "--unroll", "2"),
        *("--regenerate", "--keep-text", "--regenerate-rows", "6", "--prompt-tokens", "8"),
        *("--draft-vocab", "60", "--store-states", "--license-note", "Free."),
    ]
    out = tmp_path / "head"
    assert train_drafter.main([*arguments, "--out", str(out)]) == 0, capsys.readouterr().err
    assert len((out / "log.jsonl").read_text().splitlines()) >= 2
    card = (out / "README.md").read_text()
    assert "60 tokens" in card and "Free." in card and "4 steps of 8 rows" in card
    again = tmp_path / "again"
    assert train_drafter.main([*arguments, "--resume", "--out", str(again)]) == 0
    weights = "model.safetensors"
    assert (again / weights).read_bytes() == (out / weights).read_bytes()
    llm = LLM(model, out, speculation=SpeculationConfig.chain(3), max_length=64)
    plain = LLM(model, "none", max_length=64)
    texts = [each.generate(["def f(x):"], SamplingParams(max_tokens=20)) for each in (llm, plain)]
    assert texts[0][0].token_ids == texts[1][0].token_ids
