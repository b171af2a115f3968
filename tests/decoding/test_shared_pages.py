"""Rows that share cached pages, wait for pages, move to other pages: their texts stay the same."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import functional
from jaxspec.config.cache import pages_for
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, SpeculationConfig
from jaxspec.decoding.sampling import make_sampling
from jaxspec.decoding.state import Emitted, EngineState, Status
from jaxspec.functional import EngineParams
from tests.helpers.marks import slow
from tests.helpers.programs import new_jit
from tests.helpers.random_models import DRAFTERS, make_params, padded, random_prompts
from tests.helpers.sampling_reference import reference_texts

CAPACITY = SpeculationConfig(num_nodes=6, max_depth=2, top_k=2)
ROWS, LENGTH, PAGE, MOST = 3, 64, 4, 60
COLUMNS = pages_for(LENGTH + CAPACITY.scratch_slots, PAGE)
NUM_PAGES = 1 + 3 * COLUMNS
PROMPT = random_prompts((20,))[0]  # five pages
LIMIT = 44

admit, catch_up = new_jit(functional.admit, "may_wait"), new_jit(functional.catch_up)
prefill = new_jit(functional.prefill, "width", "columns")
decode = new_jit(functional.decode, "max_rounds", "shape", "columns")
assign_pages, copy_pages = new_jit(functional.assign_pages), new_jit(functional.copy_pages)
save_row, restore_row = new_jit(functional.save_row), new_jit(functional.restore_row)

EACH_DRAFTER = pytest.mark.parametrize(
    "drafter", ["eagle3", *(slow(name) for name in (*DRAFTERS, "mtp3") if name != "eagle3")]
)


@functools.cache
def params_of(drafter: str) -> EngineParams:
    return make_params(drafter, CAPACITY)


class Sequences:
    """A state, and each row's page table on the host."""

    def __init__(self, drafter: str):
        self.params = params_of(drafter)
        table = jnp.zeros((ROWS, COLUMNS), jnp.int32)
        self.state: EngineState = functional.init_state(
            self.params, ROWS, LENGTH, page_size=PAGE, page_table=table, num_pages=NUM_PAGES
        )
        self.free = list(range(1, NUM_PAGES))

    def table(self, pages: list[int]) -> np.ndarray:
        return np.array([pages + [0] * (COLUMNS - len(pages))], np.int32)

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def admit(self, row: int, prompt: Any, pages: list[int], seed: int = 5, **options: Any) -> None:
        sampling = make_sampling(1, temperature=0.8, seeds=np.array([seed], np.uint32))
        self.state = admit(
            self.params,
            self.state,
            np.array([row]),
            padded([np.asarray(prompt)], LENGTH),
            np.array([len(prompt)]),
            sampling=sampling,
            max_lens=np.array([LIMIT]),
            page_table=self.table(pages),
            **{name: np.array([value]) for name, value in options.items() if name != "may_wait"},
            may_wait=options.get("may_wait", False),
        )

    def read(self, row: int, width: int = 7, columns: int | None = None) -> None:
        while self.state.rows.status[row] == Status.READING:
            before = int(self.state.rows.context_lens[row])
            self.state, _ = prefill(
                self.params, self.state, np.array([row]), None, width=width, columns=columns
            )
            assert self.state.rows.context_lens[row] > before

    def decode(self, rounds: int = MOST, rows: list[int] | None = None, **options: Any) -> Emitted:
        listed = None if rows is None else np.array(rows)
        self.state, emitted = decode(
            self.params, self.state, rounds, listed, max_rounds=MOST, **options
        )
        return emitted

    def text(self, row: int) -> list[int]:
        length = int(self.state.rows.context_lens[row]) + 1
        return np.asarray(self.state.rows.tokens)[row, :length].tolist()

    def poison(self, pages: list[int]) -> None:
        def poisoned(x: Any) -> Any:
            return x.at[np.array(pages)].set(jnp.nan)

        self.state = self.state.replace(pool=jax.tree.map(poisoned, self.state.pool))

    def contents(self, pages: list[int]) -> list[np.ndarray]:
        return [np.asarray(leaf)[pages] for leaf in jax.tree.leaves(self.state.pool)]


@functools.cache
def alone(drafter: str, prompt: tuple[int, ...], seed: int = 5) -> tuple[list[int], list[int]]:
    """The text of a prompt that nothing is shared with, and what its rounds accepted."""
    own = Sequences(drafter)
    own.admit(1, prompt, own.take(COLUMNS), seed)
    own.read(1)
    emitted = own.decode()
    return own.text(1), np.asarray(emitted.accepted)[:, 1].tolist()


@functools.cache
def plain(prompt: tuple[int, ...], seed: int = 5) -> list[int]:
    """The text of a prompt by plain decoding."""
    sampling = SamplingParams(temperature=0.8, seed=seed, max_tokens=LIMIT - len(prompt))
    target, tokens = params_of("none").target, np.array(prompt, np.int32)
    return reference_texts(target, [tokens], [sampling], LENGTH)[0]


def accepted(emitted: Emitted, place: int) -> list[int]:
    return np.asarray(emitted.accepted)[:, place].tolist()


@pytest.mark.parametrize("cached", [slow(4), slow(12), 20])
@EACH_DRAFTER
def test_a_prompt_past_a_cached_prefix_has_the_same_text_and_drafts(drafter: str, cached: int):
    """The second prompt parts from the first right after the cached pages; or it does not part."""
    own, other = Sequences(drafter), np.concatenate([PROMPT[:cached], PROMPT[::-1][: 20 - cached]])
    own.admit(0, PROMPT, pages := own.take(COLUMNS))
    own.read(0)
    shared = pages[: cached // PAGE]
    before = own.contents(shared)
    own.admit(2, other, shared + own.take(COLUMNS - len(shared)), 9, cached_lens=cached)
    own.read(2)
    for old, new in zip(before, own.contents(shared), strict=True):
        np.testing.assert_array_equal(old, new)
    emitted = own.decode()
    assert own.text(0) == plain(tuple(PROMPT))
    assert own.text(2) == plain(tuple(other), 9)
    assert accepted(emitted, 2) == alone(drafter, tuple(other), 9)[1]


@pytest.mark.parametrize("shape", [{}, slow({"shape": PLAIN})], ids=["tree", "plain"])
@EACH_DRAFTER
def test_pages_of_generated_tokens_are_cached_once_they_are_settled(
    drafter: str, shape: dict[str, Any]
):
    own = Sequences(drafter)
    own.admit(0, PROMPT[:8], pages := own.take(COLUMNS))
    own.read(0)
    own.decode(**shape)
    text = own.text(0)
    own.state = catch_up(own.params, own.state, np.array([0, ROWS]))
    assert own.text(0) == text and own.state.rows.status[0] == Status.DONE
    cached = (len(text) - 1) // PAGE * PAGE
    shared, longer = pages[: cached // PAGE], [*text[:cached], 7]
    own.poison(pages[len(shared) :])
    # A limit of LIMIT leaves nothing to decode, so the next request is a shorter one.
    part = longer[:30]
    own.admit(1, part, shared[:7] + own.take(COLUMNS - 7), cached_lens=28)
    own.read(1)
    emitted = own.decode()
    assert own.text(1) == plain(tuple(part))
    assert accepted(emitted, 1) == alone(drafter, tuple(part))[1]


@EACH_DRAFTER
def test_a_row_waits_until_it_has_pages(drafter: str):
    own = Sequences(drafter)
    own.admit(1, PROMPT, pages := own.take(5), may_wait=True)
    own.read(1)
    emitted = own.decode()
    assert emitted.num_rounds == 0 and own.state.rows.status[1] == Status.DECODING
    for _ in range(COLUMNS - 5):
        pages += own.take(1)
        own.state = assign_pages(
            own.params, own.state, np.array([1, ROWS]), np.tile(own.table(pages), (2, 1))
        )
        own.decode()
    assert own.text(1) == plain(tuple(PROMPT))


@pytest.mark.slow
def test_a_call_decodes_the_rows_it_lists():
    own = Sequences("eagle3")
    for row in range(ROWS):
        own.admit(row, PROMPT, own.take(COLUMNS), row)
        own.read(row, columns=8)
    before = own.text(1)
    emitted = own.decode(rounds=2, rows=[2, 0, ROWS, ROWS + 5], columns=11)
    assert np.asarray(emitted.counts).shape[1] == 4
    assert own.text(1) == before and min(len(own.text(0)), len(own.text(2))) > len(before)
    own.decode()
    assert [own.text(row) for row in range(ROWS)] == [
        plain(tuple(PROMPT), row) for row in range(ROWS)
    ]


@pytest.mark.slow
def test_a_row_waits_at_the_end_of_a_narrow_table():
    own = Sequences("eagle3")
    own.admit(0, PROMPT, own.take(COLUMNS))
    own.read(0)
    own.decode(rows=[0], columns=8)
    assert own.state.rows.status[0] == Status.DECODING
    assert 8 * PAGE - CAPACITY.scratch_slots - 1 < len(own.text(0)) <= 8 * PAGE
    own.decode(rows=[0])
    assert own.text(0) == plain(tuple(PROMPT))


@EACH_DRAFTER
def test_a_row_goes_on_in_another_place(drafter: str):
    own = Sequences(drafter)
    own.admit(0, PROMPT, pages := own.take(COLUMNS))
    own.read(0)
    first = accepted(own.decode(rounds=3), 0)[:3]
    own.state, saved = save_row(own.params, own.state, np.array([0]), np.array([*pages, 0]))
    saved = jax.device_get(saved)
    own.poison(pages)
    new = own.take(COLUMNS)
    own.state = functional.release(own.params, own.state, [0])
    own.state = restore_row(
        own.params, own.state, saved, np.array([2]), np.array([*new, 0]), own.table(new)
    )
    emitted = own.decode()
    text, rounds = alone(drafter, tuple(PROMPT))
    assert own.text(2) == text == plain(tuple(PROMPT))
    assert (first + accepted(emitted, 2))[: len(rounds)] == rounds


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_fork_copies_the_page_that_both_would_write(drafter: str):
    own, prompt = Sequences(drafter), PROMPT[:18]  # four pages and a half
    own.admit(0, prompt, pages := own.take(COLUMNS))
    own.read(0)
    forked = own.take(1)
    own.state = copy_pages(own.params, own.state, np.array([pages[4], 0]), np.array([*forked, 0]))
    child = pages[:4] + forked + own.take(COLUMNS - 5)
    own.admit(1, prompt, child, 8, cached_lens=18)
    own.read(1)
    emitted = own.decode()
    assert own.text(0) == plain(tuple(prompt))
    assert own.text(1) == plain(tuple(prompt), 8)
    assert accepted(emitted, 1) == alone(drafter, tuple(prompt), 8)[1]
