"""Models with other tokenizers draft for published ones, through text."""

import dataclasses
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import BUILT_IN_MODEL, LLM, SamplingParams
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.llm.text_drafts.spelling import Spelling, continuation
from jaxspec.llm.tokenizer.text import TextTokenizer, open_tokenizer
from tests.helpers.engines import seal
from tests.helpers.tokenizer_texts import TEXTS
from tests.real.published import model_file

pytestmark = pytest.mark.real

CODE = "Write a Python function that reverses a list."
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.7, seed=3)
NAMES = pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
texts = st.one_of(st.text(max_size=12), st.sampled_from(TEXTS))


@functools.cache
def tokenizer(name: str) -> TextTokenizer:
    model_file(name)
    return open_tokenizer(name)


def check_drafts(target: str, draft: str, prompt: str | None, least: float) -> None:
    """A greedy and a sampled text are those of plain decoding, and come with fewer rounds:
    at least so many tokens in each. Without a prompt it is a chat."""
    model_file(target)
    chain, engine = SpeculationConfig.chain(3), EngineConfig(max_rows=2, rounds_per_call=16)
    llm = LLM(
        target, f"text:{draft}", dtype="float32", max_length=96, engine=engine, speculation=chain
    )
    seal(llm.engine, SAMPLED, prompt_tokens=64)
    chats = [[{"role": "user", "content": CODE}]] * 2
    prompts = llm.chat_prompts(chats) if prompt is None else llm.tokenize([prompt] * 2)
    sampling = [GREEDY, SAMPLED]
    plain = llm.generate(prompts, [dataclasses.replace(each, plain=True) for each in sampling])
    drafted = llm.generate(prompts, sampling)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert plain[0].token_ids != plain[1].token_ids
    assert {each.num_rounds for each in plain} == {GREEDY.max_tokens - 1}
    rounds = sum(each.num_rounds for each in drafted)
    assert 2 * (GREEDY.max_tokens - 1) / rounds > least


@pytest.mark.slow
def test_the_built_in_model_drafts_for_smollm2():
    """Its 4,096 words are of Python alone."""
    check_drafts("smollm2", str(BUILT_IN_MODEL), None, 1.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "draft", "prompt"),
    [
        ("smollm2", "gemma3-270m", None),
        ("gemma3-270m", "smollm2", "def reversed_list(values):\n"),
    ],
)
def test_published_models_draft_for_each_other(target: str, draft: str, prompt: str | None):
    model_file(draft)
    check_drafts(target, draft, prompt, 1.3)


@NAMES
@settings(max_examples=40, deadline=None)
@given(before=texts, text=texts)
def test_a_continuation_spells_the_text_after_the_tokens_before(name: str, before: str, text: str):
    found = tokenizer(name)
    ids = found.encode(before, special=False)
    more = continuation(found, before, text)
    if found.decode(found.encode(before + text, special=False)) == before + text and more:
        assert found.decode([*ids, *more]) == before + text


@NAMES
@settings(max_examples=40, deadline=None)
@given(old=texts, draft=texts, new=texts)
def test_another_text_is_spelt_from_a_boundary_that_both_share(
    name: str, old: str, draft: str, new: str
):
    found = tokenizer(name)
    ids, drafted = (found.encode(text, special=False) for text in (old, draft))
    before = Spelling.of(found, old, ids).extended(found, drafted)
    after = before.of_other(found, old + new, len(old))
    if found.decode(found.encode(old + new, special=False)) == old + new:
        assert found.decode(after.ids) == old + new
