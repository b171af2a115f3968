"""Reading collectives from a program's text, and the command that counts them."""

import os
from pathlib import Path
from typing import Any

import pytest

from jaxspec.commands.bench import collectives as bench_collectives
from jaxspec.commands.bench.collectives import difference, make_table
from jaxspec.commands.shared.compiling_process import ROOT
from jaxspec.evaluation.benchmarks.collective_volume import (
    Collective,
    parse_collectives,
    parse_exchanges,
    totals,
)

MESH = "replica_groups=mesh['data'=1,'model'=4,'hidden'=2]"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            f"%psum.1 = bf16[8,100]{{1,0}} all-reduce(%x), channel_id=1, {MESH} {{'model'}}, "
            "to_apply=%add",
            Collective("all-reduce", 4, 2 * 3 / 4 * 1600),
        ),
        (
            f"%psum.2 = (f32[8]{{0}}, f32[2]{{0}}) all-reduce-start(%x, %y), {MESH} "
            "{'model','hidden'}, to_apply=%add",
            Collective("all-reduce", 8, 2 * 7 / 8 * 40),
        ),
        (
            "%psum.3 = ((bf16[1,2,8]{2,1,0}), bf16[1,2,8]{2,1,0}) all-reduce-start(%x), "
            f"{MESH} {{'model'}}, to_apply=%add, output_to_operand_aliasing={{{{1}}: (0, {{}})}}",
            Collective("all-reduce", 4, 2 * 3 / 4 * 32),
        ),
        (
            "%rs.1 = f32[8,10]{1,0} reduce-scatter(%x), replica_groups={{0,1},{2,3}}, to_apply=%a",
            Collective("reduce-scatter", 2, 1 / 2 * 640),
        ),
        (
            "%rs.2 = ((f32[8,20]{1,0}), f32[8,10]{1,0}) reduce-scatter-start(%x), "
            "replica_groups=[2,2]<=[4], to_apply=%add",
            Collective("reduce-scatter", 2, 1 / 2 * 640),
        ),
        (
            "%ag.1 = s32[4,3]{1,0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}",
            Collective("all-gather", 4, 3 / 4 * 48),
        ),
        (
            "%ag.2 = (s32[1,3]{1,0}, s32[4,3]{1,0}) all-gather-start(%x), "
            "replica_groups=[1,4]<=[4], dimensions={0}",
            Collective("all-gather", 4, 3 / 4 * 48),
        ),
        (
            "%aa.1 = (f32[1,3]{1,0}, f32[1,3]{1,0}) all-to-all(%x, %y), replica_groups={{0,1}}",
            Collective("all-to-all", 2, 1 / 2 * 24),
        ),
    ],
)
def test_what_each_device_sends(line: str, expected: Collective):
    [found] = parse_collectives(f"ENTRY %main {{\n  {line}\n  %y = f32[2] all-gather-done(%x)\n}}")
    assert found.kind == expected.kind and found.devices == expected.devices
    assert found.sent_bytes == pytest.approx(expected.sent_bytes)
    assert totals([found, found]) == {found.kind: (2, 2 * found.sent_bytes)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%x = f32[2] collective-permute(%y), replica_groups=[1,2]<=[2]", "no rule .*permute"),
        ("%x = c64[2] all-gather(%y), replica_groups=[1,2]<=[2]", "c64 is not a known type"),
        ("%x = f32[2] all-gather(%y), dimensions={0}", "groups of devices cannot be read"),
    ],
)
def test_what_is_unknown_is_an_error(line: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse_collectives(line)


@pytest.mark.parametrize(
    ("rows", "devices", "sent"),
    [
        (2, 2, 2 * 8192 * 4),  # to the other device, half of it flags
        (8, 4, 3 * 8 * 8192 * 4),  # each row to three others
        (9, 4, 2 * 3 / 4 * 9 * 8192 * 4),  # a quarter to each, and a quarter of the sums
        (4, 8, 7 * 4 * 8192 * 4),
        (192, 8, 2 * 7 / 8 * 192 * 8192 * 4),
    ],
)
def test_what_each_device_leaves_in_the_memory_of_others(rows: int, devices: int, sent: float):
    line = (
        f"  %mpmd_map.8 = (bf16[{rows},8192]{{1,0}}, bf16[{rows},8192]{{1,0}}) custom-call(%x, %y, "
        '%w, %e), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(decode)/shard_map/'
        'while/body/verify/norm/jit(reduce_add_rms_norm_mosaic)/reduce_add_rms_norm_kernel/mpmd_map"}'
    )
    other = line.replace("reduce_add", "add")
    assert parse_exchanges(f"{line}\n{other}", devices) == [
        Collective("reduce_add_rms_norm", devices, sent)
    ]


def test_a_layer_is_the_difference_of_two_models():
    one, two = {"all-reduce": (3, 30.0)}, {"all-reduce": (5, 70.0), "all-gather": (1, 1024.0)}
    layer: Any = difference(two, one)
    assert layer == {"all-reduce": (2, 40.0), "all-gather": (1, 1024.0)}
    table = make_table([{"tp": "2x4", "tokens": 2, "layer": layer}], "tiny")
    cells = [str(next(iter(column.cells))) for column in table.columns]
    assert cells == ["2", "2x4", "2: 0.0", "0: 0.0", "1: 1.0", "0: 0.0", "3", "1.0", "0.52"]


WHEELS = Path(os.environ.get("JAXSPEC_AOT_WHEELS", ROOT / ".cache/aot-wheels"))


@pytest.mark.slow
@pytest.mark.skipif(not WHEELS.is_dir(), reason="no compiler for GPUs, see compile-ahead")
def test_a_layer_of_an_h100_program():
    arguments = ["--grids", "2x2", "--tokens", "256", "--wheels", str(WHEELS)]
    args = bench_collectives.make_parser().parse_args(arguments)
    counts = bench_collectives.count_elsewhere(args, arguments)
    assert [one["tokens"] for one in counts] == [8, 256]
    for one in counts:
        numbers = {kind: number for kind, (number, _) in one["layer"].items()}
        assert numbers == {"all-reduce": 4, "reduce-scatter": 2, "all-gather": 2}
        hidden = 4096 * 2  # bytes
        sent = sum(sent for _, sent in one["layer"].values()) / one["tokens"]
        norms = 2 * 4  # two squares of float32, over two devices
        assert sent == (13 * hidden + 4 * hidden) / 4 + norms
