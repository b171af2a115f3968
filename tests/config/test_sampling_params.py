"""SamplingParams: what is refused, and what an engine reads from it."""

import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import make_sampling
from jaxspec.config.requests import check_requests
from jaxspec.config.sampling_params import ParameterError, SamplingParams
from jaxspec.config.structured_output import StructuredOutput


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("min_tokens", -1, "an integer, at least 0"),
        ("min_tokens", 2.5, "an integer, at least 0"),
        ("min_tokens", 129, r"at most max_tokens \(128\), got 129"),
        ("ignore_eos", 1, "True or False"),
        ("stop", ("a", ""), "none of them empty"),
        ("stop", "", "none of them empty"),
        ("stop", (3,), "a tuple of strings"),
        ("stop", 3, "a tuple of strings"),
        ("repetition_penalty", 0, r"in \[0.01, 100\]"),
        ("repetition_penalty", float("nan"), r"in \[0.01, 100\]"),
        ("repetition_penalty", True, r"in \[0.01, 100\]"),
        ("presence_penalty", 2.1, r"in \[-2, 2\]"),
        ("frequency_penalty", -2.1, r"in \[-2, 2\]"),
        ("frequency_penalty", "1", r"in \[-2, 2\]"),
        ("logit_bias", {1: 101}, r"in \[-100, 100\]"),
        ("logit_bias", {1: float("nan")}, r"in \[-100, 100\]"),
        ("logit_bias", {"1": 1.0}, "a mapping from token ids"),
        ("logit_bias", [1, 2], "a mapping from token ids"),
        ("logit_bias", 3, "a mapping from token ids"),
        ("allowed_token_ids", (), "at least one token id"),
        ("allowed_token_ids", 3, "at least one token id"),
        ("allowed_token_ids", (1.5,), "at least one token id"),
        ("bad_token_ids", None, "a tuple of token ids"),
        ("bad_token_ids", ("a",), "a tuple of token ids"),
        ("bad_sequences", ((1,),), "a tuple of at most 128 tuples of 2 to 16 token ids"),
        ("bad_sequences", ((1, 2),) * 129, "a tuple of at most 128 tuples"),
        ("logprobs", 21, r"in \[0, 20\]"),
        ("logprobs", True, r"in \[0, 20\]"),
        ("prompt_logprobs", -1, r"in \[0, 20\]"),
        ("n", 0, "an integer, at least 1"),
        ("n", 2, "1 at temperature 0"),
        ("best_of", 0, "an integer, at least 1, or None"),
        ("best_of", 2, "1 at temperature 0"),
        ("priority", 1.5, "an integer"),
        ("priority", None, "an integer"),
        ("cache_salt", "", "a string that is not empty, or None"),
        ("cache_salt", 3, "a string that is not empty, or None"),
    ],
)
def test_bad_values_are_named(name: str, value: Any, rule: str):
    with pytest.raises(ValueError, match=f"^{name} must be .*{rule}") as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 3, "best_of": 2, "temperature": 1.0}, r"best_of must be at least n \(3\), got 2"),
        (
            {"allowed_token_ids": (1, 2), "bad_token_ids": (2, 1, 0)},
            "bad_token_ids has all of allowed_token_ids",
        ),
        (
            {"allowed_token_ids": (1,), "stop_token_ids": (1, 2), "min_tokens": 1},
            "min_tokens needs a token in allowed_token_ids",
        ),
    ],
)
def test_contradictions_are_errors(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_lists_and_mappings_are_kept_as_tuples():
    params = SamplingParams(
        logit_bias={7: 1.0, 2: -3},
        allowed_token_ids=[1, 2],  # pyright: ignore[reportArgumentType]
        bad_token_ids=[0],  # pyright: ignore[reportArgumentType]
        bad_sequences=[[1, 2]],  # pyright: ignore[reportArgumentType]
        stop_token_ids=[5],  # pyright: ignore[reportArgumentType]
        stop="end",  # pyright: ignore[reportArgumentType]
    )
    same = SamplingParams(
        logit_bias=MappingProxyType({2: -3, 7: 1.0}),
        allowed_token_ids=(1, 2),
        bad_token_ids=(0,),
        bad_sequences=((1, 2),),
        stop_token_ids=(5,),
        stop=("end",),
    )
    assert params == same and hash(params) == hash(same)
    assert params.logit_bias == ((2, -3), (7, 1.0)) and params.stop == ("end",)
    assert dataclasses.replace(params, seed=3).logit_bias == params.logit_bias


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": -1},
        {"frequency_penalty": 0.5},
        {"logit_bias": {1: 2}},
        {"allowed_token_ids": (1,)},
        {"bad_token_ids": (1,)},
        {"bad_sequences": ((1, 2),)},
        {"min_tokens": 1},
    ],
)
def test_these_need_controls(options: dict[str, Any]):
    assert SamplingParams(**options).needs_controls


def test_others_need_no_controls():
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 3, "logprobs": 5, "n": 2, "stop": "x"}
    assert not SamplingParams(**options, ignore_eos=True, priority=1).needs_controls
    assert SamplingParams(temperature=1.0, n=2, best_of=5).num_samples == 5


def test_structured_output_ends_with_the_models_stop_tokens():
    structured = StructuredOutput(choice=("a",))
    assert SamplingParams(structured=structured).stops((1, 2)) == (1, 2)
    assert SamplingParams(structured=structured, stop_token_ids=(3, 1)).stops((1, 2)) == (3, 1, 2)
    for name, value in (("ignore_eos", True), ("min_tokens", 2)):
        options: dict[str, Any] = {name: value}
        with pytest.raises(ValueError, match=f"{name} cannot be with structured"):
            SamplingParams(structured=structured, **options)
    text: Any = "[a-z]"
    with pytest.raises(ValueError, match=r"structured must be a structured\.StructuredOutput"):
        SamplingParams(structured=text)


@pytest.mark.parametrize("scalar", [np.uint32, np.int64, np.array, jnp.uint32])
def test_a_seed_may_be_an_array_without_dimensions(scalar: Callable[[int], Any]):
    params = SamplingParams(seed=scalar(7))
    assert params == SamplingParams(seed=7) and type(params.seed) is int
    with pytest.raises(ValueError, match=r"seed must be an integer in \[0, 2\*\*32\), or None"):
        SamplingParams(seed=cast(Any, np.asarray(scalar(7)).astype(float)))


def test_a_key_stands_for_the_seed_that_make_sampling_draws():
    keys: Any = jax.random.split(jax.random.key(7), 2)
    seeds = make_sampling(2, seeds=keys).seeds.tolist()
    assert [SamplingParams(seed=key).seed for key in keys] == seeds
    assert [hash(SamplingParams(seed=key)) for key in keys] == [
        hash(SamplingParams(seed=seed)) for seed in seeds
    ]


def test_other_keys_and_traced_seeds_are_refused():
    for seeds in (jax.random.PRNGKey(7), jax.random.split(jax.random.key(7), 3), np.arange(1)):
        with pytest.raises(ParameterError, match=r"seed must be one seed, got shape .* PRNGKey"):
            SamplingParams(seed=cast(Any, seeds))
    with pytest.raises(ParameterError, match="only make_sampling takes traced seeds"):
        jax.make_jaxpr(lambda seed: SamplingParams(seed=seed).seed)(7)


def test_samples_have_seeds_of_their_own():
    params = SamplingParams(temperature=1.0, n=2, best_of=3)
    samples = params.samples(7)
    assert [one.seed for one in samples] == [7, 8, 9]
    assert all((one.n, one.best_of, one.logprobs) == (1, None, 0) for one in samples)
    assert SamplingParams().samples(7) == [SamplingParams()]


def test_stop_tokens():
    assert SamplingParams().stops((1, 2)) == (1, 2)
    assert SamplingParams(ignore_eos=True).stops((1, 2)) == ()
    assert SamplingParams(ignore_eos=True, stop_token_ids=(3,)).stops((1, 2)) == (3,)
    assert SamplingParams(stop_token_ids=()).stops((1, 2)) == ()


def test_the_bias_of_every_token():
    params = SamplingParams(
        logit_bias={0: 2.5, 1: -100, 4: 1}, bad_token_ids=(1,), allowed_token_ids=(0, 1, 2)
    )
    bias = params.dense_bias(5)
    assert bias.dtype == np.float32
    assert bias.tolist() == [2.5, -np.inf, 0.0, -np.inf, -np.inf]
    assert not SamplingParams().dense_bias(5).any()


def check(**options: Any) -> None:
    check_requests([[1, 2]], [SamplingParams(**options)], 10, 64, 64)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", (10,)),
        ("allowed_token_ids", (1, -1)),
        ("bad_token_ids", (10,)),
        ("bad_sequences", ((1, 10),)),
        ("logit_bias", {10: 1.0}),
    ],
)
def test_tokens_outside_the_vocabulary_are_named(name: str, value: Any):
    with pytest.raises(ValueError, match=rf"{name} has (10|-1), outside 0\.\.9"):
        check(**{name: value})


def test_not_every_token_can_be_bad():
    with pytest.raises(ValueError, match="bad_token_ids must leave a token"):
        check(bad_token_ids=tuple(range(10)))
