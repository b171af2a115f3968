"""Training heads of every method: they learn, resume exactly, and come back from their export."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec import SpeculationConfig
from jaxspec.checkpoints.block import load_block_head, save_block_head
from jaxspec.checkpoints.eagle import load_eagle_head, save_eagle_head
from jaxspec.checkpoints.mtp import load_mtp_head, save_mtp_head
from jaxspec.decoding.drafters import EagleDrafter
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.functional import EngineParams, admit, init_state, prefill
from jaxspec.models.from_config.model import to_hf_config
from jaxspec.models.heads import DraftHead, default_block_capture
from jaxspec.models.heads.convolutions import ConvolutionConfig
from jaxspec.models.heads.corrections import LiLiCorrConfig, SelectorConfig
from jaxspec.parallel import DATA_AXIS, make_mesh
from jaxspec.training.heads import step as draft_step
from jaxspec.training.heads.block_init import default_mask
from jaxspec.training.heads.correction_sizes import CorrectionSizes, extra_of
from jaxspec.training.heads.data import Examples
from jaxspec.training.heads.loss import DraftBatch, LossConfig
from jaxspec.training.heads.run import DraftData, DraftTraining
from jaxspec.training.heads.step import init_head, train_step
from jaxspec.training.precision import cast_weights
from tests.helpers.block_heads import arrays_equal
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import tiny_config
from tests.training.tiny_heads import (
    BLOCKS,
    CONFIG,
    HEAD_CONFIG,
    HELD_OUT,
    TARGET,
    TRAIN,
    batch_of,
    config_of,
    make_head,
    random_examples,
    start,
)

METHODS = ["eagle3", *map(slow, ("eagle1", "mtp", *BLOCKS))]
OTHER = "another model, data or training configuration"

type Runs = Callable[[str], DraftTraining]
jit_step = jax.jit(train_step, static_argnames="config", compiler_options=FAST_COMPILE)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The uninterrupted run of a method."""
    runs: dict[str, DraftTraining] = {}

    def run(method: str) -> DraftTraining:
        if method not in runs:
            runs[method] = start(tmp_path_factory.mktemp("run"), method)
            list(runs[method].run())
        return runs[method]

    return run


def curve(run: DraftTraining) -> list[tuple[Any, ...]]:
    """The evaluations of a run. (A resumed run splits its first steps into other calls.)"""
    return [
        (r.step, r.held_out_loss, r.held_out_accuracy, r.held_out_confidence)
        for r in run.records
        if r.held_out_loss
    ]


def total_losses(run: DraftTraining) -> list[float]:
    return [record.total_loss for record in run.records if record.total_loss]


@pytest.mark.parametrize("method", METHODS)
def test_a_step_is_a_pure_function_that_learns(method: str):
    """Of heads that draft blocks test_block_loss.py has the gradients by default."""
    config = config_of(method)
    state, batch = draft_step.init_state(make_head(method), config), batch_of(method)
    _, before = jit_step(state, TARGET, batch, 100, config=config)
    for _ in range(22):
        state, after = jit_step(state, TARGET, batch, 100, config=config)
    assert after["total_loss"] < (0.9 if method in BLOCKS else 0.8) * before["total_loss"]
    assert after["accuracy"][0] > before["accuracy"][0] or method not in BLOCKS
    depths = {"dspark": 4, "eagle3": 2, "eagle1": 2, "mtp": 2}.get(method, 3)
    assert all(after[name].shape == (depths,) for name in ("loss", "accuracy", "overlap"))


@pytest.mark.slow
def test_the_loss_goes_down(whole_run: Runs):
    losses = [r.held_out_loss[0] for r in whole_run("eagle3").records if r.held_out_loss]
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "calls"), [("eagle3", 1), ("eagle3", 2), *((method, 2) for method in BLOCKS)]
)
def test_a_killed_run_resumes_on_the_same_curve(
    whole_run: Runs, method: str, calls: int, tmp_path: Path
):
    list(itertools.islice(start(tmp_path, method).run(), 1 + calls))
    resumed = start(tmp_path, method, resume=True)
    assert 0 <= resumed.step < 12
    list(resumed.run())
    whole = whole_run(method)
    assert curve(resumed) == curve(whole) and len(curve(resumed)) == 3
    assert arrays_equal(resumed.head, whole.head)
    assert (whole.records[-1].held_out_confidence is not None) == (method == "dspark")


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path):
    list(itertools.islice(start(tmp_path).run(), 1))
    swapped = Examples(TRAIN.tokens[::-1].copy(), TRAIN.learned[::-1].copy(), TRAIN.prompt_lens)
    louder = jax.tree.map(lambda x: 2 * x, TARGET)
    changes: list[dict[str, Any]] = [
        {"learning_rate": 1e-3},
        {"data": DraftData(swapped, HELD_OUT)},
        {"target": louder},
    ]
    for change in changes:
        with pytest.raises(ValueError, match=OTHER):
            start(tmp_path, resume=True, **change)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "eagle1", *BLOCKS])
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


def test_each_device_has_rows_of_every_micro_batch():
    mesh = make_mesh(data_parallel=4)
    rows = jax.device_put(jnp.arange(16), NamedSharding(mesh, P(DATA_AXIS)))
    parts = jax.jit(draft_step._parts, static_argnums=1)(rows, 2)
    assert parts.sharding.shard_shape(parts.shape) == (2, 2)
    assert sorted(np.asarray(parts).ravel()) == list(range(16))


@pytest.mark.slow
def test_few_held_out_rows_are_evaluated_on_every_device(tmp_path: Path):
    data = DraftData(TRAIN, random_examples(3, 2))
    runs = [start(tmp_path / str(devices), data=data, data_parallel=devices) for devices in (1, 4)]
    losses = [next(run.run()).held_out_loss or [] for run in runs]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert losses[0]


@pytest.mark.slow
def test_held_out_batches_weigh_by_their_learned_tokens():
    part = random_examples(4, 3)
    learned = part.learned.copy()
    learned[:2, :-1] = False
    whole = DraftBatch(tokens=jnp.asarray(part.tokens), learned=jnp.asarray(learned))
    losses = [
        draft_step.evaluate(
            make_head(), TARGET, jax.tree.map(lambda x, n=n: x.reshape(n, -1, 16), whole),
            config_of(),
        )["loss"]
        for n in (1, 2)
    ]  # fmt: skip
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.slow
def test_a_log_cut_short_by_a_kill_is_mended(tmp_path: Path):
    list(itertools.islice(start(tmp_path).run(), 3))
    log = tmp_path / "log.jsonl"
    lines = log.read_text()
    log.write_text(lines + '{"step": 8, "tot')
    assert len(start(tmp_path, resume=True).records) == 3
    assert log.read_text() == lines
    log.unlink()
    with pytest.raises(ValueError, match="without its log"):
        start(tmp_path, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "dspark", "lilicorr"])
def test_devices_share_a_batch(whole_run: Runs, method: str, tmp_path: Path):
    run = start(tmp_path, method, data_parallel=4)
    list(run.run())
    np.testing.assert_allclose(total_losses(run), total_losses(whole_run(method)), rtol=1e-3)


def test_rows_that_cannot_be_trained_on_are_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="leave nothing to learn to 15 steps of a draft"):
        start(tmp_path, loss=LossConfig(steps=15))
    with pytest.raises(ValueError, match="fewer than one batch"):
        start(tmp_path, batch_size=64)


def test_captured_layers_are_exported_in_the_order_they_are_read():
    head = init_head(TARGET, HEAD_CONFIG, "eagle3", capture=(2, 0, 1))
    assert head.capture == (0, 1, 2)
    assert init_head(TARGET, HEAD_CONFIG, "eagle3", capture=(1,)).front.fc.in_size == 32
    for capture, message in (((0, 9), "distinct, of 0 to 3"), ((1, 1), "distinct")):
        with pytest.raises(ValueError, match=message):
            init_head(TARGET, HEAD_CONFIG, "eagle3", capture=capture)
    with pytest.raises(ValueError, match="EAGLE-1 head reads the last hidden state"):
        init_head(TARGET, HEAD_CONFIG, "eagle1", capture=(0, 1))


def test_what_block_heads_read():
    assert default_block_capture(36) == (2, 10, 18, 26, 34)  # as DeepSpec's Qwen3-4B heads
    assert default_block_capture(16) == (2, 5, 8, 11, 14)
    assert default_block_capture(8) == (2, 3, 4, 5, 6)
    assert [default_block_capture(layers) for layers in (1, 2, 3)] == [(0,), (1,), (2,)]


def test_what_heads_have_beside_layers():
    """Of a head that is a quarter as wide as published ones, a quarter."""
    layers = tiny_config(hidden_size=1024)
    selector, convolution = extra_of("dflash2", layers, 8, CorrectionSizes())
    assert (selector, convolution) == (SelectorConfig(256, 16), ConvolutionConfig(2, 16))
    lattice, convolution = extra_of("lilicorr", layers, 16, CorrectionSizes(candidates=4))
    assert isinstance(lattice, LiLiCorrConfig) and convolution is None
    assert (lattice.hidden, lattice.factor, lattice.depths) == (256, 256, 15)
    assert (lattice.candidates, lattice.layers, lattice.units) == (4, 2, 512)
    assert extra_of("dspark", layers, 7, CorrectionSizes(rank=0)) == (None, None)
    with pytest.raises(ValueError, match="a dflash head takes no rank and no taps"):
        extra_of("dflash", layers, 8, CorrectionSizes(rank=3, taps=2))


def test_the_mask_is_a_token_that_no_text_has_before_a_draft():
    config = tiny_config(stop_token_ids=(7, 9))
    assert default_mask(config, 90) == 90
    assert default_mask(config, 96) == 7
    with pytest.raises(ValueError, match="give a mask token"):
        default_mask(tiny_config(stop_token_ids=()), 96)


@pytest.mark.parametrize(
    "method",
    [
        slow("eagle3"),
        slow("eagle1"),
        slow("mtp"),
        "dspark",
        *map(slow, ("dflash", "dflash2")),
        "lilicorr",
    ],
)
def test_an_exported_head_comes_back(method: str, tmp_path: Path):
    head, dtype = cast_weights(make_head(method), jnp.bfloat16), jnp.dtype(jnp.bfloat16)
    if method in BLOCKS:
        save_block_head(head, tmp_path, cast_weights(TARGET, jnp.bfloat16))
        loaded = load_block_head(tmp_path, CONFIG, dtype)
        assert loaded.method == method and loaded.capture == (2,)
    elif method == "mtp":
        save_mtp_head(head, tmp_path, to_hf_config(CONFIG))
        loaded = load_mtp_head(tmp_path, CONFIG, dtype)
    else:
        save_eagle_head(head, tmp_path, CONFIG)
        loaded = load_eagle_head(tmp_path, CONFIG, dtype)
    assert loaded.capture == head.capture
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(head), strict=True):
        np.testing.assert_array_equal(one, other)
    if isinstance(head, DraftHead):
        assert isinstance(loaded, DraftHead)
        trees = [draft_tree(each) for each in (head, loaded)]
        assert trees[0].tokens.shape == (2, 20) and (trees[0].depth == 4).any()
        assert arrays_equal(*trees)
    else:
        assert arrays_equal(loaded, head)


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
