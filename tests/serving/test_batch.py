"""`jaxspec generate --out`: a file of prompts to a file of results."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.commands import generate
from jaxspec.commands.generate import prompt_file as batch
from tests.helpers.checkpoints import tiny_byte_llama
from tests.helpers.served import TEMPLATE

ROOT = Path(__file__).parents[2]
NO_CACHE = "--no-compilation-cache"
OPTIONS = (NO_CACHE, "--max-tokens", "6", "--temperature", "1")


@pytest.fixture
def loads(llm: LLM, monkeypatch) -> list[str]:
    """What was loaded; it is the same engine each time."""
    loaded: list[str] = []

    def make_llm(arguments: Any, *_: Any) -> LLM:
        loaded.append(arguments.model)
        return llm

    monkeypatch.setattr(batch, "make_llm", make_llm)
    return loaded


class Batch:
    """Files in a folder, and the command on them."""

    def __init__(self, folder: Path, model: Path):
        self.prompts, self.out = folder / "prompts.jsonl", folder / "out.jsonl"
        self.partial = folder / "out.jsonl.partial"
        self._model = model

    def write(self, lines: Sequence[Mapping[str, Any] | str]) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.prompts.write_text("".join(f"{text}\n" for text in texts))

    def run(self, *options: str) -> int:
        files = ["--prompt-file", str(self.prompts), "--out", str(self.out)]
        return generate.main(["--model", str(self._model), *files, *OPTIONS, *options])

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]


@pytest.fixture
def files(tmp_path: Path, model: Path) -> Batch:
    return Batch(tmp_path, model)


MANY = [
    {"id": f"p{n}", "prompt": f"{n} is" * (1 + n % 3), "max_tokens": 2 + n % 7} for n in range(24)
]


@pytest.mark.usefixtures("loads")
def test_each_prompt_has_the_text_that_it_has_alone(files: Batch, llm: LLM, capsys):
    files.write(MANY)
    assert files.run("--token-ids") == 0
    results = files.results()
    assert [(one["index"], one["id"]) for one in results] == [(n, f"p{n}") for n in range(24)]
    for n in (0, 5, 23):
        sampling = SamplingParams(
            temperature=1.0, top_p=0.9, max_tokens=MANY[n]["max_tokens"], seed=n + 1
        )
        [alone] = llm.generate([MANY[n]["prompt"]], sampling)
        one, read, made = results[n], len(alone.prompt_token_ids), len(alone.token_ids)
        assert (one["text"], one["token_ids"]) == (alone.text, alone.token_ids)
        assert (one["finish_reason"], one["seed"]) == (alone.finish_reason, n + 1)
        assert one["usage"] == {
            "prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made
        }  # fmt: skip
    assert capsys.readouterr().out.startswith(f"{files.out}: 24 results; ")


def test_a_run_goes_on_where_it_was_cut_off(files: Batch, loads: list[str], capsys):
    files.write(MANY)
    assert files.run() == 0
    whole, record = files.out.read_bytes(), files.out.with_name("out.jsonl.run.json").read_bytes()
    lines = whole.splitlines(keepends=True)
    files.out.unlink()
    files.partial.write_bytes(b"".join([*lines[10:18], *lines[:3]]) + lines[4][:30])
    capsys.readouterr()
    assert files.run("--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["prompts"], report["done_before"], report["errors"]) == (24, 11, 0)
    assert files.out.read_bytes() == whole
    assert files.out.with_name("out.jsonl.run.json").read_bytes() == record
    assert len(loads) == 2
    assert files.run("--max-rows", "2") == 0  # nothing is left to do: no model is loaded
    assert len(loads) == 2 and files.out.read_bytes() == whole


def test_other_options_and_prompts_are_refused_before_the_model_is_loaded(
    files: Batch, loads: list[str], capsys
):
    files.write(MANY[:2])
    assert files.run() == 0
    assert files.run("--temperature", "0") == 2
    files.write(MANY[:3])
    assert files.run() == 2
    options, prompts = capsys.readouterr().err.splitlines()
    assert "was begun with temperature 1.0, not 0.0: go on as it was begun, or choose" in options
    assert "was begun with prompt_file_sha256" in prompts
    assert len(loads) == 1 and len(files.results()) == 2


def test_shards_in_order_are_the_whole(files: Batch, loads: list[str], monkeypatch):
    files.write(MANY[:7])
    assert files.run() == 0
    for task in range(3):
        for name, value in (("ID", task), ("COUNT", 3), ("MIN", 0), ("MAX", 2)):
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
        assert files.run("--shard", "slurm") == 0
    parts = sorted(files.out.parent.glob("out-*-of-00003.jsonl"))
    assert b"".join(part.read_bytes() for part in parts) == files.out.read_bytes()
    assert files.run("--shard", "1/3") == 0  # the same as the array's
    assert len(loads) == 4


@pytest.mark.usefixtures("loads")
def test_a_line_that_cannot_be_served_says_why(files: Batch, capsys):
    files.write(
        [
            {"id": "good", "prompt": "a"},
            {"id": "unknown", "prompt": "a", "max_token": 3},
            {"id": "empty", "prompt": ""},
            {"id": "long", "prompt": "a" * 300},
            {"id": "outside", "prompt_token_ids": [1, 2, 300]},
            {"id": "none", "prompt_token_ids": []},
            {"id": "no template", "messages": [{"role": "user", "content": "a"}]},
            {"id": "surrogate", "prompt": "\ud800"},
            {"id": "regex", "prompt": "a", "structured": {"regex": "("}},
            '{"id": "torn", "pro',
            {"id": "last", "prompt": "b"},
        ]
    )
    assert files.run() == 0
    results = files.results()
    assert [one["index"] for one in results] == list(range(11))
    errors = {one["id"]: one["error"] for one in results if "error" in one}
    for name, message in {
        "unknown": "unknown field max_token: fields are those of SamplingParams",
        "empty": "the prompt is empty",
        "long": "the prompt has 300 tokens",
        "outside": "the prompt has a token id outside 0..256",
        "none": "the prompt is empty: give at least one token",
        "no template": "has no chat template",
        "surrogate": "is no valid Unicode",
        "regex": "regex: ",
        None: "the line is not JSON",
    }.items():
        assert message in errors.pop(name)
    assert errors == {} and all("\n" not in one.get("error", "") for one in results)
    assert "9 prompts could not be served" in capsys.readouterr().out
    assert len(results[0]["text"]) > 0 < len(results[-1]["text"])


@pytest.mark.usefixtures("loads")
def test_chats_samples_and_logprobs(files: Batch, llm: LLM, tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    messages = [{"role": "user", "content": "Hello!"}]
    files.write(
        [
            {"messages": messages, "seed": 3},
            {"prompt": "a", "n": 2, "logprobs": 1, "prompt_logprobs": 1},
        ]
    )
    assert files.run("--chat-template", str(template)) == 0
    chat, samples = files.results()
    sampling = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=6, seed=3)
    [answer] = llm.chat(messages, sampling, chat_template=TEMPLATE)
    assert chat["text"] == answer.text
    assert [one["seed"] for one in samples["choices"]] == [3, 4]  # 1, and 1 x 2 samples before it
    generated = sum(len(one["logprobs"]) for one in samples["choices"])
    assert samples["usage"]["completion_tokens"] == generated
    assert samples["choices"][0]["logprobs"][0].keys() == {"token_id", "logprob", "top"}
    assert samples["prompt_logprobs"] == [None]


def openai_line(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


@pytest.mark.usefixtures("loads")
def test_openai_lines_get_openai_results(files: Batch, model: Path, tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    messages, chat = [{"role": "user", "content": "Hello!"}], "/v1/chat/completions"
    files.write(
        [
            openai_line("text", model=str(model), prompt="a", max_tokens=4),
            openai_line("chat", chat, messages=messages, max_completion_tokens=5),
            {"id": "own", "prompt": "b"},
            openai_line("model", model="other", prompt="a"),
            openai_line("field", prompt="a", max_token=4),
            openai_line("refused", prompt="a", guided_regex="a*"),
            openai_line("stream", prompt="a", stream=True),
            openai_line("url", "/v1/embeddings", input="a"),
            openai_line("value", prompt="a", temperature="hot"),
        ]
    )
    assert files.run("--chat-template", str(template)) == 0
    results = files.results()
    text, answer, own, *refused = results
    assert text["custom_id"] == "text" and text["error"] is None
    assert text["response"]["status_code"] == 200
    body = text["response"]["body"]
    assert (body["object"], body["model"]) == ("text_completion", model.name)
    assert body["usage"]["completion_tokens"] <= 4
    assert answer["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert own["id"] == "own" and own["text"]
    found = {
        one["custom_id"]: (one["response"]["status_code"], one["error"]["message"])
        for one in refused
    }
    assert {name: status for name, (status, _) in found.items()} == {
        "model": 404, "field": 400, "refused": 400, "stream": 400, "url": 400, "value": 400
    }  # fmt: skip
    assert found["field"][1] == "unknown field max_token"
    assert "use structured_outputs.regex" in found["refused"][1]
    assert "url must be one of /v1/completions, /v1/chat/completions" in found["url"][1]
    assert [one["index"] for one in results] == list(range(9))


@pytest.mark.usefixtures("loads")
def test_usage_counts_what_best_of_has_left_out(files: Batch):
    fields = {"prompt": "abc", "n": 2, "best_of": 3, "max_tokens": 6, "ignore_eos": True}
    files.write([fields, openai_line("openai", temperature=1, **fields)])
    assert files.run() == 0
    own, openai = files.results()
    for usage in (own["usage"], openai["response"]["body"]["usage"]):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 3 * 6)
        assert usage["total_tokens"] == 3 + 3 * 6


@pytest.mark.usefixtures("loads")
def test_openai_lines_without_the_extra_say_what_to_install(files: Batch, capsys, monkeypatch):
    files.write([openai_line("text", prompt="a")])

    import_module = importlib.import_module

    def without_fastapi(name: str) -> ModuleType:
        if name == "jaxspec.serving.batch":
            raise ModuleNotFoundError("No module named 'fastapi'", name="fastapi")
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", without_fastapi)
    assert files.run() == 2
    *_, line = capsys.readouterr().err.splitlines()
    cure = "fastapi is not installed: pip install 'jaxspec-decoding[serve]'"
    assert f"lines of OpenAI's kind: {cure}" in line


def test_a_failure_of_the_engine_ends_the_run(files: Batch, llm: LLM, loads, capsys, monkeypatch):
    files.write(MANY)
    step, calls = llm.engine.step, []

    def fail(most_rounds: int | None = None) -> None:
        calls.append(most_rounds)
        if len(calls) == 8:
            error = RuntimeError("out of memory")
            llm.engine._fail(error)
            raise error
        step(most_rounds)

    monkeypatch.setattr(llm.engine, "step", fail)
    assert files.run() == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert "the engine failed: interrupted: RuntimeError: out of memory; the same command" in last
    assert not files.out.exists() and 0 < len(files.partial.read_text().splitlines()) < 24
    monkeypatch.undo()
    finish = SamplingParams(max_tokens=2)
    assert llm.generate(["a"], finish)[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "x.jsonl"], "--out needs --prompt-file, with one prompt a line"),
        (["--out", "x.jsonl", "--prompt", "a"], "--out needs --prompt-file"),
        (["--shard", "0/2"], "--shard is for files of prompts: add --out"),
        (["--max-rows", "4"], "--max-rows is for files of prompts: add --out"),
        (["--dp", "2"], "--dp is for files of prompts: add --out"),
        (["--token-ids"], "--token-ids is for files of prompts: add --out"),
        (["--chat-template", "x"], "--chat-template is for files of prompts: add --out"),
        (["--prompt-file", "x.jsonl"], "x.jsonl looks like a file of prompts: add --out"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], message: str, capsys):
    assert generate.main(options) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compare"], "--out goes with neither --compare nor --show-trees"),
        (["--show-trees", "x.html"], "--out goes with neither --compare nor --show-trees"),
        (["--shard", "3/3"], "--shard must be I/N with I from 0 to N - 1, or slurm"),
        (["--shard", "slurm"], "--shard slurm needs an array job of SLURM"),
        (["--temperature", "-1"], "temperature must be a finite number"),
        (["--chat-template", "/no/such"], "cannot read /no/such"),
        (["--out", "/no/such/out.jsonl"], "there is no folder /no/such"),
        (["--prompt-file", "/no/such.jsonl"], "cannot read /no/such.jsonl: No such file"),
    ],
)
def test_what_cannot_run_leaves_nothing(
    files: Batch, loads: list[str], options: list[str], message: str, capsys, monkeypatch
):
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    files.write(MANY[:1])
    assert files.run(*options) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert loads == [] and list(files.out.parent.iterdir()) == [files.prompts]


@pytest.mark.slow
def test_kill_9_and_again(tmp_path: Path):
    model = tiny_byte_llama(tmp_path / "model")
    files = Batch(tmp_path, model)
    files.write([{"prompt": f"{n} and", "max_tokens": 40} for n in range(60)])
    command = [sys.executable, "scripts/generate.py", "--model", str(model), "--tree", "chain:2"]
    command += ["--prompt-file", str(files.prompts), "--max-rows", "4"]
    command += ["--compilation-cache", str(tmp_path / "programs"), "--drafter", "ngram"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(out: Path, cut: int | None = None) -> int:
        own = [*command, "--out", str(out)]
        with subprocess.Popen(own, env=environment, cwd=ROOT) as process:
            partial = out.with_name(f"{out.name}.partial")
            while cut is not None and process.poll() is None:
                if partial.exists() and partial.read_bytes().count(b"\n") >= cut:
                    process.send_signal(signal.SIGKILL)
                    break
                time.sleep(0.01)
        return process.returncode

    whole = tmp_path / "whole.jsonl"
    assert run(whole) == 0
    for cut in (1, 25, 45):
        assert run(files.out, cut) == -signal.SIGKILL
        assert not files.out.exists()
    assert run(files.out) == 0
    assert files.out.read_bytes() == whole.read_bytes()
