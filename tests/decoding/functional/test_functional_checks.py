"""Wrong arguments of the pure functions: errors in the caller's words, or endings of rows."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxspec
from jaxspec import SpeculationConfig, admit, decode, functional, init_state, make_sampling, prefill
from jaxspec import prefill_all as read_all
from jaxspec.config.model import ModelConfig
from jaxspec.decoding.functional.checks import check_order
from jaxspec.decoding.sampling import make_controls
from jaxspec.decoding.state import ERRORS, Emitted, Ending, EngineState, Status
from jaxspec.functional import EngineParams, verify_prefix
from jaxspec.parallel.placement import in_place_of
from tests.helpers.programs import FAST_COMPILE, new_jit
from tests.helpers.random_models import (
    CONFIG,
    as_dtype,
    jit_init,
    make_params,
    random_target,
    tiny_config,
)

CHAIN = SpeculationConfig.chain(2)
PARAMS = make_params("ngram", CHAIN)
VOCAB, LENGTH, WIDTH = CONFIG.vocab_size, 32, 8
PROMPTS = np.arange(24, dtype=np.int32).reshape(2, 12) % 7
LENS = np.array([12, 5], np.int32)
ROWS = np.arange(2)

jit_admit = new_jit(admit)
jit_prefill = new_jit(functools.partial(prefill, greedy=True), "width", "logprobs")
jit_decode = new_jit(functools.partial(decode, greedy=True), "max_rounds")
jit_read_all = new_jit(functools.partial(read_all, greedy=True), "width", "logprobs")


def empty(num_rows: int = 2) -> EngineState:
    return jit_init(PARAMS, num_rows, LENGTH)  # one program, not one for each array


def admitted() -> EngineState:
    return jit_admit(PARAMS, empty(), ROWS, PROMPTS, LENS)


def half_read() -> EngineState:
    """Row 0 has read 8 of 12 tokens; row 1 decodes."""
    return jit_prefill(PARAMS, admitted(), width=WIDTH)[0]


def in_a_program[T](function: Callable[[], T]) -> T:
    """What a function of known values returns: they are constants of one program, which compiles
    faster than their operations one by one."""
    return jax.jit(function, compiler_options=FAST_COMPILE)()


def whole() -> tuple[EngineState, Emitted]:
    """The prompts read in one chunk."""
    return jit_prefill(PARAMS, admitted(), width=16, logprobs=True)


def refused(call: Callable[[], Any], *messages: str) -> None:
    """One line, which has each of these."""
    with pytest.raises(ValueError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text
    for message in messages:
        assert message in text, text


# What admit is given.


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"prompts": PROMPTS[0]}, ["prompts must be integers [B, T], got shape [12]: give [prom"]),
        ({"prompts": PROMPTS * 1.0}, ["prompts must be integers [B, T], not float64: cast it"]),
        ({"prompts": jnp.ones((2, 12))}, ["prompts must be integers [B, T], not float32: cast it"]),
        ({"prompts": PROMPTS > 2}, ["prompts must be integers [B, T], not bool"]),
        ({"prompts": [[1, 2], [3]]}, ["prompts must be integers [B, T]: pad its lists"]),
        ({"prompts": PROMPTS[:1]}, ["prompts has 1 entries, rows has 2"]),
        ({"prompts": PROMPTS - 1}, ["prompts[0, 0] is -1: token ids are 0 to 95"]),
        ({"prompts": PROMPTS + VOCAB - 1}, ["prompts[0, 1] is 96: token ids are 0 to 95"]),
        (
            {"prompts": PROMPTS + np.int64(2**40)},
            ["prompts[0, 0] is 1099511627776: it does not fit 32 bits"],
        ),
        ({"prompts": np.zeros((2, 33), int)}, ["a prompt of 33 tokens is longer than a row (32)"]),
        ({"prompt_lens": 5}, ["prompt_lens must be integers [B], got shape []: give [prompt_le"]),
        ({"prompt_lens": [5]}, ["prompt_lens has 1 entries, rows has 2"]),
        ({"prompt_lens": [0, 5]}, ["prompt_lens[0] is 0: it must be 1 to 12"]),
        ({"prompt_lens": [5, 13]}, ["prompt_lens[1] is 13: it must be 1 to 12"]),
        ({"rows": [0, 2]}, ["rows[1] is 2: the state has rows 0 to 1"]),
        ({"rows": [-2, 1]}, ["rows[0] is -2: the state has rows 0 to 1"]),
        ({"rows": [1, 1]}, ["rows lists row 1 twice"]),
        ({"rows": [-1, -1]}, ["rows lists no row, only padding"]),
        ({"rows": 0}, ["rows must be integers [B], got shape []: give [rows]"]),
        ({"max_lens": [20, 33]}, ["max_lens[1] is 33: it must be 1 to 32, the max_length"]),
        ({"max_lens": 20}, ["max_lens must be integers [B]"]),
        ({"cached_lens": [0, 6]}, ["cached_lens[1] is 6: it must be 0 to the row's prompt_lens"]),
        ({"stop_token_ids": [96]}, ["stop_token_ids[0, 0] is 96: it must be a token id, 0 to 95"]),
        ({"stop_token_ids": [[1], [2, 3]]}, ["stop_token_ids must be integers [B, E]: pad its"]),
        ({"stop_token_ids": [1.5]}, ["stop_token_ids must be integers [E], not float64"]),
        ({"stop_token_ids": (1, 2, 3, 4, 5)}, ["make it with a larger max_stops"]),
        ({"page_table": np.ones((2, 1), int)}, ["a page_table for 2 rows must be"]),
        ({"sampling": make_sampling(3)}, ["sampling has shape [3] for 2 rows: make_sampling(2"]),
        ({"controls": 0.5}, ["the state was made without controls"]),
        ({"sampling": 0.5}, ["sampling must be what make_sampling gives, not float"]),
        (
            {"prompts": PROMPTS * 1.0, "prompt_lens": 5, "max_lens": [1.5, 2]},
            ["prompts must be integers", "prompt_lens must be", "max_lens must be integers"],
        ),
        (
            {"prompt_lens": [0, 5], "max_lens": [40, 40], "stop_token_ids": [-2]},
            ["prompt_lens[0] is 0", "max_lens[0] is 40", "stop_token_ids[0, 0] is -2"],
        ),
        ({"rows": [0, 2], "prompt_lens": [5, 13]}, ["rows[1] is 2", "prompt_lens[1] is 13"]),
    ],
)
def test_admit_names_what_is_wrong(changes: dict[str, Any], messages: list[str]):
    given: dict[str, Any] = {"rows": ROWS, "prompts": PROMPTS, "prompt_lens": LENS} | changes
    refused(lambda: admit(PARAMS, empty(), **given), *messages)


def test_values_of_padding_are_not_checked():
    prompts = np.array([PROMPTS[0], np.full(12, 99)], np.int32)
    before = empty()
    state = in_a_program(lambda: admit(PARAMS, before, [1, -1], prompts, [12, 0]))
    assert state.rows.status.tolist() == [Status.EMPTY, Status.READING]


def test_a_row_that_is_busy_is_not_replaced():
    state = half_read()
    refused(
        lambda: admit(PARAMS, state, ROWS, PROMPTS, LENS),
        "row 0 is READING, row 1 is DECODING: release it",
    )
    released = in_a_program(lambda: functional.release(PARAMS, state, [1]))
    after = in_a_program(lambda: admit(PARAMS, released, [1], PROMPTS[:1], [3]))
    assert after.rows.status.tolist() == [Status.READING, Status.READING]


# The order of calls.


def test_rounds_of_rows_without_a_prompt_are_an_error():
    state = empty()
    refused(lambda: decode(PARAMS, state, 4), "no row of this call has a prompt: admit first")
    refused(lambda: prefill(PARAMS, state, width=4), "admit first")
    refused(lambda: read_all(PARAMS, state, width=4), "admit first")
    refused(lambda: functional.draft(PARAMS, state), "admit first")


def test_rounds_before_a_prompt_is_read_are_an_error():
    told = "row 0 has read 0 of 12 prompt tokens, row 1 has read 0 of 5 prompt tokens: call prefill"
    state = admitted()
    refused(lambda: decode(PARAMS, state, 4), told, "or prefill_all")
    refused(lambda: functional.draft(PARAMS, state), told)
    half = half_read()
    refused(lambda: decode(PARAMS, half, 4, rows=[0]), "row 0 has read 8 of 12 prompt tokens")


def test_a_row_may_read_while_another_decodes():
    state, emitted = jit_decode(PARAMS, half_read(), 3, max_rounds=LENGTH)
    assert state.rows.status.tolist() == [Status.READING, Status.DECODING]
    assert emitted.num_rounds == 3 and state.rows.ending.tolist() == [Ending.NONE] * 2
    check_order(state, None, decodes=True)  # a known state may, too


def test_rounds_of_rows_that_are_done_do_nothing():
    state, _ = jit_decode(PARAMS, whole()[0], LENGTH, max_rounds=LENGTH)
    assert state.rows.ending.tolist() == [Ending.LENGTH] * 2
    check_order(state, None, decodes=True)
    after, emitted = jit_decode(PARAMS, state, 3, max_rounds=LENGTH)
    assert emitted.num_rounds == 0 and after.rows.ending.tolist() == [Ending.LENGTH] * 2


# Sizes and options.


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"num_rows": 0}, ["num_rows must be an int, at least 1, got 0"]),
        ({"max_length": 0}, ["max_length must be an int, at least 2 (a token to read"]),
        ({"max_length": 9.5}, ["max_length must be an int, at least 2", "got 9.5"]),
        ({"max_length": 100_000}, ["exceeds the model's 1024 positions"]),
        ({"page_size": 0}, ["page_size must be an int, at least 1, got 0"]),
        ({"num_rows": -1, "page_size": "a"}, ["num_rows must be", "page_size must be", "got 'a'"]),
        ({"max_stops": -1}, ["max_stops must be an int, at least 0"]),
    ],
)
def test_sizes_of_a_state_are_checked(options: dict[str, Any], messages: list[str]):
    sizes: dict[str, Any] = {"num_rows": 1, "max_length": LENGTH} | options
    refused(lambda: init_state(PARAMS, **sizes), *messages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_rounds": -1}, "num_rounds is -1: it must be at least 0"),
        ({"num_rounds": 3.5}, "num_rounds must be an integer, not float64"),
        ({"num_rounds": 5, "max_rounds": 2}, "num_rounds is 5: it must be 0 to max_rounds, 2"),
        ({"max_rounds": 0}, "max_rounds must be an int, at least 1, got 0"),
        ({"columns": 0}, "columns must be an int, at least 1, got 0"),
        ({"hidden": 1}, "hidden must be a tuple of layers, such as (1,), not 1"),
        ({"hidden": (3,)}, "hidden states [3] cannot be given: the target has 0 to 2, and -1"),
        ({"hidden": (-2,)}, "the target has 0 to 2"),
        ({"hidden": (0, 9)}, "the target has 0 to 2"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs=True"),
        ({"logprobs": True, "top_logprobs": 97}, "top_logprobs must be 0 to 96, got 97"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs must be 0 to 96, got -1"),
        ({"shape": "chain:2"}, "jaxspec.TreeShape.parse('chain:2'), not 'chain:2'"),
        ({"shape": CHAIN}, "must be a TreeShape, not a SpeculationConfig"),
        ({"controls": True}, "init_state(..., controls=True)"),
        ({"rows": [2]}, "rows[0] is 2: the state has rows 0 to 1"),
    ],
)
def test_options_of_rounds_are_checked(options: dict[str, Any], message: str):
    given: dict[str, Any] = {"num_rounds": 1} | options
    refused(lambda: decode(PARAMS, half_read(), **given), message)


def test_a_traced_number_of_rounds_needs_the_most_there_can_be():
    refused(lambda: jax.jit(decode)(PARAMS, empty(), 3), "give max_rounds")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width must be an int, at least 1, got 0"),
        ({"width": 2.5}, "width must be an int, at least 1, got 2.5"),
        ({"counts": [1, 9]}, "counts[1] is 9: it must be 0 to width, 8"),
        ({"counts": [1]}, "counts has 1 entries for 2 rows"),
        ({"counts": 3}, "counts must be integers [B]"),
        ({"masks": np.ones((2, 3), np.uint32), "policy_logprobs": True}, "cannot be with masks"),
        ({"controls": True}, "init_state(..., controls=True)"),
    ],
)
def test_options_of_reading_are_checked(options: dict[str, Any], message: str):
    given: dict[str, Any] = {"width": WIDTH} | options
    refused(lambda: prefill(PARAMS, admitted(), **given), message)


@pytest.mark.parametrize("width", [0, -1, 2.5])
def test_the_width_of_whole_prompts_is_checked(width: Any):
    told = f"width must be an int, at least 1, got {width}"
    refused(lambda: read_all(PARAMS, admitted(), width=width), told)


PAGES = np.arange(1, 7).reshape(1, 6)


@pytest.mark.parametrize(
    ("table", "num_pages", "message"),
    [
        (PAGES * 1.0, 7, "page_table must be integers [R, M], not float64: cast it"),
        (PAGES[0], 7, "page_table must be integers [R, M], got shape [6]: give [page_table]"),
        (np.concatenate([PAGES, PAGES]), 7, "page_table has 2 rows for 1: give one for each"),
        (PAGES[:, :3], 7, "32 tokens and 3 tree slots need 5 pages of 8, the page table has 3"),
        (PAGES, 6, "page_table[0, 5] is 6: pages are 0 to 5"),
        (-PAGES, 7, "page_table[0, 0] is -1: pages are 0 to 6"),
        (PAGES, 0, "num_pages must be an int, at least 2 with the null pages, got 0"),
        (PAGES, 7.5, "num_pages must be an int, at least 2 with the null pages, got 7.5"),
    ],
)
def test_page_tables_are_checked(table: Any, num_pages: Any, message: str):
    options: dict[str, Any] = dict(page_size=8, page_table=table, num_pages=num_pages)
    refused(lambda: init_state(PARAMS, 1, LENGTH, **options), message)


def test_pages_and_rows_must_go_together():
    refused(lambda: init_state(PARAMS, 2, LENGTH, num_pages=9), "give page_table and num_pages tog")
    pool = functional.init_pool(PARAMS, 64, 16, num_rows=2)
    told = "4 rows do not fit a pool that was made for 2"
    refused(lambda: functional.init_rows(PARAMS, pool, 4, LENGTH), told)


def test_page_tables_may_be_lists():
    state = init_state(PARAMS, 1, LENGTH, page_size=8, page_table=PAGES.tolist(), num_pages=7)
    assert state.rows.page_table.tolist() == PAGES.tolist()


def test_pages_that_the_pool_lacks_are_refused():
    state = admitted()
    table, most = np.array(state.rows.page_table), state.pool.num_pages
    rule = f"pages are 0 to {most - 1}"
    assign, copy = functional.assign_pages, functional.copy_pages
    told = f"page_table[0, 0] is {most}: {rule}"
    refused(lambda: assign(PARAMS, state, [0], np.full_like(table[:1], most)), told)
    told = f"a page_table for 2 rows must be {[2, table.shape[1]]}, not {[1, table.shape[1]]}"
    refused(lambda: assign(PARAMS, state, ROWS, table[:1]), told)
    refused(lambda: copy(PARAMS, state, [1], [-1]), f"destination[0] is -1: {rule}")
    refused(lambda: copy(PARAMS, state, [1, 2], [3]), "source has 2 pages, destination 1")
    refused(lambda: functional.save_row(PARAMS, state, [0], [most]), f"pages[0] is {most}: {rule}")
    refused(lambda: functional.save_row(PARAMS, state, [5], [1]), "rows[0] is 5: the state has")


def test_parameters_and_state_must_be_such_and_of_each_other():
    state, either = empty(), "must be params and state, EngineParams and EngineState, not "
    first: Any = state
    refused(
        lambda: decode(first, cast(Any, PARAMS), 1),
        either + "EngineState and EngineParams: swap them",
    )
    target: Any = PARAMS.target
    refused(lambda: decode(target, state, 1), either + "Decoder and EngineState: see jaxspec.load")
    refused(lambda: init_state(target, 1, 8), "params must be EngineParams", "not Decoder")
    rounded = jax.tree.map(lambda x: as_dtype(np.asarray(x), jnp.bfloat16), target)
    half = PARAMS.replace(target=rounded)
    refused(lambda: decode(half, state, 1), "made for weights in float32", "have bfloat16")
    function: Any = len
    refused(lambda: init_state(PARAMS.replace(target=function), 1, 8), "must be a Decoder, not the")


def test_fields_that_parameters_lack_are_named():
    with pytest.raises(TypeError, match="EngineParams has no field spec: its fields are target, d"):
        PARAMS.replace(spec=CHAIN)


def test_meshes_must_have_the_axes_of_make_mesh():
    one_axis = Mesh(np.array(jax.devices()[:2]), ("model",))
    refused(lambda: jaxspec.load(mesh=one_axis), "the mesh has axes ['model']", "jaxspec.make_mesh")
    number: Any = 2
    refused(lambda: jaxspec.load(mesh=number), "mesh must be a mesh, such as jaxspec.make_mesh(ten")
    params = PARAMS.replace(mesh=jaxspec.make_mesh(2))
    refused(lambda: init_state(params, 1, 8), "params.target is not split as params.mesh says")


def test_weights_that_cannot_replace_others_are_named():
    wider = random_target(tiny_config(vocab_size=97))
    named = "embed is float32[97, 32], not float32[96, 32]"
    refused(lambda: in_place_of(PARAMS.target, wider), named, "make a new engine")
    half = PARAMS.target.replace(embed=PARAMS.target.embed.astype(jnp.bfloat16))
    named = "embed is bfloat16[96, 32], not float32[96, 32]"
    refused(lambda: in_place_of(PARAMS.target, half), named)
    refused(lambda: in_place_of(PARAMS.target, PARAMS), "EngineParams instead of Decoder")
    other: ModelConfig = tiny_config(rope_theta=2e4)
    refused(lambda: in_place_of(PARAMS.target, PARAMS.target.replace(config=other)), "config")


def test_controls_are_checked():
    refused(lambda: make_controls(2, 9, min_tokens=1.5), "min_tokens must be integers, got 1.5")
    refused(lambda: make_controls(2, 9, presence_penalty=np.ones(3)), "a scalar or [2]")
    state, wrong = jit_init(PARAMS, 2, LENGTH, controls=True), cast(Any, 5)
    told = "policy_logprobs cannot be with controls: they are of temperature, top-k, top-p and min"
    both: dict[str, Any] = {"controls": True, "policy_logprobs": True}
    refused(lambda: decode(PARAMS, state, 1, **both), told)
    refused(lambda: prefill(PARAMS, state, width=WIDTH, **both), told)
    ids, lens = np.ones((2, 1), np.int32), np.ones(2, np.int32)
    refused(lambda: verify_prefix(PARAMS, state, None, ids, lens, width=WIDTH, **both), told)
    told = "controls must be what make_controls gives, not int"
    refused(lambda: admit(PARAMS, state, ROWS, PROMPTS, LENS, controls=wrong), told)
    wrong, told = make_controls(3, VOCAB), "must have a bias of [2, 96], not [3, 96]"
    refused(lambda: admit(PARAMS, state, ROWS, PROMPTS, LENS, controls=wrong), told)


# Traced values: rows end with an error.


def test_token_ids_outside_the_vocabulary_end_their_row():
    prompts = PROMPTS.copy()
    prompts[1, 4], prompts[1, 7] = VOCAB, -1  # of which the second is past the prompt
    state = jit_admit(PARAMS, empty(), ROWS, prompts, LENS)
    assert state.rows.status.tolist() == [Status.READING, Status.DONE]
    assert state.rows.ending.tolist() == [Ending.NONE, Ending.BAD_TOKEN]
    fine = jit_admit(PARAMS, empty(), ROWS, prompts, np.array([12, 4], np.int32))
    assert fine.rows.ending.tolist() == [Ending.NONE, Ending.NONE]


def test_a_busy_row_ends_and_keeps_its_tokens():
    state = half_read()
    before = np.asarray(state.rows.tokens)
    others = (PROMPTS + 1)[[1, 0]]
    after = jit_admit(PARAMS, state, np.array([1, -1]), others, LENS[[1, 0]])
    assert after.rows.status.tolist() == [Status.READING, Status.DONE]
    assert after.rows.ending.tolist() == [Ending.NONE, Ending.BUSY]
    np.testing.assert_array_equal(after.rows.tokens, before)
    twice = jit_admit(PARAMS, empty(), np.array([1, 1]), PROMPTS, LENS)
    assert twice.rows.ending.tolist() == [Ending.NONE, Ending.BUSY]
    np.testing.assert_array_equal(twice.rows.tokens[1, :12], PROMPTS[0])


def test_rows_that_are_to_decode_unread_end():
    state, emitted = jit_decode(PARAMS, admitted(), 3, max_rounds=LENGTH)
    assert state.rows.ending.tolist() == emitted.ending.tolist() == [Ending.UNREAD] * 2
    assert state.rows.status.tolist() == [Status.DONE] * 2 and emitted.num_rounds == 0
    waiting, _ = jit_decode(PARAMS, admitted(), 0, max_rounds=LENGTH)
    assert waiting.rows.ending.tolist() == [Ending.NONE] * 2
    assert {Ending.BAD_TOKEN, Ending.BUSY, Ending.UNREAD} <= set(ERRORS)


def test_lists_of_traced_values_are_arrays():
    def admit_one(length: Any, stop: Any) -> Any:
        prompts = [[1, 2, length]]
        rows = admit(PARAMS, empty(), [1], prompts, [length], stop_token_ids=(stop, 5)).rows
        return rows.prompt_lens, rows.stop_tokens, rows.tokens

    lens, stops, tokens = jax.jit(admit_one, compiler_options=FAST_COMPILE)(3, 7)
    assert lens.tolist() == [0, 3] and stops[1].tolist() == [7, 5, -1, -1]
    assert tokens[1, :4].tolist() == [1, 2, 3, 0]


# Whole prompts.


def test_whole_prompts_are_read_in_chunks():
    expected, at_once = whole()
    state, emitted = jit_read_all(PARAMS, admitted(), width=5, logprobs=True)
    assert state.rows.status.tolist() == [Status.DECODING] * 2
    np.testing.assert_array_equal(state.rows.tokens, expected.rows.tokens)
    roots = [expected.rows.tokens[row, length].item() for row, length in enumerate(LENS)]
    assert emitted.tokens[0, :, 0].tolist() == roots and emitted.counts.tolist() == [[1, 1]]
    assert emitted.status.tolist() == [Status.DECODING] * 2
    assert (np.asarray(emitted.logprobs) < 0).all()
    np.testing.assert_allclose(emitted.logprobs, np.asarray(at_once.logprobs), rtol=1e-4)


def test_whole_prompts_of_some_rows_and_of_known_states():
    before = admitted()
    state, emitted = in_a_program(lambda: read_all(PARAMS, before, [0, -1], width=7, greedy=True))
    assert state.rows.status.tolist() == [Status.DECODING, Status.READING]
    assert emitted.counts.tolist() == [[1, 0]]
    np.testing.assert_array_equal(state.rows.tokens[0], whole()[0].rows.tokens[0])


def test_whole_prompts_are_read_under_vmap():
    def sample(params: EngineParams, prompt: Any, length: Any) -> Any:
        state = admit(params, init_state(params, 1, LENGTH), [0], prompt[None], length[None])
        state, emitted = read_all(params, state, width=5, greedy=True)
        return state.rows.tokens[0], emitted.counts[0, 0]

    mapped = jax.vmap(sample, in_axes=(None, 0, 0))
    tokens, counts = jax.jit(mapped, compiler_options=FAST_COMPILE)(PARAMS, PROMPTS, LENS)
    np.testing.assert_array_equal(tokens, whole()[0].rows.tokens)
    assert counts.tolist() == [1, 1]
