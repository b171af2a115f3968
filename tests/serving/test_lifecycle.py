"""A server of its own: start, health, requests, SIGTERM."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from jaxspec.__main__ import main
from jaxspec.commands.serve import size
from tests.served import MODEL

ROOT = Path(__file__).parent.parent.parent
READY = re.compile(
    r"serving tiny \((?:2 engines of )?2 rows on .*\) at (http://127\.0\.0\.1:\d+)/v1"
)
LIMIT = 120  # seconds


@contextlib.contextmanager
def server(
    model: Path, cache: Path, engines: int = 1
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves, and its address."""
    command = [
        *(sys.executable, "-m", "jaxspec", "serve", "--model", str(model), "--port", "0"),
        *("--max-rows", "2", "--served-model-name", MODEL, "--drafter", "ngram", "--kv-memory"),
        *("64MiB", "--warm-up", "none", "--compilation-cache", str(cache), "--max-length", "256"),
        *("--dp", str(engines)),
    ]
    devices = f"--xla_force_host_platform_device_count={engines}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            shown = ""
            for line in process.stderr:
                shown += line
                if found := READY.search(line):
                    yield process, found[1]
                    break
            else:
                pytest.fail(f"the server did not start:\n{shown}")
        finally:
            process.kill()


@pytest.mark.slow
def test_sigterm_lets_requests_end_and_a_second_one_does_not(model: Path, tmp_path: Path):
    request = {"model": MODEL, "prompt": "abcabc", "max_tokens": 200, "temperature": 0}

    async def drain(process: subprocess.Popen[str], address: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            assert httpx.get(f"{address}/health").json() == {"status": "ready"}
            stream = await client.completions.create(**request, stream=True)
            chunks = [await anext(aiter(stream))]
            process.send_signal(signal.SIGTERM)
            chunks += [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason == "length"

    with server(model, tmp_path) as (process, address):
        asyncio.run(drain(process, address))
        assert process.wait(LIMIT) == 0

    with server(model, tmp_path) as (process, address), unfinished_request(address):
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert process.poll() is None  # it waits for the rest of the request
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0


@pytest.mark.slow
def test_sigterm_lets_the_requests_of_all_engines_end(model: Path, tmp_path: Path):
    request = {"model": MODEL, "prompt": ["abcabc", "xyz"], "max_tokens": 200, "temperature": 0}

    async def drain(process: subprocess.Popen[str], address: str) -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            whole = await client.completions.create(**request)
            metrics = httpx.get(f"{address}/metrics", timeout=LIMIT).text
            for engine in (0, 1):  # each has generated one of the two
                count = f'generation_tokens_total{{engine="{engine}",model_name="tiny"}} 200.0'
                assert count in metrics
            stream = await client.completions.create(**request, stream=True)
            texts = ["", ""]
            async for chunk in stream:
                if not any(texts):
                    process.send_signal(signal.SIGTERM)
                texts[chunk.choices[0].index] += chunk.choices[0].text
            return texts, [choice.text for choice in whole.choices]

    with server(model, tmp_path, engines=2) as (process, address):
        streamed, whole = asyncio.run(drain(process, address))
        assert streamed == whole and process.wait(LIMIT) == 0


def unfinished_request(address: str) -> socket.socket:
    """A connection with the beginning of a request."""
    host, _, port = address.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{"
    )
    return connection


def test_what_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    for arguments, message in (
        (["--model", str(tmp_path / "none")], "none"),
        (["--chat-template", str(tmp_path / "none")], "cannot read"),
        (["--no-compilation-cache", "--compilation-cache", "x"], "goes without"),
        (["--dp", "9"], "dp 9 x tp 1 needs 9 devices, this process has 8"),
        (["--dp", "0"], "must be >= 1"),
    ):
        assert main(["serve", *arguments]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("jaxspec serve: ") and message in line


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys):
    for name in [name for name in sys.modules if name.startswith("jaxspec.commands.serving")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("jaxspec.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == (
        "jaxspec serve: fastapi is not installed: pip install 'jaxspec[serve]'\n"
    )


def test_sizes_have_units(capsys: pytest.CaptureFixture[str]):
    assert [size(text) for text in ("2GiB", "1.5kB", "700")] == [2 * 2**30, 1500, 700]
    with pytest.raises(SystemExit):
        main(["serve", "--kv-memory", "much"])
    assert "must be a size such as 2GiB" in capsys.readouterr().err
