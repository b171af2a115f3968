"""The engine: its programs, its pool, and batches that are interrupted, resumed or aborted."""

import functools
import itertools
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec import functional
from jaxspec.batch_run import Run
from jaxspec.config.cache import CacheConfig
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.engine import Engine
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.sampling import make_sampling
from jaxspec.scheduling import batching
from jaxspec.scheduling.requests import SamplingParams
from jaxspec.speculation.drafters import DraftModelDrafter
from tests.programs import new_jit, traces
from tests.random_models import make_params, noisy, random_prompts, random_target, tiny_config

CHAIN = SpeculationConfig.chain(2)
PROMPTS = [prompt.tolist() for prompt in random_prompts((5, 9, 2), seed=6)]
GREEDY = SamplingParams(max_tokens=20)


def new_engine(**options: Any) -> Engine:
    cache = CacheConfig(page_size=8, max_length=64)
    return Engine(make_params("ngram", CHAIN), cache, rounds_per_call=4, max_rows=4, **options)


@functools.cache
def engine() -> Engine:
    return new_engine()


def collect(run: Run, texts: list[list[int]] | None = None) -> list[list[int]]:
    """New tokens of each request, added to ``texts``."""
    texts = [[] for _ in run.plan.prompts] if texts is None else texts
    for progress in run:
        for text, new in zip(texts, progress.new_tokens, strict=True):
            text += new
    return texts


def generate(**options: Any) -> list[list[int]]:
    return collect(Run(engine(), PROMPTS, [GREEDY] * 3, **options))


@functools.cache
def expected() -> list[list[int]]:
    return generate()


def test_two_traces_serve_all_sampling_parameters():
    own, rng = new_engine(), np.random.default_rng(0)
    before = traces(own.decode), traces(own.prefill)
    for index in range(20):
        sampling = [
            SamplingParams(
                temperature=float(rng.choice([0.0, 0.5, 1.0])) if index % 4 else 0.0,
                top_k=int(rng.choice([0, 1, 40])),
                top_p=float(rng.choice([0.3, 0.9, 1.0])),
                min_p=float(rng.choice([0.0, 0.1])),
                seed=int(rng.integers(2**32)) if rng.random() < 0.7 else None,
                max_tokens=int(rng.integers(1, 9)),
                stop_token_ids=tuple(rng.integers(96, size=rng.integers(3)).tolist()),
            )
            for _ in range(4)
        ]
        collect(Run(own, [[index + 1]] * 4, sampling))
    assert traces(own.decode) - before[0] <= 2, "one for greedy batches, one for all others"
    assert traces(own.prefill) - before[1] <= 2


def test_a_run_that_was_left_goes_on_where_it_was():
    run, texts = Run(engine(), PROMPTS, [GREEDY] * 3), [[], [], []]
    for progress in run:
        for text, new in zip(texts, progress.new_tokens, strict=True):
            text += new
        if len(texts[0]) > 5:
            break
    assert not all(len(text) == 20 for text in texts), "it ended before it was left"
    assert collect(run, texts) == expected()


def test_a_run_that_has_ended_gives_nothing_more():
    run = Run(engine(), PROMPTS, [GREEDY] * 3)
    assert collect(run) == expected()
    assert list(run) == [] and list(run) == []
    run.abort()  # does nothing
    assert generate() == expected()


def test_one_batch_runs_at_a_time():
    run = Run(engine(), PROMPTS, [GREEDY] * 3)
    next(run)
    with pytest.raises(RuntimeError, match="another batch is running"):
        Run(engine(), PROMPTS, [GREEDY] * 3)
    assert len(collect(run)[0]) == 19, "the first batch was not disturbed"


def test_an_aborted_run_frees_the_engine():
    for steps in (0, 1, 2):
        run = Run(engine(), PROMPTS, [GREEDY] * 3)
        for _ in range(steps):
            next(run)
        run.abort()
        assert list(run) == []
        run.abort()
        assert generate() == expected()


def test_an_error_frees_the_engine(monkeypatch: pytest.MonkeyPatch):
    run = Run(engine(), PROMPTS, [GREEDY] * 3)
    next(run)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def interrupted(*args: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(engine(), "run_rounds", interrupted)
        next(run)
    assert generate() == expected()


def test_all_batches_share_one_pool(monkeypatch: pytest.MonkeyPatch):
    own, made = new_engine(), []
    new_pool = own._new_pool
    monkeypatch.setattr(own, "_new_pool", lambda *sizes: made.append(new_pool(*sizes)) or made[-1])
    shapes = []
    for prompts in (PROMPTS, PROMPTS[:1], [*PROMPTS, [7]]):
        collect(Run(own, prompts, [GREEDY] * len(prompts)))
        shapes.append([leaf.shape for leaf in jax.tree.leaves(own._pool)])
    assert len(made) == 1
    assert shapes[0] == shapes[1] == shapes[2] == [leaf.shape for leaf in jax.tree.leaves(made[0])]


def test_a_larger_batch_takes_a_larger_pool_and_no_second_one(monkeypatch: pytest.MonkeyPatch):
    own, sizes = new_engine(), []
    assert collect(Run(own, PROMPTS[:1], [GREEDY])) == expected()[:1]
    assert own._pool is not None
    old = weakref.ref(jax.tree.leaves(own._pool)[0])
    new_pool = own._new_pool

    def record(num_pages: int, num_rows: int) -> Any:
        assert old() is None, "two pools at once"
        sizes.append(num_rows)
        return new_pool(num_pages, num_rows)

    monkeypatch.setattr(own, "_new_pool", record)
    assert collect(Run(own, PROMPTS, [GREEDY] * 3)) == expected()
    assert sizes == [4]


def test_a_long_prompt_is_read_without_the_rows_that_are_done(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batching, "LARGEST_CHUNK", 16)
    long = random_prompts((40,), seed=8)[0].tolist()
    own, calls = new_engine(), []
    read_chunk = own.read_chunk

    def record(state: Any, plan: Any, rows: Any, most: int | None = None) -> Any:
        if most is None:
            calls.append(None if rows is None else rows.tolist())
        return read_chunk(state, plan, rows, most)

    monkeypatch.setattr(own, "read_chunk", record)
    prompts = [*PROMPTS, long]
    texts = collect(Run(own, prompts, [GREEDY] * 4))
    assert calls == [None, [3], [3]]
    assert texts[:3] == expected()
    assert texts[3:] == collect(Run(own, [long], [GREEDY]))


def test_the_first_tokens_come_before_the_rounds_are_compiled():
    own = Engine(make_params("ngram", CHAIN), CacheConfig(8, 64), max_rows=4, rounds_per_call=3)
    before = traces(own.decode)
    run = Run(own, PROMPTS, [GREEDY] * 3)
    texts = [list(new) for new in next(run).new_tokens]
    assert all(texts) and traces(own.decode) == before
    assert collect(run, texts) == expected()
    assert traces(own.decode) == before + 1


def test_the_shape_of_a_run_may_change_between_its_steps():
    run = Run(engine(), PROMPTS, [GREEDY] * 3, rounds_per_call=2)
    texts: list[list[int]] = [[], [], []]
    shapes = itertools.cycle([PLAIN, None, TreeShape(2, 1)])
    for progress in run:
        for text, new in zip(texts, progress.new_tokens, strict=True):
            text += new
        run.shape = next(shapes)
    assert texts == expected()


def test_a_run_that_nobody_holds_frees_the_engine():
    run = Run(engine(), PROMPTS, [GREEDY] * 3)
    next(run)
    del run
    assert generate() == expected()


@pytest.mark.parametrize("options", [{"shape": PLAIN}, {"rounds_per_call": 1}], ids=str)
def test_how_a_run_is_cut_into_calls_does_not_change_the_text(options: dict[str, Any]):
    assert generate(**options) == expected()


def test_weights_are_not_swapped_under_a_batch():
    run = Run(engine(), PROMPTS, [GREEDY] * 3)
    next(run)
    with pytest.raises(RuntimeError, match="another batch is running"):
        engine().use_target(engine().params.target)
    run.abort()
    engine().use_target(engine().params.target)
    assert generate() == expected()


def test_a_pool_that_an_interrupted_call_took_is_made_anew():
    run = Run(engine(), PROMPTS, [GREEDY] * 3)
    next(run)
    assert run._state is not None
    for leaf in jax.tree.leaves(run._state.pool):
        leaf.delete()
    run.abort()
    assert generate() == expected()


def test_a_run_of_no_rounds_a_call_is_an_error():
    with pytest.raises(ValueError, match="rounds_per_call must be an integer, at least 1"):
        generate(rounds_per_call=0)
    assert generate() == expected()


def test_more_requests_than_rows_are_an_error():
    with pytest.raises(ValueError, match="this engine has 4 rows"):
        Run(engine(), [[1]] * 5, [GREEDY] * 5)
    assert generate() == expected()


# Rejection sampling through the engine: the target's own distribution, whatever is drafted.

VOCAB, COUNT, NEW = 6, 6000, 3
MODEL = tiny_config(vocab_size=VOCAB, num_layers=1)


@functools.cache
def rejection_triples() -> tuple[np.ndarray, float]:
    """The first three new tokens of many rows of one prompt, and the mean depth accepted."""
    target = random_target(MODEL, sharpness=1.0)
    params = functional.EngineParams(
        target=target,
        drafter=DraftModelDrafter(model=noisy(target, 0.7)),
        speculation=SpeculationConfig.chain(2, "rejection"),
    )
    state = functional.init_state(params, COUNT, 2 + NEW, page_size=8)
    prompts = np.tile(np.array([1, 4], np.int32), (COUNT, 1))
    state = new_jit(functional.admit)(
        params, state, np.arange(COUNT), prompts, np.full(COUNT, 2),
        sampling=make_sampling(COUNT, temperature=1.0),
    )  # fmt: skip
    state, _ = new_jit(functional.prefill, "width")(params, state, width=2)
    state, _ = new_jit(functional.decode, "max_rounds")(params, state, NEW, max_rounds=NEW)
    stats_ = state.rows.stats
    depth = float(stats_.accepted[:, 1:].sum() / stats_.rounds.sum())
    return np.asarray(state.rows.tokens)[:, 2:], depth


def p_value(sharpness: float) -> float:
    """Of a chi-square test of the triples against a target of some sharpness."""
    target = random_target(MODEL, sharpness=sharpness)
    pairs = np.stack(np.meshgrid(range(VOCAB), range(VOCAB), indexing="ij"), axis=-1).reshape(-1, 2)
    sequences = np.concatenate([np.tile([1, 4], (len(pairs), 1)), pairs], axis=1)
    positions = jnp.broadcast_to(jnp.arange(4), sequences.shape)
    normed, _, _ = decoder.run(
        target, jnp.asarray(sequences), positions, target.no_states(), dense_causal_attend
    )
    after = np.asarray(jax.nn.softmax(decoder.logits(target, normed)), np.float64)
    first, second = pairs.T
    rows = np.arange(len(pairs))
    joint = after[rows, 1, first] * after[rows, 2, second]
    probs = (joint[:, None] * after[:, 3]).ravel()
    triples, _ = rejection_triples()
    found = np.bincount(triples @ np.array([VOCAB**2, VOCAB, 1]), minlength=VOCAB**3)
    wanted = COUNT * probs
    rare = wanted < 8
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    found = np.append(found[~rare], found[rare].sum())
    return stats.chisquare(found, wanted, sum_check=False).pvalue


@pytest.mark.slow
def test_rejection_has_the_targets_distribution():
    assert 0.2 < rejection_triples()[1] < 1.9, "drafts must be accepted and refused"
    assert p_value(1.0) > 1e-3


@pytest.mark.slow
def test_another_distribution_is_noticed():
    assert p_value(1.2) < 1e-9
