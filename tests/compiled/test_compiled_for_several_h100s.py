"""A round of Llama-3.3-70B on four and eight H100s of one host, as compiled without them.

    pytest -m slow tests/compiled/test_compiled_for_several_h100s.py

About six minutes on two cores; for the compiler see test_compiled_for_h100.py. Programs are those
of 2 and of 4 layers. Half of the difference is a layer's, and 80 layers are reckoned from it;
one program is that of all 80. Numbers are those of jax 0.11.2, November 2026. Nothing here ran on
a GPU.
"""

import dataclasses
import functools

import pytest

from jaxspec.commands import compile_ahead
from jaxspec.commands.compile_ahead import NEW_TOKENS
from jaxspec.config.cache import pages_for
from jaxspec.evaluation.benchmarks.compiled_round import CompiledRound
from jaxspec.evaluation.benchmarks.modes import parse_mode
from jaxspec.evaluation.benchmarks.rounds import Workload
from jaxspec.evaluation.benchmarks.shapes import SHAPES
from tests.compiled.test_compiled_for_h100 import (
    KERNELS,
    LAUNCHES_OF_A_LAYER,
    OUTSIDE,
    WHEELS,
    pytestmark,
)

__all__ = ["pytestmark"]  # slow, and skipped without the compiler

SHAPE = "llama-3.3-70b"
MODEL = SHAPES[SHAPE]
LAYERS, MORE_LAYERS, ALL_LAYERS = 2, 4, 80
CONTEXT, PAGE_SIZE = 8192, 64
DRAFTED = 5
# Of 80 GB a tenth is left to NCCL, CUDA, and the temporaries of programs that read prompts.
MOST_BYTES = 72e9

HIDDEN, UNITS, VOCAB = 8192, 28_672, 128_256
HEADS, KV_HEADS, HEAD_DIM = 64, 8, 128
LAYER_WEIGHTS = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * UNITS
BYTES = {None: 2.0, "w4a16": 0.5 + 2 / 128}  # of a weight; of 128 of 4 bits a scale of 16


@dataclasses.dataclass(frozen=True)
class Case:
    mode: str
    batch: int
    tp: int
    quantization: str | None = None

    def __str__(self) -> str:
        return f"{self.mode}-{self.batch}-tp{self.tp}-{self.quantization or 'bf16'}"

    @property
    def rows(self) -> int:
        """Of a pass of the target, padding included."""
        return max(2, self.batch * (1 if self.mode == "plain" else 1 + DRAFTED))

    @property
    def pages(self) -> int:
        mode = parse_mode(self.mode)
        rounds = mode.rounds(NEW_TOKENS)
        length = Workload(self.batch, CONTEXT, rounds, PAGE_SIZE, 1).max_length(mode)
        scratch = 1 if mode.speculation is None else mode.speculation.scratch_slots
        return 1 + self.batch * pages_for(length + scratch, PAGE_SIZE)


CASES = [
    Case(mode, batch, tp, quantization)
    for tp in (4, 8)
    for mode, batch, quantization in (
        ("plain", 1, None),
        ("plain", 32, None),
        ("plain", 32, "w4a16"),
        ("chain:5", 32, None),
        ("chain:5", 32, "w4a16"),
    )
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@functools.cache
def compiled(case: Case, layers: int = LAYERS) -> CompiledRound:
    arguments = ["--shape", SHAPE, "--mode", case.mode, "--batch", str(case.batch)]
    arguments += ["--context", str(CONTEXT), "--page-size", str(PAGE_SIZE), "--tp", str(case.tp)]
    arguments += ["--layers", str(layers), "--kernels", "all", "--wheels", str(WHEELS)]
    arguments += ["--quantization", case.quantization] if case.quantization else []
    return compile_ahead.measure(arguments)["round"]


def whole_model_bytes(case: Case) -> float:
    """Weights and state of 80 layers on a device, reckoned from 2 and 4."""
    few, more = compiled(case).argument_bytes, compiled(case, MORE_LAYERS).argument_bytes
    return few + (more - few) / (MORE_LAYERS - LAYERS) * (ALL_LAYERS - LAYERS)


@every_case
def test_a_round_is_one_graph(case: Case):
    few, more = compiled(case), compiled(case, MORE_LAYERS)
    # The condition of several rows is a reduction before.
    outside = OUTSIDE if case.batch == 1 else OUTSIDE + 1
    for one in (few, more):
        assert (one.launches.graphs, one.launches.outside) == (1, outside)
        assert one.launches.all_reduces_in_graphs == one.launches.all_reduces
        assert not [kernel for kernel in one.kernels if kernel.spilled_bytes]
    names = {kernel.name for kernel in few.kernels}
    expected = KERNELS - {"add_rms_norm"} | {"reduce_add_rms_norm"}
    assert names == expected | ({"packed_product"} if case.quantization else set())
    added = more.launches.in_graphs - few.launches.in_graphs
    assert added == LAUNCHES_OF_A_LAYER * (MORE_LAYERS - LAYERS)


@every_case
def test_a_device_holds_its_share(case: Case):
    few, more = compiled(case), compiled(case, MORE_LAYERS)
    layer = (more.argument_bytes - few.argument_bytes) / (MORE_LAYERS - LAYERS)
    weights = LAYER_WEIGHTS * BYTES[case.quantization] / case.tp
    slots = case.pages * PAGE_SIZE
    cache = slots * 2 * KV_HEADS * HEAD_DIM * 2 / case.tp
    assert layer == pytest.approx(weights + cache, rel=1e-3)
    assert few.page_copies == more.page_copies == 0
    hidden = case.rows * HIDDEN * 2  # a head reads those of one layer more
    grown = more.temporary_bytes - few.temporary_bytes
    assert grown < hidden + (1 << 20), "weights or pages are copied"
    logits = case.rows * VOCAB * 4 / case.tp
    assert more.temporary_bytes <= logits + (20 << 20)
    assert whole_model_bytes(case) + more.temporary_bytes <= MOST_BYTES


def left_for_others(rows: int, devices: int) -> float:
    """Bytes that a device writes to others' memory for a sum: 4 an entry, of which 2 are flags."""
    row = HIDDEN * 4
    if rows <= 32 // devices:  # each row to all others
        return (devices - 1) * rows * row
    return 2 * (devices - 1) / devices * rows * row  # a part to each, and the sums of a part


@every_case
def test_what_a_device_sends(case: Case):
    draft_rows = [] if case.mode == "plain" else [case.rows, *[case.batch] * (DRAFTED - 1)]
    # Two sums of a layer's, and of the head's in each of its passes.
    passes = [*[case.rows] * MORE_LAYERS, *draft_rows]
    sums = 2 * sum(left_for_others(rows, case.tp) for rows in passes)
    # Embeddings, and value and index of the best token: of all nodes, and of each drafted token.
    embedded = case.rows + sum(draft_rows)
    chosen = case.rows + case.batch * len(draft_rows)
    reduced = 2 * (case.tp - 1) / case.tp * (embedded * HIDDEN * 2 + chosen * 8)
    assert compiled(case, MORE_LAYERS).sent == {
        "all-reduce": (3 + 3 * len(draft_rows), pytest.approx(reduced)),
        "reduce_add_rms_norm": (2 * len(passes), pytest.approx(sums)),
    }


def test_all_layers_are_as_reckoned():
    case = Case("chain:5", 32, tp=4)
    whole, few = compiled(case, ALL_LAYERS), compiled(case)
    assert (whole.launches.graphs, whole.launches.outside) == (1, OUTSIDE + 1)
    added = whole.launches.in_graphs - few.launches.in_graphs
    assert added == LAUNCHES_OF_A_LAYER * (ALL_LAYERS - LAYERS)
    assert whole.argument_bytes == pytest.approx(whole_model_bytes(case), rel=1e-4)
    assert whole.temporary_bytes < few.temporary_bytes + case.rows * HIDDEN * 2 + (1 << 20)
    assert whole.page_copies == 0


LONG, READ_AT_ONCE = 128 * 1024, 512  # tokens of a prompt; of it in a call, for each device


@functools.cache
def reading(shape: str, tp: int, sp: int, layers: int) -> CompiledRound:
    """The program that reads a prompt of 128k tokens, on sequence-parallel devices."""
    arguments = ["--shape", shape, "--program", "prefill", "--mode", "plain", "--tp", str(tp)]
    arguments += ["--sp", str(sp), "--context", str(LONG), "--page-size", "128"]
    arguments += ["--layers", str(layers), "--wheels", str(WHEELS)]
    return compile_ahead.measure(arguments)["round"]


@pytest.mark.parametrize(
    ("shape", "tp", "sp"), [("llama-3.1-8b", 1, 8), ("llama-3.1-8b", 2, 4), (SHAPE, 4, 2)]
)
def test_a_prompt_of_128k_tokens_is_read_by_eight_devices(shape: str, tp: int, sp: int):
    config = SHAPES[shape]
    few, more = (reading(shape, tp, sp, layers) for layers in (LAYERS, MORE_LAYERS))
    layers = (more.argument_bytes - few.argument_bytes) / (MORE_LAYERS - LAYERS)
    whole = few.argument_bytes + layers * (config.num_layers - LAYERS)
    assert few.page_copies == more.page_copies == 0
    # Attention goes through blocks of slots whose scores take 128 MiB.
    assert more.temporary_bytes <= 512 << 20
    assert whole + more.temporary_bytes <= MOST_BYTES
    tokens, heads = READ_AT_ONCE * sp, config.layers[0].attention.num_heads
    queries, hidden = heads * HEAD_DIM, config.hidden_size
    over_sequence, over_model = (sp - 1) / sp, (tp - 1) / tp
    # A layer gathers queries, keys and values, and gives back partial softmaxes in float32.
    gathered = tokens * (queries + 2 * KV_HEADS * HEAD_DIM) / tp * 2 * over_sequence
    partial = tokens * heads * (HEAD_DIM + 2) / tp * 4 * over_sequence
    # Its tokens are split over the devices of a model, too: gathered before, scattered after.
    split = 2 * tokens / sp * hidden * 2 * over_model
    sent = (more.sent_bytes - few.sent_bytes) / (MORE_LAYERS - LAYERS)
    assert sent == pytest.approx(gathered + partial + 2 * split)
