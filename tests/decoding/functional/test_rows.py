"""Rows admitted and released in any order, on reused pages, give the texts of separate runs.

The histories are random. Before every step all memory that no live row may read is NaN.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from jaxspec import functional
from jaxspec.cache import PagedKV
from jaxspec.config.cache import pages_for
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.decoding.sampling import make_sampling
from jaxspec.decoding.state import Emitted, Ending, EngineState, Status
from jaxspec.functional import EngineParams
from tests.helpers.programs import FAST_COMPILE, new_jit
from tests.helpers.random_models import DRAFTERS, make_params, padded, random_prompts
from tests.helpers.sampling_reference import reference_texts

CAPACITY = SpeculationConfig(num_nodes=6, max_depth=2, top_k=2)
SHAPES = (None, TreeShape(2, 1), PLAIN)
ONE_SHAPE = (None,)  # of the default tests: each shape is a program
ROWS, LENGTH, PAGE_SIZE, WIDTH, MOST_ROUNDS = 3, 32, 4, 5, 3
COLUMNS = pages_for(LENGTH + CAPACITY.scratch_slots, PAGE_SIZE)
NUM_PAGES = 1 + 2 * COLUMNS  # less than three rows may ask for
NO_ROW = (ROWS, -1, ROWS + 7)  # padding in a list of rows

admit, release = new_jit(functional.admit), new_jit(functional.release)
prefill = new_jit(functional.prefill, "width")
decode = new_jit(functional.decode, "max_rounds", "shape", "checked")


@dataclasses.dataclass(frozen=True)
class Request:
    prompt: np.ndarray
    max_len: int
    temperature: float
    seed: int
    stop: int

    @property
    def num_pages(self) -> int:
        return pages_for(self.max_len + CAPACITY.scratch_slots, PAGE_SIZE)


PROMPTS = random_prompts((1, 4, 5, 6, 11, 17, 8, 2))
NEW_TOKENS = (9, 14, 1, 12, 20, 15, 2, 30)


@functools.cache
def all_requests() -> list[Request]:
    """Greedy and sampled ones; some end at a stop token."""
    requests = []
    for index, (prompt, extra) in enumerate(zip(PROMPTS, NEW_TOKENS, strict=True)):
        request = Request(prompt, len(prompt) + extra, 0.8 * (index % 2), 40 + index, -1)
        if index in (1, 4, 5):
            stop = alone(request)[0][len(prompt) + 5]
            request = dataclasses.replace(request, stop=stop)
        requests.append(request)
    return requests


def arguments(request: Request) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """admit's, for one row."""
    sampling = make_sampling(
        1, temperature=request.temperature, seeds=np.array([request.seed], np.uint32)
    )
    options = {
        "sampling": jax.device_get(sampling),
        "max_lens": np.array([request.max_len], np.int32),
        "stop_token_ids": np.array([[request.stop, -1, -1, -1]], np.int32),
    }
    return padded([request.prompt], LENGTH), np.array([len(request.prompt)], np.int32), options


@functools.cache
def arguments_of(index: int) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    return arguments(all_requests()[index])


@functools.cache
def params_of(drafter: str) -> EngineParams:
    return make_params(drafter, CAPACITY)


def alone(request: Request) -> tuple[list[int], Ending]:
    """A request's text by plain decoding, and why it ends."""
    sampling = SamplingParams(
        temperature=request.temperature,
        seed=request.seed,
        max_tokens=request.max_len - len(request.prompt),
        stop_token_ids=() if request.stop < 0 else (request.stop,),
    )
    [text] = reference_texts(params_of("none").target, [request.prompt], [sampling], LENGTH)
    return text, Ending.STOP if text[-1] == request.stop else Ending.LENGTH


@functools.cache
def expected() -> list[tuple[list[int], Ending]]:
    return [alone(request) for request in all_requests()]


@functools.partial(jax.jit, donate_argnums=0, compiler_options=FAST_COMPILE)
def poisoned(state: EngineState, pages: Array) -> EngineState:
    """With NaN in ``pages`` bool [P] of every layer."""

    def poison(layer: PagedKV) -> PagedKV:
        return jax.tree.map(lambda x: jnp.where(pages[:, None, None, None], jnp.nan, x), layer)

    def is_layer(node: Any) -> bool:
        return isinstance(node, PagedKV)

    return state.replace(pool=jax.tree.map(poison, state.pool, is_leaf=is_layer))


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def empty(params: EngineParams) -> EngineState:
    table = jnp.zeros((ROWS, COLUMNS), jnp.int32)
    return functional.init_state(
        params, ROWS, LENGTH, page_size=PAGE_SIZE, page_table=table, num_pages=NUM_PAGES
    )


class History:
    """An engine's rows, and on the host what they should hold."""

    def __init__(
        self,
        drafter: str,
        shapes: tuple[TreeShape | None, ...] = SHAPES,
        *,
        poison: bool = True,
        listed: bool = False,
    ):
        """``listed``: prompts are read by lists of two rows alone, one program less."""
        self.params, self.shapes, self.poison = params_of(drafter), shapes, poison
        self.listed = listed
        self.state: EngineState = empty(self.params)
        self.requests: list[int | None] = [None] * ROWS
        self.pages: list[list[int]] = [[] for _ in range(ROWS)]
        self.emitted: list[list[int]] = [[] for _ in range(ROWS)]
        self.log: list[Emitted] = []
        self.finished = 0

    # Steps. Each draws what it does from ``rng``.

    def admit(self, rng: np.random.Generator) -> None:
        """A request in a row that is empty or done, with random pages of those that are free."""
        row, index = int(rng.integers(ROWS)), int(rng.integers(len(PROMPTS)))
        if self.status[row] not in (Status.EMPTY, Status.DONE):
            return
        taken = {page for other in range(ROWS) if other != row for page in self.pages[other]}
        free = sorted(set(range(1, NUM_PAGES)) - taken)
        request = all_requests()[index]
        if len(free) < request.num_pages:
            return
        self.pages[row] = rng.permutation(free)[: request.num_pages].tolist()
        self.requests[row], self.emitted[row] = index, []
        table = np.zeros((1, COLUMNS), np.int32)
        table[0, : request.num_pages] = self.pages[row]
        prompts, lens, options = arguments_of(index)
        self.before_step(empty=(row,))
        self.state = admit(
            self.params, self.state, np.array([row]), prompts, lens, page_table=table, **options
        )
        assert self.status[row] == Status.READING

    def release(self, rng: np.random.Generator) -> None:
        """Of a row that is done, or once in a while of one that is not."""
        row = int(rng.integers(ROWS))
        if self.status[row] != Status.DONE and rng.random() < 0.8:
            return
        self.before_step()
        self.state = release(self.params, self.state, np.array([row, NO_ROW[row]]))
        assert self.status[row] == Status.EMPTY
        self.requests[row], self.pages[row] = None, []

    def read(self, rng: np.random.Generator) -> None:
        """Up to two rows by index, or all of them, as many tokens of each as it happens."""
        listed = [*rng.permutation(ROWS), *NO_ROW]
        by_index = self.listed or rng.random() < 0.6
        rows = rng.permutation(listed)[:2].astype(np.int32) if by_index else None
        counts = rng.integers(0, WIDTH + 1, ROWS if rows is None else 2).astype(np.int32)
        self.read_chunk(rows, counts)

    def read_chunk(self, rows: np.ndarray | None, counts: np.ndarray) -> None:
        before, status = np.asarray(self.state.rows.context_lens), self.status
        self.before_step()
        self.state, emitted = prefill(self.params, self.state, rows, counts, width=WIDTH)
        emitted = jax.device_get(emitted)
        chosen = range(ROWS) if rows is None else rows.tolist()
        wanted = before.copy()
        for place, row in enumerate(chosen):
            if row in range(ROWS) and status[row] == Status.READING:
                prompt_len = len(PROMPTS[self.request_of(row)])
                wanted[row] = min(before[row] + counts[place], prompt_len)
                ends = wanted[row] == prompt_len and counts[place] > 0
                assert emitted.counts[0, place] == ends
                assert (self.status[row] == Status.READING) == (not ends)
            else:
                assert emitted.counts[0, place] == 0
        assert np.array_equal(self.state.rows.context_lens, wanted)
        self.after_step(emitted, list(chosen))

    def decode(self, rng: np.random.Generator) -> None:
        shape = self.shapes[rng.integers(len(self.shapes))]
        self.run_rounds(shape, int(rng.integers(MOST_ROUNDS + 1)))

    def run_rounds(self, shape: TreeShape | None, rounds: int) -> None:
        before = self.status
        self.before_step()
        self.state, emitted = decode(
            self.params, self.state, rounds, max_rounds=MOST_ROUNDS, shape=shape, checked=False
        )
        emitted = jax.device_get(emitted)
        assert not emitted.counts[:, before != Status.DECODING].any()
        self.after_step(emitted, list(range(ROWS)))

    def drain(self) -> None:
        """Read and decode until every row is done."""
        for step in range(100):
            if not np.isin(self.status, (Status.READING, Status.DECODING)).any():
                return
            if self.listed:
                for pair in (np.array([1, 0]), np.array([2, ROWS])):
                    self.read_chunk(pair.astype(np.int32), np.full(2, WIDTH, np.int32))
            else:
                self.read_chunk(None, np.full(ROWS, WIDTH, np.int32))
            self.run_rounds(self.shapes[step % len(self.shapes)], MOST_ROUNDS)
        raise AssertionError("rows that never end")

    # What is checked.

    @property
    def status(self) -> np.ndarray:
        return np.asarray(self.state.rows.status)

    def request_of(self, row: int) -> int:
        index = self.requests[row]
        assert index is not None
        return index

    def before_step(self, empty: tuple[int, ...] = ()) -> None:
        """Poison all pages but those that hold the context of a live row."""
        if not self.poison:
            return
        pages, lens = np.ones(NUM_PAGES, bool), np.asarray(self.state.rows.context_lens)
        for row, status in enumerate(self.status):
            if status in (Status.READING, Status.DECODING) and row not in empty:
                pages[self.pages[row][: pages_for(int(lens[row]), PAGE_SIZE)]] = False
        self.state = poisoned(self.state, pages)

    def after_step(self, emitted: Emitted, rows: list[int]) -> None:
        self.log.append(emitted)
        for place, row in enumerate(rows):
            pairs = zip(emitted.tokens[:, place], emitted.counts[:, place], strict=True)
            for tokens, count in pairs:
                if count:
                    self.emitted[row] += tokens[:count].tolist()
        status, ending = self.status, np.asarray(self.state.rows.ending)
        for row in range(ROWS):
            if self.requests[row] is None:
                continue
            index = self.request_of(row)
            text, reason = expected()[index]
            new = text[len(PROMPTS[index]) :]
            assert self.emitted[row] == new[: len(self.emitted[row])]
            if status[row] == Status.DONE:
                assert self.emitted[row] == new and ending[row] == reason
                assert np.asarray(self.state.rows.tokens)[row, : len(text)].tolist() == text


steps = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "read", "read", "decode", "decode", "release"]),
        st.integers(0, 2**32 - 1),
    ),
    min_size=4,
    max_size=24,
)


def run(drafter: str, history: list[tuple[str, int]], *options: Any, **more: Any) -> list[Emitted]:
    rows = History(drafter, *options, **more)
    rows.admit(np.random.default_rng(len(history)))
    for name, seed in history:
        getattr(rows, name)(np.random.default_rng(seed))
    rows.drain()
    return rows.log


def test_the_requests_end_for_different_reasons():
    assert {ending for _, ending in expected()} == {Ending.STOP, Ending.LENGTH}


@given(history=steps)
@settings(deadline=None, max_examples=8)
def test_texts_equal_those_of_separate_runs(history: list[tuple[str, int]]):
    """Drafted by EAGLE-3 or, in rows where it finds something, by lookup."""
    run("mixed", history, ONE_SHAPE, listed=True)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@given(history=steps)
@settings(deadline=None, max_examples=200)
def test_in_200_random_histories_texts_equal_those_of_separate_runs(
    drafter: str, history: list[tuple[str, int]]
):
    run(drafter, history)


@given(history=steps)
@settings(deadline=None, max_examples=4)
def test_drafts_do_not_depend_on_other_rows_memory(history: list[tuple[str, int]]):
    """What is accepted is the same, round by round, with NaN there and without."""
    poisoned_log, log = (
        run("mixed", history, ONE_SHAPE, poison=poison, listed=True) for poison in (True, False)
    )
    for found, wanted in zip(poisoned_log, log, strict=True):
        for name in ("num_rounds", "counts", "accepted", "drafted", "status", "ending"):
            np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
