"""Tokenizers and chats: equal to transformers, without torch; error messages."""

import json
import subprocess
import sys
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxspec import BUILT_IN_MODEL
from jaxspec.llm.tokenizer import TextTokenizer, load_tokenizer, tokenize, tokenize_chats
from jaxspec.llm.tokenizer.detokenizer import Detokenizer
from jaxspec.llm.tokenizer.text import plain_tokenizer
from tests.helpers.checkpoints import TINY
from tests.helpers.small_tokenizers import byte_level, metaspace, save, sentencepiece_like

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('only user and\n assistant') }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if think %} hm{% endif %}{% endif %}"
)
TEXTS = ["the quick brown fox", " two  spaces\n\tand tabs ", "café 😀 日本", "a<s>b", "x </s>"]
USER = {"role": "user", "content": "hello"}


def save_model(directory, tokenizer, model_type="llama", **config):
    save(tokenizer, directory, **config)
    (directory / "config.json").write_text(json.dumps(TINY | {"model_type": model_type}))
    return directory


@pytest.fixture
def chat_model(tmp_path):
    """Its tokenizer puts <s> before every text, and so does its template."""
    return save_model(
        tmp_path,
        sentencepiece_like(),
        tokenizer_class="LlamaTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        add_bos_token=True,
        chat_template=TEMPLATE,
    )


@pytest.mark.parametrize(
    ("maker", "model_type", "config"),
    [
        (metaspace, "llama", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}),
        (metaspace, "llama", {"tokenizer_class": "LlamaTokenizerFast"}),
        (byte_level, "llama", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        (byte_level, "llama", {"tokenizer_class": "LlamaTokenizerFast"}),
        (byte_level, "qwen2", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        (metaspace, "mistral", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        (byte_level, "llama", {}),
    ],
)
def test_a_tokenizer_is_what_transformers_makes_of_it(tmp_path, maker, model_type, config):
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    save_model(tmp_path, maker(), model_type, **marks, **config)
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.eos_token_id == theirs.eos_token_id


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", ""),
        ("tokenizer.json", None),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": 3}}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"eos_token": 5}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"a": 1}}'),
    ],
)
def test_a_broken_tokenizer_is_one_line(tmp_path, name, content):
    save_model(tmp_path, byte_level())
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r"holds no tokenizer that loads: [^\n]+$"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_in_code_is_not_run(tmp_path):
    """As that of Kimi K2, which has no tokenizer.json."""
    said = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    (tmp_path / "tokenization_kimi.py").write_text("raise SystemExit")
    with pytest.raises(
        ValueError, match=r"names Python code of .*, which is not run\. Add a tokeni"
    ):
        load_tokenizer(tmp_path)
    save(byte_level(), tmp_path / "fast")
    (tmp_path / "fast" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path)("ab")["input_ids"]


def test_a_chat_is_what_the_template_says_and_begins_once(chat_model):
    tokenizer: Any = load_tokenizer(chat_model)
    assert tokenizer("hello")["input_ids"][0] == tokenizer.bos_token_id
    messages = [USER, {"role": "assistant", "content": "fox"}, USER]
    [found] = tokenize_chats(tokenizer, messages)
    text = "<s>[user] hello</s>[assistant] fox</s>[user] hello</s>[assistant]"
    assert found == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert found.count(tokenizer.bos_token_id) == 1


def test_several_chats_are_as_one_after_the_other(chat_model):
    tokenizer = load_tokenizer(chat_model)
    chats = [[USER], [USER, USER]]
    assert tokenize_chats(tokenizer, chats) == [tokenize_chats(tokenizer, c)[0] for c in chats]


def test_a_chat_takes_another_template_and_its_variables(chat_model):
    tokenizer: Any = load_tokenizer(chat_model)
    [found] = tokenize_chats(tokenizer, [USER], "{{ messages[0]['content'] }}!")
    assert tokenizer.decode(found) == "hello!"
    [found] = tokenize_chats(tokenizer, [USER], template_variables={"think": True})
    assert tokenizer.decode(found).endswith("[assistant] hm")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a list"),
        ("hello", "messages must be a list"),
        (USER, "messages must be a list"),
        (None, "messages must be a list"),
        ([[]], "at least one"),
        (["hello"], "a conversation must be a list of messages"),
        ([[USER], USER], "a conversation must be a list of messages"),
        ([{"content": "x"}], "with role and content"),
        ([USER, "x"], "with role and content"),
        ([{"role": "tool", "content": "x"}], "refuses these messages: only user and assistant$"),
        ([{"role": "user", "content": "\ud800"}], "no valid Unicode"),
    ],
)
def test_bad_messages_are_clear_errors(chat_model, messages, message):
    with pytest.raises(ValueError, match=message):
        tokenize_chats(load_tokenizer(chat_model), messages)


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages.x.y }}", "{{ 1 + 'a' }}"])
def test_a_broken_template_is_one_line(chat_model, template):
    with pytest.raises(ValueError, match=r"^the chat template refuses[^\n]+$"):
        tokenize_chats(load_tokenizer(chat_model), [USER], template)


def test_a_model_without_a_template_says_what_to_do(tmp_path):
    tokenizer = load_tokenizer(save_model(tmp_path, byte_level()))
    with pytest.raises(ValueError, match=r"has no chat template: pass one with chat_template="):
        tokenize_chats(tokenizer, [USER])
    assert tokenize_chats(tokenizer, [USER], "{{ messages[0].content }}") == tokenize(
        TextTokenizer(tmp_path), ["hello"]
    )


HARD = [
    *TEXTS,
    "",
    "x <|endoftext|> y",
    "<|endoftext|>",
    "\r\n\t\0",
    "it's 1234.5 !",
    "\u0301e\U0001f600",
]


def both_ways(model) -> tuple[TextTokenizer, Any]:
    return TextTokenizer(model), load_tokenizer(model)


@pytest.mark.parametrize("text", HARD)
def test_the_built_in_model_needs_no_transformers_for_the_same_tokens(text):
    assert plain_tokenizer(BUILT_IN_MODEL) is not None
    ours, theirs = both_ways(BUILT_IN_MODEL)
    ids = ours.encode(text)
    assert ids == theirs(text, verbose=False)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids)


def test_every_token_of_the_built_in_model_is_the_same_text():
    ours, theirs = both_ways(BUILT_IN_MODEL)
    for token in range(len(theirs)):
        assert ours.decode([token]) == theirs.decode([token])
    source = (BUILT_IN_MODEL / "README.md").read_text(encoding="utf-8")
    assert ours.encode(source) == theirs(source, verbose=False)["input_ids"]


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": True, "bos_token": "<s>"},
        {"eos_token": "</s>"},
        {"eos_token": "a new one"},
        {"extra_special_tokens": ["quick"]},
        {"clean_up_tokenization_spaces": True},
        {"split_special_tokens": True},
        {"tokenizer_class": "LlamaTokenizerFast"},
    ],
)
@pytest.mark.parametrize("maker", [byte_level, metaspace, sentencepiece_like])
def test_text_is_what_transformers_makes_of_it(tmp_path, maker, config):
    """Whichever of the two ways is taken."""
    save_model(tmp_path, maker(), **{"tokenizer_class": "PreTrainedTokenizerFast"} | config)
    ours, theirs = both_ways(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids)


def test_a_tokenizer_that_is_more_than_its_file_is_left_to_transformers(tmp_path):
    save_model(tmp_path, byte_level(), tokenizer_class="PreTrainedTokenizerFast")
    assert plain_tokenizer(tmp_path) is not None
    (tmp_path / "added_tokens.json").write_text("{}")
    assert plain_tokenizer(tmp_path) is None


CODE = """
import sys
{before}
from jaxspec.llm.tokenizer import load_tokenizer, tokenize_chats
tokenizer = load_tokenizer(sys.argv[1])
assert tokenize_chats(tokenizer, [{{"role": "user", "content": "hello"}}])
assert not sys.modules.get("torch"), "torch was imported"
"""


@pytest.mark.parametrize("before", ["", "sys.modules['torch'] = None"], ids=["torch", "no torch"])
def test_loading_and_chatting_is_silent_and_without_torch(chat_model, before):
    code = CODE.format(before=before)
    command = [sys.executable, "-c", code, str(chat_model)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and (result.stdout, result.stderr) == ("", ""), result.stderr


def test_the_logger_of_transformers_is_left_as_it_was():
    assert transformers.logging.get_logger("transformers").filters == []


@pytest.mark.parametrize("maker", [byte_level, metaspace, sentencepiece_like])
def test_the_bytes_of_tokens_join_to_those_of_the_text(tmp_path, maker):
    """Also of characters in several tokens, and of added tokens."""
    save_model(tmp_path, maker())
    text = TextTokenizer(tmp_path)
    ids = text.encode("x 😀 日本 é")
    spelt = [text.token_bytes(token) for token in ids]
    known = [
        text.decode([token, token])[len(text.decode([token])) :].encode() if own is None else own
        for token, own in zip(ids, spelt, strict=True)
    ]
    assert b"".join(known).decode().strip() == text.decode(ids).strip()
    assert any(own is not None and len(own) == 1 and own[0] >= 0x80 for own in spelt)
    assert text.token_bytes(100_000) is None
    special = {byte_level: b"<end>"}.get(maker)
    assert text.token_bytes(0) == special  # those of an added token, or of its text


def test_spaces_are_not_cleaned_up(tmp_path):
    """A stream could not: the space before a comma has been shown when the comma comes."""
    words = [("<unk>", 0.0), ("▁a", -1.0), ("▁", -2.0), (",", -2.0)]
    tokenizer = Tokenizer(models.Unigram(words, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    save_model(tmp_path, tokenizer, clean_up_tokenization_spaces=True)
    text = TextTokenizer(tmp_path)
    ids = text.encode("a , a ,")
    assert text.decode(ids) == "a , a ,"
    assert text.full.decode(ids) == "a, a,"
    detokenizer = Detokenizer(text.decode, ids[:1])
    assert "".join(detokenizer.push([token]) for token in ids[1:]) == " , a ,"
