"""MTP drafting with a layer for each step: drafts are those of whole texts read at once, without a
cache, however the text came about; and the text is that of plain decoding."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxspec.config.cache import CacheConfig, pages_for
from jaxspec.config.engine import EngineConfig
from jaxspec.config.mtp import AFTER, AFTER_BEFORE, BEFORE, BEFORE_AFTER, MtpStates
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.decoding.drafters import MixedDrafter, NGramDrafter
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation, RoundTree
from jaxspec.functional import EngineParams
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from tests.helpers.engines import seal
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import (
    admit_prompts,
    empty_state,
    jit_prefill,
    mtp_drafter,
    padded,
    random_prompts,
    random_target,
)
from tests.helpers.sampling_reference import plain_logits

TARGET = random_target()
CHAIN = SpeculationConfig.chain(4)
TREE = SpeculationConfig(num_nodes=9, max_depth=4, top_k=2)
SMALL_TREE = SpeculationConfig(num_nodes=7, max_depth=3, top_k=2)
LENGTH = 96
GREEDY = SamplingParams(max_tokens=24, trees=True)
COMMON, *ENDS = (prompt.tolist() for prompt in random_prompts((37, 3, 9, 14)))
PROMPTS = [COMMON + ENDS[0], COMMON + ENDS[1], COMMON[:30] + ENDS[2], COMMON, [5], [7, 8]]


@functools.cache
def params_of(heads: int, shape: SpeculationConfig, states: MtpStates = AFTER) -> EngineParams:
    drafter = mtp_drafter(TARGET, heads, states=states)
    return EngineParams(target=TARGET, drafter=drafter, speculation=shape)


def new_engine(
    params: EngineParams, page_size: int = 8, num_pages: int | None = None, **options: Any
) -> Engine:
    """With few programs, for its largest calls: smaller calls run in them too."""
    cache = CacheConfig(page_size=page_size, max_length=LENGTH, num_pages=num_pages)
    options = {"max_rows": 3, "rounds_per_call": 4, "prefill_budget": 16} | options
    return seal(Engine(params, cache, EngineConfig(trees=True, **options)), GREEDY)


def served(engine: Engine, shapes: Sequence[TreeShape | None] = (None,)) -> list[Generation]:
    """Two prompts one after the other, then all together; call ``i`` has shape ``i``, in turn."""
    generations, turns = [], itertools.cycle(shapes)
    for group in (PROMPTS[:1], PROMPTS[1:2], PROMPTS):
        generations += engine.add_all(group, [GREEDY] * len(group))
        while not all(one.done for one in generations):
            engine.shape = next(turns)
            engine.step()
    assert not any(one.error for one in generations)
    engine.finish([])
    return generations


@functools.partial(jax.jit, static_argnames="steps", compiler_options=FAST_COMPILE)
@functools.partial(jax.vmap, in_axes=(None, 0, 0, None))
def reference(params: EngineParams, tokens: Array, root: Array, steps: int) -> Array:
    """Draft logits of each step after the token at index ``root``, from tokens [T], those drafted
    included: [steps, V]. Every layer reads the whole text anew."""
    drafter: Any = params.drafter
    heads, ids, places = drafter.heads, tokens[None], jnp.arange(tokens.size)[None]

    def run(head: Any, first: int, hidden: Array) -> Any:
        """Over the tokens from ``first`` on; hidden states are of the token before."""
        own = ids[:, first:], hidden, places[:, first:], (None,), dense_causal_attend
        return head.run(params.target, *own)

    none, logits = params.target.no_states(), []
    read = ids, places, none, dense_causal_attend, drafter.capture
    *_, captured = decoder.run(params.target, *read)
    assert captured is not None
    hidden = heads[0].hidden(captured[:, :-1])
    for step in range(steps):
        first = 1 + min(step, len(heads) - 1)
        out = run(heads[first - 1], first, hidden)
        at = root + step - first
        logits.append(heads[first - 1].logits(params.target, out.normed[0, at]))
        if step + 1 < len(heads):
            hidden = out.hidden[:, :-1]
        else:  # the last layer goes on, with what it made of the token before
            hidden = hidden.at[0, at + 1].set(out.hidden[0, at])
    return jnp.stack(logits)


def nodes_with_paths(tree: RoundTree) -> Iterator[tuple[list[int], int]]:
    """The drafted tokens before each drafted node, and its own."""
    for node in range(1, len(tree.tokens)):
        path, at = [], tree.parents[node]
        while at > 0:
            path.insert(0, tree.tokens[at])
            at = tree.parents[at]
        yield path, tree.tokens[node]


def continues(tree: RoundTree, text: list[int]) -> bool:
    """Whether a round committed what follows the first token of the text."""
    committed = [*(tree.tokens[node] for node in tree.path), tree.bonus][: tree.committed + 1]
    assert text, "the round is nowhere in the text"
    return committed == text[: len(committed)]


def check_drafts(params: EngineParams, generations: list[Generation], top_k: int) -> None:
    """Every drafted token of every round is among the likeliest by the reference."""
    texts, roots, steps, drafted = [], [], [], []
    for generation in generations:
        text = [*generation.prompt, *generation.token_ids]
        root = len(generation.prompt)
        for tree in generation.trees or ():
            while not continues(tree, text[root:]):  # after a preemption reading gave a token
                root += 1
            for path, token in nodes_with_paths(tree):
                whole = text[: root + 1] + path
                texts.append(whole + [0] * (LENGTH - len(whole)))
                roots.append(root)
                steps.append(len(path))
                drafted.append(token)
            root += tree.committed
    depth = params.speculation.max_depth
    logits = np.asarray(reference(params, jnp.asarray(texts), jnp.asarray(roots), depth))
    own = logits[np.arange(len(texts)), steps]  # [nodes, V]
    chosen = own[np.arange(len(texts)), drafted]
    least = np.sort(own, axis=1)[:, -top_k]
    assert len(texts) > 100
    np.testing.assert_array_less(least - 1e-3, chosen)


def check_pages(engine: Engine, generations: list[Generation]) -> None:
    """Every page of the drafter that the prefix cache has holds what reading the text at once
    writes, in every layer."""
    texts = [[*one.prompt, *one.token_ids] for one in generations]
    [shard], params, size = engine.scheduler.shards, engine.params, engine.limits.page_size
    empty = empty_state(params, len(texts), LENGTH, LENGTH)
    whole = admit_prompts(params, empty, [np.array(text) for text in texts])
    whole, _ = jit_prefill(params, whole, None, None, width=LENGTH - 1, greedy=True)
    count = 0
    for row, text in enumerate(texts):
        pages = np.array([node.page for node in shard.cache.match(text, (None,))], int)
        count += len(pages)
        own, expected = engine.programs.state.pool.draft, whole.pool.draft
        for first, layers in enumerate(zip(own.layers, expected.layers, strict=True), start=1):
            for found, read in zip(*map(jax.tree.leaves, layers), strict=True):
                slots = np.moveaxis(np.asarray(found)[pages], 1, 0)  # [G, pages, K, D]
                slots = slots.reshape(len(slots), -1, slots.shape[-1])
                other = np.asarray(read)[whole.rows.page_table[row, 0], :, : slots.shape[1]]
                np.testing.assert_allclose(slots[:, first:], other[:, first:], atol=2e-4)
    assert count * size > 100


def check_text(generations: list[Generation]) -> None:
    """Every token is the target's own choice after the text before it, read at once."""
    texts = [[*one.prompt, *one.token_ids] for one in generations]
    tokens = padded([np.array(text) for text in texts], LENGTH)
    logits = np.asarray(plain_logits(TARGET, tokens))
    for own, text, generation in zip(logits, texts, generations, strict=True):
        at = np.arange(len(generation.prompt), len(text)) - 1
        assert (own[at].max(axis=-1) - own[at, generation.token_ids] < 1e-3).all()


def check(engine: Engine, generations: list[Generation], top_k: int) -> None:
    check_text(generations)
    check_drafts(engine.params, generations, top_k)
    check_pages(engine, generations)
    trees = [tree for one in generations for tree in one.trees or ()]
    accepted = [len(tree.path) > 1 for tree in trees]
    assert 0.1 < np.mean(accepted) < 0.9, "too few or too many drafts are rejected to test much"


@pytest.mark.parametrize(
    ("heads", "shape", "page_size", "states"),
    [
        (2, SpeculationConfig.chain(2), 5, AFTER),
        slow(3, SMALL_TREE, 5, AFTER),
        slow(3, TREE, 5, AFTER),
        slow(3, CHAIN, 8, BEFORE_AFTER),
        slow(3, TREE, 1, BEFORE),
        slow(2, CHAIN, 7, BEFORE),
        slow(2, TREE, 32, AFTER_BEFORE),
        slow(1, TREE, 5, AFTER),
        slow(5, CHAIN, 5, AFTER),  # more layers than steps
        slow(3, SpeculationConfig.chain(1), 3, AFTER),
    ],
)
def test_drafts_texts_and_pages_are_those_of_whole_texts(
    heads: int, shape: SpeculationConfig, page_size: int, states: MtpStates
):
    """With chunks of prompts, prefix hits, and so few pages that rows are preempted."""
    pages = 1 + pages_for(LENGTH + 10, page_size)
    engine = new_engine(params_of(heads, shape, states), page_size, pages, preemption="recompute")
    generations = served(engine)
    hits = engine.scheduler.cache_statistics()[1]
    assert hits > 0
    assert sum(engine.scheduler.preemptions.values()) > 0
    check(engine, generations, shape.top_k)


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_calls_of_any_shape_may_follow_each_other(mixed: bool):
    """Plain ones and smaller trees, after which pending tokens are read at once; swaps."""
    params = params_of(3, TREE)
    if mixed:
        lookup = NGramDrafter(min_match=1, max_match=2)
        params = params.replace(drafter=MixedDrafter(model=params.drafter, lookup=lookup))
    pages = 1 + pages_for(LENGTH + 10, 5)
    engine = new_engine(params, 5, pages, preemption="swap")
    engine.programs.sealed = False
    generations = served(engine, (None, PLAIN, TreeShape(3, 2, 1), PLAIN, TreeShape(2, 1, 1)))
    assert engine.scheduler.preemptions["swap"] > 0
    check_text(generations)
    check_pages(engine, generations)
    if not mixed:
        check_drafts(params, generations, TREE.top_k)
