"""The command line that compiles for H100s and TPUs; tests/test_compiled_for_h100.py and
tests/test_compiled_for_tpu.py run the compilers."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from jaxlib.version import __version__ as JAXLIB_VERSION

from jaxspec.benchmarking.ahead_of_time import WHEELS
from jaxspec.benchmarking.compiled_round import CompiledRound, Launches, MosaicKernel
from jaxspec.benchmarking.tpu_ahead import (
    TpuProgram,
    count_collectives,
    count_copies,
    count_kernels,
)
from jaxspec.commands import compile_ahead


def fake_wheels(folder: Path, version: str) -> Path:
    """A folder with the wheels' names and nothing else."""
    for name in (*WHEELS, "libtpu"):
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("wheels")
    good = fake_wheels(root / "good", JAXLIB_VERSION)
    return {"good": good, "old": fake_wheels(root / "old", "0.1.2"), "empty": root / "empty"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "chain"], "not plain, chain:K"),
        (["--mode", "plain", "--draft-head", "dflash"], "--draft-head would do nothing"),
        (["--mode", "plain", "--drafter-quantization", "fp8"], "give a mode that drafts, such as"),
        (["--mode", "chain:5+int8", "--drafter-quantization", "fp8"], "exclude each other"),
        (["--layers", "0"], "--layers must be at least 1"),
        (["--tp", "0"], "must be at least 1"),
        (["--sp", "0"], "must be at least 1"),
        (["--sp", "3"], "--page-size 64 cannot be split over 3 devices; it can over 1, 2, 4"),
        (["--sp", "2", "--tpu", "v6e:2x2"], "for H100s only: leave out --tpu"),
        (["--wheels", "{empty}"], "run: pip install --target {empty} --no-deps jax-cuda13-pjrt=="),
        (["--wheels", "{old}"], "jax-cuda13-pjrt 0.1.2, but jaxlib is"),
        (["--wheels", "{good}", "--dump", "{good}"], "is not empty"),
        (["--program", "prefill", "--chunk", "0"], "--sp and --chunk must be at least 1"),
        (["--shape", "tiny", "--context", "4096"], "--context 4096 needs"),
        (["--chunk", "64"], "add --program prefill"),
        (["--tpu", "v6e:2x2", "--libtpu", "{empty}"], "lacks libtpu; run: pip install --target"),
        (["--tpu", "v6e:2x2", "--libtpu", "{old}"], "has libtpu 0.1.2, but this jax needs 0.0."),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folders, arguments, message, capsys):
    arguments = [argument.format(**folders) for argument in arguments]
    assert compile_ahead.main(arguments) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert line.startswith("jaxspec compile-ahead: ") and message.format(**folders) in line


def test_a_failing_process_is_one_line(folders, tmp_path: Path, monkeypatch, capsys):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho first\necho 'ValueError: cannot be split'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert compile_ahead.main(["--wheels", str(folders["good"])]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert "failed (1): ValueError: cannot be split (--dump FOLDER" in line


def test_the_results_as_a_table_and_as_json(folders, monkeypatch, capsys):
    launches = Launches(
        in_graphs=131,
        outside=1,
        graphs=1,
        all_reduces=4,
        all_reduces_in_graphs=0,
        loop_in_graph=False,
    )
    kernels = (MosaicKernel("top_k", 166, 8),)
    sent = {"all-reduce": (4, 1536.0)}
    compiled = CompiledRound(launches, 0, {"verify/mlp": 4}, sent, 2**31, 3 << 20, kernels)
    monkeypatch.setattr(compile_ahead, "compile_elsewhere", lambda *_: compiled)
    arguments = ["--layers", "2", "--wheels", str(folders["good"]), "--json"]
    assert compile_ahead.main(arguments) == 0
    printed = capsys.readouterr()
    results = json.loads(printed.out)
    assert (results["mode"], results["layers"]) == ("chain:5@3.5", 2)
    assert results["round"]["launches"]["in_graphs"] == 131
    assert results["round"]["kernels"] == [{"name": "top_k", "registers": 166, "spilled_bytes": 8}]
    said = ("4 verify/mlp", "2.000 GiB", "3.00 MiB", "166 registers, 8 bytes spilled")
    for words in (*said, "by 4 all-reduce", "1.5 KiB"):
        assert words in printed.err


def test_the_results_of_a_tpu(monkeypatch, capsys):
    compiled = TpuProgram(
        argument_bytes=2**31,
        temporary_bytes=3 << 20,
        code_bytes=1 << 20,
        collectives={"all-reduce verify/mlp": 4},
        kernels={"paged_attention": 2},
        weight_copies=0,
        page_copies=5,
        flops=2.5e10,
        bytes_accessed=1e9,
    )
    monkeypatch.setattr(compile_ahead, "compile_elsewhere", lambda *_: compiled)
    monkeypatch.setattr(compile_ahead, "check_libtpu", lambda _: None)
    arguments = ["--tpu", "v6e:2x2", "--program", "prefill", "--json"]
    assert compile_ahead.main(arguments) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["program"] == dataclasses.asdict(compiled)
    for words in ("v6e:2x2, prefill", "4 all-reduce verify/mlp", "2 paged_attention", "3.00 MiB"):
        assert words in printed.err


def test_what_is_counted_in_a_program_for_tpus():
    text = """
  %copy.1 = bf16[4096,2,3584]{2,0,1:T(8,128)(2,1)} copy(%param.3), backend_config={}
  %copy-start.2 = (bf16[4096,2,3584]{2,0,1:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) copy-start(%param.4)
  %copy.5 = bf16[105,2,64,128]{3,2,1,0:T(8,128)(2,1)} copy(%scatter)
  %paged_attention.16 = bf16[8,1,2,16,128]{4,3,2,1,0} custom-call(%q), \
custom_call_target="tpu_custom_call", metadata={op_name="jit(decode)"}
  %paged_attention = bf16[8,1,2,16,128]{4,3,2,1,0} custom-call(%q), \
custom_call_target="tpu_custom_call"
  %all-reduce.7 = bf16[8,4096]{1,0} all-reduce(%x), metadata={op_name="a/verify/mlp/psum"}
  %all-reduce-start.8 = f32[8]{0} all-reduce-start(%y)
  %all-reduce-done.8 = f32[8]{0} all-reduce-done(%all-reduce-start.8)
"""
    assert count_copies(text, [(4096, 2, 3584), (4096,)]) == 1
    assert count_copies(text, [(105, 2, 64, 128)]) == 1
    assert count_kernels(text) == {"paged_attention": 2}
    assert count_collectives(text) == {"all-reduce other/other": 1, "all-reduce verify/mlp": 1}
