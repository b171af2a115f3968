"""Masks of tree nodes: each equals the mask of a fresh matcher that was fed the node's path."""

import ctypes
import random
import time

import numpy as np
import pytest

from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.structured import GrammarCompiler, GrammarError, GrammarLimit, tree_masks
from jaxspec.engine.structured import compiler as compiler_module
from jaxspec.engine.structured.matcher import Matcher
from tests.helpers.constrained_rounds import is_allowed
from tests.helpers.structured_outputs import END, VOCAB, compiler, random_schema, tokenizer

OUTPUTS = [
    StructuredOutput(json_schema=random_schema(random.Random(3), 3)),
    StructuredOutput(json_schema={"type": "array", "items": {"type": "number"}}),
    StructuredOutput(json_schema={"type": "integer"}, whitespace=False),
    StructuredOutput(json_object=True),
    StructuredOutput(regex=r"[a-z]+(, [a-z]+)*"),
    StructuredOutput(
        grammar='start: expr\nexpr: NUM | expr "+" expr | "(" expr ")"\nNUM: /[0-9]+/'
    ),
    StructuredOutput(choice=("yes", "no", "yes, but", 'a "b"\n\x7f\\')),
]
FULL = np.full(VOCAB // 32, 0xFFFFFFFF, np.uint32)


def tokens_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def fresh_mask(output: StructuredOutput, path: list[int]) -> np.ndarray | None:
    """The mask after a path, None if the path is illegal or over."""
    matcher = compiler().matcher(output)
    try:
        matcher.advance(path)
    except GrammarError:
        return None
    return None if matcher.finished else matcher.mask()


def random_tree(output: StructuredOutput, prefix: list[int], rng: random.Random, size: int):
    """Tokens and parents; about half of the children are legal, some are stop tokens."""
    tokens, parents, paths = [rng.randrange(VOCAB)], [-1], [list(prefix)]
    while len(tokens) < size:
        parent = rng.randrange(len(tokens))
        mask = fresh_mask(output, paths[parent])
        choices = range(VOCAB) if mask is None or rng.random() < 0.4 else tokens_of(mask)
        token = END if rng.random() < 0.1 else rng.choice(choices)
        tokens.append(token)
        parents.append(parent)
        paths.append([*paths[parent], token])
    return tokens, parents, paths


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.kind)
def test_every_node_has_the_mask_of_its_path(output: StructuredOutput):
    rng, matcher, prefix = random.Random(1), compiler().matcher(output), []
    for _ in range(12):
        tokens, parents, paths = random_tree(output, prefix, rng, 24)
        masks, legal = matcher.masks(np.array(tokens), np.array(parents), 22)
        for node, path in enumerate(paths):
            wanted = fresh_mask(output, path) if node < 22 else None
            np.testing.assert_array_equal(masks[node], FULL if wanted is None else wanted)
            if node in range(1, 22):
                before = fresh_mask(output, paths[parents[node]])
                possible = before is not None and is_allowed(before, tokens[node])
                assert legal[node] == possible
        assert not legal[22:].any() and legal[0]
        # A walk leaves the matcher where it was.
        root = fresh_mask(output, prefix)
        assert root is not None
        np.testing.assert_array_equal(matcher.mask(), root)
        assert is_allowed(root, END) == matcher.complete
        going_on = [token for token in tokens_of(root) if token != END]
        if not going_on:
            break
        prefix.append(rng.choice(going_on))
        matcher.advance(prefix[-1:])


def test_a_closed_grammar_takes_the_stop_token_only():
    matcher = compiler().matcher(StructuredOutput(choice=("yes",)))
    ids = tokenizer()("yes")["input_ids"]
    matcher.advance(ids)
    assert tokens_of(matcher.mask()) == [END] and matcher.complete and not matcher.finished
    masks, legal = matcher.masks([ids[-1], END, ids[0], END], [-1, 0, 0, 1], 4)
    assert legal.tolist() == [True, True, False, False]
    assert tokens_of(masks[0]) == [END] and (masks[1:] == FULL).all()
    assert tokens_of(matcher.mask()) == [END], "the walk has taken nothing"
    matcher.advance([END])
    assert matcher.finished and matcher.complete
    masks, legal = matcher.masks([END], [-1], 1)
    assert (masks == FULL).all() and not legal.any()
    with pytest.raises(GrammarError, match="comes after the end of a structured output"):
        matcher.advance([5])


def test_an_integer_may_end_or_go_on():
    matcher = compiler().matcher(StructuredOutput(json_schema={"type": "integer"}))
    (one,) = tokenizer()("1")["input_ids"]
    matcher.advance([one])
    allowed = tokens_of(matcher.mask())
    assert END in allowed and one in allowed
    masks, legal = matcher.masks([one, one, END, one], [-1, 0, 0, 1], 4)
    assert legal.all() and END in tokens_of(masks[3])
    matcher.advance([one, END])
    assert matcher.finished


class Contradictory:
    """A grammar that takes no token, though its mask allows all."""

    def is_error(self) -> bool:
        return False

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return 0

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        ctypes.memset(address, 0xFF, size)


def test_a_grammar_that_contradicts_itself_has_given_up():
    """Seen once of llguidance: near a limit, it refused a token that it had allowed."""
    with pytest.raises(GrammarLimit, match="the grammar gave up: it allows token 40 and does not"):
        Matcher(Contradictory(), 4, frozenset()).advance([40])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [("{x", "does not match the grammar after 1 tokens"), ("", "token 0 does not match the gramm")],
)
def test_tokens_that_do_not_match_are_errors(tokens: str, message: str):
    matcher = compiler().matcher(StructuredOutput(json_object=True))
    with pytest.raises(GrammarError, match=message):
        matcher.advance([*(tokenizer()(text)["input_ids"][0] for text in tokens), END])


def test_a_copy_goes_its_own_way():
    matcher = compiler().matcher(StructuredOutput(regex="a*b"))
    (a,), (b,) = tokenizer()("a")["input_ids"], tokenizer()("b")["input_ids"]
    matcher.advance([a])
    other = matcher.copy()
    other.advance([b, END])
    assert other.finished and not matcher.finished
    assert a in tokens_of(matcher.mask())


def test_the_trees_of_a_batch():
    outputs = [OUTPUTS[3], None, OUTPUTS[4]]
    matchers = [output and compiler().matcher(output) for output in outputs]
    rng, size = random.Random(2), 10
    trees = [random_tree(output or OUTPUTS[0], [], rng, size)[:2] for output in outputs]
    tokens, parents = (np.array(x) for x in zip(*trees, strict=True))
    found, errors = tree_masks(matchers, tokens, parents, np.full(3, size), compiler().num_words)
    assert found.shape == (3, size, VOCAB // 32) and not errors
    for row, matcher in enumerate(matchers):
        if matcher is None:
            assert (found[row] == FULL).all()
        else:
            masks, _ = matcher.masks(tokens[row], parents[row], size)
            np.testing.assert_array_equal(found[row], masks)


def test_a_grammar_that_gives_up_fails_its_own_row():
    matchers = [compiler().matcher(OUTPUTS[3]) for _ in range(2)]
    matchers[0]._grammar.consume_token(END)  # what exceeds a limit of llguidance ends so too
    tokens, parents = np.zeros((2, 3), int), np.tile(np.arange(3) - 1, (2, 1))
    found, errors = tree_masks(matchers, tokens, parents, np.full(2, 3), compiler().num_words)
    assert list(errors) == [0] and "the grammar gave up: " in str(errors[0])
    assert (found[0] == FULL).all() and not (found[1, 0] == FULL).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json_schema": {"type": "foo"}}, "json_schema: Invalid type: foo"),
        ({"json_schema": {"not": {"type": "null"}}}, "json_schema: not cannot be enforced"),
        ({"json_schema": {"uniqueItems": True, "type": "array"}}, "uniqueItems"),
        ({"json_schema": {"minimum": 5, "maximum": 2, "type": "integer"}}, "minimum (5)"),
        ({"json_schema": {"$ref": "#/$defs/x"}}, "there is no '#/$defs/x'"),
        ({"json_schema": {"type": "string", "pattern": "(?=a)b"}}, "pattern (look-around, "),
        ({"json_schema": {"title": "\ud800"}}, "json_schema: "),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "start: foo"}, 'grammar: at 1(8): unknown name: "foo"'),
        ({"grammar": 'other: "a"'}, "grammar: no start rule found"),
        ({"grammar": "%%%"}, "lexer error"),
    ],
)
def test_bad_grammars_are_one_line_errors(given, message: str):
    with pytest.raises(ValueError) as error:
        compiler().matcher(StructuredOutput(**given))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "(a{1000}){1000}"},
        {"regex": "x(a{1000}){1000}"},
        {"json_schema": {"type": "string", "pattern": "^(a{1000}){1000}$"}},
        {"json_schema": {"multipleOf": 999983, "minimum": 1, "maximum": 10**15, "type": "integer"}},
        {"grammar": "start: " + "r " * 12_000 + '\nr: "a"? "b"?'},
    ],
    ids=["regex", "after a token", "pattern", "number", "grammar"],
)
def test_what_is_too_large_is_refused_soon(given):
    own, spec = compiler(), StructuredOutput(**given)
    started = time.thread_time()
    for _ in range(2):  # the second time it is known
        with pytest.raises(ValueError, match=rf"^{spec.kind}: [^\n]*$"):
            own.matcher(spec)
        assert own.is_known(spec)
    assert time.thread_time() - started < 0.8


def test_what_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler_module, "MOST_SECONDS", 0)
    text = tokenizer().backend_tokenizer.to_str()
    own = GrammarCompiler(text, VOCAB, [END])
    with pytest.raises(ValueError, match="regex: it takes too long to compile"):
        own.matcher(StructuredOutput(regex="[a-z]+"))


def test_few_grammars_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler_module, "MOST_GRAMMARS", 2)
    own = GrammarCompiler(tokenizer().backend_tokenizer.to_str(), VOCAB, [END])
    first, second, third = (StructuredOutput(regex=text) for text in "abc")
    own.matcher(first)
    own.matcher(second)
    own.matcher(first)
    own.matcher(third)
    assert list(own._compiled) == [first, third]


def test_padding_of_the_vocabulary_is_never_allowed():
    padded = GrammarCompiler(tokenizer().backend_tokenizer.to_str(), VOCAB + 40, [END])
    assert padded.num_words == 130
    mask = padded.matcher(OUTPUTS[3]).mask()
    assert mask.shape == (130,) and max(tokens_of(mask)) < VOCAB


def test_bad_compilers_are_refused(monkeypatch: pytest.MonkeyPatch):
    text = tokenizer().backend_tokenizer.to_str()
    with pytest.raises(ValueError, match="needs a model with a stop token"):
        GrammarCompiler(text, VOCAB, [])
    with pytest.raises(ValueError, match="structured output: vocab size too small; 100 vs 4096"):
        GrammarCompiler(text, 100, [END])
    with pytest.raises(ValueError, match="out of range"):
        GrammarCompiler(text, VOCAB, [VOCAB])
    with pytest.raises(ValueError, match="must be the text of a tokenizer"):
        GrammarCompiler("tokenizer.json", VOCAB, [END])

    def missing(name: str):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(compiler_module.importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"pip install 'jaxspec-decoding\[structured\]'"):
        GrammarCompiler(text, VOCAB, [END])


def test_further_stop_tokens_may_end_an_output_where_it_is_complete():
    """In the masks of all nodes of a tree, in copies, and beside the grammar's own."""
    further = VOCAB - 1
    (a,), (b,) = tokenizer()("a")["input_ids"], tokenizer()("b")["input_ids"]
    output = StructuredOutput(regex="ab*")
    plain = compiler().matcher(output)
    tree = [b, a, further, b, further, further], [-1, 0, 0, 1, 1, 3], 6
    expected, _ = plain.masks(*tree)
    matcher = compiler().matcher(output).ending_at([further, END])
    for own in (matcher, matcher.copy()):
        masks, legal = own.masks(*tree)
        assert legal.tolist() == [True, True, False, True, True, True]
        assert further not in tokens_of(masks[0]) and END not in tokens_of(masks[0])
        for node in (1, 3):
            assert tokens_of(masks[node]) == sorted([*tokens_of(expected[node]), further])
    with pytest.raises(GrammarError, match="does not match the grammar after 0 tokens"):
        matcher.copy().advance([further])
    matcher.advance([a, b, further])
    assert matcher.finished
    with pytest.raises(GrammarError, match="does not match the grammar after 1 tokens"):
        plain.advance([a, further])
