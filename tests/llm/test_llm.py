"""LLM: completions, batches, streams, and errors."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, Completion, SamplingParams, SpeculationConfig, TextChunk, check_prompts
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import with_distinct_seeds
from jaxspec.engine.generation import ErrorKind
from jaxspec.evaluation.speedup import compare
from tests.helpers.checkpoints import tiny_llama
from tests.helpers.marks import slow
from tests.helpers.programs import traces
from tests.helpers.small_tokenizers import metaspace, save, sentencepiece_like


@pytest.fixture(scope="module")
def model(byte_model: Path) -> Path:
    return byte_model


@pytest.fixture(scope="module")
def llm(byte_llm: LLM) -> LLM:
    return byte_llm


@pytest.fixture(scope="module")
def plain(plain_byte_llm: LLM) -> LLM:
    return plain_byte_llm


GREEDY = SamplingParams(max_tokens=40)


def test_generate_gives_one_completion_a_prompt_in_order(llm):
    prompts = ["def f(x):", [1, 2, 3], "a"]
    sampling = dataclasses.replace(GREEDY, stop_token_ids=())  # the tokenizer's ends one of them
    completions = llm.generate(prompts, sampling)
    assert [c.prompt_token_ids for c in completions[1:2]] == [[1, 2, 3]]
    for prompt, completion in zip(prompts, completions, strict=True):
        [alone] = llm.generate([prompt], sampling)
        assert alone.token_ids == completion.token_ids
        assert len(completion.token_ids) == 40 and completion.finish_reason == "length"
        assert completion.text == llm.tokenizer.decode(completion.token_ids)


def test_generate_shows_a_progress_bar_when_asked(llm, capsys):
    quiet = llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().err == ""
    shown = llm.generate(["a", "b"], GREEDY, progress=True)
    printed = capsys.readouterr()
    assert "2/2" in printed.err and "tokens a round" in printed.err and printed.out == ""
    assert [one.text for one in shown] == [one.text for one in quiet]


def test_statistics_add_up(llm):
    [completion] = llm.generate(["abcabcabcabc"], GREEDY)
    tokens = completion.acceptance_length * completion.num_rounds
    assert round(tokens) == len(completion.token_ids) - 1
    assert sorted(completion.acceptance_by_depth, reverse=True) == completion.acceptance_by_depth


def streamed(events: Iterable[TextChunk | Completion], count: int) -> tuple[list[str], list[str]]:
    """The joined chunks of each request, and the texts of their completions."""
    texts, completions = [""] * count, []
    for event in events:
        if isinstance(event, TextChunk):
            texts[event.index] += event.text
        else:
            completions.append(event.text)
    return texts, completions


def test_a_stream_of_several_batches_does_not_mix_requests(llm):
    prompts = ["def f(x):", "hello", "class A:", "a", "import"]
    expected = [c.text for c in llm.generate(prompts, GREEDY)]
    assert len(set(expected)) == 5 and llm.engine.config.max_rows < 5
    texts, completions = streamed(llm.stream(prompts, GREEDY), 5)
    assert texts == expected == completions


@pytest.fixture(scope="module", params=["sentencepiece", slow("metaspace")])
def word_llm(request, tmp_path_factory) -> LLM:
    """A model of random weights with a tokenizer of each published kind.

    Random models generate invalid UTF-8, so the SentencePiece tokenizers have no byte tokens here:
    their decoder replaces whole characters before an invalid run of bytes.
    """
    tokenizers = {
        "sentencepiece": sentencepiece_like(120, byte_fallback=False),
        "metaspace": metaspace(120, byte_fallback=False),
    }
    tokenizer = tokenizers[request.param]
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "num_hidden_layers": 1}
    path = tiny_llama(tmp_path_factory.mktemp("words"), **sizes)
    save(tokenizer, path, eos_token="</s>")
    return LLM(path, "none", max_length=128, engine=EngineConfig(max_rows=8))


def test_a_text_follows_its_prompt_space_included(word_llm):
    prompts = ["the quick brown", "hello world", "café 😀", [65]] * 2
    sampling = with_distinct_seeds(
        SamplingParams(temperature=1.0, max_tokens=60, stop_token_ids=()), 8
    )
    completions = word_llm.generate(prompts, sampling)
    decode = word_llm.tokenizer.decode
    for completion in completions:
        before, new = completion.prompt_token_ids, completion.token_ids
        assert decode(before) + completion.text == decode(before + new)
    assert any(completion.text.startswith(" ") for completion in completions)
    texts, ends = streamed(word_llm.stream(prompts, sampling, rounds_per_call=1), 8)
    assert texts == ends
    assert texts == [completion.text for completion in completions]


CHAT = [{"role": "user", "content": "hello"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def test_a_chat_completes_the_templates_text(llm):
    [expected] = llm.generate(["user: hello\nassistant:"], GREEDY)
    [found] = llm.chat(CHAT, GREEDY, chat_template=TEMPLATE)
    assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
    both = llm.chat([CHAT, [*CHAT, *CHAT], CHAT], GREEDY, chat_template=TEMPLATE)
    assert [c.token_ids for c in both[::2]] == [expected.token_ids] * 2
    events = llm.stream_chat([CHAT, [*CHAT, *CHAT], CHAT], GREEDY, chat_template=TEMPLATE)
    assert streamed(events, 3)[0] == [c.text for c in both]


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(llm):
    [whole] = llm.generate(["def f(x):"], GREEDY)
    stop = whole.token_ids[10]
    first = whole.token_ids.index(stop)
    [cut] = llm.generate(["def f(x):"], dataclasses.replace(GREEDY, stop_token_ids=(stop,)))
    assert cut.token_ids == whole.token_ids[: first + 1]
    assert cut.finish_reason == "stop"
    assert cut.text == llm.tokenizer.decode(whole.token_ids[:first])


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


def test_streams_and_calls_share_the_engine(llm):
    expected = [c.token_ids for c in llm.generate(["hello", "def f(x):"], GREEDY)]
    stream = llm.stream(["hello"], GREEDY)
    first = next(stream)
    [found] = llm.generate(["def f(x):"], GREEDY)
    *chunks, completion = stream
    assert found.token_ids == expected[1] and completion.token_ids == expected[0]
    assert [token for c in [first, *chunks] for token in c.token_ids] == expected[0]


def test_a_stream_that_is_closed_cancels_its_requests(llm):
    stream = llm.stream(["hello"], GREEDY)
    next(stream)
    assert not llm.engine.is_idle
    stream.close()
    assert llm.engine.is_idle


def test_a_completion_of_broken_weights_says_so(plain):
    [whole] = plain.generate(["hello"], GREEDY)
    token = whole.token_ids[7]
    target = plain.params.target
    plain.use_target(target.replace(embed=target.embed.at[token].set(jnp.nan)))
    [completion] = plain.generate(["hello"], GREEDY)
    plain.use_target(target)
    cut = whole.token_ids.index(token) + 1
    assert completion.token_ids == whole.token_ids[:cut]
    assert completion.finish_reason == "error"
    assert completion.error is not None and "not finite" in completion.error
    assert completion.error_kind is ErrorKind.NOT_FINITE


def all_traces(engine: Any) -> tuple[int, int, int]:
    programs = engine.programs.prefill, engine.programs.decode, engine.programs.admit_rows
    first, second, third = (traces(program) for program in programs)
    return first, second, third


@pytest.mark.slow
def test_warmed_up_requests_trace_nothing(model):
    llm = LLM(model, "ngram", max_length=512, engine=EngineConfig(max_rows=4))
    short = SamplingParams(max_tokens=8)
    warm = dataclasses.replace(short, temperature=1.0)
    calls = []
    seconds = llm.warm_up(
        (1, 4), (20,), (short, warm), on_progress=lambda *done: calls.append(done)
    )
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)] and seconds > 0
    before = all_traces(llm.engine)
    for prompts in (["x" * 30], ["x" * 17, "abc", "ab"], ["y" * 25]):
        for sampling in (short, warm):
            completions = llm.generate(prompts, sampling)
            assert completions[0].timings.compile < 0.1 * seconds
    assert all_traces(llm.engine) == before


@pytest.mark.parametrize(
    ("batch_sizes", "prompt_tokens", "message"),
    [
        ((1,), (600,), "600 tokens"),
        ((0,), (20,), "batch_sizes must be"),
        ((1,), (2.5,), "prompt_tokens must be"),
        ((), (20,), "must not be empty"),
    ],
)
def test_sizes_that_cannot_be_warmed_up_are_clear_errors(llm, batch_sizes, prompt_tokens, message):
    with pytest.raises(ValueError, match=message):
        llm.warm_up(batch_sizes, prompt_tokens, GREEDY)
    llm.generate(["x"], GREEDY)  # the engine is free


def test_compare_gives_every_pair(llm, plain):
    result = compare(llm, plain, "abcabcabc", GREEDY, pairs=4)
    assert result.identical and result.first_difference is None and result.speedup > 0
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
        (["x" * 256], GREEDY, "raise max_length"),
        ([[999]], GREEDY, "token id outside"),
        ([], GREEDY, "no prompts"),
        ("text", GREEDY, "not one str"),
        (["x"], [GREEDY, GREEDY], "1 prompts but 2 sampling params"),
        (["x" * 2000], GREEDY, "at most 512 fit this model: shorten the prompt"),
        ([[1.0, 2.0]], GREEDY, "prompt 0 has token ids that are float"),
        ([[1], [True]], GREEDY, "prompt 1 has token ids that are bool"),
        ([[np.float32(1)]], GREEDY, "token ids that are float32"),
        ([[[1]]], GREEDY, "token ids that are list"),
        ([b"abc"], GREEDY, "prompt 0 must be text or a list of token ids, not bytes"),
        ([{1: 2}], GREEDY, "not dict"),
        ([1, 2], GREEDY, "prompt 0 must be text or a list of token ids, not int"),
        ([None], GREEDY, "not NoneType"),
        (jnp.array([1, 2]), GREEDY, "prompt 0 must be text or a list of token ids, not ArrayImpl"),
        (np.array([[1.0, 2.0]]), GREEDY, "prompt 0 has token ids that are float"),
        (["\ud800"], GREEDY, "prompt 0 is no valid Unicode"),
        (b"text", GREEDY, "not one bytes"),
        (None, GREEDY, "not one NoneType"),
        (["x"], None, "sampling must be SamplingParams"),
        (["x"], [None], "sampling must be SamplingParams"),
        (["x"], dataclasses.replace(GREEDY, stop_token_ids=(257,)), "stop_token_ids has 257"),
        (["x"], dataclasses.replace(GREEDY, stop_token_ids=(-1,)), "stop_token_ids has -1"),
    ],
)
def test_bad_prompts_are_clear_errors(llm, prompts, sampling, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, sampling)


def test_integers_of_arrays_are_token_ids(llm):
    [expected] = llm.generate([[1, 2]], GREEDY)
    for prompt in ((1, 2), np.array([1, 2]), [np.int64(1), 2], jnp.array([1, 2])):
        [found] = llm.generate([prompt], dataclasses.replace(GREEDY, max_tokens=np.int32(40)))
        assert found.token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("prompt", "max_length", "message"),
    [
        ("", None, "prompt 0 is empty: give it at least one character"),
        ("x" * 2**18, None, "262144 tokens; .* at most 512 fit this model: shorten"),
        ("x" * 2**18, 128, "at most 512 fit this model: shorten"),
        ("x" * 200, 128, "at most 128 fit: raise max_length, to at most 512"),
        ("x", 1000, "exceeds the model's 512"),
    ],
)
def test_bad_prompts_are_refused_without_weights(model, tmp_path, prompt, max_length, message):
    for path in model.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=message):
        check_prompts(tmp_path, [prompt], GREEDY, max_length)


def test_checked_prompts_come_back_as_tokens(model, llm):
    tokens = check_prompts(model, ["x" * 200, [1, 2]], GREEDY, 256)
    assert tokens == [llm.tokenizer("x" * 200)["input_ids"], [1, 2]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("min_p", 2.0),
        ("top_k", -1),
        ("max_tokens", 0),
        ("seed", -1),
        *[(field, float("nan")) for field in ("temperature", "top_p", "min_p")],
        *[(field, True) for field in ("temperature", "top_p", "min_p", "top_k", "seed")],
        *[(field, 1.5) for field in ("top_k", "seed", "max_tokens")],
        *[(field, 2.0) for field in ("top_k", "seed", "max_tokens")],
        *[(field, "1") for field in ("temperature", "top_p", "top_k", "seed", "max_tokens")],
        ("max_tokens", True),
        ("max_tokens", None),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("top_k", 2**31),
        ("stop_token_ids", 5),
        ("stop_token_ids", (1.0,)),
        ("stop_token_ids", "ab"),
    ],
)
def test_bad_sampling_values_are_clear_errors(field, value):
    with pytest.raises(ValueError, match=f"^{field} must be [^\n]*$"):
        dataclasses.replace(GREEDY, **{field: value})


def test_sizes_that_are_no_numbers_are_clear_errors(model):
    with pytest.raises(ValueError, match=r"max_length must be an integer, at least 1, got 1\.5"):
        LLM(model, "none", max_length=cast(Any, 1.5))


def test_rounds_per_call_must_be_an_integer(llm):
    with pytest.raises(ValueError, match="rounds_per_call must be an integer"):
        list(llm.stream(["x"], GREEDY, rounds_per_call=1.5))


def test_a_request_beyond_the_page_budget_is_an_error(model):
    tree = SpeculationConfig(num_nodes=60, max_depth=8, top_k=8)
    llm = LLM(model, "ngram", speculation=tree, max_length=128, page_size=16, num_pages=8)
    message = "request '1': .* need 10 pages of 16, there are 8: shorten"
    with pytest.raises(ValueError, match=message):
        llm.generate(["x", [7] * 50], GREEDY)


def test_a_drafter_of_another_vocabulary_is_an_error(model, tmp_path):
    other = tiny_llama(tmp_path / "other", vocab_size=320)
    with pytest.raises(ValueError, match="must share at least 50%, or draft as text:"):
        LLM(model, other)
