"""A server of its own: start, health, requests, SIGTERM."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from fastapi import FastAPI

from jaxspec.__main__ import main
from jaxspec.commands.serve import size
from jaxspec.serving import lifecycle
from tests.helpers.serve_process import ROOT, ServeProcess, serve_process
from tests.helpers.served import HEAD, MODEL

LIMIT = 120  # seconds


def server(
    model: Path, cache: Path, engines: int = 1
) -> contextlib.AbstractContextManager[ServeProcess]:
    """A process that serves two rows, with each of its engines."""
    return serve_process(
        *("--model", str(model), "--max-rows", "2", "--served-model-name", MODEL),
        *("--drafter", "ngram", "--kv-memory", "64MiB", "--max-length", "256"),
        *("--warm-up", "none", "--compilation-cache", str(cache), "--dp", str(engines)),
        devices=engines,
    )


async def texts_under_sigterm(own: ServeProcess, count: int) -> list[str | None]:
    """How so many requests end, half of them streams, that began before the signal."""
    request = {"model": MODEL, "max_tokens": 100, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=f"{own.address}/v1", api_key="none") as client:

        async def whole(index: int) -> str | None:
            answer = await client.completions.create(**request, prompt=f"abc{index}")
            return answer.choices[0].finish_reason

        async def streamed(index: int) -> str | None:
            stream = await client.completions.create(**request, prompt=f"abc{index}", stream=True)
            return [chunk async for chunk in stream][-1].choices[0].finish_reason

        kinds = (whole, streamed)
        tasks = [asyncio.create_task(kinds[index % 2](index)) for index in range(count)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # the others have begun
        assert not all(task.done() for task in tasks)
        own.process.send_signal(signal.SIGTERM)
        return list(await asyncio.gather(*tasks))


@pytest.mark.slow
def test_sigterm_lets_requests_end_and_a_second_one_does_not(model: Path, tmp_path: Path):
    with server(model, tmp_path) as own:
        assert httpx.get(f"{own.address}/health").json()["status"] == "ready"
        reasons = asyncio.run(texts_under_sigterm(own, 16))
        assert set(reasons) <= {"length", "stop"} and len(reasons) == 16
        assert own.process.wait(LIMIT) == 0

    with server(model, tmp_path) as own, unfinished_request(own.address):
        time.sleep(0.5)
        own.process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert own.process.poll() is None  # it waits for the rest of the request
        assert httpx.get(f"{own.address}/health").status_code == 503  # and takes no other
        own.process.send_signal(signal.SIGTERM)
        assert own.process.wait(LIMIT) == 0


@pytest.mark.slow  # the next test has the same without a process
def test_sigterm_while_the_model_loads_is_no_crash(model: Path):
    command = [sys.executable, "-m", "jaxspec", "serve", "--port", "0", "--model", str(model)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=pipe, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "compiling for" in line:
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(LIMIT) == 0 and "FATAL" not in rest and "Traceback" not in rest


def test_the_process_ends_at_once_while_the_model_loads(monkeypatch: pytest.MonkeyPatch):
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    lifecycle.end_if_loading()
    assert not statuses
    loaded = threading.Event()
    thread = threading.Thread(target=loaded.wait, name=lifecycle.LOADING)
    thread.start()
    lifecycle.end_if_loading()
    loaded.set()
    thread.join()
    assert statuses == [0]


@pytest.mark.slow
def test_after_kill_9_it_serves_again(model: Path, tmp_path: Path):
    """The stored programs are used again."""
    request = {"model": MODEL, "prompt": "abc", "max_tokens": 8, "temperature": 0}
    texts = []
    for _ in range(2):
        started = time.perf_counter()
        with server(model, tmp_path) as own:
            print(f"ready after {time.perf_counter() - started:.1f} s")
            answer = httpx.post(f"{own.address}/v1/completions", json=request, timeout=LIMIT)
            texts.append(answer.json()["choices"][0]["text"])
            own.process.kill()
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_sigterm_lets_the_requests_of_all_engines_end(model: Path, tmp_path: Path):
    request = {"model": MODEL, "prompt": ["abcabc", "xyz"], "max_tokens": 200, "temperature": 0}

    async def drain(own: ServeProcess) -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{own.address}/v1", api_key="none") as client:
            whole = await client.completions.create(**request)
            metrics = httpx.get(f"{own.address}/metrics", timeout=LIMIT).text
            for engine in (0, 1):  # each has generated one of the two
                count = f'generation_tokens_total{{engine="{engine}",model_name="tiny"}} 200.0'
                assert count in metrics
            stream = await client.completions.create(**request, stream=True)
            texts = ["", ""]
            async for chunk in stream:
                if not any(texts):
                    own.process.send_signal(signal.SIGTERM)
                texts[chunk.choices[0].index] += chunk.choices[0].text
            return texts, [choice.text for choice in whole.choices]

    with server(model, tmp_path, engines=2) as own:
        streamed, whole = asyncio.run(drain(own))
        assert streamed == whole and own.process.wait(LIMIT) == 0


def unfinished_request(address: str) -> socket.socket:
    """A connection with the beginning of a request."""
    host, _, port = address.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(HEAD % 100 + b"{")
    return connection


def test_a_server_closes_no_log_of_its_process(monkeypatch: pytest.MonkeyPatch):
    closed, kept = [], logging.NullHandler()
    monkeypatch.setattr(kept, "close", lambda: closed.append(kept))
    lifecycle.make_server(FastAPI())
    assert not closed


def test_what_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    for arguments, message in (
        (["--model", str(tmp_path / "none")], "none"),
        (["--chat-template", str(tmp_path / "none")], "cannot read"),
        (["--no-compilation-cache", "--compilation-cache", "x"], "goes without"),
        (["--dp", "9"], "tp 1, dp 9, sp 1 needs 9 devices, this process has 8"),
        (["--dp", "0"], "must be >= 1"),
    ):
        assert main(["serve", *arguments]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("jaxspec serve: ") and message in line


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys):
    for name in [name for name in sys.modules if name.startswith("jaxspec.commands.serve.server")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("jaxspec.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == (
        "jaxspec serve: fastapi is not installed: pip install 'jaxspec-decoding[serve]'\n"
    )


def test_sizes_have_units(capsys: pytest.CaptureFixture[str]):
    assert [size(text) for text in ("2GiB", "1.5kB", "700")] == [2 * 2**30, 1500, 700]
    with pytest.raises(SystemExit):
        main(["serve", "--kv-memory", "much"])
    assert "must be a size such as 2GiB" in capsys.readouterr().err
