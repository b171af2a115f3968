"""Estimates of acceptance: they converge, and what a round cannot show does not count."""

import numpy as np
import pytest

from jaxspec.config.speculation import PLAIN, TreeShape
from jaxspec.scheduling.acceptance_estimate import AcceptanceEstimate, count_rounds
from tests.scheduling.adaptive_simulation import draw_accepted

SHORT, LONG, TREE = (TreeShape.parse(text) for text in ("chain:3", "chain:7", "60:7:10"))
SHAPES = (PLAIN, SHORT, LONG, TREE)


def remembering(rounds: float = 1e6) -> AcceptanceEstimate:
    return AcceptanceEstimate(SHAPES, memory=rounds, shared_memory=rounds)


def test_counts_of_one_round_at_each_depth():
    counted = count_rounds(np.array([[2]]), np.array([[3]]), depth=5)
    np.testing.assert_array_equal(counted.tries, [[1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(counted.hits, [[1, 1, 0, 0, 0]])


def test_a_text_that_ended_tells_nothing_of_what_was_cut_off():
    # Four drafted tokens were accepted, the second of them ended the text.
    counted = count_rounds(np.array([[4]]), np.array([[2]]), depth=5)
    np.testing.assert_array_equal(counted.tries, [[1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(counted.hits, [[1, 1, 0, 0, 0]])
    # It ended with the bonus token: nothing was cut.
    counted = count_rounds(np.array([[2]]), np.array([[3]]), depth=3)
    np.testing.assert_array_equal(counted.tries, [[1, 1, 1]])


def test_rounds_in_which_a_row_did_not_run_do_not_count():
    counted = count_rounds(np.array([[3, 0], [0, 0]]), np.array([[4, 0], [0, 0]]), 3, forget=0.5)
    np.testing.assert_array_equal(counted.tries, [[1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(counted.kept, [0.5, 1])


def test_later_rounds_of_a_call_weigh_more():
    counted = count_rounds(np.array([[1], [0]]), np.array([[2], [1]]), depth=1, forget=0.25)
    np.testing.assert_allclose(counted.tries, [[1.75]])
    np.testing.assert_allclose(counted.hits, [[0.75]])
    np.testing.assert_allclose(counted.kept, [0.75**2])


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [LONG, TREE], ids=["chain", "tree"])
def test_the_estimate_converges(level: float, shape: TreeShape):
    random, estimate = np.random.default_rng(0), remembering()
    accepted = draw_accepted(random, np.full(1, level), shape, 20_000)
    estimate.observe(["a"], shape, accepted, accepted + 1)
    expected = [(accepted >= depth).mean() for depth in range(1, 8)]
    for row in ("a", "new"):
        survival = estimate.survival(estimate.hazards([row]), shape)[0]
        np.testing.assert_allclose(survival, expected, atol=0.015)


def test_short_trees_and_ends_of_text_do_not_bias_the_estimate():
    random = np.random.default_rng(1)
    hazards, estimate = np.array([0.9, 0.5, 0.7, 0.3, 0.8, 0.6, 0.4]), remembering()
    for shape in (SHORT, LONG):
        matched = random.random((200_000, shape.max_depth)) < hazards[: shape.max_depth]
        accepted = np.cumprod(matched, axis=1).sum(axis=1)[:, None]
        # Texts end anywhere: no round commits more than its room.
        committed = np.minimum(accepted + 1, random.integers(1, 9, (200_000, 1)))
        estimate.observe(["a"], shape, accepted, committed)
    np.testing.assert_allclose(estimate.hazards(["a"])[0, 0], hazards, atol=0.03)
    # The mean over rounds is biased, so this test could fail.
    assert abs((committed - 1).mean() - np.cumprod(hazards).sum()) > 0.2


def test_a_short_chain_tells_nothing_of_deeper_levels():
    random, estimate = np.random.default_rng(2), remembering()
    deep = draw_accepted(random, np.full(1, 0.9), LONG, 500)
    estimate.observe(["a"], LONG, deep, deep + 1)
    before = estimate.hazards(["new"])[0, 0, 3:]
    shallow = draw_accepted(random, np.full(1, 0.9), SHORT, 500)
    estimate.observe(["b"], SHORT, shallow, shallow + 1)
    np.testing.assert_allclose(estimate.hazards(["new"])[0, 0, 3:], before, atol=1e-3)


def test_plain_rounds_show_nothing_and_what_their_row_showed_fades():
    estimate = AcceptanceEstimate(SHAPES)
    ones = np.ones((50, 2), int)
    estimate.observe(["good", "bad"], LONG, ones * [3, 0], ones * [4, 1])

    def first_hazards() -> list[float]:
        hazards = estimate.hazards(["good", "bad", "new"])
        return [float(estimate.survival(hazards, LONG)[row, 0]) for row in range(3)]

    good, bad, new = first_hazards()
    assert bad < new - 0.1 and good > new + 0.1
    estimate.observe(["bad"], PLAIN, 0 * ones[:, :1], ones[:, :1])
    later_good, later_bad, later_new = first_hazards()
    assert (later_good, later_new) == (good, new)  # of others nothing is known that was not
    assert bad + 0.5 * (new - bad) < later_bad < new
    assert estimate.survival(estimate.hazards(["bad"]), PLAIN).shape == (1, 0)


def test_a_row_that_changes_is_followed():
    random, estimate = np.random.default_rng(3), AcceptanceEstimate(SHAPES)
    for level in (0.9, 0.2):
        accepted = draw_accepted(random, np.full(1, level), LONG, 400)
        estimate.observe(["a"], LONG, accepted, accepted + 1)
    assert estimate.survival(estimate.hazards(["a"]), LONG)[0, 0] == pytest.approx(0.2, abs=0.15)


def test_rows_are_told_apart_at_depths_that_they_have_not_reached():
    random, estimate = np.random.default_rng(4), AcceptanceEstimate(SHAPES)
    levels = np.array([0.9, 0.9, 0.4, 0.4])
    for _ in range(8):
        accepted = draw_accepted(random, levels, SHORT, 8)
        estimate.observe(list("abcd"), SHORT, accepted, accepted + 1)
    chains, trees = estimate.hazards(list("abcd"))[:, 0], estimate.hazards(list("abcd"))[:, 1]
    for hazards in (chains[:, 6], trees[:, 6]):
        assert min(hazards[:2]) > max(hazards[2:]) + 0.1
    assert (trees >= chains - 0.05).all()  # nothing is known of trees but that they miss less


def test_a_new_row_starts_where_others_are_and_an_ended_one_is_forgotten():
    estimate = AcceptanceEstimate(SHAPES)
    ones = np.ones((100, 1), int)
    estimate.observe(["easy"], LONG, 7 * ones, 8 * ones)
    assert estimate.survival(estimate.hazards(["new"]), LONG)[0, 6] > 0.6
    estimate.forget("easy")
    np.testing.assert_array_equal(*estimate.hazards(["easy", "new"]))
    # Those that come later find nothing of it in its place.
    estimate.observe(["next"], PLAIN, 0 * ones, ones)
    np.testing.assert_array_equal(*estimate.hazards(["next", "new"]))


def test_many_rows_keep_their_own_estimates():
    random, estimate = np.random.default_rng(5), AcceptanceEstimate(SHAPES)
    rows = list(range(50))
    accepted = random.integers(0, 8, (6, 50))
    estimate.observe(rows, LONG, accepted, accepted + 1)
    for row in rows[::2]:
        estimate.forget(row)
    later = random.integers(0, 8, (6, 30))
    estimate.observe(list(range(100, 130)), LONG, later, later + 1)
    others = AcceptanceEstimate(SHAPES)
    others.observe(rows, LONG, accepted, accepted + 1)
    others.observe(list(range(200, 230)), LONG, later, later + 1)
    np.testing.assert_array_equal(estimate.hazards(rows[1::2]), others.hazards(rows[1::2]))
    np.testing.assert_array_equal(estimate.hazards([105]), others.hazards([205]))


# What a drafter hears of plain rounds.


def test_what_was_heard_counts_once_and_as_rounds_do():
    estimate, other = remembering(), remembering()
    for totals in ([[10, 4]], [[10, 4]], [[30, 12]]):
        estimate.hear(["a"], np.array(totals))
    accepted = np.repeat([1, 0], [12, 18])[:, None]
    other.observe(["a"], TreeShape.parse("chain:1"), accepted, accepted + 1)
    for row in ("a", "new"):
        found, expected = (each.hazards([row])[:, 0, 0] for each in (estimate, other))
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert estimate.rounds_seen(SHORT) == pytest.approx(30, rel=1e-4)
    np.testing.assert_allclose(estimate.shown(["a", "new"]), [30, 0], rtol=1e-4)


def test_a_row_that_was_read_anew_or_has_ended_is_heard_from_nothing():
    estimate = remembering()
    estimate.hear(["a"], np.array([[30, 12]]))
    estimate.hear(["a"], np.array([[7, 7]]))
    np.testing.assert_allclose(estimate.shown(["a"]), [37], rtol=1e-4)
    estimate.forget("a")
    estimate.hear(["a"], np.array([[8, 0]]))
    np.testing.assert_allclose(estimate.shown(["a"]), [8])


def test_the_newest_rows_say_most_of_what_is_expected():
    """Five texts of one kind, then two of another; a row of one round says next to nothing."""
    estimates = AcceptanceEstimate(SHAPES, newest=0.25), AcceptanceEstimate(SHAPES)
    for estimate in estimates:
        for text in range(7):
            estimate.hear([text], np.array([[40, 36 if text < 5 else 8]]))
            estimate.forget(text)
    new, old = (estimate.hazards(["new"])[0, 0, 0] for estimate in estimates)
    assert new < 0.55 < 0.65 < old
    before = estimates[0].rounds_seen(SHORT)
    estimates[0].hear(["short"], np.array([[1, 1]]))
    estimates[0].forget("short")
    assert estimates[0].rounds_seen(SHORT) > 0.97 * before


def test_harder_rows_accept_less_until_they_show_otherwise():
    estimate = remembering()
    estimate.hear(["others"], np.array([[400, 320]]))
    usual, harder = (estimate.hazards(["new"], by)[0, 0, 0] for by in (0.0, 1.0))
    assert usual == pytest.approx(0.8, abs=0.01)
    assert np.log(harder / (1 - harder)) == pytest.approx(np.log(usual / (1 - usual)) - 1)
    estimate.hear(["new"], np.array([[200, 160]]))
    assert estimate.hazards(["new"], 1.0)[0, 0, 0] == pytest.approx(0.8, abs=0.02)
