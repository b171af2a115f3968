"""Parsing of the files of XLA and ptxas, on excerpts of real ones."""

import json
from pathlib import Path

import pytest

from jaxspec.evaluation.benchmarks.ahead_of_time import (
    FACTS,
    PROGRAM,
    compiler_environment,
    read_round,
)
from jaxspec.evaluation.benchmarks.compiled_round import (
    Launches,
    MosaicKernel,
    count_all_reduces,
    count_page_copies,
    parse_kernels,
    parse_launches,
)

ONE_GRAPH = """\
001: kCopy  [source       | next=002 (1)] kCopy
002: kWhile [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        004: kCustomKernel [source       | next=005 (1)] loop_gather_fusion_2 grid: [192, 1, 1]
        005: kCustomCall   [prev=004 (1) | sink        ] kCustomCall
006: kCopy  [source       | sink        ] kCopy
"""
# All-reduces split a round: they are launched on other streams.
TWO_GRAPHS = """\
002: kWhile [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
  body:
    004: kPartitionId   [source       | next=005 (1)] kPartitionId
    006: kAsyncStart    [prev=005 (1) | next=000 (4)] stream=computation_stream[0], async_id=6
        007: kCollectiveKernel [source | sink] kCollectiveKernel
    010: kAsyncDone     [source       | sink        ] async_id=6
    000: kCommandBuffer [prev=009 (2) | next=020 (1)]
        011: kCustomKernel [source       | next=012 (1)] fusion_284 grid: [192, 1, 1]
        012: kAllReduce    [prev=011 (1) | sink        ] kAllReduce
    000: kCommandBuffer [prev=020 (2) | next=028 (1)]
        023: kCustomCall   [source       | next=024 (1)] kCustomCall
"""
LOOP_IN_GRAPH = """\
000: kCommandBuffer [source | sink]
    001: kCopy  [source       | next=002 (1)] kCopy
    002: kWhile [prev=001 (1) | sink        ]
condition:
        003: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
      body:
        004: kCustomKernel [source       | sink] loop_gather_fusion_2 grid: [192, 1, 1]
"""
# A loop inside the round is a part of it, not the round.
LOOP_IN_LOOP = """\
002: kWhile [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
  body:
    004: kWhile [source | sink        ]
condition:
        005: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
      body:
        006: kCustomKernel [source | sink] loop_add_fusion grid: [1, 1, 1]
"""
# A kernel whose operands are slices of arrays is one launch.
ON_SLICES = """\
002: kWhile [prev=001 (1) | sink        ]
  body:
    000: kCommandBuffer [source | sink]
        004: kDynamicSliceFusion [source       | sink] params=7, results=1
            005: kCustomCall [source | sink] kCustomCall
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ONE_GRAPH, Launches(2, 1, 1, 0, 0, False)),
        (TWO_GRAPHS, Launches(3, 3, 2, 2, 1, False)),
        (LOOP_IN_GRAPH, Launches(2, 0, 0, 0, 0, True)),
        (LOOP_IN_LOOP, Launches(0, 3, 0, 0, 0, False)),
        (ON_SLICES, Launches(1, 0, 1, 0, 0, False)),
    ],
    ids=["one graph", "two graphs", "loop in graph", "loop in loop", "on slices"],
)
def test_launches(text: str, expected: Launches):
    assert parse_launches(text) == expected


def test_launches_without_a_loop_are_refused_in_a_round():
    text = "001: kCopy  [source | sink] kCopy\n"
    with pytest.raises(ValueError, match="no loop"):
        parse_launches(text)
    assert parse_launches(text, of_loop=False) == Launches(0, 1, 0, 0, 0, False)
    assert parse_launches(ONE_GRAPH, of_loop=False) == Launches(2, 3, 1, 0, 0, False)


PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'rope_kv_write_kernel_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for rope_kv_write_kernel_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 39 registers, used 2 barriers, 1 bytes smem
ptxas info    : Compile time = 16.680 ms

ptxas /tmp/tempfile-vm, line 399; info    : Potential out of bound access while accessing symbol
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'add_rms_norm_kernel_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for add_rms_norm_kernel_mosaic_gpu_kernel
    48 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 1 bytes smem
"""


def test_registers_and_spills():
    expected = (MosaicKernel("rope_kv_write", 39, 0), MosaicKernel("add_rms_norm", 255, 40))
    assert parse_kernels(f"some warning\n{PTXAS}more\n") == expected


@pytest.mark.parametrize("missing", ["Used", "spill stores"])
def test_a_kernel_without_its_figures_is_refused(missing: str):
    lines = [line for line in PTXAS.splitlines() if missing not in line]
    with pytest.raises(ValueError, match="ptxas printed no"):
        parse_kernels("\n".join(lines))


PAGES = (11, 8, 64, 128)


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("  %copy.1 = bf16[11,8,64,128]{3,2,1,0} copy(%param.1), metadata={}", 1),
        ("  ROOT %t = bf16[11,8,64,128]{3,2,0,1} transpose(%p), dimensions={1,0,2,3}", 1),
        ("  %c = (bf16[11,8,64,128]{3,2,1,0}, bf16[11,8,64,128]{3,2,1,0}) copy-start(%p)", 1),
        ("  %g = bf16[11,8,64,128]{3,2,1,0} all-gather(%p), channel_id=1, dimensions={1}", 1),
        ("  %copy.1 = bf16[11,8,64]{2,1,0} copy(%param.1)", 0),
        ("  %copy.1 = bf16[2,11,8,64,128]{4,3,2,1,0} copy(%param.1)", 0),
        ("  %b = bf16[11,8,64,128]{3,2,1,0} bitcast(%copy.1)", 0),
        ("  %b = s32[] copy(%x), metadata={op_name=\"bf16[11,8,64,128] copy(\"}", 0),
        ("  %call = (bf16[11,8,64,128]{3,2,1,0}, s32[]) custom-call(%copy.1, %copy.2)", 0),
    ],
)  # fmt: skip
def test_copies_of_pages(line: str, count: int):
    assert count_page_copies(f"HloModule m\n{line}\n", [PAGES, PAGES, (6, 8, 64, 128)]) == count


def test_all_reduces_by_what_they_are_for():
    body, scopes = "jit(decode)/shard_map/while/body", ("draft/o", "verify/mlp", "verify/mlp")
    lines = [
        f"  ROOT %psum.{index} = bf16[1,6,4096]{{2,1,0}} all-reduce(%param_0), channel_id=1, "
        f'metadata={{op_name="{body}/{scope}/psum"}}'
        for index, scope in enumerate(scopes)
    ]
    lines.append("  %pmax = (f32[1]{0}, s32[1]{0}) all-reduce-start(%a, %b), channel_id=2")
    lines.append("  %done = (f32[1]{0}, s32[1]{0}) all-reduce-done(%pmax)")
    expected = {"draft/o": 1, "other/other": 1, "verify/mlp": 2}
    assert count_all_reduces("\n".join(lines)) == expected


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A folder as a compiling process leaves it."""
    text = (
        "HloModule jit_decode, is_scheduled=true\n"
        "  %pages = bf16[11,8,64,128]{3,2,1,0} parameter(0)\n"
        '  %call = bf16[4]{0} custom-call(%pages), custom_call_target="mosaic_gpu_v2"\n'
    )
    (tmp_path / PROGRAM).write_text(text)
    facts = {"program": "decode", "sharing": 1, "page_shapes": [PAGES]}
    facts |= {"argument_bytes": 7, "temporary_bytes": 5}
    (tmp_path / FACTS).write_text(json.dumps(facts))
    launches = "thunk_sequence_after_thunk_passes.txt"
    (tmp_path / f"module_0001.jit_decode.{launches}").write_text(ONE_GRAPH)
    (tmp_path / f"module_0002.jit_other.{launches}").write_text("")
    return tmp_path


def test_a_round_is_read_from_a_folder(dump: Path):
    compiled = read_round(dump, PTXAS)
    assert (compiled.argument_bytes, compiled.temporary_bytes) == (7, 5)
    assert (compiled.page_copies, compiled.all_reduces, compiled.sent) == (0, {}, {})
    assert compiled.sent_bytes == 0
    assert compiled.launches == parse_launches(ONE_GRAPH)
    assert compiled.kernels == parse_kernels(PTXAS)


def test_missing_compiler_output_is_an_error(dump: Path):
    with pytest.raises(ValueError, match="ptxas printed nothing"):
        read_round(dump, "")
    with pytest.raises(ValueError, match="no call of it could be read"):
        read_round(dump, PTXAS.replace("add_rms_norm", "reduce_add_rms_norm"))
    facts = json.loads((dump / FACTS).read_text()) | {"page_shapes": [[1, 2, 3, 4]]}
    (dump / FACTS).write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="shape of KV pages"):
        read_round(dump, PTXAS)
    next(dump.glob("*jit_decode.thunk*")).unlink()
    with pytest.raises(ValueError, match="0 lists of launches of jit_decode"):
        read_round(dump, PTXAS)


def test_the_callers_environment_is_kept(tmp_path: Path):
    inherited = {"HOME": "/h", "XLA_FLAGS": "--a=1", "PATH": "/bin", "PYTHONPATH": "/p"}
    made = compiler_environment(tmp_path / "wheels", tmp_path / "dump", inherited)
    assert made["HOME"] == "/h"
    assert made["XLA_FLAGS"].endswith(" --a=1") and f"={tmp_path}/dump" in made["XLA_FLAGS"]
    assert made["PATH"] == f"{tmp_path}/wheels/nvidia/cu13/bin:/bin"
    assert made["PYTHONPATH"] == f"{tmp_path}/wheels:/p"
