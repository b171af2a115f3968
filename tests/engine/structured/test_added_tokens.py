"""Added tokens like <tool_call> and <b>: structured outputs may contain them."""

import json
from collections.abc import Callable

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.structured import GrammarCompiler
from jaxspec.engine.structured.added_tokens import Markers, read_vocabulary
from tests.helpers.small_tokenizers import MARKUP, byte_level, metaspace, with_markup
from tests.helpers.structured_outputs import legal

KINDS = {"byte_level": byte_level, "byte_fallback": metaspace}
PLAIN = {text for text, special in MARKUP.items() if not special and text != "\n\n"}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    make: Callable[[], Tokenizer] = KINDS[request.param]
    return with_markup(make())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    end = tokenizer.get_vocab()["<|im_end|>"]
    return GrammarCompiler(tokenizer.to_str(), tokenizer.get_vocab_size(), [end])


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text in the midst of others: at the beginning some tokenizers put a space."""
    ids = tokenizer.encode("<b>" + text, add_special_tokens=False).ids
    return ids[ids.index(tokenizer.get_vocab()["<b>"]) + 1 :]


def written(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: StructuredOutput) -> list[int]:
    """Tokens of an output: at each place the last one that may come next."""
    matcher, found = compiler.matcher(spec), []
    while not matcher.finished:
        found.append(legal(matcher)[-1])
        matcher.advance(found[-1:])
    return found[:-1]


def test_ids_and_bytes_of_all_tokens_stay(tokenizer: Tokenizer):
    text = tokenizer.to_str()
    vocabulary, size = read_vocabulary(text, []), tokenizer.get_vocab_size()
    assert set(vocabulary.plain) == PLAIN and not PLAIN & vocabulary.added.keys()
    before, after = (LLTokenizer(t, eos_token=[0]) for t in (text, vocabulary.tokenizer_json))
    assert before.vocab_size == after.vocab_size == size
    for token in range(size):
        assert before.decode_bytes([token]) == after.decode_bytes([token])
        moved = tokenizer.id_to_token(token) in PLAIN
        assert after.is_special_token(token) == (before.is_special_token(token) and not moved)
        assert before.is_special_token(token) or not moved


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (StructuredOutput(regex="[a-z]*<b>[a-z]+</b>"), "fox<b>hello</b>"),
        (StructuredOutput(regex="<b>(a|b)"), "<b>a"),
        (StructuredOutput(choice=("the <b>fox", "<table>", "dog")), "the <b>fox"),
        (StructuredOutput(json_object=True), '{"a": "<table><b>x</b>"}'),
        (StructuredOutput(json_schema={"enum": ["<b>a", "<table>"]}), '"<table>"'),
        (StructuredOutput(grammar='start: "<table>" /[a-z]+/ "<b>"'), "<table>fox<b>"),
    ],
    ids=["regex", "forced", "choice", "json", "enum", "grammar"],
)
def test_plain_tokens_are_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer, spec: StructuredOutput, text: str
):
    ids = ids_of(tokenizer, text)
    assert any(tokenizer.id_to_token(token) in PLAIN for token in ids), "not as a tokenizer does it"
    matcher = compiler.matcher(spec)
    for token in ids:
        assert token in legal(matcher)
        matcher.advance([token])
    assert matcher.complete


@pytest.mark.parametrize(
    "spec",
    [
        StructuredOutput(choice=("a<|im_start|>b",)),
        StructuredOutput(regex=r"a<\|im_start\|>b"),
        StructuredOutput(grammar='start: "a<|im_start|>b"'),
        StructuredOutput(json_schema={"const": "a<|im_start|>b"}),
    ],
    ids=["choice", "regex", "grammar", "const"],
)
def test_the_text_of_a_special_token_is_spelled(
    compiler: GrammarCompiler, tokenizer: Tokenizer, spec: StructuredOutput
):
    """A special token is no text; forced, it would be allowed and never taken."""
    if tokenizer.token_to_id("|") is None and tokenizer.token_to_id("<0x7C>") is None:
        pytest.skip("the tokenizer cannot spell it")
    ids = written(compiler, tokenizer, spec)
    assert tokenizer.token_to_id("<|im_start|>") not in ids
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text.strip('"') == "a<|im_start|>b"


def test_markers_are_written_by_id(compiler: GrammarCompiler, tokenizer: Tokenizer):
    call, bold = (tokenizer.token_to_id(text) for text in ("<tool_call>", "<b>"))
    markers = compiler.markers
    assert markers.literal('a<tool_call>\n"<b><b') == f'"a" <[{call}]> "\\n\\"" <[{bold}]> "<b"'
    assert markers.literal("\x7f") == r'"\u007f"' and markers.literal("") == ""
    assert not markers.is_special("<tool_call>") and markers.is_special("<|im_start|>")
    matcher = compiler.matcher(
        StructuredOutput(grammar=f'start: {markers.literal("<tool_call>")} "x"')
    )
    assert legal(matcher) == [call], "neither spelled nor begun"


def test_the_longest_marker_counts():
    markers = Markers({"<b>": 1, "<b><b>": 2}, {})
    assert markers.literal("<b><b><b>") == "<[2]> <[1]>"
    assert markers.mentioned(r"<b\>") and not markers.mentioned("<a>")


def test_tokenizers_that_cannot_be_changed_stay():
    content = json.loads(with_markup(byte_level()).to_str())
    content["decoder"] = None
    text = json.dumps(content)
    vocabulary = read_vocabulary(text, [])
    assert vocabulary.tokenizer_json == text and not vocabulary.plain
    assert vocabulary.added.keys() > PLAIN


def test_special_tokens_and_stop_tokens_are_no_text():
    content = json.loads(with_markup(byte_level()).to_str())
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    next(t for t in content["added_tokens"] if t["content"] == "<b>")["special"] = True
    stops = [ids["<|im_end|>"], ids["<table>"]]  # some files do not say that an end is special
    own = GrammarCompiler(json.dumps(content), 500, stops)
    for spec in (StructuredOutput(regex="x(.|\n)*y"), StructuredOutput(json_object=True)):
        matcher = own.matcher(spec)
        for letter in "x" if spec.kind == "regex" else '{"':
            matcher.advance([content["model"]["vocab"][letter]])
        assert ids["</b>"] in legal(matcher)
        assert not {ids["<b>"], *stops} & set(legal(matcher))
