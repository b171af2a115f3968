"""What the TPU's compiler makes of the programs and of the kernel, without a TPU.

    pytest -m slow tests/compiled/test_compiled_for_tpu.py

Some minutes on two cores. Nothing here was ever run on a TPU. Widths and vocabulary are
Llama-3.1-8B's, layers are few. The compiler is libtpu in a folder, see scripts/compile_ahead.py;
JAXSPEC_LIBTPU names another one than `.cache/libtpu`.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.commands import compile_ahead
from jaxspec.commands.shared.compiling_process import ROOT
from jaxspec.evaluation.benchmarks.shapes import SHAPES
from jaxspec.evaluation.benchmarks.tpu_ahead import TpuProgram, install_command, libtpu_environment

LIBTPU = Path(os.environ.get("JAXSPEC_LIBTPU", ROOT / ".cache/libtpu"))
TOPOLOGIES = ("v5e:2x2", "v6e:2x2")
SHAPE, LAYERS, TP, BATCH = "llama-3.1-8b", 2, 4, 8
CONTEXT = 8192  # the keys of one layer are 34 MB a device: far more than the room for temporaries
CHAIN, DRAFTED = "chain:1@1.5", 1

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not LIBTPU.is_dir(), reason=f"no compiler for TPUs; run: {install_command(LIBTPU)}"
    ),
]


@functools.cache
def compiled(mode: str, topology: str, *more: str) -> TpuProgram:
    arguments = ["--shape", SHAPE, "--mode", mode, "--layers", str(LAYERS), "--tp", str(TP)]
    arguments += ["--batch", str(BATCH), "--context", str(CONTEXT), "--libtpu", str(LIBTPU)]
    return compile_ahead.measure([*arguments, "--tpu", topology, *more])["program"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_round_copies_neither_weights_nor_pages(topology: str):
    one = compiled(CHAIN, topology)
    assert (one.weight_copies, one.page_copies) == (0, 0)
    logits = BATCH * (1 + DRAFTED) * SHAPES[SHAPE].vocab_size * 4 // TP
    assert one.temporary_bytes <= logits + (24 << 20)
    assert one.kernels == {"paged_attention": LAYERS + DRAFTED}


def test_a_tree_neither():
    one = compiled("tree:3:1:2@1.5", "v6e:2x2")
    assert (one.weight_copies, one.page_copies) == (0, 0)


def test_reading_prompts_neither():
    one = compiled(CHAIN, "v6e:2x2", "--program", "prefill")
    assert (one.weight_copies, one.page_copies) == (0, 0)
    assert one.kernels == {"paged_attention": LAYERS}  # the head only writes keys and values


def test_kernels_are_chosen_by_name():
    kernel, gathered = (compiled("plain", "v6e:2x2", "--kernels", name) for name in ("all", "none"))
    assert gathered.kernels == {} and kernel.kernels == {"paged_attention": LAYERS}
    assert gathered.temporary_bytes > kernel.temporary_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tpu", "v6e:9x9x9x9"], "no topology 'v6e:9x9x9x9', such as v5e:2x2 or v6e:2x2"),
        (["--tpu", "v6e:2x2", "--tp", "8"], "v6e:2x2 has 4 devices, 8 are needed"),
        (["--tpu", "v6e:2x2", "--kernels", "top_k"], "no kernel for TPUs is called 'top_k'"),
    ],
)
def test_bad_targets_are_one_line(options: list[str], message: str, capsys):
    assert compile_ahead.main(["--layers", "1", "--libtpu", str(LIBTPU), *options]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert message in line


def test_collectives_of_a_round():
    one = compiled(CHAIN, "v6e:2x2").collectives
    assert one["all-reduce verify/o"] == one["all-reduce verify/mlp"] == LAYERS
    assert one["all-reduce verify/embed"] == 1


KERNEL = """
import functools, sys
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxspec.evaluation.benchmarks.ahead_of_time import compile_ahead
from jaxspec.evaluation.benchmarks.tpu_ahead import make_devices, target_devices
from pallas_kernels.paged_attention.cases import Case, KERNEL_CASES, LONG_CASES, make_arguments
from pallas_kernels.paged_attention.mosaic_tpu import paged_attention_mosaic

jax.devices()
devices = make_devices(sys.argv[1], 1)
most = (  # that misfit_tpu lets pass
    Case("largest pages", (300, 9), 80, 32, 32, 128, 512 // jnp.dtype(sys.argv[2]).itemsize // 2),
    Case("largest table", (70,) * 64, 2, 16, 4, 128, 16, tree=True, num_columns=2048),
)
for case in (*most, *KERNEL_CASES, *LONG_CASES):
    shapes = jax.eval_shape(lambda: make_arguments(case, jnp.dtype(sys.argv[2])))
    place = SingleDeviceSharding(devices[0])
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes
    )
    function = jax.jit(functools.partial(paged_attention_mosaic, options=case.options))
    with target_devices(devices):
        text = compile_ahead(function, arguments, "tpu").as_text()
    assert "tpu_custom_call" in text, case.name
    print(case.name)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_kernel_compiles_for_every_case(topology: str, dtype: str):
    environment = libtpu_environment(LIBTPU, os.environ)
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-c", KERNEL, topology, dtype]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
