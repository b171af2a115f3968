"""The profile of reading prompts, on a CPU."""

import json

import pytest

from jaxspec.commands import profile_prompt

TINY = ["--shape", "tiny-hybrid", "--context", "32", "--page-size", "16", "--dtype", "float32"]


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
