"""Decoders from and to safetensors: layouts, shards, memory, errors."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from jaxspec.checkpoints import read_arrays, safetensors_io
from jaxspec.checkpoints.checkpoint_files import StoredTensor
from jaxspec.checkpoints.safetensors_io import load_decoder, save_decoder
from jaxspec.config.model import dense_model
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import load_model_config
from jaxspec.models.mixers import Attention
from jaxspec.models.mlps import Dense
from jaxspec.parallel import DATA_AXIS, grid_of, make_mesh, partition_specs
from tests.helpers.checkpoints import (
    hf_logits,
    save_tensors,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
)
from tests.helpers.marks import slow

TOKENS = np.random.default_rng(3).integers(0, 320, (2, 12))
BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), vocab_size=323, **BIASES)


def load(directory: Path, dtype: Any = jnp.float32, **options: Any) -> Decoder:
    return load_decoder(directory, load_model_config(directory), dtype, **options)


def read(directory: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    tensors = {k: v for f in directory.glob("*.safetensors") for k, v in load_file(f).items()}
    return tensors, json.loads((directory / "config.json").read_text())


def assert_trees_equal(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_the_layout(llama: Path):
    model, (tensors, _) = load(llama), read(llama)
    prefix, attention, mlp = "model.layers.1.", model.layers[1].mixer, model.layers[1].mlp
    assert isinstance(attention, Attention) and isinstance(mlp, Dense)
    qkv = attention.qkv
    keys = tensors[f"{prefix}self_attn.k_proj.weight"]  # 2 KV heads of 16
    queries = tensors[f"{prefix}self_attn.q_proj.weight"]
    np.testing.assert_array_equal(qkv.weight[:, 1, -2], keys[16:].T)
    np.testing.assert_array_equal(qkv.weight[:, 1, 0], queries[32:48].T)
    values = tensors[f"{prefix}self_attn.v_proj.bias"]
    assert qkv.bias is not None
    np.testing.assert_array_equal(qkv.bias[0, -1], values[:16])
    output, up = (tensors[f"{prefix}{name}.weight"] for name in ("self_attn.o_proj", "mlp.up_proj"))
    np.testing.assert_array_equal(attention.o.weight, output.T)
    np.testing.assert_array_equal(mlp.gate_up.weight[:, 1], up.T)


@pytest.mark.parametrize(
    ("tensor_parallel", "data_parallel"),
    [pytest.param(4, 1, id="tp4"), pytest.param(2, 2, id="tp2-dp2"), slow((2, 2), 1, id="tp2x2")],
)
def test_a_sharded_model_computes_the_same(llama: Path, tensor_parallel: Any, data_parallel: int):
    mesh = make_mesh(tensor_parallel, data_parallel)
    model = load(llama, mesh=mesh)  # tp4: KV heads repeat, and 323 tokens are padded to 324
    axes = tuple(mesh.shape)[1:]
    assert model.layout.heads == model.layout.vocab == axes
    devices = mesh.size // data_parallel
    assert model.embed.addressable_shards[0].data.shape == (-(-323 // devices), 64)
    (x, y), mixer = grid_of(tensor_parallel), model.layers[0].mixer
    assert isinstance(mixer, Attention)
    groups, queries = max(2, devices), mixer.config.num_heads * mixer.config.head_dim
    assert mixer.qkv.weight.addressable_shards[0].data.shape[:2] == (64 // x, groups // y)
    assert mixer.o.weight.addressable_shards[0].data.shape == (queries // y, 64 // x)

    @jax.jit
    @jax.shard_map(
        mesh=mesh,
        in_specs=(partition_specs(model), P(DATA_AXIS)),
        out_specs=P(DATA_AXIS, None, axes),
        check_vma=False,
    )
    def forward(model, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _, _ = decoder.run(model, tokens, positions, model.no_states(), dense_causal_attend)
        return decoder.logits(model, hidden)

    ours, theirs = forward(model, jnp.asarray(TOKENS)), hf_logits(llama, TOKENS)
    np.testing.assert_allclose(ours[..., :323], theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
    assert np.all(np.asarray(ours[..., 323:]) == -np.inf)


def test_an_unsharded_model_on_a_mesh_is_whole_everywhere(llama: Path):
    model = load(llama, mesh=make_mesh(tensor_parallel=4), sharded=False)
    assert model.layout.heads == model.layout.vocab == ()
    assert_trees_equal(model, load(llama))
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(model))


@pytest.mark.parametrize("index", [0, 1])
def test_weights_read_by_threads_lie_where_the_caller_says(llama: Path, index: int):
    device = jax.devices()[index]
    with jax.default_device(device):
        leaves = jax.tree.leaves(load(llama))
    assert all(leaf.committed and leaf.devices() == {device} for leaf in leaves)
    assert not any(leaf.committed for leaf in jax.tree.leaves(load(llama)))


@pytest.mark.parametrize("tensor_parallel", [2, (2, 1)])
def test_each_shard_reads_its_own_slices_once_and_in_chunks(
    llama: Path, tensor_parallel: Any, monkeypatch
):
    sizes: dict[str, list[int]] = {}
    read_part = StoredTensor.read

    def record(self: StoredTensor, *index: slice) -> np.ndarray:
        part = read_part(self, *index)
        sizes.setdefault(self.name, []).append(part.size)
        return part

    monkeypatch.setattr(StoredTensor, "read", record)
    monkeypatch.setattr(read_arrays, "CHUNK_ELEMENTS", 1024)
    mesh = make_mesh(tensor_parallel, data_parallel=2)
    model = load(llama, mesh=mesh)
    for name, tensor in read(llama)[0].items():
        # Replicated vectors too: devices that hold the same block share one reading.
        assert sum(sizes[name]) == tensor.size, name
        assert max(sizes[name]) <= 2048, name  # a group's query heads are not divided
    monkeypatch.undo()
    assert_trees_equal(model, load(llama, mesh=mesh))


def test_dtypes_are_cast(llama: Path, tmp_path: Path):
    whole = load(llama)
    half = load(llama, jnp.bfloat16)
    assert_trees_equal(half, jax.tree.map(lambda a: a.astype(jnp.bfloat16), whole))
    save_decoder(half, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert_trees_equal(load(tmp_path, jnp.bfloat16), half)
    assert_trees_equal(load(tmp_path), jax.tree.map(lambda a: a.astype(jnp.float32), half))


@pytest.mark.parametrize(
    ("build", "overrides"),
    [
        (tiny_llama, BIASES | {"head_dim": 24, "eos_token_id": [5, 6]}),
        (tiny_llama, {"tie_word_embeddings": True}),
        (tiny_qwen2, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        (tiny_qwen3, {}),
        (tiny_mistral, {"sliding_window": 4}),
    ],
    ids=["llama", "llama-tied", "qwen2", "qwen3", "mistral"],
)
def test_transformers_reads_what_we_save(build: Any, overrides: dict[str, Any], tmp_path: Path):
    original = build(tmp_path / "theirs", **overrides)
    model = load(original)
    save_decoder(model, tmp_path / "ours")
    tensors, saved = read(original)[0], read(tmp_path / "ours")[0]
    assert saved.keys() == tensors.keys()
    assert all(np.array_equal(saved[name], tensors[name]) for name in tensors)
    assert load_model_config(tmp_path / "ours") == model.config
    np.testing.assert_allclose(
        hf_logits(tmp_path / "ours", TOKENS), hf_logits(original, TOKENS), rtol=1e-6
    )


def test_a_sharded_model_is_saved_whole(llama: Path, tmp_path: Path):
    save_decoder(load(llama, mesh=make_mesh(tensor_parallel=4)), tmp_path)
    tensors, saved = read(llama)[0], read(tmp_path)[0]
    assert saved.keys() == tensors.keys()
    assert all(np.array_equal(saved[name], tensors[name]) for name in tensors)
    save_decoder(load(llama, mesh=make_mesh((2, 2))), tmp_path)
    saved = read(tmp_path)[0]
    assert all(np.array_equal(saved[name], tensors[name]) for name in tensors)


def test_several_files(llama: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(safetensors_io, "MAX_FILE_BYTES", 100_000)
    save_decoder(load(llama), tmp_path)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert_trees_equal(load(tmp_path), load(llama))
    np.testing.assert_allclose(hf_logits(tmp_path, TOKENS), hf_logits(llama, TOKENS), rtol=1e-6)
    monkeypatch.undo()
    save_decoder(load(llama), tmp_path)  # in place of these files
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


def test_all_misfits_are_listed(llama: Path, tmp_path: Path):
    tensors, config = read(llama)
    del tensors["model.norm.weight"], tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(16, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:300]
    tensors["model.layers.0.mlp.gate_proj.bias"] = np.ones(128, np.int8)
    with pytest.raises(ValueError) as caught:
        load(save_tensors(tmp_path, tensors, config))
    message = str(caught.value)
    for part in (
        str(tmp_path),
        "model.norm.weight is missing",
        "model.layers.2.mlp.up_proj.weight is missing",
        "model.layers.0.self_attn.q_norm.weight is not part of this model",
        "lm_head.weight is [300, 64], not [323, 64]",
        "model.layers.0.mlp.gate_proj.bias has unsupported dtype I8",
    ):
        assert part in message
    assert "\n" not in message


def test_unused_tensors_of_a_checkpoint_are_ignored(tmp_path: Path):
    directory = tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    tensors, config = read(directory)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    assert_trees_equal(load(save_tensors(tmp_path / "more", tensors, config)), load(directory))


def test_a_broken_file_is_named(llama: Path, tmp_path: Path):
    tensors, config = read(llama)
    file = save_tensors(tmp_path, tensors, config) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable safetensors"):
        load(tmp_path)


def test_a_file_of_the_index_that_is_not_there_is_named(llama: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="model-00001-of-00002"):
        load(tmp_path)


def test_pickled_weights_are_refused_with_the_way_out(llama: Path, tmp_path: Path):
    config = load_model_config(llama)
    with pytest.raises(ValueError, match=r"no \*\.safetensors file"):
        load_decoder(tmp_path, config, jnp.float32)  # pyright: ignore[reportArgumentType]
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"Convert them .* run python -c '"):
        load_decoder(tmp_path, config, jnp.float32)  # pyright: ignore[reportArgumentType]


def test_a_mesh_with_other_axes_is_refused(llama: Path):
    mesh = jax.make_mesh((2,), ("tp",))
    with pytest.raises(ValueError, match=r"axes \['tp'\], and needs 'data' and 'model'"):
        load(llama, mesh=mesh)


@pytest.mark.parametrize("tied", [False, True])
def test_the_advice_for_pickled_weights_works(tied: bool, tmp_path: Path, monkeypatch):
    original = tiny_llama(tmp_path / "safe", tie_word_embeddings=tied)
    tensors = {name: torch.from_numpy(value) for name, value in read(original)[0].items()}
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # as torch saves it
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(original / "config.json", pickled)
    for part, name in enumerate(("pytorch_model-00001-of-00002.bin", "pytorch_model-2.bin")):
        shard = {key: value for i, (key, value) in enumerate(tensors.items()) if i % 2 == part}
        torch.save(shard | ({"lm_head.weight": tensors["lm_head.weight"]} if tied else {}),
                   pickled / name)  # fmt: skip
    torch.save({"not": "weights"}, pickled / "training_args.bin")
    with pytest.raises(ValueError) as caught:
        load(pickled)
    _, command, _ = str(caught.value).split("'")
    monkeypatch.chdir(pickled)
    exec(command, {})  # what python -c would run, without importing torch again
    assert_trees_equal(load(pickled), load(original))


@pytest.mark.parametrize(
    "weight_map",
    [
        None, [], {}, "model.safetensors", {"a": 1}, {"a": None}, {"a": ["model.safetensors"]},
        {"a": "../llama0/model.safetensors"}, {"a": "/etc/passwd"}, {"a": "x/../../y.safetensors"},
        {"a": "model.bin"}, {"a": ""}, {"a": "a\0.safetensors"}, {"a": "a\nb.safetensors"},
    ],
)  # fmt: skip
def test_an_invalid_index_file_is_named(weight_map: Any, llama: Path, tmp_path: Path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(llama / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"index\.json: weight_map ") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_few_of_many_misfits_are_listed(llama: Path, tmp_path: Path):
    tensors, config = read(llama)
    surplus = {f"more.{i}\n": np.ones(1, np.float32) for i in range(100)}
    with pytest.raises(ValueError, match=r"and 80 problems more$") as caught:
        load(save_tensors(tmp_path, tensors | surplus, config))
    assert r"'more.0\n' is not part of this model" in str(caught.value)
    assert "\n" not in str(caught.value)


MEASURE = """
import resource, sys
import jax.numpy as jnp
from jaxspec.models.from_config.model import load_model_config
from jaxspec.models.mixers import Attention
from jaxspec.models.mlps import Dense
from jaxspec.checkpoints.safetensors_io import load_decoder

def peak():  # of this process alone; ru_maxrss would start at its parent's
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

config = load_model_config(sys.argv[1])
jnp.zeros(8).block_until_ready()
before = peak()
model = load_decoder(sys.argv[1], config, jnp.bfloat16)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_host_memory_at_its_peak(tmp_path: Path):
    config = dense_model(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_layers=12,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position=512,
    )
    shapes = decoder.decoder_shapes(config, jnp.dtype("bfloat16"))
    model = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)
    save_decoder(model, tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    model_bytes = sum(math.prod(leaf.shape) * 2 for leaf in jax.tree.leaves(shapes))
    (file,) = tmp_path.glob("*.safetensors")
    overhead = int(result.stdout) - model_bytes  # on CPU the arrays themselves are host memory
    assert overhead < 0.4 * file.stat().st_size  # one array, staged once, and a few chunks
