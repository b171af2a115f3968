"""The job scripts of scripts/slurm, under a stub of srun that sets the variables of SLURM."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.checkpoints import tiny_byte_llama

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "scripts/slurm").glob("*.sbatch"))
SERVE, ARRAY = ROOT / "scripts/slurm/serve.sbatch", ROOT / "scripts/slurm/generate_array.sbatch"
TRAIN = ROOT / "scripts/slurm/train.sbatch"
JAXSPEC = f"{sys.executable} -m jaxspec"
# What jax.distributed takes for a process of a SLURM job. jaxspec must not wait for the others.
SEEN_BY_JAX = {
    *("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
}
SMALL = ("--drafter", "ngram", "--tree", "chain:2", "--max-length", "128", "--max-rows", "2")


def environment(**variables: object) -> dict[str, str]:
    """Of a batch script."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return {
        **own,
        "PATH": f"{ROOT / 'tests/slurm'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS_PER_NODE": "2",
        "JAXSPEC_API_KEY": "secret",
        "JAXSPEC": "echo",
        **{name: str(value) for name, value in variables.items()},
    }


def task(index: int, count: int, **variables: object) -> dict[str, str]:
    """Of a task of an array."""
    names = {"ID": index, "COUNT": count, "MIN": 0, "MAX": count - 1}
    array = {f"SLURM_ARRAY_TASK_{name}": value for name, value in names.items()}
    return environment(**array, **variables)


def run(
    folder: Path, script: Path, *arguments: object, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(script), *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script: Path, tmp_path: Path):
    assert run(tmp_path, script, env={}).returncode != 0  # no variables, no arguments
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.read_text().startswith("#!/bin/bash\n")


def test_the_stub_sets_what_jax_looks_for(tmp_path: Path):
    command = [ROOT / "tests/slurm/srun", "--ntasks=2", "env"]
    printed = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = {name for name, _, value in (line.partition("=") for line in printed) if value}
    assert found >= SEEN_BY_JAX
    assert {line for line in printed if line.startswith("SLURM_PROCID=")} == {
        "SLURM_PROCID=0", "SLURM_PROCID=1"
    }  # fmt: skip


def test_each_task_of_an_array_does_its_shard(tmp_path: Path):
    done = run(tmp_path, ARRAY, "p.jsonl", "o.jsonl", "--model", "a b", env=task(3, 8))
    expected = "generate --prompt-file p.jsonl --out o.jsonl --shard slurm --model a b\n"
    assert done.stdout == expected
    done = run(tmp_path, ARRAY, "p.jsonl", "o.jsonl", env=task(3, 4, SHARDS=8))
    assert done.stdout.split()[-2:] == ["--shard", "3/8"]
    done = run(tmp_path, ARRAY, "p.jsonl", env=task(3, 8))
    assert done.returncode == 2 and done.stderr.startswith("usage: sbatch --array=0-N")


def test_training_goes_on_from_its_last_checkpoint(tmp_path: Path):
    started = run(tmp_path, TRAIN, "work", "--data", "d e", env=environment())
    assert started.stdout == "train-drafter --work work --data d e\n"
    (tmp_path / "work/checkpoints/12").mkdir(parents=True)
    env = environment(TRAIN="train-lm")
    again = run(tmp_path, TRAIN, "work", "--steps", "20", env=env)
    assert again.stdout == "train-lm --work work --resume --steps 20\n"
    done = run(tmp_path, TRAIN, "--data", "d", env=environment())
    assert done.returncode == 2 and done.stderr == "usage: sbatch train.sbatch WORK [options]\n"


@pytest.mark.slow
def test_a_training_job_that_was_cut_off_gives_what_one_run_gives(tmp_path: Path):
    for name in "ab":
        text = "".join(f"{n} and {name} {n + 1} are numbers. " for n in range(400))
        (tmp_path / f"{name}.md").write_text(text)
    sizes = ["--hidden", 16, "--layers", 1, "--heads", 2, "--kv-heads", 1, "--head-dim", 8]
    sizes += ["--ff", 16, "--vocab", 300, "--context", 32, "--batch", 2, "--save-every", 5]
    options = ["--data", "a.md", "b.md", "--out", "model", "--steps", 10, *sizes]
    env = environment(JAXSPEC=JAXSPEC, TRAIN="train-lm")
    whole = run(tmp_path, TRAIN, "whole", *options, env=env)
    assert whole.returncode == 0, whole.stderr
    weights = (tmp_path / "model/model.safetensors").read_bytes()
    cut = run(tmp_path, TRAIN, "cut", *options, env=env)
    assert cut.returncode == 0, cut.stderr
    shutil.rmtree(tmp_path / "model")
    shutil.rmtree(tmp_path / "cut/checkpoints/10")  # as if it had ended after the one before
    again = run(tmp_path, TRAIN, "cut", *options, env=env)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "model/model.safetensors").read_bytes() == weights


def test_each_task_serves_at_a_port_of_its_own(tmp_path: Path):
    server, folder = tmp_path / "server", tmp_path / "job"
    server.write_text('#!/bin/bash\necho "$@"\nsleep 2\n')  # while the router starts
    server.chmod(0o755)
    folder.mkdir()
    env = environment(JAXSPEC=server, ROUTER="echo router")
    done = run(folder, SERVE, "--model", "m", env=env)
    assert done.returncode == 0, done.stderr
    lines = set(done.stdout.splitlines())
    # 10000 + 456 * 20 is the router's
    urls = "http://localhost:19121 http://localhost:19122"
    assert lines >= {
        "serve --host 0.0.0.0 --port 19121 --model m",
        "serve --host 0.0.0.0 --port 19122 --model m",
        f"servers: {urls}",
        f"router --host 0.0.0.0 --port 19120 --worker-urls {urls}",
    }
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("command", ["generate", "serve --host 0.0.0.0"])
def test_all_tasks_are_one_engine(command: str, tmp_path: Path):
    script = ROOT / f"scripts/slurm/{command.split()[0]}_processes.sbatch"
    done = run(tmp_path, script, "--tp", "2", env=environment(SLURMD_NODENAME="node1"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{command} --coordinator node1:23456 --tp 2"] * 2


def test_no_server_without_a_key(tmp_path: Path):
    done = run(tmp_path, SERVE, env=environment(JAXSPEC_API_KEY=""))
    assert done.returncode != 0 and "JAXSPEC_API_KEY: set it and export it" in done.stderr
    assert done.stdout == ""


def test_a_server_that_fails_gives_its_status(tmp_path: Path):
    done = run(tmp_path, SERVE, env=environment(JAXSPEC="bash -c exit${IFS}3"))
    assert done.returncode == 3 and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_array_job_gives_what_one_run_gives(tmp_path: Path):
    model, prompts = tiny_byte_llama(tmp_path / "model"), tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n} and"}) + "\n" for n in range(7)))
    options = ["--model", model, "--max-tokens", 8, "--compilation-cache", tmp_path / "programs"]
    for index in range(3):
        env = task(index, 3, JAXSPEC=JAXSPEC)
        done = run(tmp_path, ARRAY, "prompts.jsonl", "out.jsonl", *options, *SMALL, env=env)
        assert done.returncode == 0, done.stderr
    parts = [path.read_text() for path in sorted(tmp_path.glob("out-*-of-00003.jsonl"))]
    assert len(parts) == 3
    command = [*JAXSPEC.split(), "generate", "--prompt-file", "prompts.jsonl", "--out", "one.jsonl"]
    command += [*map(str, options), *SMALL]
    subprocess.run(command, cwd=tmp_path, env=environment(), check=True)
    assert "".join(parts) == (tmp_path / "one.jsonl").read_text()


def free_port() -> int:
    """One before two that are free, too."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("localhost", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError):
                for offset in (1, 2):
                    stack.enter_context(socket.socket()).bind(("localhost", port + offset))
                return port


def get(url: str, body: dict[str, object] | None = None) -> dict[str, object]:
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        return json.loads(answer.read())


@contextlib.contextmanager
def started(folder: Path, *arguments: object, env: dict[str, str]) -> Iterator[subprocess.Popen]:
    command = ["bash", str(SERVE), *map(str, arguments)]
    with subprocess.Popen(command, cwd=folder, env=env, start_new_session=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_two_servers_of_a_job_answer_and_drain(tmp_path: Path):
    model, port = tiny_byte_llama(tmp_path / "model"), free_port()
    options = ["--model", model, "--compilation-cache", tmp_path / "programs", *SMALL]
    env = environment(JAXSPEC=JAXSPEC, PORT=port)
    with started(tmp_path, *options, env=env) as process:
        texts, waiting = {}, {port + 1, port + 2}
        deadline = time.monotonic() + 240
        while waiting and process.poll() is None and time.monotonic() < deadline:
            for own in sorted(waiting):
                with contextlib.suppress(OSError):  # not yet there, or 503
                    get(f"http://localhost:{own}/health")
                    body = {"prompt": "one and", "max_tokens": 8, "temperature": 0}
                    answer = get(f"http://localhost:{own}/v1/completions", body)
                    texts[own] = answer["choices"][0]["text"]  # type: ignore[index]
                    waiting.remove(own)
            time.sleep(0.2)
        assert len(texts) == 2 and len(set(texts.values())) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert not list(tmp_path.glob("*.urls"))
