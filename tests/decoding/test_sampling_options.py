"""No sampling option is ignored under speculation: texts are those of a plain decoding loop over
transformers' logits processors, token for token, float32."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxspec.config.reasoning import ReasoningBudget
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.sampling import (
    Controls,
    Sampling,
    make_budgets,
    make_controls,
    make_sampling,
    with_budgets,
)
from jaxspec.decoding.state import EngineState
from jaxspec.functional import EngineParams
from tests.helpers.marks import slow
from tests.helpers.p_values import of_one_distribution
from tests.helpers.random_models import (
    CONFIG,
    admit_prompts,
    empty_state,
    jit_decode,
    make_params,
    random_prompts,
    random_target,
    read_prompts,
    texts,
)
from tests.helpers.sampling_reference import reference_texts

VOCAB = CONFIG.vocab_size
LENGTH, NEW_TOKENS = 56, 32
STOPS = (3, 17, 29, 41, 55, 68, 80, 94)
# Parts of what the model repeats.
LOOPS = ((37, 32, 6, 82), (2, 4, 0), (94, 5, 48), (94, 5, 90), (66, 66), (15, 95))
BAD_SEQUENCES = (*LOOPS, *((token, token) for token in range(96)))

TREES = {
    "chain": SpeculationConfig.chain(3),
    "tree": SpeculationConfig(num_nodes=10, max_depth=3, top_k=3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition_penalty below 1": {"repetition_penalty": 0.8},
    "presence_penalty": {"presence_penalty": 1.6},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "negative frequency_penalty": {"frequency_penalty": -1.5},
    "logit_bias": {"logit_bias": {5: 6.5, 11: -7.0, 60: 4.0}},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(4, 96, 5))},
    "bad_token_ids": {"bad_token_ids": tuple(range(0, 96, 4))},
    "bad_sequences": {"bad_sequences": BAD_SEQUENCES},
    "stop_token_ids": {"stop_token_ids": STOPS},
    "min_tokens": {"stop_token_ids": STOPS, "min_tokens": 24},
    "budget": {"reasoning_budget": ReasoningBudget(9, (7, 8, 9), inside=True)},
    "no budget left": {"reasoning_budget": ReasoningBudget(0, (7,), inside=True)},
    "budget longer than the text": {"reasoning_budget": ReasoningBudget(99, (7,), inside=True)},
    # The text begins to reason again and again.
    "budgets": {
        "reasoning_budget": ReasoningBudget(4, (7, 8), (50, 51), repeats=True),
        "allowed_token_ids": (50, 51, 7, 8),
        "logit_bias": {7: -1.5, 8: -1.5},
    },
    "all": {
        "reasoning_budget": ReasoningBudget(6, (40, 41), (5,)),
        "stop_token_ids": STOPS,
        "min_tokens": 12,
        "logit_bias": {5: 3.0, 3: -2.0, 50: 2.5},
        "bad_token_ids": (7, 8, 9),
        "allowed_token_ids": tuple(range(2, 90)),
        "bad_sequences": ((4, 50, 39), (94, 5), (15, 5)),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
}
TRUNCATION = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01}


def with_seeds(options: Sequence[dict[str, Any]]) -> list[SamplingParams]:
    return [
        SamplingParams(seed=70 + index, max_tokens=NEW_TOKENS, **own)
        for index, own in enumerate(options)
    ]


@functools.cache
def all_options() -> list[SamplingParams]:
    """Each option alone, greedily and sampled, all in one batch."""
    alone = list(OPTIONS.values())
    return with_seeds([*alone, *({**TRUNCATION, **own} for own in alone)])


def prompts_of(count: int) -> list[np.ndarray]:
    """The greedy and the sampled half of a batch have the same prompts."""
    return random_prompts(tuple(3 + 5 * (index % 4) for index in range(count)), seed=5)


@functools.cache
def expected() -> list[list[int]]:
    sampling = all_options()
    return reference_texts(random_target(), prompts_of(len(sampling)), sampling, LENGTH)


def sampling_of(sampling: Sequence[SamplingParams]) -> Sampling:
    names = ("temperature", "top_k", "top_p", "min_p")
    values = {name: np.array([getattr(p, name) for p in sampling]) for name in names}
    return make_sampling(len(sampling), seeds=np.array([p.seed for p in sampling]), **values)


def controls_of(sampling: Sequence[SamplingParams], prompt_lens: Sequence[int]) -> Controls:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
    controls = make_controls(
        len(sampling),
        VOCAB,
        bias=np.stack([params.dense_bias(VOCAB) for params in sampling]),
        bad_sequences=np.stack([params.bad_sequence_table() for params in sampling]),
        prompt_lens=np.array(prompt_lens),
        **{name: np.array([getattr(params, name) for params in sampling]) for name in names},
    )
    return with_budgets(controls, make_budgets([params.reasoning_budget for params in sampling]))


def stop_table(sampling: Sequence[SamplingParams]) -> np.ndarray:
    stops = [params.stops(()) for params in sampling]
    return np.array([[*ids, *[-1] * (len(STOPS) - len(ids))] for ids in stops], np.int32)


def started(
    params: EngineParams,
    prompts: Sequence[np.ndarray],
    sampling: Sequence[SamplingParams],
    prompt_lens: Sequence[int] | None = None,
) -> EngineState:
    """A state that has read the prompts, in chunks; ``prompt_lens`` tokens count as prompt."""
    lens = [len(prompt) for prompt in prompts] if prompt_lens is None else list(prompt_lens)
    limits = [min(LENGTH, size + p.max_tokens) for size, p in zip(lens, sampling, strict=True)]
    state = admit_prompts(
        params,
        empty_state(params, len(prompts), LENGTH, 4, max_stops=len(STOPS), controls=True),
        prompts,
        sampling=sampling_of(sampling),
        controls=controls_of(sampling, lens),
        max_lens=np.array(limits, np.int32),
        stop_token_ids=stop_table(sampling),
    )
    return read_prompts(params, state, 7, controls=True)


def generate(
    params: EngineParams,
    prompts: Sequence[np.ndarray],
    sampling: Sequence[SamplingParams],
    prompt_lens: Sequence[int] | None = None,
) -> tuple[list[list[int]], EngineState]:
    state = started(params, prompts, sampling, prompt_lens)
    state, _ = jit_decode(params, state, LENGTH, max_rounds=LENGTH, controls=True)
    assert not state.rows.active.any()
    return texts(state), state


CASES = [
    slow("ngram", "tree"),
    slow("eagle3", "tree"),
    slow("eagle3", "chain"),
    slow("ngram", "chain"),
    slow("eagle1", "tree"),
    slow("draft_model", "tree"),
    slow("draft_model", "chain"),
    slow("none", "chain"),
]


@pytest.mark.parametrize(("drafter", "tree"), CASES)
def test_texts_are_those_of_transformers_processors(drafter: str, tree: str):
    sampling = all_options()
    found, state = generate(make_params(drafter, TREES[tree]), prompts_of(len(sampling)), sampling)
    names = [f"{name}, {kind}" for kind in ("greedy", "sampled") for name in OPTIONS]
    for name, text, wanted in zip(names, found, expected(), strict=True):
        assert text == wanted, name
    counts = state.rows.stats
    least = 1.0 if drafter == "none" else 1.2
    assert counts.accepted.sum() >= least * counts.rounds.sum(), "hardly a draft was accepted"


@pytest.mark.slow
def test_every_option_changes_the_text():
    """Else the test above would not notice that it is ignored."""
    own = all_options()
    needed = {
        "min_tokens": OPTIONS["stop_token_ids"],
        "budgets": {n: value for n, value in OPTIONS["budgets"].items() if n != "reasoning_budget"},
    }
    without: list[dict[str, Any]] = [needed.get(name, {}) for name in OPTIONS]
    sampling = with_seeds([*without, *({**TRUNCATION, **options} for options in without)])
    plain = reference_texts(random_target(), prompts_of(len(own)), sampling, LENGTH)
    names = 2 * list(OPTIONS)
    changed = {name for name, a, b in zip(names, plain, expected(), strict=True) if a != b}
    assert changed == {*OPTIONS} - {"nothing", "budget longer than the text"}


def random_options(rng: np.random.Generator) -> dict[str, Any]:
    """Some of the options, with random values."""

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.permutation(VOCAB)[:count].tolist())

    options = {
        "repetition_penalty": float(rng.uniform(0.7, 2.0)),
        "presence_penalty": float(rng.uniform(-2, 2)),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "logit_bias": dict(zip(tokens(6), rng.uniform(-9, 9, 6).tolist(), strict=True)),
        "allowed_token_ids": tokens(int(rng.integers(60, VOCAB))),
        "bad_token_ids": tokens(int(rng.integers(1, 30))),
        "min_tokens": int(rng.integers(1, NEW_TOKENS)),
        "top_p": float(rng.uniform(0.8, 1)),
        "top_k": int(rng.integers(5, VOCAB)),
        "min_p": float(rng.uniform(0, 0.05)),
    }
    chosen = {name: value for name, value in options.items() if rng.random() < 0.4}
    temperature = float(rng.choice([0.0, 0.8]))
    return chosen | {"temperature": temperature, "stop_token_ids": tokens(len(STOPS))}


@pytest.mark.parametrize(
    ("drafter", "tree", "seed"),
    [
        slow("ngram", "tree", 0),
        *(slow("ngram", "tree", seed) for seed in range(1, 6)),
        *(slow("eagle3", "tree", seed) for seed in range(6)),
        *(slow("eagle3", "chain", seed) for seed in range(6)),
    ],
)
def test_random_mixtures_in_one_batch(drafter: str, tree: str, seed: int):
    rng = np.random.default_rng(seed)
    sampling = with_seeds([random_options(rng) for _ in all_options()])
    prompts = prompts_of(len(sampling))
    found, _ = generate(make_params(drafter, TREES[tree]), prompts, sampling)
    assert found == reference_texts(random_target(), prompts, sampling, LENGTH)


@pytest.mark.parametrize("drafter", [slow("ngram"), slow("eagle3")])
def test_a_row_that_reads_its_own_output_again_goes_on_as_before(drafter: str):
    """After a preemption generated tokens are read like a prompt, but do not count as one."""
    sampling, prompts = all_options(), prompts_of(len(all_options()))
    whole = expected()
    lens = [len(prompt) for prompt in prompts]
    cuts = [min(size + 9, len(text) - 1) for size, text in zip(lens, whole, strict=True)]
    again = [np.array(text[:cut], np.int32) for text, cut in zip(whole, cuts, strict=True)]
    assert generate(make_params(drafter, TREES["tree"]), again, sampling, lens)[0] == whole


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES)
def test_rejection_at_temperature_0_gives_the_same_texts(tree: str):
    rule = dataclasses.replace(TREES[tree], acceptance="rejection")
    sampling = all_options()
    found, state = generate(make_params("eagle3", rule), prompts_of(len(sampling)), sampling)
    half = len(OPTIONS)
    assert found[:half] == expected()[:half]
    assert state.rows.stats.accepted[:half].sum() > 1.2 * state.rows.stats.rounds[:half].sum()


@pytest.mark.slow
def test_rejection_draws_from_the_controlled_distribution():
    """The second and third token of many rows, against the matching rule's: a chi-square test."""
    rows, width = 3000, 3
    options: dict[str, Any] = {
        "temperature": 1.5,
        "allowed_token_ids": (3, 20, 41, 77),
        "frequency_penalty": 1.2,
        "repetition_penalty": 1.3,
    }
    [prompt] = random_prompts((4,), seed=3)

    def draws(rule: str, first_seed: int) -> np.ndarray:
        sampling = [
            SamplingParams(seed=first_seed + row, max_tokens=width + 3, **options)
            for row in range(rows)
        ]
        spec = dataclasses.replace(TREES["chain"], acceptance=rule)
        found, _ = generate(make_params("eagle3", spec), [prompt] * rows, sampling)
        new = np.array([text[len(prompt) : len(prompt) + width] for text in found])
        codes = np.searchsorted(options["allowed_token_ids"], new)
        return np.bincount(codes @ [16, 4, 1], minlength=64)

    counts = np.stack([draws("match", 0), draws("rejection", 10**6)])
    counts = counts[:, counts.sum(axis=0) >= 10]
    assert counts.shape[1] > 20
    assert of_one_distribution(counts) > 1e-3
