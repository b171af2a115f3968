"""A user-defined weight format: 4-bit integers with group scales and zeros, loader included.

Nothing of the package knows it. It stands here as the proof that quantized kinds fit; the format is
the one of GPTQ: eight inputs in a word, zeros packed along the outputs.
"""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from jaxspec.checkpoints.safetensors_io import load_decoder, save_tree
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import load_model_config
from jaxspec.models.linear import Linear, Product
from jaxspec.models.tensors import Piece, Source, Split, TensorMap, Tensors, splitting
from jaxspec.models.wrapped_tensors import Wrapped
from jaxspec.parallel import MODEL_AXIS, make_mesh, partition_specs
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.selection import NO_KERNELS, Kernels
from tests.helpers.checkpoints import save_tensors, tiny_qwen2

GROUP = 16
TOKENS = np.random.default_rng(3).integers(0, 320, (2, 12))


class InputsFirst(Wrapped):
    """Stored as [in, out]."""

    def split(self, kind: str) -> Split:
        inner = self.source.split(kind)

        def split(block: np.ndarray, start: tuple[int, ...]) -> list[Piece]:
            return [piece._replace(inputs_first=True) for piece in inner(block, start)]

        return split

    def join(self, kind: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
        transposed = {f"{name}.{kind}": tensors[f"{name}.{kind}"].T for name in self.names}
        return self.source.join(kind, transposed, shape)


@pytree
class Packed(Pytree):
    """w = (q - zero) * scale for each group of GROUP inputs, with q and zero of 4 bits."""

    qweight: Array = array()  # int32 [in / 8, *out], eight inputs in a word
    qzeros: Array = array()  # int32 [in / GROUP, *out / 8], eight outputs in a word
    scales: Array = array()  # [in / GROUP, *out]
    bias: Array | None = array(default=None)
    axes: tuple[str, ...] = static()

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        names = ("qweight", "qzeros", "scales")
        return {**dict.fromkeys(names, self.axes), "bias": self.axes[1:]}

    @property
    def dtype(self) -> jnp.dtype:
        return self.scales.dtype

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.scales.shape[1:]

    def __call__(self, x: Array, kernels: Kernels = NO_KERNELS) -> Array:
        y = self.partial_sums(x, 1, kernels)[0]
        return y if self.bias is None else y + self.bias

    def float32(self, x: Array, kernels: Kernels = NO_KERNELS) -> Array:
        return self(x.astype(jnp.float32), kernels)

    def product(self, x: Array, scope: str) -> Product:
        return Product(self, x, scope)

    def partial_sums(self, x: Array, num_splits: int, kernels: Kernels) -> Array:
        assert num_splits == 1
        return jnp.tensordot(x, self.dense(), axes=1, precision="highest")[None]

    def best_num_splits(self, x: Array, kernels: Kernels) -> int:
        return 1

    def dense(self) -> Array:
        q, zero = unpacked(self.qweight, 0), unpacked(self.qzeros, -1)
        zero, scale = (jnp.repeat(each, GROUP, axis=0) for each in (zero, self.scales))
        return (q - zero).astype(self.dtype) * scale

    def mapped(self, source: Source, tensor_map: TensorMap) -> "Packed":
        stored = InputsFirst(source)
        return self.replace(
            qweight=tensor_map.of_source(stored, "qweight", self.qweight),
            qzeros=tensor_map.of_source(stored, "qzeros", self.qzeros),
            scales=tensor_map.of_source(stored, "scales", self.scales),
            bias=tensor_map.of_source(source, "bias", self.bias),
        )


def packed_shapes(linear: Linear, source: Source) -> Linear | Packed:
    """What stands for a projection: packed, all but the LM head."""
    if source.names == ("lm_head",):
        return linear
    size, out = linear.in_size, linear.out_shape

    def shape(sizes: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    return Packed(
        qweight=shape((size // 8, *out), jnp.int32),
        qzeros=shape((size // GROUP, *out[:-1], out[-1] // 8), jnp.int32),
        scales=shape((size // GROUP, *out), linear.dtype),
        bias=linear.bias,
        axes=linear.axes,
    )


def unpacked(words: Array, axis: int) -> Array:
    axis %= words.ndim
    nibbles = jnp.stack([(words >> 4 * i) & 15 for i in range(8)], axis=axis + 1)
    return nibbles.reshape(*words.shape[:axis], -1, *words.shape[axis + 1 :])


def packed(values: np.ndarray) -> np.ndarray:
    """int32 words of eight 4-bit values along the first axis."""
    words = values.reshape(-1, 8, values.shape[1]).astype(np.uint32)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
    return np.bitwise_or.reduce(words << shifts, axis=1).view(np.int32)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    """A packed checkpoint, and the same weights as a usual one."""
    source = tiny_qwen2(tmp_path_factory.mktemp("source"), num_hidden_layers=2)
    quantized, dense, rng = {}, {}, np.random.default_rng(0)
    for name, tensor in load_file(source / "model.safetensors").items():
        dense[name] = quantized[name] = tensor
        if not name.endswith("proj.weight"):
            continue
        outs, ins = tensor.shape
        q, zero = rng.integers(16, size=(ins, outs)), rng.integers(6, 10, size=(ins // GROUP, outs))
        scale = rng.uniform(0.5, 1, (ins // GROUP, outs)).astype(np.float32) / 8 / math.sqrt(ins)
        del quantized[name]
        stem = name.removesuffix("weight")
        quantized[f"{stem}qweight"], quantized[f"{stem}scales"] = packed(q), scale
        quantized[f"{stem}qzeros"] = np.ascontiguousarray(packed(zero.T).T)
        values = (q - np.repeat(zero, GROUP, 0)) * np.repeat(scale, GROUP, 0)
        dense[name] = np.ascontiguousarray(values.T).astype(np.float32)
    folders = []
    for kind, tensors in (("packed", quantized), ("dense", dense)):
        folder = tmp_path_factory.mktemp(kind)
        save_tensors(folder, tensors, json.loads((source / "config.json").read_text()))
        folders.append(folder)
    return folders[0], folders[1]


def load(directory: Path, **options: Any) -> Decoder:
    return load_decoder(directory, load_model_config(directory), jnp.dtype("float32"), **options)


def logits(model: Decoder, tokens: Array) -> Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _, _ = decoder.run(model, tokens, positions, model.no_states(), dense_causal_attend)
    return decoder.logits(model, hidden)


@pytest.mark.parametrize("devices", [1, 2])
def test_it_computes_what_its_checkpoint_says(checkpoints: tuple[Path, Path], devices: int):
    directory, reference = checkpoints
    mesh = make_mesh(tensor_parallel=devices)
    model: Any = load(directory, mesh=mesh, kind=packed_shapes)
    layer = model.layers[1]
    assert isinstance(layer.mixer.o, Packed) and isinstance(model.lm_head, Linear)
    assert layer.mlp.down.qweight.addressable_shards[0].data.shape == (16 // devices, 64)
    forward = jax.shard_map(
        logits,
        mesh=mesh,
        in_specs=(partition_specs(model), P()),
        out_specs=P(None, None, MODEL_AXIS),
        check_vma=False,
    )
    wanted = np.asarray(jax.jit(logits)(load(reference), TOKENS))
    found = np.asarray(jax.jit(forward)(model, jnp.asarray(TOKENS)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_it_is_written_as_it_was_read(checkpoints: tuple[Path, Path], tmp_path: Path):
    directory, _ = checkpoints
    model = load(directory, kind=packed_shapes)
    save_tree(tmp_path, model, model.mapped(splitting()), {})
    read, written = (load_file(f / "model.safetensors") for f in (directory, tmp_path))
    assert set(written) == set(read)
    for name, tensor in read.items():
        np.testing.assert_array_equal(written[name], tensor)
