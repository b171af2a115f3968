"""scripts/plot_tree.py draws a round that the engine would run."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import SpeculationConfig
from jaxspec.decoding.acceptance import Accepted
from jaxspec.decoding.trees.tree import make_tree
from scripts import plot_tree
from tests.helpers.random_models import make_params

PROMPT = [3, 5, 7, 11, 13]
PNG = b"\x89PNG"


@pytest.mark.slow
def test_the_round_that_is_drawn_is_the_next_one():
    params = make_params("eagle3", SpeculationConfig.parse("tree:8:3:2"))
    depths = set()
    for skip in (0, 2):
        state = plot_tree.start(params, PROMPT, skip, temperature=0.5, seed=1)
        tree, accepted = plot_tree.run_round(params, state)
        _, emitted = jaxspec.decode(params, state, 1)
        depth = int(accepted.depth[0])
        committed = np.asarray(accepted.tokens)[0, : depth + 1]
        expected = np.asarray(emitted.tokens)[0, 0, : int(emitted.counts[0, 0])]
        assert committed.tolist() == expected.tolist()
        path = np.asarray(accepted.path)[0, 1 : depth + 1]
        assert np.asarray(tree.tokens)[0, path].tolist() == expected[:-1].tolist()
        depths.add(depth)
    assert max(depths) > 0, "nothing was accepted: the test shows little"


def test_more_rounds_than_the_model_has_positions_are_refused():
    params = make_params("ngram", SpeculationConfig.chain(2))
    with pytest.raises(ValueError, match="smaller --skip"):
        plot_tree.start(params, PROMPT, 1024, temperature=0.0, seed=0)


def test_leaves_stand_below_one_another_and_parents_in_between():
    #      0 -> 1 -> (3, 4), 0 -> 2
    assert plot_tree.heights([-1, 0, 0, 1, 1]) == [1.25, 0.5, 2.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [("\n", "↵"), (" a b", "␣a␣b"), ("    x", "␣×4x"), ("$x$", r"\$x\$"), ("", "")],
)
def test_labels_show_spaces(text: str, shown: str):
    assert plot_tree.label(text) == shown


def test_a_path_that_ends_inside_the_tree_is_drawn(tmp_path: Path):
    tree = make_tree(jnp.array([[1, 2, 3, 4]]), jnp.array([[-1, 0, 1, 1]]), jnp.array([4]), 2)
    accepted = Accepted(
        path=jnp.array([[0, 1, 0]]), depth=jnp.array([1]), tokens=jnp.array([[2, 5, 0]])
    )
    out = tmp_path / "tree.png"
    plot_tree.draw(tree, accepted, dict.fromkeys(range(6), "token"), out)
    assert out.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tree", "plain"), "plain decoding drafts no tree"),
        (("--tree", "tree:8"), "is not plain, chain:K or NODES:DEPTH:TOPK"),
        (("--skip", "-1"), "--skip must be at least 0, got -1"),
    ],
)
def test_bad_options_are_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
):
    assert plot_tree.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.slow
def test_the_built_in_model_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "tree.png"
    assert plot_tree.main(("--skip", "0", "--tree", "tree:8:3:2", "--out", str(out))) == 0
    assert out.read_bytes().startswith(PNG)
    assert "of 7 drafted tokens accepted" in capsys.readouterr().out
