"""Samples of prompts in one call are the texts of an engine; a loss has their log-probabilities."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from jaxspec import (
    Ending,
    Samples,
    SamplingParams,
    forward,
    group_seeds,
    make_mesh,
    make_sampling,
    right_padded,
    sample,
    split_padded,
    token_logprobs,
)
from jaxspec.config.recurrent import GatedDeltaConfig
from jaxspec.decoding.sampling import perturb, process_logits
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from tests.helpers.engines import CHAIN, ready_engine
from tests.helpers.layouts import on_mesh
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import (
    make_params,
    padded,
    random_prompts,
    random_target,
    tiny_config,
)

# Of three pages of 16 tokens the first prompt fills two, of which one is shared.
PROMPTS = random_prompts((32, 5), seed=2)
LENS = np.array([32, 5], np.int32)
NEW, SAMPLES, STOPS = 9, 3, (1, 7, 30, 51)
POLICY: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}
jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)


@jit
def of_epochs(params: EngineParams, key: Array) -> Samples:
    """Samples of two epochs, [2, B, S, ...] each."""

    def step(carry: None, epoch: Array) -> tuple[None, Samples]:
        seeds = group_seeds(key, [11, 4], SAMPLES, epoch=epoch)
        sampling = make_sampling(2 * SAMPLES, seeds=seeds.reshape(-1), **POLICY)
        prompts = padded(PROMPTS, 33)
        how: dict[str, Any] = {"num_samples": SAMPLES, "new_tokens": NEW, "stop_token_ids": STOPS}
        return carry, sample(params, prompts, LENS, sampling, **how)

    return lax.scan(step, None, jnp.arange(2))[1]


@functools.cache
def samples_of(drafter: str = "ngram", tensor: int = 1, data: int = 1) -> Samples:
    params = make_params(drafter, CHAIN)
    if (tensor, data) != (1, 1):
        params = on_mesh(params, make_mesh(tensor, data))
    return jax.device_get(of_epochs(params, jax.random.key(3)))


@pytest.mark.slow
def test_they_are_the_texts_of_an_engine():
    found, engine = samples_of(), ready_engine("none")
    assert found.tokens.shape == (2, 2, SAMPLES, 33 + NEW)
    for place in np.ndindex(2, 2, SAMPLES):
        prompt = PROMPTS[place[1]].tolist()
        params = SamplingParams(
            seed=int(found.seeds[place]), max_tokens=NEW, stop_token_ids=STOPS, **POLICY
        )
        [generation] = engine.add_all([prompt], [params])
        engine.finish([generation])
        length, text = int(found.lengths[place]), [*prompt, *generation.token_ids]
        assert found.tokens[place][:length].tolist() == text
        assert not found.tokens[place][length:].any()
        assert found.mask[place].nonzero()[0].tolist() == list(range(len(prompt), length))
        assert Ending(int(found.ending[place])).name.lower() == generation.finish_reason


@pytest.mark.parametrize(
    ("drafter", "tensor", "data"),
    [slow("none", 1, 1), slow("ngram", 2, 1), slow("eagle3", 1, 1), slow("eagle3", 1, 2)],
)
def test_drafters_and_meshes_change_nothing(drafter: str, tensor: int, data: int):
    found, expected = samples_of(drafter, tensor, data), samples_of()
    for name in ("tokens", "mask", "lengths", "seeds", "ending", "prompt_lens"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    for name in ("logprobs", "policy_logprobs"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-4)
    if drafter == "none":
        np.testing.assert_array_equal(found.rounds, found.mask.sum(-1) - 1)


@jit
def of_model(target: Decoder, tokens: Array, lengths: Array, seeds: Array) -> tuple[Array, ...]:
    """From texts [R, T] of the rows' seeds: the tokens that the noise of these draws at each place,
    and the log-probabilities of the texts, raw and under the policy: [R, T] each."""
    sampling = make_sampling(len(tokens), seeds=seeds, **POLICY)
    logits = process_logits(forward(target, tokens, lengths), sampling)
    after = 1 + jnp.arange(tokens.shape[1])
    noisy = perturb(logits, sampling, after[None], jnp.arange(logits.shape[-1]))
    drawn = jnp.roll(jnp.argmax(noisy, -1), 1, axis=1)
    scores = functools.partial(token_logprobs, target, tokens, lengths)
    return drawn, scores(), scores(**POLICY)


def check_whole_texts(samples: Samples, target: Decoder) -> None:
    """Their tokens and log-probabilities are those that of_model computes."""
    rows = [x.reshape(12, *x.shape[3:]) for x in (samples.tokens, samples.lengths, samples.seeds)]
    found = of_model(target, *rows)
    drawn, raw, of_policy = (np.asarray(x).reshape(samples.mask.shape) for x in found)
    assert samples.mask.sum() > 60
    np.testing.assert_array_equal(samples.tokens[samples.mask], drawn[samples.mask])
    expected = np.where(samples.mask, of_policy, 0)
    np.testing.assert_allclose(samples.policy_logprobs, expected, atol=1e-4)
    np.testing.assert_allclose(samples.logprobs, np.where(samples.mask, raw, 0), atol=1e-4)


# By default prompts are read under vmap in test_functional_checks.py.
@pytest.mark.slow
def test_samples_of_mapped_seeds_are_the_same():
    expected = samples_of()

    def of_seeds(params: EngineParams, seeds: Array) -> Samples:
        how: dict[str, Any] = {"num_samples": SAMPLES, "new_tokens": NEW, "stop_token_ids": STOPS}
        rules = make_sampling(2 * SAMPLES, seeds=seeds, **POLICY)
        return sample(params, padded(PROMPTS, 33), LENS, rules, **how)

    mapped = jit(jax.vmap(of_seeds, in_axes=(None, 0)))
    found = jax.device_get(mapped(make_params("ngram", CHAIN), expected.seeds.reshape(2, -1)))
    for name in ("tokens", "mask", "lengths", "seeds", "ending", "prompt_lens"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    for name in ("logprobs", "policy_logprobs"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-4)


def test_tokens_and_log_probabilities_are_those_of_whole_texts():
    samples = samples_of()
    check_whole_texts(samples, make_params("none", CHAIN).target)
    assert {*np.asarray(samples.ending).flat} == {Ending.STOP, Ending.LENGTH}
    assert samples.rounds.sum() < (samples.mask.sum(-1) - 1).sum(), "no draft was accepted"


@pytest.mark.slow
def test_prompts_of_recurrent_layers_are_read_for_each_sample():
    config = tiny_config(num_heads=8)
    first, second = config.layers
    delta = GatedDeltaConfig(num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=8, folded=8)
    layers = first, dataclasses.replace(second, mixer=delta)
    target = random_target(dataclasses.replace(config, layers=layers))
    params = make_params("ngram", CHAIN, target)
    check_whole_texts(jax.device_get(of_epochs(params, jax.random.key(3))), target)


@pytest.mark.parametrize("keep_stop", [True, False])
def test_padded_batches_and_back(keep_stop: bool):
    samples = jax.tree.map(lambda x: jnp.asarray(x[0]), samples_of())
    split = jit(split_padded, static_argnums=1, static_argnames="keep_stop")
    found = split(samples, 95, keep_stop=keep_stop)
    stopped = np.asarray(samples.ending).reshape(-1) == Ending.STOP
    num_new = (np.asarray(samples.lengths) - LENS[:, None]).reshape(-1) - (
        stopped & (not keep_stop)
    )
    for row, count in enumerate(num_new):
        place = divmod(row, SAMPLES)
        text, prompt = np.asarray(samples.tokens[place]), PROMPTS[place[0]]
        new = slice(len(prompt), len(prompt) + count)
        assert found.prompt_ids[row].tolist() == [95] * (33 - len(prompt)) + prompt.tolist()
        assert found.completion_ids[row].tolist() == text[new].tolist() + [95] * (NEW - count)
        assert found.completion_mask[row].tolist() == [True] * count + [False] * (NEW - count)
        for name in ("logprobs", "policy_logprobs"):
            values = np.zeros(NEW, np.float32)
            values[:count] = getattr(samples, name)[place][new]
            np.testing.assert_array_equal(getattr(found, name)[row], values)
    if keep_stop:
        both = [np.concatenate(pair, 1) for pair in (found[0::2][:2], found[1::2][:2])]
        tokens, lengths = jit(right_padded)(*both)
        np.testing.assert_array_equal(tokens, samples.tokens.reshape(tokens.shape))
        np.testing.assert_array_equal(lengths, samples.lengths.reshape(-1))


def test_further_samples_have_the_seeds_after_their_prompts():
    params = make_params("none", CHAIN)

    def seeds_of(sampling: Any) -> Any:
        shapes = jax.eval_shape(
            lambda: sample(params, padded(PROMPTS, 33), LENS, sampling, num_samples=2, new_tokens=1)
        )
        assert shapes.seeds.shape == (2, 2)
        return None

    seeds_of(make_sampling(2, seeds=np.array([4, 2**32 - 1])))
    seeds_of(make_sampling(4, seeds=np.arange(4)))
    with pytest.raises(ValueError, match=r"sampling has shape \[3\] for 2 prompts of 2 samples"):
        seeds_of(make_sampling(3))


def test_what_does_not_fit_is_told():
    params, prompts, one = make_params("none", CHAIN), padded(PROMPTS, 33), make_sampling(2)
    how: dict[str, Any] = {"new_tokens": 4}
    with pytest.raises(ValueError, match=r"prompts\[1, 3\] is 96: token ids are 0 to 95"):
        wrong = prompts.copy()
        wrong[1, 3] = 96
        sample(params, wrong, LENS, one, **how)
    with pytest.raises(ValueError, match=r"lengths\[1\] is 0: it must be 1 to 33"):
        sample(params, prompts, [32, 0], one, **how)
    with pytest.raises(ValueError, match="new_tokens must be an integer, at least 1"):
        sample(params, prompts, LENS, one, new_tokens=0)
    with pytest.raises(ValueError, match="num_samples must be an integer, at least 1"):
        sample(params, prompts, LENS, one, num_samples=0, **how)
    with pytest.raises(ValueError, match="pad_id must be a token id, got -1"):
        split_padded(samples_of(), -1)
    with pytest.raises(ValueError, match=r"must both be \[B, T\], got \[2, 33\] and \[2\]"):
        right_padded(prompts, LENS)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle3", "none"])
def test_drafts_change_nothing_but_the_rounds(drafter: str):
    expected = jax.tree.map(lambda x: x[0], samples_of())
    drafts, lens = np.zeros((2, SAMPLES, NEW), np.int32), np.zeros((2, SAMPLES), np.int32)
    for place in np.ndindex(2, SAMPLES):
        text = expected.tokens[place][expected.mask[place]]
        drafts[place][: len(text)], lens[place] = text, len(text)
    drafts[0, 1, 4] += 1  # of this sample a part is kept
    lens[1, 2] = 0  # and of this one nothing
    rules = make_sampling(2 * SAMPLES, seeds=expected.seeds.reshape(-1), **POLICY)

    @jit
    def again(params: EngineParams, drafts: Array, lens: Array) -> Samples:
        how: dict[str, Any] = {"num_samples": SAMPLES, "new_tokens": NEW, "stop_token_ids": STOPS}
        prompts = padded(PROMPTS, 33)
        return sample(params, prompts, LENS, rules, drafts=drafts, draft_lens=lens, **how)

    found = jax.device_get(again(make_params(drafter, CHAIN), drafts, lens))
    for name in ("tokens", "mask", "lengths", "seeds", "ending", "prompt_lens"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    for name in ("logprobs", "policy_logprobs"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-4)
    assert found.rounds[0, 0] == 0 and found.rounds[1, 2] >= expected.rounds[1, 2] > 0


def test_bad_drafts_are_refused():
    params, rules = make_params("none", CHAIN), make_sampling(2)
    cases: list[tuple[Any, Any, str]] = [
        ([[[1]], [[1]]], None, "give drafts and draft_lens together, or neither"),
        ([[[1]]], [[1]], "for 2 prompts of 1 samples"),
        ([[[1]], [[1]]], [[1], [2]], "is 2: drafts have 1"),
    ]
    for drafts, lens, message in cases:
        how: dict[str, Any] = {"new_tokens": 3, "drafts": drafts, "draft_lens": lens}
        call = functools.partial(sample, params, padded(PROMPTS, 33), LENS, rules, **how)
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(call)  # what is known before anything is computed
