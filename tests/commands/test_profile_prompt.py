"""The profile of reading prompts, on a CPU."""

import json
from typing import Any

import pytest
from rich.console import Console

from jaxspec.commands import profile_prompt
from jaxspec.commands.shared.shape_bench import shape_bench
from jaxspec.decoding import functional

TINY = ["--shape", "tiny-hybrid", "--context", "32", "--page-size", "16", "--dtype", "float32"]


def test_of_the_programs_only_that_which_reads_is_compiled(monkeypatch: pytest.MonkeyPatch):
    def decode(*_: Any, **__: Any) -> Any:
        raise AssertionError("rounds are compiled")

    monkeypatch.setattr(functional, "decode", decode)
    args = profile_prompt.make_parser().parse_args([*TINY, "--shape", "tiny", "--layers", "1"])
    bench = shape_bench(args, 1, Console(quiet=True), 32)
    assert "attention" in bench.prompt_program_text()
    with pytest.raises(AssertionError, match="rounds are compiled"):
        bench.program_text()


# jaxlib's type of event statistics lacks the attribute.
@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")
@pytest.mark.slow
def test_reading_is_divided_by_parts_of_the_model(capsys):
    assert profile_prompt.main([*TINY, "--batch", "2", "--chunk", "16", "--json"]) == 0
    printed = capsys.readouterr()
    results = json.loads(printed.out)
    assert results["chunk"] == 16
    found = {kernel["part"] for kernel in results["kernels"]}
    assert found >= {"attention", "delta_rule", "mlp", "norm", "o", "kv_write", "lm_head"}
    busy = sum(kernel["us"] for kernel in results["kernels"])
    assert busy + results["gaps_us"] == pytest.approx(results["length_us"])
    assert all(kernel["launches"] > 0 for kernel in results["kernels"])
    assert "without the profiler" in printed.err
