"""`jaxspec generate`: what its options mean, the comparison, and the chat."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec import BUILT_IN_MODEL, LLM, SamplingParams, SpeculationConfig
from jaxspec.commands import generate
from jaxspec.commands.generate import chat, generation
from jaxspec.commands.shared import program_cache
from jaxspec.commands.shared.engine_config import speculation_config
from jaxspec.llm.tokenizer import TextTokenizer
from tests.helpers.checkpoints import tiny_byte_llama

ROOT = Path(__file__).parents[2]
NO_CACHE = "--no-compilation-cache"
SMALL = ["--drafter", "ngram", "--max-length", "128", NO_CACHE]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<assistant>' }}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a chat template."""
    path = tiny_byte_llama(tmp_path_factory.mktemp("model"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def compiled() -> dict[str, LLM]:
    return {}


@pytest.fixture
def loaded_once(compiled: dict[str, LLM], monkeypatch) -> None:
    """An engine of each drafter is loaded and compiled by the first test that asks for it."""
    make_llm = generation.make_llm

    def make(arguments, drafter: str, tokenizer: TextTokenizer, *_: None) -> LLM:
        if drafter not in compiled:
            compiled[drafter] = make_llm(arguments, drafter, tokenizer)
        return compiled[drafter]

    monkeypatch.setattr(generation, "make_llm", make)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("chain:3", SpeculationConfig(4, 3, 1)),
        ("20:5:4", SpeculationConfig(20, 5, 4)),
        ("tree:20:5:4", SpeculationConfig(20, 5, 4)),
    ],
)
def test_the_tree_is_one_option(text: str, tree: SpeculationConfig):
    arguments = generate.make_parser().parse_args(["--tree", text])
    assert speculation_config(arguments) == tree


def test_top_k_is_of_sampling():
    arguments = generate.make_parser().parse_args(["--top-k", "7"])
    assert generation.sampling_params(arguments).top_k == 7
    assert speculation_config(arguments).top_k == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "", NO_CACHE], "the prompt is empty"),
        (["--pairs", "3"], "--pairs would do nothing: add --compare"),
        (["--chat", "--json"], "--chat goes with neither --compare nor --json"),
        (["--chat", "--show-trees", "x.html"], "--show-trees goes with neither --chat nor"),
        (["--compare", "--show-trees", "x.html"], "--show-trees goes with neither --chat nor"),
        (["--show-trees", "/nowhere/x.html", NO_CACHE], "there is no folder /nowhere"),
        (["--show-trees", "/", NO_CACHE], "cannot write /: it is a folder"),
        (["--verbose", "--out", "x"], "--verbose would do nothing with --out: leave it out"),
        (["--chat", NO_CACHE], "has no chat template: --chat needs an instruction-tuned model"),
        ([NO_CACHE, "--compilation-cache", "x"], "goes without --compilation-cache"),
        (["--compilation-cache", "/dev/null/here"], "cannot keep compiled programs: "),
    ],
)
def test_what_cannot_run_is_refused_before_the_weights_are_read(
    arguments: list[str], message: str, monkeypatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(generation, "make_llm", lambda *_: pytest.fail("weights were read"))
    assert generate.main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_programs_are_kept_unless_told_otherwise(monkeypatch, tmp_path: Path, capsys):
    """A home that cannot be written to costs one line."""
    kept: list[Path | None] = []
    folders = iter([tmp_path, Path("/dev/null/cache")])
    monkeypatch.setattr(generation, "keep_compiled_programs", kept.append)
    monkeypatch.setattr(generation, "generate", lambda *_: None)
    monkeypatch.setattr(program_cache, "default_folder", lambda: next(folders))
    other = tmp_path / "other"
    for arguments in ([], [NO_CACHE], ["--compilation-cache", str(other)], []):
        assert generate.main(arguments) == 0
    assert kept == [tmp_path, None, other, None]
    assert other.is_dir()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("cannot keep compiled programs: ") and line.endswith("going on without")


@pytest.mark.usefixtures("loaded_once")
def test_the_comparison_is_of_alternating_pairs(model: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--model", str(model), *SMALL, "--prompt", "abcabc", "--max-tokens", "24"]
    arguments = [*arguments, "--temperature", "0", "--compare", "--pairs", "3", "--json"]
    assert generate.main(arguments) == 0
    results = json.loads(capsys.readouterr().out)
    assert len(results["speedups"]) == 3
    assert sorted(results["speedups"])[1] == results["speedup"]
    assert results["identical"] is True and results["first_difference"] is None
    assert results["decode_tokens_per_second"] > 0 < results["plain_decode_tokens_per_second"]
    text, number = generation.summary(results), r"\d+\.\d\d"
    assert re.search(rf"speed-up: {number}x \({number} to {number}\), .* 3 alternating", text)
    assert text.count("tokens identical") == 1
    assert len(re.findall(r"decode [\d.]+ tokens/s", text)) == 1


@pytest.mark.usefixtures("loaded_once")
def test_verbose_shows_the_tokens_that_end_the_text(
    model: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["--model", str(model), *SMALL, "--prompt", "abcabc", "--max-tokens", "24"]
    arguments = [*arguments, "--temperature", "0"]
    stops = [{"id": 2, "text": "#"}, {"id": 256, "text": "<end>"}]  # of config and tokenizer
    assert generate.main([*arguments, "--verbose"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "stop tokens: 2 '#', 256 '<end>'"
    assert generate.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stop_tokens"] == stops


def test_ten_pairs_are_the_default(monkeypatch):
    def compare(speculative, plain, prompt, sampling, pairs):
        raise ValueError(f"{pairs} pairs")

    monkeypatch.setattr(generation, "compare", compare)
    monkeypatch.setattr(generation, "make_llm", lambda *_: None)
    monkeypatch.setattr(generation, "stream", lambda *_: None)
    monkeypatch.setattr(generation, "report", lambda *_: {})
    with pytest.raises(ValueError, match="10 pairs"):
        generate.run(generate.make_parser().parse_args([NO_CACHE, "--compare", "--json"]))


@pytest.mark.slow
def test_the_page_of_trees_is_one_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "trees.html"
    arguments = ["--model", str(model), *SMALL, "--prompt", "abcabcabc", "--max-tokens", "24"]
    assert generate.main([*arguments, "--json", "--show-trees", str(page)]) == 0
    results = json.loads(capsys.readouterr().out)
    html = page.read_text(encoding="utf-8")
    assert re.findall(r"(?:src|href)=.(?!data:)|@import|url\(", html) == []
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    shown = json.loads(data)
    assert (shown["prompt"], shown["text"]) == ("abcabcabc", results["text"])
    trees = shown["speculation"]["trees"]
    assert len(trees) == shown["speculation"]["rounds"] == results["num_rounds"]
    assert 1 + sum(tree["committed"] for tree in trees) == results["num_tokens"]
    assert "/* " + "TREE" not in html and "class RoundPanel" in html


@pytest.mark.usefixtures("loaded_once")
def test_a_chat_remembers_and_shows_acceptance(
    model: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
):
    lines = iter(["first", "", "second", "/help", "/clear", "third", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    asked: list[list[chat.Message]] = []

    def record(llm, messages):
        asked.append(messages)
        return chat_prompts(llm, messages)

    chat_prompts = LLM.chat_prompts
    monkeypatch.setattr(LLM, "chat_prompts", record)
    options = [*SMALL, "--temperature", "0", "--max-tokens", "8"]
    assert generate.main(["--chat", "--model", str(model), *options]) == 0
    roles = [[message["role"] for message in messages] for messages in asked]
    assert roles == [["user"], ["user", "assistant", "user"], ["user"]]
    printed = capsys.readouterr().out
    answers = re.findall(r"\[\d+ tokens, [\d.]+ a round, [\d.]+ tokens/s", printed)
    assert len(answers) == 3
    assert "commands: /clear" in printed
    assert next(lines) == "never"


@pytest.mark.usefixtures("loaded_once")
def test_a_chat_that_is_too_long_can_be_cleared(model: Path, capsys: pytest.CaptureFixture[str]):
    arguments = generate.make_parser().parse_args(["--model", str(model), *SMALL])
    llm = generation.make_llm(arguments, "ngram", TextTokenizer(model))
    chat.chat(llm, SamplingParams(max_tokens=4), ["x" * 200, "/clear", "y"])
    printed = capsys.readouterr().out
    assert "/clear forgets the chat so far" in printed
    assert len(re.findall(r"tokens/s", printed)) == 1


def test_ctrl_d_ends_a_chat(monkeypatch, capsys: pytest.CaptureFixture[str]):
    def end_of_file(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end_of_file)
    assert list(chat.typed_lines()) == []
    assert capsys.readouterr().out == "\n"


@pytest.mark.slow
def test_sigint_ends_a_process_in_one_line():
    command = [sys.executable, "-m", "jaxspec", "generate", NO_CACHE]
    command += ["--model", str(BUILT_IN_MODEL), "--max-tokens", "1500"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()  # it runs
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors.splitlines() == ["jaxspec generate: interrupted"]
