"""Whatever happens, in whatever order, every request gets its own text and no page is lost."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxspec.config.cache import pages_for
from jaxspec.config.engine import Preemption
from jaxspec.scheduling.plan import Limits
from jaxspec.scheduling.sequence import Request
from tests.helpers.marks import slow
from tests.scheduling.fake_device import Run, text_alone

STEMS = ([1] * 24, [1] * 11 + [2] * 13, [3, 4] * 12)  # prompts share beginnings of these


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    shards = draw(st.integers(1, 2))
    rows = shards * draw(st.integers(1, 5))
    scratch = draw(st.integers(1, 6))
    snapshots = draw(st.sampled_from([None, 6, 2, 0])) if shards == 1 else None
    preemption: Preemption = draw(st.sampled_from(["auto", "recompute", "swap"]))
    return Limits(
        num_rows=rows,
        num_pages=pages_for(40 + scratch, 4) + draw(st.integers(0, 8)),
        page_size=4,
        max_length=40,
        scratch_slots=scratch,
        tokens_per_round=draw(st.integers(1, 4)),
        shards=shards,
        prefill_budget=draw(st.integers(rows, 40)),
        largest_verified=draw(st.integers(1, 20)),
        verified_rows=draw(st.integers(1, 3)),
        max_rounds=draw(st.integers(1, 8)),
        watermark=draw(st.sampled_from([0.0, 0.1, 0.3])),
        prefix_caching=draw(st.sampled_from([True, True, False])),
        share_pages=snapshots is None,
        prefix_tokens_read_again=draw(st.integers(1, 3)) if snapshots is None else 1,
        snapshots=snapshots,
        preemption=preemption,
        part_pages=draw(st.integers(1, 3)),
        host_parts=draw(st.none() | st.integers(0, 30)),
        swaps_only=preemption == "swap" and shards == 1 and draw(st.booleans()),
    )


class Histories(RuleBasedStateMachine):
    run: Run

    @initialize(limits=limits(), has_drafter=st.booleans(), seed=st.integers(0, 999))
    def start(self, limits: Limits, has_drafter: bool, seed: int):
        self.run = Run(limits, seed=seed, has_drafter=has_drafter)
        self.groups = 0

    @rule(part=st.sampled_from([0.5, 50.0]))
    def measure(self, part: float):
        """Reading a token takes 1 s, moving a part little or much more."""
        self.run.scheduler.costs.add_reading(1, 1.0)
        self.run.scheduler.costs.add_swap(1, part)

    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(1, 24),
        own=st.lists(st.integers(5, 6), max_size=6),
        max_tokens=st.integers(1, 20),
        samples=st.integers(1, 3),
        priority=st.integers(0, 1),
        patience=st.none() | st.integers(1, 30),
        salt=st.sampled_from([None, None, "salt"]),
        right=st.none() | st.integers(0, 20),
        wrong=st.lists(st.integers(0, 3), max_size=3),
    )
    def add(self, stem, length, own, max_tokens, samples, priority, patience, salt, right, wrong):
        group = f"group {self.groups}" if samples > 1 else None
        self.groups += 1
        for _ in range(samples):
            prompt = [*stem[:length], *own]
            self.run.add(
                prompt,
                max_tokens,
                draft=self.draft(prompt, max_tokens, right, wrong),
                priority=priority,
                deadline=None if patience is None else self.run.now + patience,
                cache_salt=salt,
                group=group,
            )

    def draft(self, prompt, max_tokens, right, wrong) -> tuple[int, ...]:
        """So many tokens that the next request generates, then some that it may not."""
        limits = self.run.scheduler.limits
        if right is None or limits.swaps_only:  # such engines take no drafts
            return ()
        request = Request(f"r{len(self.run.requests)}", tuple(prompt), max_tokens, 0.0)
        return (*text_alone(request, limits.max_length)[0][:right], *wrong)

    @precondition(lambda self: self.run.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject):
        self.run.cancel(data.draw(st.sampled_from(sorted(self.run.requests))))

    @rule(lag=st.integers(0, 1), steps=st.integers(1, 5), undrafted=st.booleans())
    def go_on(self, lag: int, steps: int, undrafted: bool):
        """Whole engines whose rows must be swapped are never left without a drafter."""
        undrafted = undrafted and not self.run.scheduler.limits.swaps_only
        for _ in range(steps):
            self.run.step(lag, undrafted=undrafted)

    def teardown(self):
        if hasattr(self, "run"):
            self.run.finish(lag=1)


@pytest.mark.parametrize("examples", [30, slow(300)])
def test_every_history_ends_well(examples: int):
    run_state_machine_as_test(
        Histories, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None)
    )
