"""Loading holds READ_AHEAD bytes of arrays on the host beyond those on devices, or an array that is
larger, whatever the format of a file."""

import json
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints import read_arrays
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.models.from_config.model import load_model_config
from jaxspec.parallel.memory_format import default_place
from tests.helpers.marks import slow

HIDDEN, EXPERTS, LAYERS = 512, 8, 12
DTYPES = {"F8_E4M3": 1, "U8": 1, "BF16": 2, "F32": 4}
CONFIG: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
Shapes = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name


def in_bfloat16(prefix: str) -> Shapes:
    """Attention and norms of a layer."""
    sizes = {"q_proj": (256, HIDDEN), "o_proj": (HIDDEN, 256)}
    sizes |= dict.fromkeys(("k_proj", "v_proj"), (128, HIDDEN))
    shapes: Shapes = {
        f"{prefix}.self_attn.{name}.weight": ("BF16", size) for name, size in sizes.items()
    }
    for norm in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{prefix}.{norm}.weight"] = "BF16", (HIDDEN,)
    return shapes


def qwen_in_float8() -> tuple[Shapes, dict[str, Any]]:
    shapes: Shapes = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= in_bfloat16(prefix)
        shapes[f"{prefix}.mlp.gate.weight"] = "BF16", (EXPERTS, HIDDEN)
        for norm in ("q_norm", "k_norm"):
            shapes[f"{prefix}.self_attn.{norm}.weight"] = "BF16", (64,)
        for expert in range(EXPERTS):
            for kind in ("gate_proj", "up_proj", "down_proj"):
                name = f"{prefix}.mlp.experts.{expert}.{kind}"
                shapes[f"{name}.weight"] = "F8_E4M3", (HIDDEN, HIDDEN)
                shapes[f"{name}.weight_scale_inv"] = "F32", (HIDDEN // 128, HIDDEN // 128)
    config = CONFIG | {"model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": 2}
    config |= {"moe_intermediate_size": HIDDEN, "norm_topk_prob": True}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return shapes, config | {"quantization_config": quantization}


def gpt_oss_in_mxfp4() -> tuple[Shapes, dict[str, Any]]:
    shapes: Shapes = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= in_bfloat16(prefix)
        sizes = {"q_proj": 256, "k_proj": 128, "v_proj": 128, "o_proj": HIDDEN}
        for name, size in sizes.items():
            shapes[f"{prefix}.self_attn.{name}.bias"] = "BF16", (size,)
        shapes[f"{prefix}.self_attn.sinks"] = "BF16", (4,)
        shapes[f"{prefix}.mlp.router.weight"] = "BF16", (EXPERTS, HIDDEN)
        shapes[f"{prefix}.mlp.router.bias"] = "BF16", (EXPERTS,)
        for kind, size in (("gate_up_proj", 2 * HIDDEN), ("down_proj", HIDDEN)):
            name, groups = f"{prefix}.mlp.experts.{kind}", (EXPERTS, size, HIDDEN // 32)
            shapes[f"{name}_blocks"] = "U8", (*groups, 16)
            shapes[f"{name}_scales"] = "U8", groups
            shapes[f"{name}_bias"] = "BF16", (EXPERTS, size)
    config = CONFIG | {"model_type": "gpt_oss", "num_local_experts": EXPERTS}
    config |= {"num_experts_per_tok": 2, "sliding_window": 8, "rope_theta": 1e4}
    return shapes, config | {"quantization_config": {"quant_method": "mxfp4"}}


def write(folder: Path, shapes: Shapes, config: dict[str, Any]) -> Path:
    """A file in which bytes are all 60, a small number in each dtype."""
    table = {"model.embed_tokens.weight": ("BF16", (512, HIDDEN))}
    shapes = {**table, "lm_head.weight": table["model.embed_tokens.weight"], **shapes}
    shapes["model.norm.weight"] = "BF16", (HIDDEN,)
    header, end = dict[str, Any](), 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + int(np.prod(shape)) * DTYPES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    said = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(said).to_bytes(8, "little") + said)
        np.full(end, 60, np.uint8).tofile(file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("written", [gpt_oss_in_mxfp4, slow(qwen_in_float8)])
def test_the_host_holds_an_array_at_a_time(
    written: Callable[[], tuple[Shapes, dict[str, Any]]], tmp_path: Path, monkeypatch: Any
):
    """On a CPU devices have the host's memory, but not that of NumPy, which is counted."""
    path = write(tmp_path, *written())
    size = (path / "model.safetensors").stat().st_size
    monkeypatch.setattr(read_arrays, "CHUNK_ELEMENTS", 1 << 16)
    monkeypatch.setattr(read_arrays, "READ_AHEAD", 0)  # else as many as are read side by side
    config = load_model_config(path)
    default_place()  # JAX starts
    tracemalloc.start()
    try:
        model = load_decoder(path, config, jnp.dtype("bfloat16"))
        left, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(model))
    # An array, the one before, which JAX may not have let go yet, and what describes the tensors.
    assert most - left < 2 * largest + (4 << 20) < size / 3


def test_arrays_that_fit_together_are_read_side_by_side():
    both, held = threading.Barrier(2), read_arrays.HeldBytes(10)
    large = threading.Event()

    def meet() -> None:
        with held.while_reading(5):
            both.wait(timeout=30)
            assert not large.is_set()

    def hold_all() -> None:
        with held.while_reading(100):
            large.set()

    with ThreadPoolExecutor(3) as pool:
        small = pool.submit(meet)
        with held.while_reading(5):
            waiting = pool.submit(hold_all)
            both.wait(timeout=30)
        for future in (small, waiting):
            future.result(timeout=30)
