"""A drafter of text between the halves of rounds: texts are those of plain decoding."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxspec import LLM, SamplingParams, load
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.llm.text_drafts.drafter import TextDrafter, TextSource
from jaxspec.llm.text_drafts.model_source import ModelSource
from jaxspec.parallel import make_mesh
from tests.helpers.engines import seal
from tests.helpers.small_tokenizers import one_token_a_byte
from tests.llm.text_drafts.test_spelling import Plain

PROMPTS = ["abc", "naïve 你", "the end of the"]
GREEDY = SamplingParams(max_tokens=20)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, seed=5)
CHAIN = SpeculationConfig.chain(4)


class Oracle(TextSource):
    """Writes the rest of texts that it knows, and a wrong letter in every third round."""

    def __init__(self, known: list[str]):
        self.known, self.asked, self.forgotten = known, 0, set[str]()

    def continue_texts(self, texts: Mapping[str, str], tokens: int) -> Mapping[str, str]:
        self.asked += 1
        return {name: self._rest(text, tokens) for name, text in texts.items()}

    def _rest(self, text: str, tokens: int) -> str:
        found = next((each[len(text) :] for each in self.known if each.startswith(text)), "?")
        return found[:tokens] if self.asked % 3 else f"{found[:1]}#{found[2:tokens]}"

    def forget(self, request_id: str) -> None:
        self.forgotten.add(request_id)


@functools.cache
def bytes_tokenizer() -> Plain:
    return Plain(one_token_a_byte())


def drafts(source: TextSource, tokens: list[int], most: int = 4) -> list[int]:
    return list(TextDrafter(bytes_tokenizer(), source, 256).draft({"1": tokens}, most)["1"])


def test_a_draft_begins_with_the_bytes_that_its_character_lacks():
    ids = bytes_tokenizer().encode("né 你好")
    source = Oracle(["né 你好"])
    for cut in range(1, len(ids)):
        assert drafts(source, ids[:cut], 2) == ids[cut : cut + 2], cut
        source.asked = 0
    assert drafts(Oracle(["né 他好"]), ids[:6]) == []  # another character than the one begun


def test_a_draft_model_without_room_for_the_draft_writes_nothing():
    engine: Any = SimpleNamespace(limits=SimpleNamespace(max_length=12))
    assert ModelSource(engine, bytes_tokenizer()).continue_texts({"1": "abc"}, 12) == {}


def test_requests_begin_again_and_are_forgotten():
    source = Oracle(["abcdef", "xbcdef"])
    drafter, encode = TextDrafter(bytes_tokenizer(), source, 256), bytes_tokenizer().encode
    assert drafter.draft({"1": encode("ab")}, 2) == {"1": encode("cd")}
    source.asked = 0
    assert drafter.draft({"1": encode("xb")}, 2) == {"1": encode("cd")}
    drafter.forget("1")
    assert source.forgotten == {"1"}


def test_tokens_that_the_model_lacks_are_not_drafted():
    found = TextDrafter(bytes_tokenizer(), Oracle(["abcabc"]), bytes_tokenizer().encode("c")[0])
    assert found.draft({"1": bytes_tokenizer().encode("a")}, 4) == {
        "1": bytes_tokenizer().encode("b")
    }


@pytest.fixture(scope="module")
def llm(byte_model: Path) -> LLM:
    """It drafts for itself, through text."""
    engine = EngineConfig(max_rows=3, rounds_per_call=4)
    name = f"text:{byte_model}"
    made = LLM(byte_model, name, speculation=CHAIN, max_length=64, page_size=8, engine=engine)
    seal(made.engine, SAMPLED)
    return made


def test_texts_are_those_of_other_drafters(llm: LLM, byte_llm: LLM):
    sampling = [GREEDY, SAMPLED, GREEDY]
    found, other = (each.generate(PROMPTS, sampling) for each in (llm, byte_llm))
    assert [each.token_ids for each in found] == [each.token_ids for each in other]
    greedy = found[0]
    assert greedy.acceptance_length > 1.5, "it drafts what it would write itself"


FEW = {"page_size": 8, "num_pages": 9}
IN_ENGINES: dict[str, dict[str, Any]] = {
    "swapped": FEW | {"engine": EngineConfig(max_rows=3, preemption="swap")},
    "read again": FEW | {"engine": EngineConfig(max_rows=3, preemption="recompute")},
    "two devices": {"mesh": 2},
    "rejection": {"speculation": SpeculationConfig.chain(4, "rejection")},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_ENGINES)
def test_texts_are_those_of_other_drafters_in_engines_of_all_kinds(
    case: str, byte_model: Path, byte_llm: LLM
):
    """With prefix hits when requests come again. Under rejection those at temperature 0 are."""
    options: dict[str, Any] = {"speculation": CHAIN, "page_size": 8} | IN_ENGINES[case]
    if "mesh" in options:
        options["mesh"] = make_mesh(tensor_parallel=options["mesh"])
    llm = LLM(byte_model, f"text:{byte_model}", max_length=64, **options)
    sampling = [GREEDY, GREEDY if case == "rejection" else SAMPLED, GREEDY]
    wanted = [each.token_ids for each in byte_llm.generate(PROMPTS, sampling)]
    for hits in (0, 8):
        found = llm.generate(PROMPTS, sampling)
        assert [each.token_ids for each in found] == wanted
        assert found[2].cached_tokens >= hits
    preemption = options["engine"].preemption if "engine" in options else None
    assert preemption is None or llm.engine.scheduler.preemptions[preemption] > 0


@pytest.mark.slow
def test_structured_texts_are_those_of_other_drafters(llm: LLM, byte_llm: LLM):
    structured = SamplingParams(max_tokens=20, structured=StructuredOutput(regex="[a-f ]{9}"))
    sampling = [structured, dataclasses.replace(structured, temperature=0.9, seed=3), GREEDY]
    found, other = (each.generate(PROMPTS, sampling) for each in (llm, byte_llm))
    assert [each.token_ids for each in found] == [each.token_ids for each in other]
    assert [each.finish_reason for each in found] == [each.finish_reason for each in other]


@pytest.mark.slow
def test_plain_requests_are_decoded_beside_drafted_ones(llm: LLM):
    found = llm.generate(PROMPTS[:1] * 2, [SamplingParams(max_tokens=20, plain=True), GREEDY])
    assert found[0].token_ids == found[1].token_ids
    assert found[0].num_rounds == 19


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": EngineConfig(adaptive=True)}, "does not go with adaptive trees"),
        ({"speculation": SpeculationConfig.parse("8:2:4")}, "trees but chains"),
        ({"drafter_bits": 8}, "does not go with drafter_bits"),
    ],
)
def test_options_that_do_not_go_with_text_drafts(
    byte_model: Path, options: dict[str, object], message: str
):
    with pytest.raises(ValueError, match=message):
        LLM(byte_model, f"text:{byte_model}", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["text:", "ngram+text:x/y", "text:https://example.org"])
def test_names_that_stand_for_no_text_drafter(byte_model: Path, name: str):
    with pytest.raises(ValueError, match="text"):
        LLM(byte_model, name)
    with pytest.raises(ValueError, match="text"):
        load(byte_model, name)


def test_a_folder_of_no_model_and_half_an_address_are_named(tmp_path: Path):
    """Before the target is loaded."""
    for name, message in (
        (str(tmp_path), f"{tmp_path}/config.json is missing"),
        ("localhost:8001", "after text: give http:// and a port of this machine"),
        ("ftp://127.0.0.1", "after text: give http:// and a port of this machine"),
        ("HTTP://127.0.0.1:1", "does not list its models"),
    ):
        with pytest.raises(ValueError) as caught:
            LLM("no target", f"text:{name}")
        assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_nothing_compiles_after_a_warm_up(byte_model: Path, plain_byte_llm: LLM):
    engine, name = EngineConfig(max_rows=1), f"text:{byte_model}"
    llm = LLM(byte_model, name, speculation=CHAIN, max_length=64, page_size=8, engine=engine)
    llm.engine.warm_up([GREEDY], tokens=64)
    ready = set(llm.engine.programs.ready)
    [found], [plain] = (each.generate(PROMPTS[:1], GREEDY) for each in (llm, plain_byte_llm))
    assert found.token_ids == plain.token_ids
    assert llm.engine.programs.ready == ready
