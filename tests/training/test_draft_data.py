"""Text, JSONL and chats as rows; what cannot be used is counted, and nothing is an error."""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers
from tokenizers.processors import TemplateProcessing

from jaxspec import BUILT_IN_MODEL
from jaxspec.training import data
from jaxspec.training.heads.data import (
    Examples,
    coverage,
    draft_vocabulary,
    held_out_prompts,
    read_examples,
    spread_rows,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Drops what the assistant said in earlier turns, as templates do with reasoning.
FORGETFUL_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] != 'assistant' or loop.last %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUILT_IN_MODEL)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def chat(*turns: str) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]}


def write_lines(path: Path, *lines: object) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts) + "\n")
    return path


def learned_text(tokenizer, examples: Examples) -> str:
    return tokenizer.decode(examples.tokens[examples.learned])


def test_text_becomes_full_rows_and_files_are_held_out(tokenizer, tmp_path):
    texts = {f"f{i}.py": f"def f{i}(x):\n    return x + {i}\n" * 8 for i in range(6)}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    train, held_out, report = read_examples([tmp_path], tokenizer, 32, prompt_tokens=5)
    assert train.tokens.shape[1] == held_out.tokens.shape[1] == 32
    found = learned_text(tokenizer, train).split("<|endoftext|>")
    rest = learned_text(tokenizer, held_out).split("<|endoftext|>")
    assert sorted(filter(None, found + rest)) == sorted(texts.values())
    assert set(train.prompt_lens[:-1]) == {5}
    assert report.documents == 6 and report.train_rows == len(train)
    assert report.learned_tokens == train.learned.sum()


def test_a_head_is_judged_on_the_files_that_its_target_was_judged_on(tokenizer, tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.py").write_text(f"value = {i}\n")
    documents, _, _ = data.gather([tmp_path])
    for fraction in (0.0, 0.3):
        names = [document.name for document in documents]
        _, expected = data.split(documents, names, fraction)
        _, held_out, _ = read_examples([tmp_path], tokenizer, 32, held_out_fraction=fraction)
        texts = learned_text(tokenizer, held_out).split("<|endoftext|>")[:-1]
        assert texts == [document.text for document in expected]


def test_rows_are_spread_evenly():
    assert spread_rows(9, 3).tolist() == [0, 4, 8]
    assert spread_rows(3, 9).tolist() == [0, 1, 2]
    assert spread_rows(5, 1).tolist() == [0]
    with pytest.raises(ValueError, match="at least 1 row"):
        spread_rows(5, 0)


def test_only_the_assistant_is_learned(tokenizer, tmp_path):
    path = write_lines(
        tmp_path / "chats.jsonl",
        chat("add 1 and 2", "3", "and 4", "7"),
        chat("add 1 and 2 again", "3", "and 4", "7"),
    )
    train, held_out, _ = read_examples([path], tokenizer, 64)
    for examples in (train, held_out):
        assert len(examples) == 1
        assert learned_text(tokenizer, examples) == "3\n7\n"
        prompt = tokenizer.decode(examples.tokens[0, : examples.prompt_lens[0]])
        assert prompt.startswith("<user>add 1 and 2") and prompt.endswith("<assistant>")


def test_rewritten_turns_are_not_learned(tokenizer, tmp_path):
    tokenizer.chat_template = FORGETFUL_TEMPLATE
    path = write_lines(tmp_path / "c.jsonl", chat("a", "b", "c", "d"), chat("e", "f", "g", "h"))
    train, held_out, _ = read_examples([path], tokenizer, 64)
    assert {learned_text(tokenizer, part) for part in (train, held_out)} == {"d", "h"}


def test_the_name_of_a_special_token_inside_a_text_is_text(tokenizer, tmp_path):
    texts = ["a<|endoftext|>b", "c\u2028d"]  # a line of JSON may hold other line ends
    lines = (json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    path = write_lines(tmp_path / "texts.jsonl", *lines)
    train, held_out, report = read_examples([path], tokenizer, 64)
    assert not report.skipped
    for examples in (train, held_out):
        assert (examples.tokens[examples.learned] == tokenizer.eos_token_id).sum() == 1
    assert sorted(learned_text(tokenizer, part)[:-13] for part in (train, held_out)) == texts


def test_rows_of_text_begin_as_prompts_do(tokenizer, tmp_path):
    bos = tokenizer.convert_tokens_to_ids("a")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="a $A", special_tokens=[("a", bos)]
    )
    path = write_lines(tmp_path / "t.jsonl", {"text": "x = 1\n" * 50}, {"text": "y = 2\n" * 50})
    for examples in read_examples([path], tokenizer, 16)[:2]:
        assert len(examples) > 1 and (examples.tokens[:, 0] == bos).all()
        assert not examples.learned[:, 0].any() and examples.learned[0, 1:].all()


def test_a_chat_that_its_template_refuses_is_counted(tokenizer, tmp_path):
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + CHAT_TEMPLATE
    )
    refused = {"messages": [{"role": "system", "content": "x"}, *chat("a", "b")["messages"]]}
    path = write_lines(tmp_path / "c.jsonl", refused, chat("a", "b"), chat("c", "d"))
    *_, report = read_examples([path], tokenizer, 64)
    assert report.skipped == {"refused by the chat template": 1}


def test_prompts_keep_to_their_limit(tokenizer, tmp_path):
    path = write_lines(tmp_path / "c.jsonl", *(chat("word " * n, "yes") for n in range(1, 60)))
    prompts, *_ = held_out_prompts([path], tokenizer, 9, prompt_tokens=90, max_tokens=60)
    assert prompts and all(len(prompt) <= 90 for prompt in prompts)
    with pytest.raises(ValueError, match=r"at most 5 tokens \(--prompt-tokens\).* have \d+ to"):
        held_out_prompts([path], tokenizer, 9, prompt_tokens=5, max_tokens=145)


def test_all_rows_are_prompts_where_no_training_has_seen_them(tokenizer, tmp_path):
    path = write_lines(tmp_path / "c.jsonl", *(chat(f"{n}?", "yes") for n in range(7)))
    sizes = {"prompt_tokens": 90, "max_tokens": 60, "all_rows": True}
    prompts, _, report = held_out_prompts([path], tokenizer, 9, **sizes)
    assert len(prompts) == report.held_out_rows == 7 and report.train_rows == 0
    path.write_text("{}\n")
    with pytest.raises(ValueError, match=r"no usable document \(1 without text or messages\)"):
        held_out_prompts([path], tokenizer, 9, **sizes)


def test_prompts_have_the_kind_of_their_line_or_file(tokenizer, tmp_path):
    """They stay together when long prompts are left out."""
    lines = [chat("a?", "yes") | {"kind": "chat"}, chat("word " * 99, "no") | {"kind": "long"}]
    lines = [*lines, chat("b?", "yes"), chat("c?", "yes") | {"kind": 3}]
    path = write_lines(tmp_path / "named.jsonl", *lines)
    sizes = {"prompt_tokens": 90, "max_tokens": 60, "all_rows": True}
    prompts, kinds, _ = held_out_prompts([path], tokenizer, 9, **sizes)
    assert kinds == ["chat", "named", "named"]
    for prompt, question in zip(prompts, "abc", strict=True):
        assert f"{question}?" in tokenizer.decode(prompt)
    train, held_out, _ = read_examples([path], tokenizer, 400)
    assert sorted([*train.kinds, *held_out.kinds]) == ["chat", "long", "named", "named"]
    assert train.take(np.array([2, 0])).kinds == (train.kinds[2], train.kinds[0])


def test_a_row_of_several_texts_has_the_kind_of_that_which_its_prompt_ends_in(tokenizer, tmp_path):
    path = write_lines(tmp_path / "c.jsonl", {"text": "ab " * 40, "kind": "lines"})
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "page.txt").write_text("cd " * 400)
    sizes = {"prompt_tokens": 8, "max_tokens": 24, "all_rows": True}
    prompts, kinds, _ = held_out_prompts([folder, path], tokenizer, 999, **sizes)
    texts = list(map(tokenizer.decode, prompts))
    assert set(kinds) == {"lines", "pages"}
    ends = ["lines" if set(text[-2:]) & set("ab") else "pages" for text in texts]
    assert kinds == ends


def test_unusable_lines_are_counted(tokenizer, tmp_path):
    path = write_lines(
        tmp_path / "mixed.jsonl",
        {"text": "x = 1\n" * 20},
        {"text": "y = 2\n" * 20},
        "{broken",
        {"messages": [{"role": "user", "content": "hello"}]},
        chat("word " * 200, "yes"),
        {"text": "  "},
        {"prompt": "?"},
        {"messages": "hello"},
    )
    *_, report = read_examples([path], tokenizer, 64)
    assert report.documents == 8
    assert report.skipped == {
        "broken JSON": 1,
        "without an assistant turn": 1,
        "a prompt longer than the limit": 1,
        "without text or messages": 2,
        "messages that are no list of objects": 1,
    }
    assert "1 broken JSON" in str(report)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (None, "cannot read"),
        ([], "is empty"),
        (["{", "{"], "fewer than two usable documents .*2 broken JSON"),
        ([{"text": "only one"}], "fewer than two"),
        ([chat("a", "b"), chat("c", "d")], "no chat template"),
    ],
)
def test_nothing_to_train_on_is_an_error(tokenizer, tmp_path, lines, message):
    tokenizer.chat_template, path = None, tmp_path / "bad.jsonl"
    if lines is not None:
        write_lines(path, *lines)
    with pytest.raises(ValueError, match=message):
        read_examples([path], tokenizer, 64)


def test_the_draft_vocabulary_has_the_most_frequent_learned_tokens():
    tokens = np.array([[5, 5, 5, 2, 2, 9, 7, 7, 7, 7]], np.int32)
    learned = np.arange(10)[None] < 6  # the sevens are not learned
    examples = Examples(tokens, learned, np.array([1]))
    ids = draft_vocabulary(examples, 10, 2)
    assert ids is not None and ids.tolist() == [2, 5]
    assert coverage(examples, ids) == pytest.approx(5 / 6)
    assert draft_vocabulary(examples, 10, 10) is None
    with pytest.raises(ValueError, match="1 to 10"):
        draft_vocabulary(examples, 10, 11)
