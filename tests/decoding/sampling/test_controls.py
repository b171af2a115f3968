"""Controls of single nodes against plain numpy, and how they come to their rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import functional
from jaxspec.config.sampling_params import LONGEST_BAD_SEQUENCE, MOST_BAD_SEQUENCES
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.sampling import Controls, History, control_logits, make_controls
from jaxspec.decoding.state import Ending, EngineState, Status
from jaxspec.decoding.trees.tree import DraftTree, path_tokens
from jaxspec.functional import EngineParams
from jaxspec.parallel import Layout
from tests.helpers.programs import FAST_COMPILE, new_jit, traces
from tests.helpers.random_models import CONFIG, make_params, padded, random_prompts
from tests.helpers.random_trees import path_from_root, random_tree

jit_control = jax.jit(control_logits, compiler_options=FAST_COMPILE)
VOCAB, ROWS, NODES, LENGTH = 64, 4, 7, 12  # tokens of random trees are below 64
SIZES = [7, 1, 5, 7]


def reference(
    logits: np.ndarray, row: int, controls: Controls, before: list[int], stops: np.ndarray
) -> np.ndarray:
    """One node [V], after the tokens ``before``."""
    logits = logits + np.asarray(controls.bias)[row]
    if len(before) < controls.min_lens[row]:
        logits[stops[stops >= 0]] = -np.inf
    output = before[int(controls.prompt_lens[row]) :]
    for sequence in np.asarray(controls.bad_sequences)[row]:
        *begun, end = sequence[sequence >= 0].tolist() or [-1]
        if end >= 0 and len(output) >= len(begun) and output[len(output) - len(begun) :] == begun:
            logits[end] = -np.inf
    for token in set(before):
        factor = float(controls.repetition_penalty[row])
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        logits[token] -= float(controls.presence_penalty[row])
        logits[token] -= float(controls.frequency_penalty[row]) * output.count(token)
    return logits


def bad_sequences(rng: np.random.Generator) -> np.ndarray:
    """None, some of one and two tokens, and all of two of the few that paths are made of."""
    some = {1: [(9,), *rng.integers(VOCAB, size=(40, 2))], 3: [*np.ndindex(7, 7)]}
    some[2] = [*rng.integers(7, size=(60, 3))]
    table = np.full((ROWS, MOST_BAD_SEQUENCES, LONGEST_BAD_SEQUENCE), -1, np.int32)
    for row, sequences in some.items():
        for place, sequence in enumerate(sequences):
            table[row, place, -len(sequence) :] = sequence
    return table


def example(
    rng: np.random.Generator,
) -> tuple[np.ndarray, Controls, History, DraftTree, jax.Array]:
    """Logits, controls (none, bias, penalties, all), history and tree of four rows, and stops."""
    bias = 3 * rng.standard_normal((ROWS, VOCAB)).astype(np.float32)
    bias[:, rng.permutation(VOCAB)[:5]] = -np.inf
    bias[[0, 2]] = 0
    lens = np.array([4, 1, 12, 9], np.int32)
    controls = make_controls(
        ROWS,
        VOCAB,
        bias=bias,
        repetition_penalty=np.array([1.0, 1.0, 1.4, 0.7]),
        presence_penalty=np.array([0.0, 0.0, 0.5, -0.4]),
        frequency_penalty=np.array([0.0, 0.0, -0.3, 0.8]),
        prompt_lens=np.array([3, 0, 5, 2]),
        min_tokens=np.array([0, 2, 0, 9]),
        bad_sequences=bad_sequences(rng),
    )
    tokens = rng.integers(VOCAB, size=(ROWS, LENGTH)).astype(np.int32)
    # Of few kinds, so that paths repeat what came before.
    tokens[2:] %= 7
    roots = tokens[np.arange(ROWS), lens - 1]
    tree = random_tree(rng, roots, SIZES, NODES, 3)
    drafted = np.array(tree.tokens)
    drafted[2:] %= 7
    drafted[:, 0] = roots
    tree = tree.replace(tokens=drafted)
    logits = 3 * rng.standard_normal((ROWS, NODES, VOCAB)).astype(np.float32)
    history = History(jnp.asarray(tokens), jnp.asarray(lens), path_tokens(tree))
    return logits, controls, history, tree, jnp.array([[1, 5, -1]] * ROWS)


@pytest.mark.parametrize("seed", range(5))
def test_each_node_counts_its_own_path(seed: int):
    logits, controls, history, tree, stops = example(np.random.default_rng(seed))
    found = np.asarray(jit_control(logits, controls, history, stops))
    for row, size in enumerate(SIZES):
        committed = np.asarray(history.tokens)[row, : int(history.lens[row])].tolist()
        for node in range(size):
            path = path_from_root(np.asarray(tree.parents)[row], node)[1:]
            before = committed + [int(tree.tokens[row, i]) for i in path]
            expected = reference(
                logits[row, node].copy(), row, controls, before, np.asarray(stops[row])
            )
            np.testing.assert_allclose(found[row, node], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[0], logits[0])


def test_a_split_vocabulary_is_controlled_as_a_whole_one():
    logits, controls, history, _, stops = example(np.random.default_rng(0))
    parts = logits.reshape(ROWS, NODES, 4, -1)
    bias = controls.bias.reshape(ROWS, 4, -1)

    def part(logits: jax.Array, bias: jax.Array) -> jax.Array:
        own = controls.replace(bias=bias)
        return control_logits(logits, own, history, stops, Layout(vocab=("model",)))

    split = jax.vmap(part, in_axes=(2, 1), out_axes=2, axis_name="model")
    found = jax.jit(split)(parts, bias).reshape(logits.shape)
    np.testing.assert_allclose(found, jit_control(logits, controls, history, stops), rtol=1e-6)


def test_not_a_number_is_not_hidden():
    _, controls, history, _, stops = example(np.random.default_rng(0))
    broken = np.full((ROWS, NODES, VOCAB), np.nan, np.float32)
    assert jnp.isnan(jit_control(broken, controls, history, stops)).all()


def test_no_value_of_a_control_compiles_anew():
    logits, _, history, _, stops = example(np.random.default_rng(0))
    control = jax.jit(lambda *args: control_logits(*args))
    for options in ({}, {"bias": np.ones(VOCAB)}, {"min_tokens": 3}, {"presence_penalty": 1.0}):
        control(logits, make_controls(ROWS, VOCAB, **options), history, stops)
    assert traces(control) == 1


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("bias", np.full(VOCAB, np.nan), "finite, or -inf, got nan"),
        ("bias", np.full(VOCAB, np.inf), "finite, or -inf, got inf"),
        ("bias", np.zeros(VOCAB + 1), r"\[4, 64\], not \[65\]"),
        ("repetition_penalty", 0.0, r"in \[0.01, 100.0\], got 0.0"),
        ("repetition_penalty", [1.0, 1.0, np.nan, 1.0], "got nan"),
        ("presence_penalty", 2.5, r"in \[-2.0, 2.0\], got 2.5"),
        ("frequency_penalty", [0.0, 0.0, 0.0, -3.0], r"in \[-2.0, 2.0\], got -3.0"),
        ("prompt_lens", -1, "at least 0, got -1"),
        ("min_tokens", -1, "at least 0, got -1"),
        ("bad_sequences", np.zeros((ROWS, 2, 2), np.int32), r"\[4, 128, 16\], not \[4, 2, 2\]"),
    ],
)
def test_values_out_of_range_are_named(option: str, value, rule: str):
    with pytest.raises(ValueError, match=f"{option} must be .*{rule}"):
        make_controls(ROWS, VOCAB, **{option: value})


def test_all_that_is_wrong_is_named_at_once():
    names = ["bias", "presence_penalty", "min_tokens", "bad_sequences"]
    with pytest.raises(ValueError, match=".*; ".join(f"{name} must be" for name in names)):
        make_controls(ROWS, VOCAB, **dict.fromkeys(names, np.full(ROWS, -3)))


# Rows of an engine.

admit, prefill = new_jit(functional.admit), new_jit(functional.prefill, "width", "controls")
decode = new_jit(functional.decode, "max_rounds", "controls")
PROMPTS = random_prompts((5, 3, 8), seed=1)
LENS = np.array([len(prompt) for prompt in PROMPTS], np.int32)


def params_of() -> EngineParams:
    return make_params("none", SpeculationConfig.chain(1))


def admitted(params: EngineParams, **options) -> EngineState:
    state = functional.init_state(params, 3, 40, page_size=4, controls=True)
    return admit(params, state, np.arange(3), padded(PROMPTS, 16), LENS, **options)


@pytest.mark.slow
def test_a_row_with_controls_ends_a_call_that_applies_none():
    params = params_of()
    controls = make_controls(3, CONFIG.vocab_size, presence_penalty=np.array([0.0, 1.0, 0.0]))
    state = admitted(params, controls=controls)
    unread, emitted = prefill(params, state, width=16)
    assert unread.rows.ending.tolist() == [Ending.NONE, Ending.UNCONTROLLED, Ending.NONE]
    assert emitted.counts.tolist() == [[1, 0, 1]]
    state, _ = prefill(params, admitted(params, controls=controls), width=16, controls=True)
    assert state.rows.status.tolist() == [Status.DECODING] * 3
    state, _ = decode(params, state, 3, max_rounds=3)
    assert state.rows.ending.tolist() == [Ending.NONE, Ending.UNCONTROLLED, Ending.NONE]


def test_a_row_with_no_token_left_ends_with_an_error():
    params, bias = params_of(), np.zeros((3, CONFIG.vocab_size), np.float32)
    bias[1] = -np.inf
    state = admitted(params, controls=make_controls(3, CONFIG.vocab_size, bias=bias))
    state, _ = prefill(params, state, width=16, controls=True)
    assert state.rows.ending.tolist() == [Ending.NONE, Ending.NOT_FINITE, Ending.NONE]


@pytest.mark.slow
def test_rows_that_are_listed_have_their_own_controls_and_later_ones_get_new_ones():
    params, vocab = params_of(), CONFIG.vocab_size
    bias = np.full((3, vocab), -np.inf, np.float32)
    bias[np.arange(3), [1, 2, 3]] = 0
    state = admitted(params, controls=make_controls(3, vocab, bias=bias))
    listed = np.array([2, 0, 3], np.int32)
    state, emitted = prefill(params, state, listed, width=16, controls=True)
    assert emitted.tokens[0, :2, 0].tolist() == [3, 1]
    state = admit(params, state, np.array([0, 3, 3]), padded(PROMPTS, 16), LENS)
    assert state.controls is not None
    assert state.controls.used.tolist() == [False, True, True]
    np.testing.assert_array_equal(state.controls.bias, [np.zeros(vocab), *bias[1:]])
    _, emitted = prefill(params, state, width=16, controls=True)
    assert emitted.tokens[0, 0, 0] != 1 and emitted.tokens[0, 1, 0] == 2
