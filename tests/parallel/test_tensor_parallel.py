"""Sharded over devices, the engine computes what it computes on one, and moves no large array."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import functional
from jaxspec.decoding.sampling import Sampling, make_controls, make_sampling
from jaxspec.decoding.state import Emitted, Ending, EngineState, Rows, Status
from jaxspec.evaluation.benchmarks.collective_volume import parse_collectives, totals
from jaxspec.functional import EngineParams
from jaxspec.parallel import TensorParallel, make_mesh
from tests.helpers.block_heads import block_target
from tests.helpers.layouts import on_mesh
from tests.helpers.marks import slow, slow_by_name
from tests.helpers.programs import decode_hlo, new_jit, traces
from tests.helpers.random_models import make_params, random_target, tiny_config
from tests.helpers.split_models import SPECULATIONS, is_of_blocks, params_of

# On four and on eight devices the two KV heads are repeated and the vocabulary is padded.
TARGET = tiny_config(vocab_size=98, num_heads=8, qkv_bias=True)
BATCH, LENGTH, PAGE_SIZE, PROMPT = 4, 40, 4, 9


@functools.cache
def one_device(name: str) -> EngineParams:
    if name == "none, target of blocks":
        return make_params("none", SPECULATIONS["none"], block_target(TARGET))
    return params_of(name, random_target(TARGET))


def empty_state(params: EngineParams, page_size: int = PAGE_SIZE) -> EngineState:
    return functional.init_state(params, BATCH, LENGTH, page_size=page_size)


def generate(
    params: EngineParams, state: EngineState, prompts: Any, counts: Any, sampling: Sampling
) -> tuple[EngineState, Emitted, Emitted]:
    """Rows are admitted out of order, and their prompts read in two chunks, the first of them with
    the rows listed: in another order, where a device has several."""
    order = jnp.array([2, 3, 0, 1])
    state = functional.admit(
        params, state, order, prompts[order], counts[order],
        sampling=jax.tree.map(lambda x: x[order], sampling),
    )  # fmt: skip
    listed = [1, 0, 3, 2] if params.data_parallel < BATCH else [0, 1, 2, 3]
    most = np.where(np.array(listed) == 1, 3, 5)
    state, _ = functional.prefill(params, state, np.array(listed), most, width=5)
    state, read = functional.prefill(params, state, width=PROMPT)
    return *functional.decode(params, state, LENGTH), read


@functools.cache
def run(
    name: str,
    model: TensorParallel = 1,
    data: int = 1,
    shard_drafter: bool = True,
    page_size: int = PAGE_SIZE,
    sequence: int = 1,
):
    """The token buffer, the rounds and accepted tokens of each sequence, and what was emitted."""
    params = one_device(name)
    if (model, data, sequence) != (1, 1, 1):
        mesh = make_mesh(model, data, sequence_parallel=sequence)
        params = on_mesh(params, mesh, shard_drafter=shard_drafter)
    prompts = np.random.default_rng(0).integers(
        TARGET.vocab_size, size=(BATCH, PROMPT), dtype=np.int32
    )
    counts = np.array([PROMPT, 5, PROMPT, 2], np.int32)
    # Greedy and sampling rows side by side; the sampling ones use top-p.
    sampling = make_sampling(
        BATCH,
        temperature=np.array([0.0, 0.8, 0.8, 0.0]),
        top_p=np.array([1.0, 0.9, 0.9, 1.0]),
        seeds=np.arange(BATCH),
    )
    arguments = prompts, counts, sampling
    state, *emitted = jax.device_get(
        new_jit(generate)(params, empty_state(params, page_size), *arguments)
    )
    rows = state.rows
    return rows.tokens, rows.stats.rounds, rows.stats.accepted, emitted


@pytest.mark.parametrize(
    ("name", "model", "data", "shard_drafter"),
    slow_by_name(
        {
            "none": [(4, 1, True), (2, 1, True), (1, 4, True)],
            "eagle3": [(4, 1, True), (2, 1, True), (4, 1, False), (2, 2, False), (2, 2, True)],
            "eagle3 tree": [(2, 2, False), (2, 1, True), (4, 1, True), (4, 1, False), (2, 2, True)],
            "eagle3 rejection": [(4, 1, True), (2, 2, False)],
            "draft_model rejection": [(2, 1, True), (4, 1, False)],
            "ngram": [(2, 2, True)],
            "eagle1": [(4, 1, True), (2, 2, False)],
            "draft_model": [(2, 1, True), (4, 1, True), (4, 1, False), (2, 2, False)],
            "mapped tree": [(2, 1, False)],
            "mapped rejection": [(2, 1, False)],
            "peagle tree": [(2, 1, False), (4, 1, True)],
            "dflash": [(2, 1, False), (2, 2, True)],
            "dflash tree": [(2, 1, True), (4, 1, False)],
            "dflash rejection": [(2, 1, True), (4, 1, True)],
            "dspark": [(2, 1, True)],
            "reduced dspark": [(2, 1, False), (2, 1, True)],
            "reduced dflash tree": [(4, 1, True)],
            "dspark tree": [(4, 1, True), (2, 1, True), (2, 2, False)],
            "dspark rejection": [(2, 1, False)],
            "rnn tree": [(2, 1, True)],
            "domino tree": [(2, 1, True)],
            "xpress": [(2, 1, True)],
            "lilicorr tree": [(2, 1, True)],
            "gated": [(2, 1, True)],
            "rnn rejection": [(2, 1, True)],
            "domino rejection": [(2, 1, False)],
            "xpress tree": [(2, 1, False)],
            "xpress rejection": [(2, 1, True)],
            "lilicorr rejection": [(2, 1, True)],
            "windowed tree": [(2, 1, True)],
            "causal": [(2, 1, True)],
            "mimo tree": [(2, 1, True)],
            "dflash2": [(2, 1, True)],
            "dflash2 tree": [(2, 1, False), (2, 2, True)],
            "dflash2 rejection": [(2, 1, True)],
            "mixed": [(4, 1, False), (2, 2, True)],
            "mixed rejection": [(2, 2, True)],
            "ngram+dflash": [(2, 1, True)],
            "ngram+dspark tree": [(2, 1, False)],
            "suffix": [(2, 1, True)],
            "suffix mixed tree": [(2, 1, True)],
        },
        fast=[("ngram", 2, 2, True)],
    ),
)
def test_sharding_changes_nothing(name: str, model: int, data: int, shard_drafter: bool):
    check_changes_nothing(name, model, data, shard_drafter)


# Grids: hidden states over the first size, heads and hidden units of MLPs over both. A drafter that
# is split is: a head over all devices, a draft model as its target.
@pytest.mark.parametrize(
    ("name", "grid", "data", "shard_drafter", "page_size"),
    slow_by_name(
        {
            "none": [((2, 2), 1, True, 4)],
            "eagle3": [((2, 2), 1, True, 16), ((2, 2), 1, False, 1)],
            "eagle3 tree": [
                ((2, 2), 1, True, 1),
                ((2, 2), 1, False, 16),
                ((2, 2), 2, True, 4),
                ((2, 4), 1, True, 4),
                ((4, 2), 1, True, 4),
            ],
            "eagle3 rejection": [((2, 2), 1, True, 4)],
            "eagle1": [((2, 2), 1, True, 16), ((2, 2), 1, False, 1)],
            "draft_model": [
                ((2, 2), 1, True, 1),
                ((2, 2), 1, False, 16),
                ((2, 1), 2, True, 4),
                ((2, 4), 1, True, 4),
                ((4, 2), 1, True, 4),
            ],
            "draft_model rejection": [((2, 2), 1, True, 4)],
            "ngram": [((2, 2), 1, True, 16)],
            "dflash tree": [((2, 2), 1, True, 4)],
            "dspark": [((2, 2), 1, False, 16)],
            "mixed": [((2, 2), 1, True, 4)],
        }
    ),
)
def test_two_dimensional_sharding_changes_nothing(
    name: str, grid: tuple[int, int], data: int, shard_drafter: bool, page_size: int
):
    check_changes_nothing(name, grid, data, shard_drafter, page_size)


def check_changes_nothing(name: str, model: Any, *options: Any) -> None:
    tokens, rounds, accepted, emitted = run(name, model, *options)
    one_tokens, one_rounds, one_accepted, one_emitted = run(name)
    np.testing.assert_array_equal(tokens, one_tokens)
    # Else a drafter that draws nonsense when it is sharded would not be noticed.
    np.testing.assert_array_equal(rounds, one_rounds)
    np.testing.assert_array_equal(accepted, one_accepted)
    for found, expected in zip(jax.tree.leaves(emitted), jax.tree.leaves(one_emitted), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert name in ("none", "ngram") or accepted[:, 1].sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SPECULATIONS if name != "none"])
def test_one_device_has_the_texts_of_plain_decoding(name: str):
    """So what equals its texts above has them, too."""
    plain = run("none, target of blocks" if is_of_blocks(name) else "none")[0]
    rows = [0, 3] if "rejection" in name else [0, 1, 2, 3]  # its samples depend on the drafter
    np.testing.assert_array_equal(run(name)[0][rows], plain[rows])


def generate_controlled(params: EngineParams, state: EngineState, prompts: Any, counts: Any):
    """Every control, and every log-probability, beside a row without controls."""
    vocab = TARGET.vocab_size
    state = functional.admit(
        params, state, jnp.arange(BATCH), prompts, counts,
        sampling=make_sampling(BATCH, temperature=jnp.array([0.0, 0.8, 0.8, 0.0])),
        controls=make_controls(
            BATCH,
            vocab,
            bias=jnp.where(jnp.arange(BATCH)[:, None] == 1, jnp.arange(vocab) % 7 * 0.5, 0.0),
            repetition_penalty=jnp.array([1.0, 1.0, 1.5, 1.2]),
            frequency_penalty=jnp.array([0.0, 0.5, 0.0, 0.5]),
            prompt_lens=counts,
            min_tokens=jnp.array([0, 9, 0, 12]),
        ),
        stop_token_ids=tuple(range(90, 94)),
    )  # fmt: skip
    ask: Any = {"controls": True, "logprobs": True, "top_logprobs": 4}
    state, read = functional.prefill(params, state, width=PROMPT, prompt_logprobs=True, **ask)
    return *functional.decode(params, state, LENGTH, **ask), read


@functools.cache
def run_controlled(name: str, model: int = 1, data: int = 1) -> tuple[Rows, list[Emitted]]:
    params = one_device(name)
    if model * data > 1:
        params = on_mesh(params, make_mesh(model, data), shard_drafter=False)
    prompts = np.random.default_rng(1).integers(
        TARGET.vocab_size, size=(BATCH, PROMPT), dtype=np.int32
    )
    state = functional.init_state(params, BATCH, LENGTH, page_size=PAGE_SIZE, controls=True)
    counts = np.array([PROMPT, 5, PROMPT, 2], np.int32)
    state, *emitted = jax.device_get(new_jit(generate_controlled)(params, state, prompts, counts))
    return state.rows, emitted


@pytest.mark.parametrize(
    ("name", "model", "data"),
    [slow("ngram", 2, 2), slow("eagle3 tree", 4, 1), slow("eagle3 tree", 2, 2)],
)
def test_sharding_changes_no_control_and_no_log_probability(name: str, model: int, data: int):
    rows, emitted = run_controlled(name, model, data)
    one_rows, one_emitted = run_controlled(name)
    np.testing.assert_array_equal(rows.tokens, one_rows.tokens)
    np.testing.assert_array_equal(rows.tokens, run_controlled("none")[0].tokens)
    np.testing.assert_array_equal(rows.stats.accepted, one_rows.stats.accepted)
    for found, expected in zip(emitted, one_emitted, strict=True):
        np.testing.assert_array_equal(found.top_tokens, expected.top_tokens)
        for field in ("logprobs", "top_logprobs"):
            np.testing.assert_allclose(getattr(found, field), getattr(expected, field), atol=1e-5)
    for field in ("valid", "logprobs", "top_tokens", "top_logprobs"):
        parts = [getattr(one[-1].prompt, field) for one in (emitted, one_emitted)]
        np.testing.assert_allclose(*parts, atol=1e-5)


@pytest.mark.parametrize(("name", "data"), [("none", 1), slow("eagle3", 1), slow("eagle3", 2)])
def test_equal_shapes_are_traced_once(name: str, data: int):
    params = on_mesh(one_device(name), make_mesh(2, data), shard_drafter=False)
    state, decode = empty_state(params), new_jit(functional.decode, "max_rounds")
    for rounds in range(10):
        state, _ = decode(params, state, rounds, max_rounds=10)
    assert traces(decode) == 1


@pytest.mark.parametrize("rows", [[0, 2, 1, 3], [0, 1, 2]])
def test_a_device_reads_no_other_devices_rows(rows: list[int]):
    params = on_mesh(one_device("none"), make_mesh(1, 2))
    with pytest.raises(ValueError, match=r"its own 2 rows|cannot be split"):
        functional.prefill(params, empty_state(params), np.array(rows), width=4)


@pytest.mark.slow
def test_traced_rows_of_another_device_are_misplaced_and_stay_as_they_are():
    params = on_mesh(one_device("none"), make_mesh(1, 2))
    prompts, lengths = np.full((BATCH, 3), 7, np.int32), np.full(BATCH, 3, np.int32)
    state = functional.admit(params, empty_state(params), np.arange(BATCH), prompts, lengths)
    prefill = new_jit(functional.prefill, "width")
    # The first device has rows 0 and 1. Row 9 does not exist, and is no mistake.
    state, emitted = prefill(params, state, np.array([0, 3, 9, 2]), width=3)
    endings = [Ending.NONE, Ending.MISPLACED, Ending.NONE, Ending.NONE]
    assert emitted.ending.tolist() == endings
    assert emitted.counts.sum(0).tolist() == [1, 0, 0, 1]
    decoding, reading = Status.DECODING, Status.READING
    assert state.rows.status.tolist() == [decoding, reading, decoding, reading]


def test_the_collectives_of_a_layer_on_a_grid():
    params = on_mesh(one_device("none"), make_mesh((2, 2)))
    state = empty_state(params)
    found = totals(parse_collectives(decode_hlo(params, state, greedy=True)))
    layers, tokens, float32 = TARGET.num_layers, BATCH, 4
    hidden, width = TARGET.hidden_size, TARGET.layers[0].units
    mixer = TARGET.layers[0].attention
    queries = mixer.num_heads * mixer.head_dim
    qkv = queries + 2 * 4 * mixer.head_dim  # its two KV heads are repeated for four devices
    # A row-parallel product is summed over the devices along its input, of which each sends half of
    # its half of the hidden state twice; the norm after it over those along the hidden state.
    sums, norms = 2 * layers, 2 * layers + 1
    choice, embedding = 2 * 2 * 3 / 4, 1  # the best token's value and index, over four devices
    assert found["all-reduce"] == (
        sums + norms + embedding + 2,
        tokens * float32 * ((sums + embedding) * hidden / 2 + norms + choice),
    )
    # Before attention and the activation. Then each device has a quarter of the heads or units.
    assert found["reduce-scatter"] == (
        2 * layers + 1,
        tokens * float32 * (layers * (qkv / 2 + 2 * width / 2) + hidden) / 2,
    )
    # After them, and of the last hidden state.
    assert found["all-gather"] == (
        2 * layers + 1,
        tokens * float32 * (layers * (queries + width) / 2 + hidden) / 2,
    )


def collectives(hlo: str, kind: str) -> list[tuple[int, ...]]:
    """Shapes of the results of every ``kind`` (all-reduce, all-gather) of a compiled program."""
    found = []
    for line in hlo.splitlines():
        if match := re.search(rf"= (.*?) {kind}(?:-start)?\(", line):
            shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
            found += [tuple(int(size) for size in s.split(",") if size) for s in shapes]
    return found


@pytest.mark.parametrize(
    ("name", "shard_drafter", "drafting"),
    [
        slow("none", True, 0),
        # Each of the two passes of the head looks up embeddings, and has two reductions of its
        # own where it is sharded.
        slow("eagle3", False, 2 * 1),
        ("eagle3", True, 2 * 3),
    ],
)
def test_the_collectives_of_a_round(name: str, shard_drafter: bool, drafting: int):
    params = on_mesh(one_device(name), make_mesh(2), shard_drafter=shard_drafter)
    state = empty_state(params)
    hlo = decode_hlo(params, state)
    reduced, gathered = collectives(hlo, "all-reduce"), collectives(hlo, "all-gather")
    hidden = [shape for shape in reduced if shape[-1:] == (TARGET.hidden_size,)]
    assert len(hidden) == 2 * TARGET.num_layers + 1 + drafting
    largest = BATCH * (params.speculation.max_depth + 1) * TARGET.hidden_size
    assert max(map(math.prod, reduced + gathered)) <= largest
    pages = state.pool.target.layers[0].k.shape
    for shape in gathered:
        assert not {TARGET.vocab_size, 64} & set(shape), f"logits are gathered: {shape}"
        assert shape[-3:] != pages[-3:], f"KV pages are gathered: {shape}"
    for kind in ("all-to-all", "collective-permute", "reduce-scatter"):
        assert not collectives(hlo, kind)
