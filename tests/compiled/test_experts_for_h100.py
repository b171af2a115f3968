"""What the compiler makes of models with quantized experts on an H100, and of prompts' memory.

    pytest -m slow tests/compiled/test_experts_for_h100.py

See test_compiled_for_h100.py for the compiler and the room in these numbers.
"""

import functools

import pytest

from jaxspec.commands import compile_ahead
from jaxspec.evaluation.benchmarks.ahead_of_time import install_command
from jaxspec.evaluation.benchmarks.compiled_round import CompiledRound
from tests.compiled.test_compiled_for_h100 import WHEELS

HYBRID = ("--shape", "qwen3.6-35b-a3b", "--quantization", "fp8-block")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not WHEELS.is_dir(), reason=f"no compiler for GPUs; run: {install_command(WHEELS)}"
    ),
]


@functools.cache
def compiled(*arguments: str) -> CompiledRound:
    return compile_ahead.measure(["--wheels", str(WHEELS), "--mode", "plain", *arguments])["round"]


@pytest.mark.parametrize(
    ("arguments", "kernel", "most_launches"),
    [
        ((*HYBRID, "--expert-format", "fp8"), "expert_gate_up_down", 60),  # 58
        ((*HYBRID, "--expert-format", "mxfp4"), "expert_gate_up_down", 60),
        ((*HYBRID, "--expert-format", "fp8", "--batch", "32"), "packed_expert_product", None),
        (("--shape", "gpt-oss-20b", "--expert-format", "mxfp4"), "packed_expert_product", 110),
        (("--shape", "qwen3-30b-a3b", "--expert-format", "int4"), "packed_expert_product", None),
        (("--shape", "qwen3-30b-a3b", "--expert-format", "nvfp4"), "packed_expert_product", None),
    ],
    ids=["fp8", "mxfp4", "fp8, 32 rows", "gpt-oss", "int4", "nvfp4"],
)
def test_experts_are_read_as_they_are_stored(
    arguments: tuple[str, ...], kernel: str, most_launches: int | None
):
    """By their kernel, without spills; so many launches of four layers."""
    found = compiled(*arguments, "--layers", "4")
    assert kernel in {each.name for each in found.kernels}
    assert not [each for each in found.kernels if each.spilled_bytes]
    assert found.launches.graphs == 1
    if most_launches is not None:
        assert found.launches.in_graphs <= most_launches


@pytest.mark.parametrize(
    "arguments",
    [
        (*HYBRID, "--expert-format", "fp8"),
        (*HYBRID, "--expert-format", "fp8", "--tp", "2"),
        ("--shape", "qwen3.5-9b"),
        ("--shape", "llama-3.1-8b", "--quantization", "nvfp4"),
    ],
    ids=" ".join,
)
def test_prompts_take_no_memory_for_each_layer(arguments: tuple[str, ...]):
    few, many = (
        compiled(*arguments, "--program", "prefill", "--batch", "32", "--layers", layers)
        for layers in ("4", "8")
    )
    assert many.temporary_bytes < 1.1 * few.temporary_bytes
