"""Adaptive speculation beside fixed trees, on a tiny model, and its synthetic acceptance."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.commands.bench import adaptive as bench_adaptive
from jaxspec.decoding.acceptance import Verified
from jaxspec.decoding.sampling import make_sampling
from jaxspec.decoding.trees.tree import make_chain
from jaxspec.evaluation.benchmarks.acceptance_levels import AcceptanceLevels
from jaxspec.evaluation.benchmarks.shapes import SHAPES
from jaxspec.parallel import Layout
from tests.helpers.json_lines import joined

TINY = ["--shape", "tiny", "--page-size", "8", "--dtype", "float32"]


@pytest.mark.slow
def test_each_request_has_its_own_level():
    seeds, drafted = np.arange(600, dtype=np.uint32), 3
    levels = (0.2, 0.5, 0.9)
    tokens, nodes = jnp.zeros((600, drafted + 1), jnp.int32), jnp.full(600, drafted + 1)
    tree = make_chain(tokens, nodes)
    verified = Verified(
        tree=tree,
        logits=jnp.zeros((600, drafted + 1, 8)),
        sampling=make_sampling(600, seeds=seeds),
        context_lens=jnp.full(600, 7),
        layout=Layout(),
    )
    depth = np.asarray(AcceptanceLevels(levels).accept(verified).depth)
    for index, level in enumerate(levels):
        expected = sum(level**d for d in range(1, drafted + 1))
        assert depth[index::3].mean() == pytest.approx(expected, abs=0.2)


@pytest.mark.parametrize("levels", [(), (0.5, 1.1), (-0.1,)])
def test_bad_levels_are_refused(levels: tuple[float, ...]):
    with pytest.raises(ValueError, match="acceptance levels must lie"):
        AcceptanceLevels(levels)


@pytest.mark.slow
def test_the_command_prints_tables_and_json(monkeypatch, capsys):
    tiny = SHAPES["tiny"]
    small = dataclasses.replace(tiny, layers=tiny.layers[:2])
    monkeypatch.setattr(bench_adaptive, "SHAPES", {"tiny": small})
    sizes = ["--clients", "1,2", "--levels", "0.1,0.9", "--prompt-tokens", "8"]
    sizes += ["--new-tokens", "24", "--trees", "plain,chain:2"]
    times = ["--seconds", "0.05", "--warm-up", "0.02", "--phase-seconds", "0.05"]
    assert bench_adaptive.main([*TINY, *sizes, *times, "--json"]) == 0
    printed = capsys.readouterr()
    results = joined(printed.out, "steady")
    assert [(row["clients"], row["level"]) for row in results["steady"]] == [
        (1, 0.1), (1, 0.9), (2, 0.1), (2, 0.9)
    ]  # fmt: skip
    for row in results["steady"]:
        assert list(row["rates"]) == ["plain", "chain:2", "adaptive"]
        assert row["best"] in ("plain", "chain:2") and row["of_best"] > 0
        assert set(row["rounds"]) <= {"plain", "chain:2"}
    assert set(results["mixed"]["total"]) == {"plain", "chain:2", "adaptive"}
    assert set(results["round_ms"]) == {"plain", "chain:2"}
    assert "mixed load" in printed.err and "ms/round" in printed.err
