"""LLM: text in, text out, in batches, streamed, with clear errors."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from jaxspec import LLM, Completion, SamplingParams, SpeculationConfig, TextChunk
from jaxspec.comparison import compare
from tests.checkpoints import tiny_byte_llama, tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_byte_llama(tmp_path_factory.mktemp("llm"))


@pytest.fixture(scope="module")
def llm(model) -> LLM:
    return LLM(model, "ngram", max_length=128, max_batch=2)


GREEDY = SamplingParams(max_tokens=40)


def test_generate_gives_one_completion_a_prompt_in_order(llm):
    prompts = ["def f(x):", [1, 2, 3], "a"]
    completions = llm.generate(prompts, GREEDY)
    assert [c.prompt_token_ids for c in completions[1:2]] == [[1, 2, 3]]
    for prompt, completion in zip(prompts, completions, strict=True):
        [alone] = llm.generate([prompt], GREEDY)
        assert alone.token_ids == completion.token_ids
        assert len(completion.token_ids) == 40 and completion.finish_reason == "length"
        assert completion.text == llm.tokenizer.decode(completion.token_ids)


def test_statistics_add_up(llm):
    [completion] = llm.generate(["abcabcabcabc"], GREEDY)
    tokens = completion.acceptance_length * completion.num_rounds
    assert round(tokens) == len(completion.token_ids) - 1
    assert sorted(completion.acceptance_by_depth, reverse=True) == completion.acceptance_by_depth


def test_stream_gives_the_same_text_in_pieces(llm):
    prompts = ["def f(x):", "hello"]
    expected = [c.text for c in llm.generate(prompts, GREEDY)]
    texts, completions = ["", ""], []
    for event in llm.stream(prompts, GREEDY):
        if isinstance(event, TextChunk):
            texts[event.index] += event.text
        else:
            completions.append(event)
    assert texts == expected == [c.text for c in completions]


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(llm):
    [whole] = llm.generate(["def f(x):"], GREEDY)
    stop = whole.token_ids[10]
    first = whole.token_ids.index(stop)
    [cut] = llm.generate(["def f(x):"], dataclasses.replace(GREEDY, stop_token_ids=(stop,)))
    assert cut.token_ids == whole.token_ids[: first + 1]
    assert cut.finish_reason == "stop"
    assert cut.text == llm.tokenizer.decode(whole.token_ids[:first])


@pytest.mark.slow
def test_requests_of_a_batch_keep_their_own_sampling(llm):
    warm = SamplingParams(temperature=1.0, seed=3, max_tokens=30)
    prompts, params = ["hello", "hello"], [warm, dataclasses.replace(warm, seed=4)]
    one, other = llm.generate(prompts, params)
    assert one.token_ids != other.token_ids
    assert llm.generate(["hello"], params[1])[0].token_ids == other.token_ids


@pytest.mark.slow
def test_equal_prompts_without_seeds_give_different_texts_that_their_seeds_bring_back(llm):
    warm = SamplingParams(temperature=1.0, max_tokens=30)
    one, other = llm.generate(["hello", "hello"], warm)
    assert one.seed != other.seed and one.token_ids != other.token_ids
    for completion in (one, other):
        seeded = dataclasses.replace(warm, seed=completion.seed)
        [again] = llm.generate(["hello"], seeded)
        assert again.token_ids == completion.token_ids and again.seed == completion.seed


def test_a_seed_that_was_given_is_the_completions(llm):
    [completion] = llm.generate(["hello"], SamplingParams(temperature=1.0, seed=2**32 - 1))
    assert completion.seed == 2**32 - 1


def test_a_stream_that_is_closed_frees_the_engine(llm):
    [expected] = llm.generate(["hello"], GREEDY)
    stream = llm.stream(["hello"], GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="another batch"):
        llm.generate(["hello"], GREEDY)
    stream.close()
    [found] = llm.generate(["hello"], GREEDY)
    assert found.token_ids == expected.token_ids


def test_batches_of_a_call_and_later_calls_share_one_pool(llm, monkeypatch):
    llm.generate(["a", "b"], GREEDY)

    def no_pool(*sizes: int):
        raise AssertionError("a second pool")

    monkeypatch.setattr(llm.engine, "_new_pool", no_pool)
    assert len(llm.generate(["a", "b", "c"], GREEDY)) == 3, "two batches"
    llm.generate(["d"], GREEDY)


def test_a_completion_of_broken_weights_says_so(model):
    broken = LLM(model, "none", max_length=64)
    [whole] = broken.generate(["hello"], GREEDY)
    token = whole.token_ids[7]
    target = broken.params.target
    broken.use_target(target.replace(embed=target.embed.at[token].set(jnp.nan)))
    [completion] = broken.generate(["hello"], GREEDY)
    cut = whole.token_ids.index(token) + 1
    assert completion.token_ids == whole.token_ids[:cut]
    assert completion.finish_reason == "error"
    assert completion.error is not None and "not finite" in completion.error


def num_traces(engine: Any) -> tuple[int, int]:
    return engine.prefill._cache_size(), engine.decode._cache_size()


def test_ten_calls_of_one_bucket_trace_once(model):
    engine = (llm := LLM(model, "ngram", max_length=128, page_size=8)).engine
    before = num_traces(engine)
    for length in range(1, 11):
        llm.generate(["x" * length], GREEDY)
    after = num_traces(engine)
    assert after == (before[0] + 1, before[1] + 1)


def test_compare_finds_equal_tokens(llm, model):
    result = compare(llm, LLM(model, "none", max_length=128), "abcabcabc", GREEDY, pairs=1)
    assert result.identical and result.first_difference is None
    assert result.speedup > 0


def test_compare_gives_every_pair(llm, model):
    plain = LLM(model, "none", max_length=128)
    result = compare(llm, plain, "abcabcabc", GREEDY, pairs=4)
    assert len(result.speedups) == 4
    assert min(result.speedups) <= result.speedup <= max(result.speedups)
    with pytest.raises(ValueError, match="at least one pair"):
        compare(llm, plain, "abc", GREEDY, pairs=0)


def test_a_text_of_one_token_has_no_speed_to_compare(llm):
    with pytest.raises(ValueError, match="no decoding to compare"):
        compare(llm, llm, "abc", SamplingParams(max_tokens=1), pairs=1)


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ([""], GREEDY, "prompt 0 is empty"),
        ([[]], GREEDY, "prompt 0 is empty"),
        (["x" * 128], GREEDY, "raise max_length"),
        ([[999]], GREEDY, "token id outside"),
        ([], GREEDY, "no prompts"),
        ("text", GREEDY, "not one string"),
        (["x"], [GREEDY, GREEDY], "1 prompts but 2 sampling params"),
    ],
)
def test_bad_prompts_are_clear_errors(llm, prompts, sampling, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, sampling)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("min_p", 2.0),
        ("top_k", -1),
        ("max_tokens", 0),
        ("seed", -1),
    ],
)
def test_bad_sampling_values_are_clear_errors(llm, field, value):
    with pytest.raises(ValueError, match=field):
        llm.generate(["x"], dataclasses.replace(GREEDY, **{field: value}))


def test_max_length_beyond_the_model_is_an_error(model):
    with pytest.raises(ValueError, match="exceeds the model's"):
        LLM(model, "none", max_length=100_000)


def test_a_request_beyond_the_page_budget_is_an_error(model):
    tree = SpeculationConfig(num_nodes=60, max_depth=8, top_k=8)
    llm = LLM(model, "ngram", speculation=tree, max_length=128, page_size=16, num_pages=8)
    with pytest.raises(ValueError, match=r"request 1: .* need 10 pages of 16, the budget is num_p"):
        llm.generate(["x", [7] * 50], GREEDY)


@pytest.mark.slow
def test_a_batch_beyond_the_page_budget_is_split(llm, model):
    prompts = ["x", "def f(x):", "hello"]
    few = LLM(model, "ngram", max_length=128, max_batch=4, num_pages=8)
    found = few.generate(prompts, GREEDY)
    expected = llm.generate(prompts, GREEDY)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert len({id(c.timings) for c in found}) > 1, "all ran in one batch"


def test_a_drafter_of_another_vocabulary_is_an_error(model, tmp_path):
    other = tiny_llama(tmp_path / "other", vocab_size=320)
    with pytest.raises(ValueError, match="share a tokenizer"):
        LLM(model, other)


def test_completion_is_what_a_stream_ends_with(llm):
    *_, last = llm.stream(["x"], GREEDY)
    assert isinstance(last, Completion)
