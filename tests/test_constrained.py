"""Rounds in two calls: masks hold at every node, and speculation does not change the text."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import functional
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.parallel import WHOLE, make_mesh
from jaxspec.sampling import make_sampling
from jaxspec.speculation.token_masks import restrict
from jaxspec.state import Ending, Status
from tests.constrained_rounds import (
    bigram_masks,
    bigram_words,
    generate_restricted,
    is_allowed,
    jit_draft,
    jit_prefill,
    jit_verify,
    packed,
)
from tests.layouts import on_mesh
from tests.marks import slow
from tests.random_models import (
    admit_prompts,
    empty_state,
    make_params,
    padded,
    random_prompts,
    random_target,
    read_prompts,
    texts,
    tiny_config,
)
from tests.sampling_reference import plain_logits

VOCAB, NEW = 98, 24  # no multiple of 32, nor of the shards
TARGET = tiny_config(vocab_size=VOCAB, qkv_bias=True)
PROMPTS = random_prompts((9, 5, 7, 3))
WORDS = bigram_words(VOCAB)
MIXED = make_sampling(
    4,
    temperature=np.array([0.0, 0.8, 0.8, 0.0]),
    top_p=np.array([1.0, 0.9, 1.0, 1.0]),
    top_k=np.array([0, 0, 20, 0]),
    seeds=5,
)
SPECULATIONS = {
    "none": SpeculationConfig.chain(1),
    "ngram": SpeculationConfig.chain(3),
    "draft_model": SpeculationConfig.chain(3),
    "eagle1": SpeculationConfig(num_nodes=8, max_depth=3, top_k=3),
    "eagle3": SpeculationConfig(num_nodes=8, max_depth=3, top_k=3),
    "eagle3 rejection": SpeculationConfig.chain(3, "rejection"),
}


@functools.cache
def make(name: str):
    return make_params(name.split()[0], SPECULATIONS[name], random_target(TARGET))


def generate(params, sampling=MIXED, **options):
    masks = bigram_masks(WORDS, PROMPTS)
    return generate_restricted(params, PROMPTS, sampling, masks, new_tokens=NEW, **options)


@functools.cache
def expected():
    return generate(make("none"))[0]


@pytest.mark.slow
def test_plain_rounds_are_the_restricted_argmax_of_a_dense_pass():
    target = make("none").target
    greedy = [row for row in range(4) if not MIXED.drawn[row]]
    sequences = [[*PROMPTS[row].tolist(), *expected()[row]] for row in greedy]
    tokens = padded([np.array(s) for s in sequences], 9 + NEW)
    logits, restricted = np.asarray(plain_logits(target, tokens)), 0
    for row, sequence, scores in zip(greedy, sequences, logits, strict=True):
        for index in range(len(PROMPTS[row]) - 1, len(sequence) - 1):
            allowed = [is_allowed(WORDS[sequence[index]], i) for i in range(VOCAB)]
            assert sequence[index + 1] == np.argmax(np.where(allowed, scores[index], -np.inf))
            restricted += sequence[index + 1] != np.argmax(scores[index])
    assert restricted > NEW, "the masks must matter"


@pytest.mark.parametrize(
    "name", [slow("ngram"), slow("eagle3"), slow("draft_model"), slow("eagle1")]
)
def test_speculation_does_not_change_a_restricted_text(name: str):
    found, state = generate(make(name))
    assert found == expected()
    for prompt, text in zip(PROMPTS, found, strict=True):
        pairs = zip([prompt[-1], *text], text, strict=False)
        assert all(is_allowed(WORDS[before], token) for before, token in pairs)
    stats = state.rows.stats
    assert (np.asarray(stats.rounds) < NEW).any(), "some drafts must be accepted"


@pytest.mark.slow
@pytest.mark.parametrize("shape", [PLAIN, TreeShape(num_nodes=4, max_depth=2, top_k=2)])
def test_smaller_shapes_do_not_change_it_either(shape: TreeShape):
    assert generate(make("eagle3"), shape=shape)[0] == expected()


@pytest.mark.slow
def test_rejection_obeys_the_masks():
    found, state = generate(make("eagle3 rejection"))
    for row, (prompt, text) in enumerate(zip(PROMPTS, found, strict=True)):
        pairs = zip([prompt[-1], *text], text, strict=False)
        assert all(is_allowed(WORDS[before], token) for before, token in pairs)
        if not MIXED.drawn[row]:
            assert text == expected()[row]
    assert (np.asarray(state.rows.ending) == Ending.LENGTH).all()


@pytest.mark.slow
def test_the_greedy_program_gives_the_same_text():
    found, _ = generate(make("eagle3"), make_sampling(4), greedy=True)
    assert found == generate(make("none"), make_sampling(4))[0]
    assert [found[0], found[3]] == [expected()[0], expected()[3]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "ngram"])
def test_full_masks_are_a_round_of_decode(name: str):
    params, free = make(name), packed(np.ones((4, VOCAB), bool))

    def masks(tree):
        return free if tree is None else np.repeat(free[:, None], tree.tokens.shape[1], axis=1)

    found, state = generate_restricted(params, PROMPTS, MIXED, masks, new_tokens=NEW)
    max_lens = np.array([len(prompt) + NEW for prompt in PROMPTS], np.int32)
    plain = empty_state(params, 4, 9 + NEW)
    plain = admit_prompts(params, plain, PROMPTS, sampling=MIXED, max_lens=max_lens)
    plain, _ = functional.decode(params, read_prompts(params, plain), NEW)
    for prompt, text, row in zip(PROMPTS, found, texts(plain), strict=True):
        assert prompt.tolist() + text == row
    for field in ("rounds", "drafted", "accepted"):
        found_, wanted = (getattr(s.rows.stats, field) for s in (state, plain))
        np.testing.assert_array_equal(found_, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "data"),
    [("eagle3", 2, 1), ("eagle3", 4, 1), ("ngram", 2, 2), ("none", 1, 2)],
)
def test_shards_use_their_own_bits(name: str, model: int, data: int):
    assert generate(on_mesh(make(name), make_mesh(model, data)))[0] == expected()


@pytest.mark.slow
def test_drawn_chains_keep_their_distributions_on_a_mesh():
    alone = generate(make("eagle3 rejection"))[0]
    assert generate(on_mesh(make("eagle3 rejection"), make_mesh(2, 2)))[0] == alone


@pytest.mark.slow
def test_only_the_listed_rows_change():
    params, masks = make("eagle3"), bigram_masks(WORDS, PROMPTS)
    state = admit_prompts(params, empty_state(params, 4, 40), PROMPTS, sampling=MIXED)
    state, _ = jit_prefill(params, state, width=9, masks=masks(None))
    rows = np.array([3, 1, 7])  # the last one is padding
    drafted, tree = jit_draft(params, state, rows)
    after, emitted = jit_verify(params, drafted, tree, masks(tree), rows)
    counts = np.asarray(emitted.counts[0])
    assert (counts[:2] > 0).all() and counts[2] == 0
    for row in range(4):
        new = texts(after)[row][len(texts(state)[row]) :]
        listed = rows.tolist().index(row) if row in rows else None
        wanted = [] if listed is None else emitted.tokens[0, listed, : counts[listed]].tolist()
        assert new == wanted
        assert expected()[row][: 1 + len(new)] == texts(after)[row][len(PROMPTS[row]) :]


@pytest.mark.slow
def test_a_row_without_a_legal_token_ends_with_an_error():
    params, masks = make("none"), bigram_masks(WORDS, PROMPTS)
    state = admit_prompts(params, empty_state(params, 4, 40), PROMPTS, sampling=MIXED)
    first = masks(None)
    first[0] = 0
    state, emitted = jit_prefill(params, state, width=9, masks=first)
    assert emitted.ending[0] == Ending.NOT_FINITE and (emitted.ending[1:] == Ending.NONE).all()
    state, tree = jit_draft(params, state)
    words = masks(tree)
    words[1] = 0
    state, emitted = jit_verify(params, state, tree, words)
    assert emitted.ending[1] == Ending.NOT_FINITE and emitted.counts[0, 1] == 0
    assert (emitted.status[2:] == Status.DECODING).all()


@pytest.mark.slow
def test_sampling_rows_end_in_a_greedy_call():
    params = make("none")
    state = admit_prompts(params, empty_state(params, 4, 40), PROMPTS, sampling=MIXED)
    state = read_prompts(params, state)
    state, tree = jit_draft(params, state, greedy=True)
    state, emitted = jit_verify(params, state, tree, WORDS[np.asarray(tree.tokens)], greedy=True)
    assert emitted.ending.tolist() == [0, Ending.NOT_GREEDY, Ending.NOT_GREEDY, 0]


def test_a_mask_does_not_hide_a_broken_model():
    logits = jnp.array([1.0, jnp.nan, jnp.inf, -jnp.inf, 2.0])[None, None]
    words = jnp.array([[[0b00001]]], jnp.uint32)
    found = np.asarray(restrict(logits, words, WHOLE))[0, 0]
    np.testing.assert_array_equal(found, [1.0, np.nan, np.inf, -np.inf, -np.inf])


def test_bad_arguments_are_refused():
    params = make("ngram")
    state = empty_state(params, 4, 40)
    with pytest.raises(ValueError, match=r"masks must be uint32 \[4, 4\].* not uint32 \[4, 3\]"):
        functional.prefill(params, state, width=4, masks=jnp.zeros((4, 3), jnp.uint32))
    _, tree = jit_draft(params, state)
    masks = jnp.zeros((*tree.tokens.shape, 4), jnp.uint32)
    with pytest.raises(ValueError, match="masks must be uint32"):
        functional.verify_drafts(params, state, tree, masks.astype(jnp.int32))
    with pytest.raises(ValueError, match="give verify_drafts the shape of draft"):
        functional.verify_drafts(params, state, tree, masks, shape=PLAIN)
    with pytest.raises(ValueError, match="give verify_drafts the rows of draft"):
        functional.verify_drafts(params, state, tree, masks, [0, 1])
