"""Rows that the drafter leaves out, and what becomes of them and of their pages."""

from jaxspec.scheduling.plan import Limits
from jaxspec.scheduling.sequence import DrafterRead
from tests.scheduling.fake_device import ENDLESS, Run

LIMITS = Limits(
    num_rows=4,
    num_pages=100,
    page_size=4,
    max_length=100,
    scratch_slots=3,
    tokens_per_round=3,
    watermark=0.0,
)
PROMPT = list(range(1, 13))


def test_they_share_pages_among_themselves_alone_and_are_read_again_later():
    run = Run(LIMITS)
    run.add(PROMPT, 40, payload=ENDLESS)
    run.step()
    [before] = run.scheduler.shards[0].running
    assert run.step(undrafted=True).undrafted
    known = len(run.scheduler.shards[0].cache)
    assert before.drafter_read is DrafterRead.PART and known == 3  # the prompt's
    run.add(PROMPT, 40, payload=ENDLESS)
    [admission] = run.step(undrafted=True).admissions
    assert admission.cached == 0 and admission.sequence.drafter_read is DrafterRead.NOTHING
    run.add(PROMPT, 40, payload=ENDLESS)
    [admission] = run.step(undrafted=True).admissions
    assert admission.cached == 12
    plan = run.step()
    assert len(plan.release) == 3 and len(plan.admissions) == 3 and not plan.catch_up
    assert run.scheduler.preemptions == {"recompute": 3, "swap": 0}
    assert sorted(each.cached for each in plan.admissions) == [12, 12, 12]  # the first prompt's
    run.finish()


def test_a_row_that_ends_unread_leaves_the_drafter_nothing_to_do():
    run = Run(LIMITS)
    run.add(PROMPT, 2, payload=ENDLESS)
    run.step()
    while not run.scheduler.is_idle:
        assert not run.step(undrafted=True).catch_up
    run.check()
