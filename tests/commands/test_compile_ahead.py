"""The command line that compiles for H100s and TPUs; tests/compiled/test_compiled_for_h100.py and
tests/compiled/test_compiled_for_tpu.py run the compilers."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from jaxlib.version import __version__ as JAXLIB_VERSION

from jaxspec.commands import compile_ahead
from jaxspec.evaluation.benchmarks.compiled_round import CompiledRound, Launches, MosaicKernel
from jaxspec.evaluation.benchmarks.tpu_ahead import (
    TpuProgram,
    count_collectives,
    count_copies,
    count_kernels,
)
from tests.commands.test_bad_input import fake_wheels


@pytest.fixture
def wheels(tmp_path: Path) -> str:
    return str(fake_wheels(tmp_path / "wheels", JAXLIB_VERSION))


def test_a_failing_process_is_one_line(wheels: str, tmp_path: Path, monkeypatch, capsys):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho first\necho 'ValueError: cannot be split'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert compile_ahead.main(["--wheels", wheels]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert "failed (1): ValueError: cannot be split (--dump FOLDER" in line


def test_the_results_as_a_table_and_as_json(wheels: str, monkeypatch, capsys):
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
    arguments = ["--layers", "2", "--wheels", wheels, "--json"]
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
