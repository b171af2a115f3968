"""Whole runs: resumed ones, what is written, and what is refused."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.eagle import load_eagle_head
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.commands import quantize
from jaxspec.commands.shared import program_cache
from jaxspec.models.from_config.model import load_model_config
from jaxspec.quantize.checkpoint import Checkpoint
from jaxspec.quantize.run import Quantization
from tests.helpers.checkpoints import tiny_eagle3_head
from tests.helpers.marks import slow
from tests.helpers.sampling_reference import plain_logits

ROOT = Path(__file__).parents[2]
TOKENS = jnp.asarray(np.random.default_rng(3).integers(0, 257, (2, 12)))
TEXT = ("--samples", "6", "--length", "32", "--batch", "4", "--held-out", "5")
FLOAT32 = jnp.dtype("float32")
NO_CACHE = "--no-compilation-cache"
LEFT_OUT = {"README.md", "quantization.json", "quantization.png"}  # they tell the time


def command(model: Path, data: Path | None, out: Path, *options: str) -> list[str]:
    text = [] if data is None else ["--data", str(data), *TEXT]
    return ["--model", str(model), "--group", "32", "--out", str(out), NO_CACHE, *text, *options]


def logits(directory: Path) -> np.ndarray:
    model = load_decoder(directory, load_model_config(directory), jnp.dtype("float32"))
    return np.asarray(plain_logits(model, TOKENS))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in LEFT_OUT}


def of_arguments(arguments: list[str], directory: Path, work: Path) -> Quantization:
    args = quantize.make_parser().parse_args(arguments)
    rows = quantize.read_text(args, directory, quantize.progress_console())
    text = None if rows is None else quantize.calibration_text(rows[0], args.batch)
    return Quantization(Checkpoint(directory), quantize.plan_of(args), text, work)


@pytest.mark.parametrize("method", ["rtn", slow("awq"), slow("gptq")])
def test_a_run_that_was_cut_off_gives_the_same_bytes(
    method: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert quantize.main(command(model, data, whole, "--method", method)) == 0
    printed = capsys.readouterr().out
    arguments = command(model, data, cut, "--method", method)
    first = of_arguments(arguments, model, cut / "work").run()
    assert not next(first).resumed  # the first of two layers is done, and there it ends
    again = of_arguments(arguments, model, cut / "work").run()
    assert [done.resumed for done in again] == [True, False]
    assert quantize.main(arguments) == 0  # all is there, and is written
    assert files_of(whole) == files_of(cut)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(files_of(whole))
    assert not (cut / "work").exists()
    report = json.loads((cut / "quantization.json").read_text())
    assert len(report["errors"]) == 14
    assert 4 * 31 < report["after"]["tokens"] <= 5 * 31  # the last row may be shorter
    assert report["errors"] == json.loads((whole / "quantization.json").read_text())["errors"]
    low, high = report["worse"][1]
    assert low <= report["worse"][0] <= high
    assert f"{method}, 4 bits, groups of 32" in printed and "worse by" in printed
    assert (cut / "quantization.png").stat().st_size > 1000
    assert "quantized by jaxspec" in (cut / "README.md").read_text()


@pytest.mark.slow
def test_a_killed_process_goes_on(model: Path, data: Path, tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert quantize.main(command(model, data, whole, "--method", "awq")) == 0
    arguments = command(model, data, killed, "--method", "awq")
    line = [sys.executable, "-m", "jaxspec", "quantize", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(line, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    first = killed / "work" / "unit-00000.safetensors"
    for _ in range(3000):
        if first.exists():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert first.exists() and not (killed / "config.json").exists()
    assert quantize.main(arguments) == 0
    weights = "model.safetensors"
    one, other = ((folder / weights).read_bytes() for folder in (whole, killed))
    assert one == other or np.abs(logits(whole) - logits(killed)).max() < 1e-3


@pytest.mark.parametrize(
    "options",
    [
        ("--method", "rtn", "--no-symmetric"),
        slow(("--method", "gptq", "--order", "mixed")),
        slow(("--method", "awq")),
        slow(("--method", "gptq", "--no-symmetric", "--lm-head")),
        slow(("--method", "gptq", "--bits", "8", "--group", "-1")),
    ],
    ids=" ".join,
)
def test_every_format_means_the_same(
    options: tuple[str, ...], model: Path, data: Path, tmp_path: Path
):
    """Written from one run, and read by the loader of quantized checkpoints."""
    found, text = {}, None if "rtn" in options else data
    names = ["dense"]
    if "--lm-head" not in options:  # 257 outputs do not fill whole words
        names += ["awq" if "awq" in options else "gptq"]
    if "mixed" not in options:
        names += ["compressed-tensors"]
    for name in names:
        more = (*options, "--format", name, "--work", str(tmp_path / "work"))
        assert quantize.main(command(model, text, tmp_path / name, *more)) == 0
        found[name] = logits(tmp_path / name)
    for name in names[1:]:
        close = 2e-5 * np.abs(found["dense"]).max()
        np.testing.assert_allclose(found[name], found["dense"], atol=close)
    assert np.abs(found["dense"] - logits(model)).max() > 10 * close  # it is not the original


@pytest.mark.parametrize("method", ["rtn", slow("gptq"), slow("awq")])
def test_rounded_activations_are_written_read_and_measured(
    method: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The same weights, written with and without."""
    reports = []
    for name, more in (("plain", []), ("rounds", ["--activations", "fp8"])):
        more += ["--method", method, "--symmetric", "--format", "compressed-tensors"]
        work = ("--work", str(tmp_path / "work"))
        assert quantize.main(command(model, data, tmp_path / name, *more, *work)) == 0
        reports.append(json.loads((tmp_path / name / "quantization.json").read_text()))
    said = "with its activations rounded, too"
    assert said in capsys.readouterr().out and said in (tmp_path / "rounds/README.md").read_text()
    assert said not in (tmp_path / "plain/README.md").read_text()
    plain, rounds = (files_of(tmp_path / name) for name in ("plain", "rounds"))
    assert {name for name in plain if plain[name] != rounds[name]} == {"config.json"}
    assert reports[0]["before"] == reports[1]["before"]
    assert 0 < abs(reports[0]["worse"][0] - reports[1]["worse"][0]) < 0.1

    def down(name: str) -> Any:
        folder = tmp_path / name
        mlp: Any = load_decoder(folder, load_model_config(folder), FLOAT32).layers[0].mlp
        return mlp.down

    weights = np.asarray(down("plain").dense(FLOAT32))  # [out, in]
    x = np.random.default_rng(0).normal(size=(3, weights.shape[1])).astype(np.float32)
    step = np.abs(x).max(-1, keepdims=True) / 448
    wanted = ((x / step).astype(jnp.float8_e4m3fn).astype(np.float32) * step) @ weights.T
    np.testing.assert_allclose(down("rounds")(x), wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(("method", "close"), [("rtn", 0.25), slow("fp8", 0.1)])
def test_a_draft_head_is_rounded(method: str, close: float, model: Path, tmp_path: Path):
    head, target = tiny_eagle3_head(tmp_path / "head", model), load_model_config(model)
    original: Any = load_eagle_head(head, target, jnp.dtype("float32"))
    out = tmp_path / method
    arguments = ["--model", str(head), "--out", str(out), "--group", "32", "--method", method]
    assert quantize.main([*arguments, "--lm-head", NO_CACHE]) == 0
    found: Any = load_eagle_head(out, target, jnp.dtype("float32"))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 192)), jnp.float32)
    ours, theirs = found.front.fc(x), original.front.fc(x)
    assert type(found.front.fc) is type(found.lm_head) is not type(original.front.fc)
    assert 0 < np.abs(ours - theirs).max() < close * np.abs(theirs).max()


def test_programs_are_kept_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    kept: list[Path | None] = []

    def keep(folder: Path | None) -> None:
        kept.append(folder)
        raise ValueError("and no more")

    monkeypatch.setattr(quantize, "keep_compiled_programs", keep)
    monkeypatch.setattr(program_cache, "default_folder", lambda: tmp_path)
    other = tmp_path / "other"
    for more in ([], [NO_CACHE], ["--compilation-cache", str(other)]):
        assert quantize.main(["--method", "rtn", "--out", str(tmp_path / "out"), *more]) == 2
    assert kept == [tmp_path, None, other]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "awq"], "awq needs text to calibrate with: give --data"),
        (["--method", "gptq", "--group", "48"], "a group of 48 does not divide 64 inputs"),
        (["--method", "rtn", "--data", "EMPTY"], "no usable text file"),
        (["--method", "rtn", "--group", "0"], "--group must be at least 1, or -1"),
        (["--method", "rtn", "--out", "MODEL"], "holds a checkpoint already: choose another --out"),
        (["--method", "rtn", "--out", "DATA"], "is not empty"),
        (["--method", "rtn", "--model", "QUANTIZED"], "is quantized already"),
        (["--method", "gptq", "--model", "HEAD"], "a draft head is rounded without calibration"),
        (["--method", "rtn", "--model", "HEAD", "--data", "DATA"], "head is rounded without text"),
        (["--method", "fp8", "--work", "OTHER"], "holds another run, which differs in"),
        (["--method", "rtn", "--compilation-cache", "MODEL", NO_CACHE], "goes without"),
        (["--method", "rtn", "--compilation-cache", "/dev/null/here"], "cannot keep compiled"),
    ],
)
def test_mistakes_are_named(
    options: list[str],
    message: str,
    model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    places = {"MODEL": model, "DATA": data, "EMPTY": tmp_path / "empty", "HEAD": tmp_path / "head"}
    places |= {"QUANTIZED": tmp_path / "quantized", "OTHER": tmp_path / "other"}
    (tmp_path / "empty").mkdir()
    if "HEAD" in options:
        tiny_eagle3_head(tmp_path / "head", model)
    if "QUANTIZED" in options:
        assert quantize.main(command(model, None, places["QUANTIZED"], "--method", "rtn")) == 0
    if "OTHER" in options:
        work = ["--method", "rtn", "--work", str(places["OTHER"])]
        assert quantize.main(command(model, None, tmp_path / "first", *work)) == 0
    given = [str(places.get(option, option)) for option in options]
    arguments = ["--model", str(model), "--out", str(tmp_path / "out"), "--group", "32", *given]
    arguments += [] if "--compilation-cache" in options else [NO_CACHE]
    if "gptq" in options and not {"--data", "HEAD", "--format"} & {*options}:
        arguments += ["--data", str(data), *TEXT]
    assert quantize.main(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error, error
    assert re.match("jaxspec quantize: ", error)
