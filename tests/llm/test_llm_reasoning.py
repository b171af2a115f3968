"""Structured output after free reasoning, or calls after free text: equal to plain decoding, and to
masked rows."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from jaxspec import LLM, ReasoningBudget, SamplingParams
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.config.structured_output import Reasoning, StructuredOutput
from jaxspec.engine.warm_up.compile_by_running import compile_by_running
from tests.helpers.engines import FULL
from tests.helpers.random_models import save_random_target
from tests.helpers.small_tokenizers import byte_level, with_markup

TOKENIZER = with_markup(byte_level())
TOKENIZER.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
IDS = TOKENIZER.get_vocab()
END, BEGIN, CLOSE, CALL = (IDS[t] for t in ("<|im_end|>", "<think>", "</think>", "<tool_call>"))
SPECIAL = (END, IDS["<|im_start|>"], IDS["<end>"], IDS["<begin>"])
# What a grammar takes as reasoning, too, so that rows which it masks all along have the same texts:
# no special token, and no part of a character.
TEXTS = tuple(i for i in IDS.values() if TOKENIZER.decode([i]).isascii() and i not in SPECIAL)
INSIDE = Reasoning("<think>", "</think>", inside=True, end_id=CLOSE)
OUTSIDE = Reasoning("<think>", "</think>", begin_ids=((BEGIN,), (IDS["Ċ"], BEGIN)), end_id=CLOSE)
CALLS = """
start: trigger "x"
spelled[lazy]: TEXT "<tool_call>"
trigger: spelled
TEXT: /(.|\\n)*/
"""
LIST: dict[str, Any] = {"type": "array", "items": {"enum": [1, 22, "</think>"]}, "maxItems": 4}


def request(
    reasoning: Reasoning, budget: int | None, bias: dict[int, float], seed: int
) -> SamplingParams:
    spent = None
    if budget is not None:
        spent = ReasoningBudget(budget, (CLOSE,), (BEGIN,), inside=reasoning.inside)
    return SamplingParams(
        temperature=0.8 * (seed % 2),
        seed=seed,
        max_tokens=60,
        reasoning_budget=spent,
        logit_bias=bias,
        allowed_token_ids=(*TEXTS, END),
        structured=StructuredOutput(json_schema=LIST, reasoning=reasoning),
    )


OPTIONAL = dataclasses.replace(INSIDE, optional=True, end_id=None)
SAMPLING = [
    request(INSIDE, 0, {}, 0),
    request(INSIDE, 9, {}, 1),
    request(INSIDE, 20, {CLOSE: 2}, 3),
    request(INSIDE, None, {CLOSE: -100}, 5),  # it never ends
    request(OUTSIDE, 9, {BEGIN: 100}, 2),
    request(OUTSIDE, 14, {BEGIN: 100}, 7),
    request(OUTSIDE, 7, {IDS["Ċ"]: 80, IDS["\n\n"]: -100, BEGIN: 50}, 9),
    request(OUTSIDE, 9, {BEGIN: -100, IDS["Ċ"]: -100, IDS["\n\n"]: -100}, 11),  # it never begins
    dataclasses.replace(
        request(OPTIONAL, None, {CALL: 3, CLOSE: -100}, 13),
        structured=StructuredOutput(grammar=CALLS, reasoning=OPTIONAL, trigger=CALL),
    ),
    dataclasses.replace(request(INSIDE, 9, {}, 15), max_tokens=10),  # its last token ends it
    dataclasses.replace(  # a call in the midst of text, without reasoning
        request(INSIDE, None, {CALL: 3, CLOSE: -100}, 17),
        structured=StructuredOutput(grammar=CALLS, trigger=CALL),
    ),
]
PROMPTS: list[Any] = [[5, 60 + i % 4, 70, 80, 90] for i in range(len(SAMPLING))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reasoning")
    save_random_target(path, vocab_size=TOKENIZER.get_vocab_size(), stop_token_ids=(END,))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, eos_token="<|im_end|>")
    fast.save_pretrained(path)
    return path


def make_llm(model: Path, drafter: str = "ngram", max_rows: int = 4, **options: Any) -> LLM:
    given = {"max_rows": max_rows, "rounds_per_call": 4, "adaptive": False}
    config = EngineConfig(**(given | options.pop("engine", {})))
    llm = LLM(model, drafter, max_length=96, page_size=8, engine=config, **options)
    for structured in (None, SAMPLING[0].structured):
        compile_by_running(
            llm.engine, max_rows, 5, dataclasses.replace(FULL, structured=structured)
        )
    llm.engine.programs.sealed = True
    return llm


def found(llm: LLM, sampling: Sequence[SamplingParams] = SAMPLING) -> list[tuple[list[int], str]]:
    completions = llm.generate(PROMPTS, sampling)
    assert not any(one.error for one in completions)
    return [(one.token_ids, one.finish_reason) for one in completions]


def masked(params: SamplingParams) -> SamplingParams:
    """The same with reasoning that is not free."""
    assert params.structured is not None
    reasoning = params.structured.reasoning
    reasoning = None if reasoning is None else dataclasses.replace(reasoning, end_id=None)
    structured = dataclasses.replace(params.structured, reasoning=reasoning, trigger=None)
    return dataclasses.replace(params, structured=structured)


@pytest.fixture(scope="module")
def plain(model: Path) -> LLM:
    """Plain decoding, one request after the other."""
    return make_llm(model, "none", 1)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[tuple[list[int], str]]:
    """Of plain decoding of rows that are masked all along."""
    return found(plain, list(map(masked, SAMPLING)))


def test_outputs_follow_the_reasoning(expected: list[tuple[list[int], str]]):
    for index, (tokens, reason) in enumerate(expected):
        text = TOKENIZER.decode(tokens, skip_special_tokens=False).removesuffix("<|im_end|>")
        if index in (3, 9):
            assert reason == "length" and len(tokens) == SAMPLING[index].max_tokens
        elif index in (8, 10):
            assert reason == "stop" and text.endswith("<tool_call>x") and CLOSE not in tokens
        else:
            output = text if index == 7 else text.split("</think>", 1)[1]
            assert reason == "stop" and isinstance(json.loads(output), list)
    assert [tokens.index(CLOSE) for tokens, _ in expected[:2]] == [0, 9]


@pytest.mark.parametrize("drafter", ["none", pytest.param("ngram", marks=pytest.mark.slow)])
def test_free_reasoning_has_the_texts_of_masked_rows(
    model: Path, plain: LLM, expected: Any, drafter: str
):
    chain = SpeculationConfig.chain(2)
    llm = plain if drafter == "none" else make_llm(model, speculation=chain)
    plans: list[Any] = []
    llm.engine.on_read = lambda plan, _: plans.append(plan)
    assert found(llm) == expected
    assert any(plan.resumed for plan in plans) and any(plan.rounds > 1 for plan in plans)
    # Only what comes before and after free text ran as masked rows; a plan may be made before
    # it is known that a row has paused.
    rounds = sum(len(plan.masked_rows) for plan in plans)
    free = sum(tokens.index(CLOSE) for tokens, _ in expected if CLOSE in tokens[:40])
    free += sum(tokens.index(CALL) for tokens in (expected[8][0], expected[10][0]))
    assert rounds <= sum(len(tokens) for tokens, _ in expected) - free + len(SAMPLING)


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_free_reasoning_survives_preemption_in_trees(model: Path, expected: Any, preemption: Any):
    tree = SpeculationConfig(num_nodes=6, max_depth=2, top_k=2)
    options: Any = {"speculation": tree, "num_pages": 20, "engine": {"preemption": preemption}}
    few = make_llm(model, **options)
    assert found(few) == expected
    assert few.engine.scheduler.preemptions[preemption] > 0


def test_a_cancelled_pause_leaves_its_row(plain: LLM):
    engine = plain.engine
    generation = engine.add(PROMPTS[0], SAMPLING[0])
    while not generation.token_ids:
        engine.step()
    engine.cancel(generation)
    other = engine.add(PROMPTS[1], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.finish([other])
    assert len(other.token_ids) == 5 and engine.is_idle
