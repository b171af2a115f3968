"""What the compiler makes of a decoding round on an H100, without one: for every release.

    pytest -m slow tests/compiled/test_compiled_for_h100.py

About eight minutes on two cores. Widths and vocabulary are Llama-3.1-8B's, layers are few. The
compiler comes from wheels in a folder, see scripts/compile_ahead.py; JAXSPEC_AOT_WHEELS names
another one than `.cache/aot-wheels`. Numbers here are those of jax 0.11.2 and 0.12.0.1, November
2026; where there is room above them, it is for what XLA fuses otherwise in another version.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.commands import compile_ahead
from jaxspec.commands.shared.compiling_process import ROOT
from jaxspec.evaluation.benchmarks.ahead_of_time import compiler_environment, install_command
from jaxspec.evaluation.benchmarks.compiled_round import CompiledRound, parse_kernels
from jaxspec.evaluation.benchmarks.shapes import SHAPES
from pallas_kernels.latent_attention.cases import COMPILED_CASES

WHEELS = Path(os.environ.get("JAXSPEC_AOT_WHEELS", ROOT / ".cache/aot-wheels"))
SHAPE, MODES = "llama-3.1-8b", ("plain", "chain:5", "tree:60:7:10")
LAYERS, MORE_LAYERS = 2, 4
CONTEXT = 4096  # one layer's keys are 8.6 MiB or more: larger than the room for temporaries

# Products: qkv, o, gate and up, down. Kernels: RoPE with the KV write, attention, and two
# additions with a norm. XLA's own: the activation.
LAUNCHES_OF_A_LAYER = 9
OUTSIDE = 1  # the loop's condition, which the host reads
KERNELS = {"add_rms_norm", "paged_attention", "rope_kv_write"}
ROWS = {"plain": 2, "chain:5": 6, "tree:60:7:10": 60}  # of a pass of the target, padding included
DRAFT_PASSES = 5  # of chain:5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not WHEELS.is_dir(), reason=f"no compiler for GPUs; run: {install_command(WHEELS)}"
    ),
]


@functools.cache
def compiled(
    mode: str,
    layers: int = LAYERS,
    tp: int = 1,
    sampling: str = "greedy",
    kernels: str = "auto",
    sp: int = 1,
    kv_dtype: str | None = None,
    quantization: str | None = None,
    lm_head: str | None = None,
) -> CompiledRound:
    arguments = ["--shape", SHAPE, "--mode", mode, "--layers", str(layers), "--tp", str(tp)]
    arguments += ["--context", str(CONTEXT), "--wheels", str(WHEELS), "--sampling", sampling]
    arguments += ["--kernels", kernels, "--sp", str(sp)]
    arguments += ["--kv-dtype", kv_dtype] if kv_dtype else []
    arguments += ["--quantization", quantization] if quantization else []
    arguments += ["--lm-head-quantization", lm_head] if lm_head else []
    return compile_ahead.measure(arguments)["round"]


def most_temporary_bytes(mode: str, tp: int) -> int:
    """The float32 logits of the tokens that are verified, and 2 MiB for all else."""
    return ROWS[mode] * SHAPES[SHAPE].vocab_size * 4 // tp + (2 << 20)


@pytest.mark.parametrize(
    ("mode", "most_launches"),
    [
        # The target's layers take 18. The rest of a plain round is embedding, logits, sampling and
        # the state's bookkeeping.
        ("plain", 39),  # 36
        # Beside that five passes of the head, each with 16 or 17 launches.
        ("chain:5", 129),  # 126
        # Seven passes, each followed by the choice of nodes; then the tree's mask, and compaction.
        # Each pass adds up where its slots end, in a launch of one thread, as attention must not
        # read past them; XLA leaves five of the six sums of scores by themselves.
        ("tree:60:7:10", 198),  # 195
    ],
)
def test_a_round_is_one_graph(mode: str, most_launches: int):
    launches = compiled(mode).launches
    assert (launches.graphs, launches.outside) == (1, OUTSIDE)
    assert launches.in_graphs <= most_launches


@pytest.mark.parametrize("mode", ["plain", "chain:5"])
def test_launches_of_a_layer(mode: str):
    few, more = compiled(mode).launches, compiled(mode, MORE_LAYERS).launches
    assert more.in_graphs - few.in_graphs <= LAUNCHES_OF_A_LAYER * (MORE_LAYERS - LAYERS)


@pytest.mark.parametrize("mode", MODES)
def test_no_context_is_copied(mode: str):
    one = compiled(mode)
    assert one.page_copies == 0
    assert one.temporary_bytes <= most_temporary_bytes(mode, tp=1)


@pytest.mark.parametrize("mode", MODES)
def test_kernels_keep_to_their_registers(mode: str):
    kernels = compiled(mode).kernels
    expected = KERNELS | ({"kv_compact", "top_k"} if mode.startswith("tree") else set())
    assert {kernel.name for kernel in kernels} == expected
    assert not [kernel for kernel in kernels if kernel.spilled_bytes]


def test_latent_attention_keeps_to_its_registers(tmp_path: Path):
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_latent_attention"],
        env=compiler_environment(WHEELS, tmp_path, os.environ),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    kernels = parse_kernels(result.stdout)
    assert len(kernels) == len(COMPILED_CASES)
    assert {kernel.name for kernel in kernels} == {"latent_attention"}
    assert not [kernel for kernel in kernels if kernel.spilled_bytes]


def test_a_round_of_rows_that_sample_is_one_graph():
    one = compiled("chain:5", sampling="general")
    assert (one.launches.graphs, one.launches.outside) == (1, OUTSIDE)
    assert {kernel.name for kernel in one.kernels} == KERNELS | {"truncate"}
    assert not [kernel for kernel in one.kernels if kernel.spilled_bytes]


@pytest.mark.parametrize("mode", ["plain", "chain:5"])
@pytest.mark.parametrize(
    ("scheme", "kernel", "scales"),
    [
        ("w4a16", "packed_product", 2 / 128),  # bytes of 16 bits for 128 weights
        ("nvfp4", "packed_expert_product", 1 / 16),
    ],
)
def test_weights_of_4_bits_stay_so(mode: str, scheme: str, kernel: str, scales: float):
    """No array of widened weights: temporaries are as without quantization."""
    one = compiled(mode, kernels="all", quantization=scheme)
    assert kernel in {each.name for each in one.kernels}
    assert not [each for each in one.kernels if each.spilled_bytes]
    assert (one.launches.graphs, one.launches.outside) == (1, OUTSIDE)
    assert one.temporary_bytes <= most_temporary_bytes(mode, tp=1)
    # Two layers of 218 million weights at 4 bits and their scales, instead of 16.
    saved = compiled(mode).argument_bytes - one.argument_bytes
    assert saved == pytest.approx(LAYERS * 218e6 * (2 - 0.5 - scales), rel=0.01)


# Inputs of 8 bits are rounded: those of o in launches of their own, the others by the norms and by
# the activation.
@pytest.mark.parametrize(
    ("scheme", "rounding"), [("w4a16", 0), ("nvfp4", 0), ("w4a8", 1), ("fp8", 1)]
)
def test_launches_of_a_quantized_layer(scheme: str, rounding: int):
    how = {"kernels": "all", "quantization": scheme}
    few = compiled("plain", **how).launches
    more = compiled("plain", MORE_LAYERS, **how).launches
    expected = LAUNCHES_OF_A_LAYER + rounding
    assert more.in_graphs - few.in_graphs == expected * (MORE_LAYERS - LAYERS)


@pytest.mark.parametrize("scheme", ["w4a16", "fp8"])
def test_a_quantized_lm_head_is_not_widened(scheme: str):
    """Temporaries hold logits, but no table of 16-bit weights (1 GB)."""
    one = compiled("plain", kernels="all", lm_head=scheme)
    assert "packed_product" in {kernel.name for kernel in one.kernels}
    assert not [kernel for kernel in one.kernels if kernel.spilled_bytes]
    assert one.temporary_bytes <= most_temporary_bytes("plain", tp=1)


@pytest.mark.parametrize("mode", ["plain", "chain:3", "16:5:4"])
def test_rounds_of_recurrent_layers_are_one_graph(mode: str):
    """Three recurrent layers of 2 MiB of states each, and one of attention."""
    arguments = ["--shape", "qwen3.5-9b", "--layers", "4", "--mode", mode, "--wheels", str(WHEELS)]
    one = compile_ahead.measure(arguments)["round"]
    assert (one.launches.graphs, one.launches.outside) == (1, OUTSIDE)
    assert {"delta_read", "delta_commit"} <= {kernel.name for kernel in one.kernels}
    assert not [kernel for kernel in one.kernels if kernel.spilled_bytes]
    assert one.page_copies == 0
    rows = {"plain": 2, "chain:3": 4, "16:5:4": 16}[mode]
    logits = rows * SHAPES["qwen3.5-9b"].vocab_size * 4
    assert one.temporary_bytes <= logits + (4 << 20), "the states, 6 MiB, are copied"


# Norms, products of q, k, v and o, their kernels: 6. Then the router in two launches, its choice,
# the weights, the slots, two products, and their sum.
LAUNCHES_OF_EXPERTS = 14


@pytest.mark.parametrize("mode", ["plain", "chain:3", "16:5:4"])
def test_chosen_experts_are_read_in_one_graph(mode: str):
    def measured(layers: int) -> CompiledRound:
        arguments = ["--shape", "qwen3-30b-a3b", "--mode", mode, "--layers", str(layers)]
        arguments += ["--kernels", "all", "--wheels", str(WHEELS)]
        return compile_ahead.measure(arguments)["round"]

    few, more = measured(LAYERS), measured(MORE_LAYERS)
    for one in (few, more):
        assert (one.launches.graphs, one.launches.outside) == (1, OUTSIDE)
        assert "expert_product" in {kernel.name for kernel in one.kernels}
        assert not [kernel for kernel in one.kernels if kernel.spilled_bytes]
    assert more.temporary_bytes < few.temporary_bytes + (1 << 20), "weights are copied"
    if mode != "16:5:4":  # more than 8 rows are gathered
        added = more.launches.in_graphs - few.launches.in_graphs
        assert added <= LAUNCHES_OF_EXPERTS * (MORE_LAYERS - LAYERS)


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("mode", ["plain", "chain:5"])
def test_products_are_summed_over_devices_where_they_are_added_and_normed(mode: str, tp: int):
    one = compiled(mode, tp=tp, kernels="all")
    names = {kernel.name for kernel in one.kernels}
    assert names == KERNELS - {"add_rms_norm"} | {"reduce_add_rms_norm"}
    assert not [kernel for kernel in one.kernels if kernel.spilled_bytes]
    # All-reduces that are left: of embeddings, and two for a choice among the shards' best tokens,
    # for its value and its index.
    expected = {"verify/embed": 1, "accept/other": 2}
    if mode != "plain":
        expected |= {"draft/embed": DRAFT_PASSES, "draft/sample": 2 * DRAFT_PASSES}
    assert one.all_reduces == expected
    assert one.page_copies == 0
    assert one.temporary_bytes <= most_temporary_bytes(mode, tp=tp)  # no copy of an exchange


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_round_of_several_devices_is_one_graph(tp: int):
    launches = compiled("chain:5", tp=tp, kernels="all").launches
    assert (launches.graphs, launches.outside) == (1, OUTSIDE)
    assert launches.all_reduces_in_graphs == launches.all_reduces == 3 + 3 * DRAFT_PASSES
    assert launches.in_graphs <= 168  # 161


@pytest.mark.parametrize(
    ("mode", "sp", "tp"), [("plain", 2, 1), ("tree:60:7:10", 2, 1), ("chain:5", 4, 2)]
)
def test_attention_of_spread_sequences_is_a_kernel(mode: str, sp: int, tp: int):
    """Of pages of 64 slots, which devices share."""
    one = compiled(mode, tp=tp, sp=sp, kernels="partial_attention,paged_attention")
    assert {kernel.name for kernel in one.kernels} == {"paged_attention"}
    assert not [kernel for kernel in one.kernels if kernel.spilled_bytes]
    assert (one.launches.graphs, one.launches.outside) == (1, OUTSIDE)
    assert one.page_copies == 0
    assert one.temporary_bytes <= most_temporary_bytes(mode, tp=tp)


@pytest.mark.parametrize("mode", MODES)
def test_pages_of_8_bits_take_no_launch_more(mode: str):
    kernels = "add_rms_norm,float8_pages,kv_compact,paged_attention,rope_kv_write,top_k"
    one, wide = compiled(mode, kernels=kernels, kv_dtype="fp8"), compiled(mode)
    assert one.launches == wide.launches
    assert {kernel.name for kernel in one.kernels} == {kernel.name for kernel in wide.kernels}
    assert not [kernel for kernel in one.kernels if kernel.spilled_bytes]
    assert one.page_copies == 0
    assert one.temporary_bytes <= most_temporary_bytes(mode, tp=1)
    assert one.argument_bytes < wide.argument_bytes


def test_without_the_kernel_a_round_is_one_graph_too():
    """NCCL's all-reduces can be nodes of a graph; XLA's own cannot."""
    one = compiled("chain:5", tp=2, kernels="add_rms_norm,paged_attention,rope_kv_write")
    # Two reductions a layer, after its row-parallel products; the head has one layer.
    assert one.all_reduces["verify/o"] == one.all_reduces["verify/mlp"] == LAYERS
    assert one.all_reduces["draft/o"] == one.all_reduces["draft/mlp"] == DRAFT_PASSES
    total = 3 + 3 * DRAFT_PASSES + 2 * DRAFT_PASSES + 2 * LAYERS
    assert one.launches.all_reduces == sum(one.all_reduces.values()) == total
    assert (one.launches.graphs, one.launches.outside) == (1, OUTSIDE)
    assert one.launches.all_reduces_in_graphs == total
    assert one.page_copies == 0
    assert one.temporary_bytes <= most_temporary_bytes("chain:5", tp=2)
