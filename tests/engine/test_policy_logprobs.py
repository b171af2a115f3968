"""Log-probabilities with which an engine sampled its tokens are those that a loss computes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxspec import SamplingParams, token_logprobs
from jaxspec.config.reasoning import ReasoningBudget
from jaxspec.config.sampling_params import ParameterError
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.generation import Generation
from jaxspec.llm.completion import GrowingText
from jaxspec.llm.tokenizer.detokenizer import Detokenizer
from tests.helpers.engines import engine_of_options
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import random_prompts, random_target

POLICY = SamplingParams(
    temperature=0.8, top_k=30, top_p=0.9, seed=5, max_tokens=20, logprobs=0, policy_logprobs=True
)
PROMPTS = [prompt.tolist() for prompt in random_prompts((9, 4, 6), seed=2)]
RULES = ("temperature", "top_k", "top_p", "min_p")
scores = jax.jit(token_logprobs, compiler_options=FAST_COMPILE)


@functools.cache
def generations() -> list[Generation]:
    """One with a policy, one that is greedy, and one that does not ask."""
    engine = engine_of_options()
    greedy = dataclasses.replace(POLICY, temperature=0.0, logprobs=None)
    silent = dataclasses.replace(POLICY, policy_logprobs=False, presence_penalty=0.5)
    found = engine.add_all(PROMPTS, [POLICY, greedy, silent])
    engine.finish(found)
    return found


def of_loss(rules: list[SamplingParams]) -> np.ndarray:
    """What token_logprobs gives for the texts, under these policies: [3, 32]."""
    texts = [[*one.prompt, *one.token_ids] for one in generations()]
    tokens = np.array([[*text, *[0] * (32 - len(text))] for text in texts], np.int32)
    policy = {name: np.array([getattr(one, name) for one in rules]) for name in RULES}
    return np.asarray(
        scores(random_target(), tokens, np.array([len(text) for text in texts]), **policy)
    )


def test_they_are_those_of_the_policy():
    sampled, greedy, silent = generations()
    assert sampled.statistics.rounds < len(sampled.token_ids) - 1, "no draft was accepted"
    of_policy = of_loss([one.sampling for one in generations()])
    raw = of_loss([SamplingParams(temperature=1.0)] * 3)
    new = slice(len(sampled.prompt), len(sampled.prompt) + len(sampled.token_ids))
    np.testing.assert_allclose(sampled.policy_logprobs or [], of_policy[0, new], atol=1e-4)
    own = [entry.logprob for entry in sampled.logprobs or ()]
    np.testing.assert_allclose(own, raw[0, new], atol=1e-4)
    assert np.abs(of_policy[0, new] - raw[0, new]).max() > 0.01
    assert greedy.policy_logprobs == [0.0] * len(greedy.token_ids)
    assert silent.policy_logprobs is None


def test_they_end_with_the_text():
    sampled, *_ = generations()
    letters = ["abcdefghij"[token % 10] for token in sampled.token_ids]
    sampling = dataclasses.replace(sampled.sampling, stop=("".join(letters[5:9]),))
    stopping = dataclasses.replace(sampled, sampling=sampling)
    known = stopping.policy_logprobs = sampled.policy_logprobs or []
    text = GrowingText(
        stopping,
        Detokenizer(lambda ids: "".join("abcdefghij"[token % 10] for token in ids)),
        (),
    )
    text.update()
    completion = text.completion()
    assert 0 < len(completion.token_ids) < len(known)
    assert completion.policy_logprobs == known[: len(completion.token_ids)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {3: 1.0}),
        ("allowed_token_ids", (1, 2)),
        ("bad_token_ids", (1,)),
        ("bad_sequences", ((1, 2),)),
        ("min_tokens", 2),
        ("repetition_penalty", 1.1),
        ("frequency_penalty", 0.1),
        ("presence_penalty", 0.1),
        ("reasoning_budget", ReasoningBudget(3, (1,), inside=True)),
        ("structured", StructuredOutput(json_object=True)),
    ],
)
def test_what_else_changes_logits_is_refused(name: str, value: object):
    with pytest.raises(ParameterError, match=f"policy_logprobs cannot be with {name}"):
        dataclasses.replace(POLICY, **{name: value})
