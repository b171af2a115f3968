"""Texts end at every stop token of the model's files; chats where a turn ends in their template."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from jaxspec import LLM, SamplingParams
from jaxspec.commands.generate.chat import chat
from jaxspec.config.engine import EngineConfig
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.llm.async_llm import AsyncLLM
from jaxspec.llm.batch.answers import Answers
from jaxspec.llm.completion import Completion
from jaxspec.training.heads.data import Examples
from jaxspec.training.regenerate import regenerate
from tests.helpers.random_models import save_random_target
from tests.helpers.served import MODEL, ask, with_client
from tests.helpers.small_tokenizers import one_token_a_byte

END, START, TURN, TOOL = 256, 257, 258, 259  # <|endoftext|>, <|im_start|>, <|im_end|>, <tool>
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
USER = [{"role": "user", "content": "hi"}]
ENDS_TURN = SamplingParams(max_tokens=6, logit_bias={TURN: 100.0})
CHOICE = StructuredOutput(choice=("yes", "no"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a ChatML fine-tune of a base model: all files name <|endoftext|> alone."""
    path = tmp_path_factory.mktemp("chatml")
    save_random_target(path, vocab_size=260, stop_token_ids=(END,))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=one_token_a_byte())
    fast.add_special_tokens({"eos_token": "<|endoftext|>"})
    fast.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    fast.add_tokens(["<tool>"])
    fast.chat_template = CHATML
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    config = EngineConfig(max_rows=1, rounds_per_call=4)
    return LLM(model, "none", max_length=64, engine=config)


def ending(completion: Completion) -> tuple[str, str, list[int]]:
    return completion.text, completion.finish_reason, completion.token_ids


STOPPED = ("", "stop", [TURN])


def test_a_chat_ends_with_its_turn_and_a_completion_does_not(llm: LLM):
    assert llm.params.target.config.stop_token_ids == (END,) and llm.turn_end() == (TURN,)
    [answer] = llm.chat(USER, ENDS_TURN)
    assert ending(answer) == STOPPED
    *_, streamed = llm.stream_chat(USER, [ENDS_TURN])
    assert isinstance(streamed, Completion) and ending(streamed) == STOPPED
    [free] = llm.generate(llm.chat_prompts(USER), ENDS_TURN)
    assert ending(free) == ("<|im_end|>" * 6, "length", [TURN] * 6)


def test_what_replaces_or_ignores_the_stop_tokens_does_so_in_chats(llm: LLM):
    for change in ({"stop_token_ids": ()}, {"ignore_eos": True}, {"stop_token_ids": (END,)}):
        [answer] = llm.chat(USER, dataclasses.replace(ENDS_TURN, **change))
        assert answer.finish_reason == "length" and answer.token_ids == [TURN] * 6
    early = dataclasses.replace(ENDS_TURN, min_tokens=3)
    [answer] = llm.chat(USER, early)
    assert answer.token_ids.index(TURN) == 3 == len(answer.token_ids) - 1


@pytest.mark.parametrize("sampling", [None, [None], {"max_tokens": 4}])
def test_bad_sampling_of_a_chat_is_refused(llm: LLM, sampling: Any):
    with pytest.raises(ValueError, match=r"^sampling must be SamplingParams, "):
        llm.chat(USER, sampling)


def test_another_template_ends_its_turns_elsewhere(llm: LLM):
    for template, end in {
        CHATML.replace("<|im_end|>\n", " <tool> "): (TOOL,),
        CHATML.replace("<|im_end|>\n", "<|endoftext|>"): (),  # one of the model's own
        CHATML.replace("<|im_end|>\n", "[end]<|im_end|>"): (),  # no single token
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}": (),
        "{{ raise_exception('never') }}": (),
        "{{ messages[0].content }}": (),
    }.items():
        assert llm.turn_end(template) == end
    [answer] = llm.chat(USER, ENDS_TURN, chat_template="{{ messages[0].content }}")
    assert answer.finish_reason == "length"


def test_a_structured_answer_may_end_with_the_turn(llm: LLM):
    """At its end alone, however much the model wants to end before."""
    wants = dataclasses.replace(ENDS_TURN, structured=CHOICE)
    [answer] = llm.chat(USER, wants)
    assert answer.text in ("yes", "no") and answer.token_ids[-1] == TURN
    [free] = llm.generate(llm.chat_prompts(USER), wants)
    assert free.token_ids == [*answer.token_ids[:-1], END]


def test_files_of_prompts_and_the_terminal_end_with_the_turn(llm: LLM, capsys):
    async def lines() -> list[dict[str, Any]]:
        async with AsyncLLM(llm) as own:
            answers = Answers(own, ENDS_TURN, token_ids=True)
            prompt = {"prompt_token_ids": llm.chat_prompts(USER)[0]}
            return [await answers.answer(0, {"messages": USER}), await answers.answer(1, prompt)]

    answer, free = asyncio.run(lines())
    assert (answer["text"], answer["finish_reason"], answer["token_ids"]) == STOPPED
    assert free["finish_reason"] == "length"
    chat(llm, ENDS_TURN, ["hi"])
    assert "[1 tokens" in capsys.readouterr().out


def test_answers_to_learn_from_end_with_the_turn(llm: LLM, tmp_path: Path, monkeypatch):
    answers, asked = llm.chat(USER, ENDS_TURN), []

    def record(prompts: Any, sampling: list[SamplingParams]) -> list[Completion]:
        asked.extend(sampling)
        return [dataclasses.replace(answers[0], prompt_token_ids=prompts[0])]

    monkeypatch.setattr(llm, "generate", record)
    rows = np.full((1, 12), 65, np.int32)
    examples = Examples(rows, np.ones(rows.shape, bool), np.full(1, 8))
    regenerate(llm, examples, tmp_path / "answers.jsonl")
    assert [one.stops((END,)) for one in asked] == [(END, TURN)]


@pytest.mark.parametrize("template", [None, CHATML.replace("<|im_end|>\n", "<tool>")])
def test_a_server_ends_chats_with_the_turn_and_shows_its_stop_tokens(llm: LLM, template):
    end = TURN if template is None else TOOL
    fields = {"model": MODEL, "max_tokens": 6, "temperature": 0, "logit_bias": {str(end): 100}}
    user = {**fields, "messages": USER}
    requests = [
        user,
        {**user, "extra_body": {"stop_token_ids": [7]}},
        {**user, "extra_body": {"ignore_eos": True}},
        {**user, "stream": True},
        {**fields, "prompt": "hi"},
    ]
    *found, chunks, text = ask(llm, *requests, chat_template=template)
    card = with_client(llm, lambda client: client.models.retrieve(MODEL), chat_template=template)
    endings = [one.choices[0].finish_reason for one in (*found, chunks[-1])]
    assert endings == ["stop", "stop", "length", "stop"]
    assert found[0].choices[0].message.content == ""
    assert text.choices[0].finish_reason == "length"
    assert card.stop_tokens == [
        {"id": END, "text": "<|endoftext|>", "chats_only": False},
        {"id": end, "text": "<|im_end|>" if end == TURN else "<tool>", "chats_only": True},
    ]


def test_too_many_tokens_that_end_a_text_are_refused(llm: LLM):
    many = SamplingParams(further_stop_token_ids=tuple(range(20)))
    with pytest.raises(ValueError, match=r"^21 tokens would end the text, and at most 16 may: "):
        llm.generate(["hi"], many)


def test_the_tokenizers_end_token_ends_texts(model: Path, tmp_path: Path):
    """It differs from that of config.json, as in many fine-tunes; chats need no template for it."""
    for path in model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"eos_token": "<|im_end|>"})
    )
    config = EngineConfig(max_rows=1, rounds_per_call=2)
    llm = LLM(tmp_path, "none", max_length=64, engine=config)
    assert llm.params.target.config.stop_token_ids == (END, TURN) and llm.turn_end() == ()
    [answer] = llm.generate(["hi"], ENDS_TURN)
    assert ending(answer) == STOPPED
