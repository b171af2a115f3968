"""The engine's options on the command line: what they mean, and their defaults."""

import dataclasses
import json
from pathlib import Path
from typing import get_args

import pytest

from jaxspec.commands import check_exactness, generate, serve
from jaxspec.commands.serve import server as serving
from jaxspec.commands.shared import engine_options
from jaxspec.commands.shared.engine_config import engine_config, speculation_config, with_memory
from jaxspec.config.engine import EngineConfig, Preemption
from jaxspec.llm.tokenizer.text import TextTokenizer
from tests.helpers.checkpoints import tiny_byte_llama

MODES = ["--deterministic", "--adaptive", "--no-prefix-cache"]
SMALL = ["--drafter", "ngram", "--max-length", "64", "--no-compilation-cache", "--tree", "chain:3"]


def test_the_defaults_are_those_of_the_engine():
    assert get_args(Preemption) == engine_options.PREEMPTION
    assert EngineConfig().swap_memory == engine_options.SWAP_MEMORY
    assert EngineConfig().snapshot_memory == engine_options.SNAPSHOT_MEMORY
    arguments = check_exactness.make_parser().parse_args([])
    config = with_memory(engine_config(arguments, EngineConfig().max_rows, plain=False), arguments)
    assert config == EngineConfig()


def test_each_option_is_a_field_of_the_engine():
    words = [*MODES, "--preemption", "swap", "--swap-memory", "0.5", "--snapshot-memory", "2"]
    arguments = check_exactness.make_parser().parse_args(words)
    config = with_memory(engine_config(arguments, 3, plain=False), arguments)
    assert config == EngineConfig(
        max_rows=3,
        prefix_caching=False,
        deterministic=True,
        adaptive=True,
        preemption="swap",
        swap_memory=0.5,
        snapshot_memory=2.0,
    )
    assert not engine_config(arguments, 3, plain=True).adaptive


@pytest.mark.slow
def test_the_server_takes_the_options_of_both(tmp_path: Path):
    model = tiny_byte_llama(tmp_path)
    words = ["--model", str(model), "--drafter", "ngram", "--tree", "chain:3", "--num-pages", "40"]
    words += ["--acceptance", "rejection", "--proposal", "top_k", "--verify-width", "8"]
    words += ["--preemption", "swap", "--swap-memory", "0.5", "--max-programs", "99"]
    words += ["--adaptive", "--no-prefix-cache", "--max-rows", "3", "--max-length", "64"]
    arguments = serve.make_parser().parse_args(words)
    speculation = speculation_config(arguments)
    assert (speculation.name, speculation.acceptance, speculation.proposal) == (
        *("chain:3", "rejection", "top_k"),
    )
    llm = serving.make_llm(arguments, None, TextTokenizer(model))
    assert llm.params.speculation == speculation
    config = llm.engine.config
    assert (config.preemption, config.swap_memory, config.max_programs) == ("swap", 0.5, 99)
    assert config.adaptive and not config.prefix_caching
    assert llm.engine.cache.num_pages == 40


def test_every_option_of_the_engine_is_on_the_command_line():
    """But for those that ``serve`` names in its own words, or chooses itself."""
    own = {"fixed_rounds", "shapes", "trees", "prefix_caching"}
    arguments = vars(serve.make_parser().parse_args([]))
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert fields - own <= set(arguments) and "no_trees" in arguments
    assert arguments["max_programs"] == EngineConfig().max_programs
    shared = {"tree", "acceptance", "proposal", "verify_width", "shard_drafter", "num_pages"}
    assert shared <= set(arguments) & set(vars(generate.make_parser().parse_args([])))


def test_what_cannot_be_combined_is_one_line(capsys: pytest.CaptureFixture[str]):
    words = ["--deterministic", "--preemption", "recompute", "--prompts", "1"]
    assert check_exactness.main(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert 'preemption="recompute" is not exact in bfloat16' in line


@pytest.mark.slow
def test_generate_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = tiny_byte_llama(tmp_path)
    words = ["--model", str(model), *SMALL, "--prompt", "abcabc", "--max-tokens", "24", "--json"]
    words += ["--dtype", "bfloat16", "--compare", "--pairs", "1", *MODES]
    assert generate.main(words) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["identical"] is True and results["num_tokens"] == 24


@pytest.mark.slow
def test_check_exactness_preempts_with_few_pages(capsys: pytest.CaptureFixture[str]):
    words = ["--prompts", "4", "--prompt-tokens", "24", "--max-tokens", "40", "--json"]
    words += ["--pages", "10", "--dtype", "bfloat16", "--deterministic", "--drafter", "ngram"]
    assert check_exactness.main(words) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["identical"] == row["prompts"] == 4
    assert row["preemptions"]["swap"] > 0 == row["preemptions"]["recompute"]
