"""jaxspec plot-tree draws a round that the engine would run."""

from pathlib import Path

import pytest

from jaxspec import LLM, EngineConfig, SamplingParams, SpeculationConfig
from jaxspec.commands import plot_tree
from tests.helpers.checkpoints import tiny_byte_llama

PNG = b"\x89PNG"


@pytest.mark.slow
def test_the_round_that_is_drawn_follows_the_skipped_ones(tmp_path: Path):
    engine = EngineConfig(max_rows=1, trees=True)
    model, chain = tiny_byte_llama(tmp_path / "model"), SpeculationConfig.chain(2)
    llm = LLM(model, "ngram", speculation=chain, engine=engine)
    sampling = SamplingParams(temperature=0.5, seed=1, max_tokens=16, trees=True)
    [completion] = llm.generate(["abcabcabc"], sampling)
    trees = completion.trees
    assert trees is not None
    for skip in (0, 2):
        drawn = plot_tree.decode_round(llm, "abcabcabc", skip, temperature=0.5, seed=1)
        assert [node["token"] for node in drawn["nodes"]] == list(trees[skip].tokens)
        assert drawn["path"] == list(trees[skip].path)
        before = 1 + sum(tree.committed for tree in trees[:skip])
        assert drawn["before"] == "abcabcabc" + llm.detokenize(completion.token_ids[:before])


def test_more_rounds_than_the_model_has_positions_are_refused():
    assert plot_tree.most_tokens(rounds=9, max_depth=5, max_position=1024) == 55
    with pytest.raises(ValueError, match="smaller --skip"):
        plot_tree.most_tokens(rounds=1000, max_depth=5, max_position=1024)


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
    parents = (-1, 0, 1, 1)
    nodes = [{"token": n, "text": "token", "parent": parent} for n, parent in enumerate(parents)]
    out = tmp_path / "tree.png"
    plot_tree.draw({"nodes": nodes, "path": [0, 1], "bonus": {"token": 5, "text": ""}}, out)
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
