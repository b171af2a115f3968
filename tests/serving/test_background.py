"""Programs that are compiled while no request runs."""

import asyncio
import dataclasses
from concurrent.futures import Future
from pathlib import Path

import pytest

from jaxspec import LLM, EngineConfig, SamplingParams, SpeculationConfig
from jaxspec.config.speculation import TreeShape
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs.names import program_name
from jaxspec.engine.programs.sizes import Kind, Load, ReadKey, RoundsKey
from jaxspec.engine.warm_up.compile_by_running import compile_by_running
from jaxspec.engine.warm_up.compile_general import compile_moves, general_keys
from jaxspec.engine.warm_up.compile_kinds import CompilesKinds, RequestKind, lacking, needed
from jaxspec.llm.async_llm import AsyncLLM
from jaxspec.serving.background import missing_programs, warm_in_background
from tests.helpers.compilations import Compilations
from tests.helpers.engines import CHAIN, tiny_llm
from tests.helpers.served import run

SAMPLED = SamplingParams(temperature=1.0, max_tokens=4)
MASKED = dataclasses.replace(SAMPLED, structured=StructuredOutput(regex="[a-z]{2,9}"))
KINDS = (
    SamplingParams(max_tokens=4),
    SAMPLED,
    dataclasses.replace(SAMPLED, logprobs=2),
    dataclasses.replace(SAMPLED, presence_penalty=0.5, prompt_logprobs=1),
    dataclasses.replace(SAMPLED, plain=True),
    dataclasses.replace(SAMPLED, plain=True, logprobs=0),
    MASKED,
    dataclasses.replace(MASKED, frequency_penalty=0.5),
    dataclasses.replace(MASKED, plain=True),
)


def test_the_likeliest_programs_come_first_and_no_more_than_may_be_kept(llm: LLM):
    keys = missing_programs(llm.engine)
    rounds = [key for key in keys if isinstance(key, RoundsKey)]
    assert len(set(keys)) == len(keys) < llm.engine.programs.max_programs
    assert not set(keys) & llm.engine.programs.ready
    plain = [key.shape.is_plain for key in rounds]
    assert plain == sorted(plain), "plain decoding comes last"
    reads = [key for key in keys if isinstance(key, ReadKey)]
    assert {key.kind for key in reads} <= set(Kind)
    scored = {key.width for key in reads if key.kind == Kind.PROMPT}
    assert scored == {key.width for key in reads if key.kind == Kind.SAMPLED} and len(scored) > 2


@pytest.mark.slow
def test_afterwards_no_request_waits_for_a_compiler(model: Path):
    config = EngineConfig(max_rows=2, rounds_per_call=4)
    speculation = SpeculationConfig.chain(2)
    llm = LLM(model, "ngram", speculation=speculation, max_length=300, page_size=8, engine=config)
    compile_by_running(llm.engine, 1, 8, SAMPLED)
    compile_moves(llm.engine)  # as a server that is ready has
    llm.engine.programs.sealed = True

    async def test() -> tuple[int, int]:
        async with AsyncLLM(llm) as own:
            await warm_in_background(own, idle=0)
            before = llm.engine.programs.compiled
            for params in KINDS:
                for prompts in (["abc"], ["xyz", "a" * 280]):
                    await own.generate(prompts, params)
            await own.generate(["ab"], dataclasses.replace(SAMPLED, max_tokens=290))
            await own.generate(["ab"] * 2, KINDS[:2])
            await own.generate(["abcabc"], dataclasses.replace(SAMPLED, n=2))
            return before, llm.engine.programs.compiled

    before, after = run(test())
    assert after == before > 7


def test_only_a_new_kind_is_held_back(llm: LLM):
    sizes = llm.engine.programs.sizes
    usual = [RequestKind.of([1] * 8, each, sizes) for each in (SamplingParams(), SAMPLED)]
    assert len(set(usual)) == 1, "greedy and sampled requests share programs"
    others = {RequestKind.of([1] * 8, each, sizes) for each in KINDS} - set(usual)
    assert len(others) >= 5
    assert CompilesKinds().begin(llm.engine, usual, needed) == [], "their programs are there"


def is_read(key: ReadKey | RoundsKey) -> bool:
    return isinstance(key, ReadKey)


def test_few_programs_serve_nearly_any_request_and_those_of_their_own_are_better(model: Path):
    config = EngineConfig(max_rows=4)
    engine = LLM(model, "ngram", speculation=CHAIN, max_length=300, engine=config).engine
    programs, sizes = engine.programs, engine.programs.sizes
    programs.sealed = True
    for key in general_keys(engine):
        programs.coming[key] = Future()
        programs.coming[key].set_result(None)
    longest = sizes.max_length - 4
    scored = dataclasses.replace(SAMPLED, prompt_logprobs=1)
    for params in (*KINDS, scored):
        for tokens in (1, longest):
            kind = RequestKind.of([1] * tokens, params, sizes)
            asks_for_more = params.prompt_logprobs is not None or params.plain
            assert bool(needed(engine, kind)) == asks_for_more, (params, tokens)
    assert lacking(engine, RequestKind.of([1] * 8, SAMPLED, sizes))
    reads = [(0, longest, sizes.max_length)]
    calls = list(programs.readings(reads, Load(), {0}, Kind.FULL))
    assert sum(read[1] for _, part in calls for read in part) == longest
    assert {key for key, _ in calls} == set(filter(is_read, general_keys(engine)))


def test_programs_have_names_that_people_know():
    shape = TreeShape.parse("chain:3")
    rounds = RoundsKey(4, 32, shape, Kind.SAMPLED, True)
    assert program_name(rounds, 16) == (
        "rounds of 4 requests of up to 512 tokens, tree chain:3, sampled, structured"
    )
    read = ReadKey(1, 32, 64, Kind.GREEDY)
    assert program_name(read, 8) == "prompts, 64 tokens of 1 request of up to 256 tokens, greedy"
    assert program_name(("copy_pages", ()), 8) == "copies of pages"


@pytest.mark.slow
def test_a_new_kind_is_compiled_beside_the_work(model: Path, compilations: Compilations):
    """The engine's thread waits for no program that reads, drafts or decodes."""
    config = EngineConfig(max_rows=2, rounds_per_call=4)
    speculation = SpeculationConfig.chain(3)  # no other test of this file compiles its programs
    llm = LLM(model, "ngram", speculation=speculation, max_length=300, page_size=8, engine=config)
    for rows in (1, 2):
        compile_by_running(llm.engine, rows, 8, SAMPLED)
    llm.engine.programs.sealed = True

    async def test() -> None:
        async with AsyncLLM(llm, holds_back=True) as own:
            usual = own.generate(["abc"] * 2, SAMPLED)
            texts = await asyncio.gather(usual, *(own.generate(["ab"], each) for each in KINDS))
            long = await own.generate(["ab"], dataclasses.replace(SAMPLED, max_tokens=290))
            # Both are read in one plan, and the long one is of the usual kind.
            both = [SAMPLED, dataclasses.replace(SAMPLED, logprobs=2)]
            mixed = await own.generate(["a" * 200, "ab"], both)
            ended = {one.finish_reason for found in (*texts, long, mixed) for one in found}
            assert ended <= {"stop", "length"}

    compilations.clear()
    run(test())
    large = ("prefill", "read_rows", "decode", "draft_rows", "verify_rows")
    names = [(name, thread.name) for name, thread in compilations if any(n in name for n in large)]
    assert len(names) >= 5
    assert not [name for name, thread in names if thread == "jaxspec engine"]


def test_a_request_goes_first(model: Path):
    """While one runs, nothing is compiled; a closed engine ends the work."""
    llm = tiny_llm(model, kinds=(SamplingParams(),))

    async def test() -> list[int]:
        counts = []
        async with AsyncLLM(llm) as own:
            running = asyncio.create_task(
                own.generate(["abc"], SamplingParams(max_tokens=200, temperature=0))
            )
            await asyncio.sleep(0)
            while llm.engine.is_idle:
                await asyncio.sleep(0.001)
            warming = asyncio.create_task(warm_in_background(own, idle=0))

            def count(engine: Engine) -> None:
                if not engine.is_idle:
                    counts.append(engine.programs.compiled)

            while not running.done():
                await own.run(count)
        with pytest.raises(RuntimeError, match="closed"):
            await warming
        return counts

    counts = run(test())
    assert counts and len(set(counts)) == 1
