"""A drafter of which almost nothing is accepted is reported, once."""

import argparse
import asyncio
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec import BUILT_IN_HEAD, BUILT_IN_MODEL
from jaxspec.commands import eval_drafter
from jaxspec.commands.shared.shell import command_parser, run_command
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.decoding.drafters import EagleDrafter, NGramDrafter, NoDrafter, SuffixDrafter
from jaxspec.decoding.state import Emitted
from jaxspec.engine.async_engine import AsyncEngine
from jaxspec.engine.draft_watch import FEWEST, MOST, DraftWatch
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs.call import LaunchedCall
from tests.helpers.engines import CHAIN, CROWDED, seal
from tests.helpers.random_models import eagle3_head, make_params, random_target


def rounds(accepted: list[int], drafted: int = 2, num_rounds: int | None = None) -> LaunchedCall:
    """A call of one row that ran a round for each number of accepted tokens."""
    counts: Any = np.array(accepted)[:, None]  # [C, 1]
    nothing: Any = np.zeros(1)
    number: Any = np.int32(len(accepted) if num_rounds is None else num_rounds)
    emitted = Emitted(
        num_rounds=number,
        tokens=counts[..., None],
        counts=counts + 1,
        accepted=counts,
        drafted=0 * counts + drafted,
        status=nothing,
        ending=nothing,
        logprobs=None, hidden=None, top_tokens=None, top_logprobs=None,
    )  # fmt: skip
    return LaunchedCall.now(np.array([0]), emitted)


def watch_of(drafter: Any) -> tuple[DraftWatch, list[str]]:
    said: list[str] = []
    watch = DraftWatch(drafter)
    watch.on_warning = said.append
    return watch, said


@pytest.fixture(scope="module")
def head() -> EagleDrafter:
    return EagleDrafter(head=eagle3_head(random_target()))


def test_it_is_said_once_after_so_many_rounds(head: EagleDrafter):
    watch, said = watch_of(head)
    watch.add([rounds([0] * (FEWEST - 1))])
    assert not said
    watch.add([rounds([0]), rounds([0] * FEWEST)])
    [message] = said
    assert "EagleDrafter" in message and f"0 of the first {2 * FEWEST} rounds" in message
    assert "fine-tune" in message and "chat template" in message and "\n" not in message
    watch.restart(head)
    watch.add([rounds([0] * FEWEST)])
    assert len(said) == 1


@pytest.mark.parametrize(("good", "told"), [(9, True), (10, False)])
def test_the_limit_is_a_share_of_the_rounds(head: EagleDrafter, good: int, told: bool):
    watch, said = watch_of(head)
    watch.add([rounds([1] * good + [0] * (MOST - good))])
    assert bool(said) == told


def test_only_the_first_rounds_count(head: EagleDrafter):
    watch, said = watch_of(head)
    watch.add([rounds([1] * MOST)])
    watch.add([rounds([0] * 100 * MOST)])
    assert not said


def test_rounds_that_drafted_nothing_and_prefills_do_not_count(head: EagleDrafter):
    watch, said = watch_of(head)
    watch.add([rounds([0] * FEWEST, drafted=0), rounds([0] * FEWEST, num_rounds=0)])
    assert not said


@pytest.mark.parametrize("drafter", [NGramDrafter(), SuffixDrafter(), NoDrafter()])
def test_lookup_is_not_watched(drafter: Any):
    watch, said = watch_of(drafter)
    watch.add([rounds([0] * FEWEST)])
    assert not said


def test_another_drafter_is_counted_anew(head: EagleDrafter):
    watch, said = watch_of(head)
    watch.add([rounds([0] * (FEWEST - 1))])
    watch.restart(head)
    watch.add([rounds([0] * (FEWEST - 1))])
    assert not said
    watch.add([rounds([0])])
    assert len(said) == 1


def hopeless_engine() -> Engine:
    """Its head drafts the tokens that it holds least likely. Its programs are those of
    test_engine.py."""
    params: Any = make_params("eagle3", CHAIN)
    head = params.drafter.head
    lm_head = head.lm_head.replace(weight=-head.lm_head.weight)
    drafter = EagleDrafter(head=head.replace(lm_head=lm_head))
    config = EngineConfig(max_rows=3, rounds_per_call=4, preemption="swap")
    return seal(Engine(params.replace(drafter=drafter), CROWDED, config))


def test_an_engine_warns_and_a_server_logs_instead(caplog: pytest.LogCaptureFixture):
    engine = hopeless_engine()
    sampling = [SamplingParams(temperature=0.0, max_tokens=50)] * 4
    engine.watch.restart(engine.params.drafter)

    def generate() -> None:
        engine.finish(engine.add_all([[1], [2], [3], [4]], sampling))

    with pytest.warns(UserWarning, match="EagleDrafter.* is of no use here"):
        generate()
    generate()  # once is enough

    engine.watch = DraftWatch(engine.params.drafter)
    serving = AsyncEngine(engine)
    with caplog.at_level(logging.WARNING):
        asyncio.run(serving.run(lambda _: generate()))
        asyncio.run(serving.close())
    [record] = caplog.records
    assert record.name == "jaxspec.engine.async_engine" and "is of no use here" in record.message


@pytest.mark.filterwarnings("default")
def test_commands_print_warnings_in_a_line(capsys: pytest.CaptureFixture[str]):
    def run(_: argparse.Namespace) -> None:
        warnings.warn("the drafter\nis of no use", stacklevel=1)

    assert run_command(command_parser("generate", None), run, []) == 0
    assert capsys.readouterr().err == "jaxspec generate: warning: the drafter is of no use\n"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_eval_says_it_once(tmp_path: Path, sources: Path, capsys: pytest.CaptureFixture[str]):
    """Of a head with other embeddings, by two engines."""
    shutil.copytree(BUILT_IN_HEAD, tmp_path / "head")
    file = tmp_path / "head/model.safetensors"
    table = load_file(BUILT_IN_MODEL / "model.safetensors")["model.embed_tokens.weight"]
    other = np.random.default_rng(0).permutation(table)
    save_file(load_file(file) | {"embed_tokens.weight": other}, file)
    options = ["--modes", "chain:2,chain:3", "--rules", "coupled", "--temperatures", "0"]
    options += ["--prompts", "4", "--prompt-tokens", "16", "--max-tokens", "64"]
    options += ["--drafter", str(tmp_path / "head"), "--data", str(sources)]
    assert eval_drafter.main(options) == 0
    output = capsys.readouterr().err
    assert output.count("is of no use here") == 1
    assert (
        "jaxspec eval-drafter: warning: " in output and "embed_tokens.weight differs from" in output
    )
