"""The trees of rounds: they say how every token of a text came, and change none."""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec import LLM, TextChunk, functional, make_mesh
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.decoding.state import EngineState
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation, RoundTree
from jaxspec.llm.tokenizer import TextTokenizer
from jaxspec.llm.tree_text import RoundTexts
from tests.helpers.checkpoints import tiny_byte_llama
from tests.helpers.engines import CHAIN, LENGTH, new_engine
from tests.helpers.layouts import on_mesh
from tests.helpers.marks import slow
from tests.helpers.random_models import (
    empty_state,
    make_params,
    random_prompts,
    random_target,
    tiny_config,
)
from tests.helpers.sampling_reference import plain_logits
from tests.helpers.small_tokenizers import byte_level, sentencepiece_like

TREE = SpeculationConfig(num_nodes=8, max_depth=3, top_k=3)
PROMPTS = [prompt.tolist() for prompt in random_prompts((5, 9), seed=3)]
PROMPTS[0] = [7, 8, 9, 7, 8]  # the n-gram drafter finds something at once
WIDTHS = {"tokens": "N", "parents": "N", "num_nodes": "", "path": "A", "logprobs": "N"}
GREEDY = SamplingParams(max_tokens=24, trees=True)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.8, seed=5)


def tree_engine(drafter: str, speculation: SpeculationConfig, **options: Any) -> Engine:
    cache = CacheConfig(page_size=8, max_length=LENGTH)
    config = EngineConfig(**{"max_rows": 2, "rounds_per_call": 4, "trees": True} | options)
    return Engine(make_params(drafter, speculation), cache, config)


def run(engine: Engine, *sampling: SamplingParams) -> list[Generation]:
    generations = engine.add_all(PROMPTS[: len(sampling)], sampling)
    engine.finish(generations)
    return generations


def check(generation: Generation, engine: Engine) -> None:
    """Its rounds say where each token comes from, and what the model gave each node."""
    trees = generation.trees
    assert trees and len(trees) == generation.statistics.rounds
    committed = [tree.committed_tokens for tree in trees]
    assert generation.token_ids[1:] == list(itertools.chain(*committed))
    assert sum(len(tree.tokens) - 1 for tree in trees) == generation.statistics.drafted
    accepted = [len(tree.path) - 1 for tree in trees]
    reached = [sum(one >= depth for one in accepted) for depth in range(len(set(accepted)))]
    assert generation.statistics.accepted[: len(reached)] == reached
    roots = [generation.token_ids[0], *(tokens[-1] for tokens in committed)]
    assert [tree.tokens[0] for tree in trees] == roots[:-1]
    for tree in trees:
        assert tree.parents[0] == tree.path[0] + -1 == -1
        assert all(parent < node for node, parent in enumerate(tree.parents))
        assert all(tree.parents[low] == high for high, low in itertools.pairwise(tree.path))
        assert 1 <= tree.committed <= len(tree.path)
    assert all(tree.committed == len(tree.path) for tree in trees[:-1])
    for tree, context in zip(trees, contexts(generation), strict=True):
        check_probabilities(tree, context, engine)


def contexts(generation: Generation) -> Iterator[list[int]]:
    """The tokens up to each round's root."""
    tokens = [*generation.prompt, generation.token_ids[0]]
    for tree in generation.trees or ():
        yield list(tokens)
        tokens += tree.committed_tokens


def check_probabilities(tree: RoundTree, context: Sequence[int], engine: Engine) -> None:
    paths = [list(context)]
    for token, parent in list(zip(tree.tokens, tree.parents, strict=True))[1:]:
        paths.append([*paths[parent], token])
    padded = np.zeros((len(paths), 2 * LENGTH), np.int32)  # one shape for all rounds
    for row, path in enumerate(paths):
        padded[row, : len(path)] = path
    padded = np.concatenate([padded, np.zeros((8 - len(paths), 2 * LENGTH), np.int32)])
    chances = jax.nn.softmax(plain_logits(engine.params.target, padded))
    assert tree.probabilities[0] is None
    expected = [
        float(chances[node, len(paths[node]) - 2, tree.tokens[node]])
        for node in range(1, len(paths))
    ]
    np.testing.assert_allclose(np.array(tree.probabilities[1:]), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("drafter", "speculation"),
    [
        slow("eagle3", TREE),
        slow("ngram", CHAIN),
        slow("mixed", TREE),
        slow("mixed", CHAIN),
        slow("none", CHAIN),
        slow("eagle3", SpeculationConfig(8, 3, 3, acceptance="rejection")),
        slow("eagle3", SpeculationConfig(6, 3, 3, verify_width=8)),
    ],
)
def test_trees_say_how_each_token_came(drafter: str, speculation: SpeculationConfig):
    engine = tree_engine(drafter, speculation)
    both = run(engine, GREEDY, SAMPLED)
    check(both[0], engine)
    assert both[1].trees is None  # it did not ask
    nodes = [len(tree.tokens) for tree in both[0].trees or ()]
    assert (max(nodes) == 1) == (drafter == "none")
    without = tree_engine(drafter, speculation, trees=False)
    assert [one.token_ids for one in run(without, SamplingParams(max_tokens=24), SAMPLED)] == [
        one.token_ids for one in both
    ]


@pytest.mark.slow
def test_restricted_rows_have_trees_and_texts(tmp_path: Path):
    """Beside a free row; the texts of the committed tokens are the text."""
    options: dict[str, Any] = {"speculation": CHAIN, "max_length": 96, "dtype": "float32"}
    llm = LLM(
        tiny_byte_llama(tmp_path), "ngram", engine=EngineConfig(max_rows=2, trees=True), **options
    )
    free = SamplingParams(max_tokens=24, trees=True)
    restricted = dataclasses.replace(free, structured=StructuredOutput(regex="(abcab|c){4,}"))
    prompts = ["abcabcabcabca", "xyzzy é🙂"]
    text = TextTokenizer(tmp_path)
    streamed: list[list[RoundTree]] = [[], []]
    for event in llm.stream(prompts, [restricted, free], rounds_per_call=2):
        if isinstance(event, TextChunk):
            streamed[event.index] += event.trees or []
    completions = llm.generate(prompts, [restricted, free])
    assert [completion.trees for completion in completions] == streamed
    for completion, prompt in zip(completions, prompts, strict=True):
        ids = completion.prompt_token_ids
        rounds = RoundTexts(text.decode, ids).add(completion.trees or ())
        committed = [tree.committed_tokens for tree in completion.trees or ()]
        assert completion.token_ids == [completion.token_ids[0], *itertools.chain(*committed)]
        for round_, tree in zip(rounds, completion.trees or (), strict=True):
            assert [node["token"] for node in round_["nodes"]] == list(tree.tokens)
            assert [node["parent"] for node in round_["nodes"]] == list(tree.parents)
            assert round_["committed"] == tree.committed and round_["path"] == list(tree.path)
        if prompt == prompts[0]:
            assert completion.num_drafted > 0
            assert re.fullmatch("(abcab|c)+a?b?c?a?", completion.text)
            first = rounds[0]["nodes"][0]["text"]
            assert first + "".join(map(committed_text, rounds)) == completion.text


def committed_text(round_: dict[str, Any]) -> str:
    nodes = [round_["nodes"][node]["text"] for node in round_["path"][1:]]
    return "".join([*nodes, round_["bonus"]["text"]][: round_["committed"]])


@pytest.mark.parametrize("shape", [PLAIN, TreeShape(3, 2, 1)], ids=str)
def test_trees_have_the_size_of_the_calls_shape(shape: TreeShape):
    params = make_params("eagle3", TREE)
    state = empty_state(params, 3, LENGTH)

    def decode(state: EngineState, trees: bool) -> Any:
        return functional.decode(params, state, 5, [0, 2], shape=shape, trees=trees)[1]

    without, emitted = (
        jax.eval_shape(functools.partial(decode, trees=trees), state) for trees in (False, True)
    )
    nodes, depth = shape.num_nodes, shape.max_depth + 1
    assert {name: getattr(emitted.trees, name).shape for name in WIDTHS} == {
        name: (5, 2, *[{"N": nodes, "A": depth}[axis] for axis in axes])
        for name, axes in WIDTHS.items()
    }
    assert without.trees is None
    assert jax.tree.leaves(emitted.replace(trees=None)) == jax.tree.leaves(without)


def test_a_token_has_the_text_that_it_adds():
    """A space that is dropped at the beginning, and a character of several tokens."""
    words = {1: b"the", 2: b" end", 3: "é".encode()[:1], 4: "é".encode()[1:], 5: b"."}

    def decode(ids: list[int]) -> str:
        return b"".join(words[token] for token in ids).decode(errors="replace").lstrip(" ")

    texts = RoundTexts(decode, [5])
    tree = RoundTree((1, 2, 3, 4), (-1, 0, 0, 2), (None, 0.5, 0.25, 0.125), (0, 2, 3), 2, 3)
    [round_] = texts.add([tree])
    assert [node["text"] for node in round_["nodes"]] == ["the", " end", "\ufffd", "é"]
    assert round_["bonus"] == {"token": 2, "text": " end"}
    assert (round_["path"], round_["committed"]) == ([0, 2, 3], 3)
    [after] = texts.add([RoundTree((2, 2), (-1, 0), (None, 0.5), (0,), 5, 1)])
    assert [node["text"] for node in after["nodes"]] == [" end", " end"]
    assert json.loads(json.dumps(after)) == after


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_characters_of_many_tokens_have_their_text(make: Callable[[], Any]):
    """Whole ones in the token that ends them, however many are spelt in bytes one after another."""
    tokenizer = make()
    prompt, text = tokenizer.encode("देव").ids, "नागरी 😀😀 日本"
    ids = tokenizer.encode("देव" + text).ids
    assert ids[: len(prompt)] == prompt
    ids = ids[len(prompt) :]
    texts = RoundTexts(functools.partial(tokenizer.decode, skip_special_tokens=False), prompt)
    trees = [
        RoundTree((ids[i], ids[i + 1], ids[0]), (-1, 0, 1), (None, 1.0, 1.0), (0, 1), ids[i + 2], 2)
        for i in range(0, len(ids) - 2, 2)
    ]
    rounds = texts.add(trees)
    found = rounds[0]["nodes"][0]["text"] + "".join(map(committed_text, rounds))
    whole = tokenizer.decode([*prompt, *ids[: 1 + 2 * len(trees)]])
    assert found.replace("\ufffd", "") == whole.removeprefix(tokenizer.decode(prompt))


def test_an_engine_that_emits_no_trees_refuses_to_give_them():
    engine = new_engine()
    with pytest.raises(ValueError, match=r"^trees needs an engine .* make it with trees=True$"):
        engine.add([1, 2], GREEDY)
    assert engine.is_idle


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [False, True])
def test_plain_requests_run_without_drafts_while_they_are_alone(adaptive: bool):
    engine = tree_engine("eagle3", CHAIN, adaptive=adaptive)
    plain = dataclasses.replace(GREEDY, plain=True)
    engine.warm_up([GREEDY, plain, SAMPLED], tokens=LENGTH, rows=[2])
    compiled = engine.programs.compiled
    [alone] = run(engine, plain)
    assert alone.statistics.drafted == 0
    assert {len(tree.tokens) for tree in alone.trees or ()} == {1}
    [drafted] = run(engine, GREEDY)
    assert drafted.token_ids == alone.token_ids
    engine.shape = CHAIN.shape
    beside, _ = run(engine, plain, dataclasses.replace(SAMPLED, max_tokens=40))
    assert beside.statistics.drafted > 0 and beside.token_ids == alone.token_ids
    assert engine.programs.compiled == compiled


@pytest.mark.slow
def test_a_mesh_emits_the_same_trees():
    params = make_params("eagle3", TREE, random_target(tiny_config(num_heads=4, num_kv_heads=2)))
    found = []
    for own in (params, on_mesh(params, make_mesh(2, 2))):
        cache = CacheConfig(page_size=8, max_length=LENGTH)
        engine = Engine(own, cache, EngineConfig(max_rows=2, rounds_per_call=4, trees=True))
        [generation, _] = run(engine, GREEDY, SAMPLED)
        found.append(generation.trees or [])
    for one, split in zip(*found, strict=True):
        assert dataclasses.replace(one, probabilities=()) == dataclasses.replace(
            split, probabilities=()
        )
        own, other = (np.array(tree.probabilities[1:]) for tree in (one, split))
        np.testing.assert_allclose(own, other, atol=1e-4)


@pytest.mark.slow
def test_calls_of_a_fixed_number_of_rounds_are_read_as_one():
    engine = tree_engine("ngram", CHAIN, fixed_rounds=True, rounds_per_call=3)
    [generation] = run(engine, GREEDY)
    check(generation, engine)
