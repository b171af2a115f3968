"""The shared expert as the last of a layer's experts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.kernel_order import in_order
from jaxspec.config.experts import ExpertsConfig, RoutingConfig
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.mlps.experts import Experts, experts_shape
from jaxspec.models.quantized.float8 import Float8Linear, as_linear, float8_shape
from jaxspec.models.quantized.float8_experts import float8_experts_shape
from jaxspec.models.quantized.packed_experts import packed_experts
from jaxspec.models.quantized.shared_among import shared_among
from jaxspec.parallel import Layout, Shards
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.random_models import as_dtype

SIZE, BLOCK = 128, (128, 128)
CONFIG = ExpertsConfig(
    2 * SIZE, RoutingConfig(4, 2, normalize=True), shared_size=2 * SIZE, shared_gate=True
)
STEP = ForwardPass(dense_causal_attend, {}, {}, 1e-6, Layout(), NO_KERNELS)


# One program, not one for every operation.
jit_packed = jax.jit(packed_experts)


def numbers(rng: np.random.Generator, shape: jax.ShapeDtypeStruct) -> jax.Array:
    return as_dtype(rng.normal(size=shape.shape, scale=0.3), shape.dtype)


def experts(config: ExpertsConfig = CONFIG, *, packed: bool = True) -> Any:
    """Random experts in blocks of 8-bit floats, the shared one, too, as a loader has them: on a GPU
    whose kernel reads them, ``packed``."""
    made: Any = experts_shape(config, SIZE, jnp.dtype("float32"), Shards())
    formats = {
        name: float8_experts_shape(getattr(made, name), BLOCK, jnp.dtype("float32"))
        for name in ("gate_up", "down")
    }
    shared = made.shared.replace(
        gate_up=float8_shape(made.shared.gate_up, 1, jnp.dtype("float32")),
        down=float8_shape(made.shared.down, config.shared_size // SIZE, jnp.dtype("float32")),
    )
    rng = np.random.default_rng(0)
    made = jax.tree.map(lambda shape: numbers(rng, shape), made.replace(**formats, shared=shared))
    if packed:
        made = made.replace(gate_up=jit_packed(made.gate_up), down=jit_packed(made.down))
    return made.replace(
        shared=made.shared.replace(
            gate_up=in_blocks(made.shared.gate_up), down=in_blocks(made.shared.down)
        )
    )


def in_blocks(linear: Float8Linear) -> Float8Linear:
    """With the same scales for all outputs of a block."""
    size = linear.out_shape[-1]
    of_blocks = np.repeat(np.asarray(linear.scale)[..., :: BLOCK[0]], BLOCK[0], axis=-1)
    return linear.replace(scale=jax.device_put(of_blocks[..., :size]))


@jax.jit
def result(made: Experts, x: jax.Array) -> jax.Array:
    mixture = made(x, STEP)
    return mixture.partial_sums(Layout(), NO_KERNELS, lambda *_: False)[0]


def test_it_is_computed_beside_the_others():
    among = shared_among(experts())
    assert among.last is None and among.gate_up.num_experts == 5
    assert_beside(experts(), among)


def test_others_of_4_bits_have_it_beside_them():
    made = experts()
    made = made.replace(gate_up=in_mxfp4(made.gate_up), down=in_mxfp4(made.down))
    among = shared_among(made)
    assert among.last is not None and among.gate_up.num_experts == 4
    assert among.share_read(2) == 2 / 4
    assert_beside(made, among)


def in_mxfp4(linear: Any) -> Any:
    """Random numbers and scales in the place of others."""
    *outputs, size = linear.values.shape
    rng = np.random.default_rng(2)
    values = rng.integers(0, 256, (*outputs, size // 2), np.uint8)
    scale = rng.integers(121, 124, (*outputs[:-1], size // 32, outputs[-1]), np.uint8)
    how = {"code": "e2m1", "block": (1, 32)}
    return linear.replace(values=jnp.asarray(values), scale=jnp.asarray(scale), **how)


def assert_beside(made: Any, among: Any) -> None:
    """The same as with a wide shared expert."""
    assert among.shared is None and among.shared_is_last
    x = numbers(np.random.default_rng(1), jax.ShapeDtypeStruct((2, 3, SIZE), jnp.dtype("float32")))
    wide = made.shared.replace(  # in 8 bits it would round its inputs
        gate_up=as_linear(made.shared.gate_up, jnp.dtype("float32")),
        down=as_linear(made.shared.down, jnp.dtype("float32")),
    )
    wanted = result(made.replace(shared=wide), x)
    np.testing.assert_allclose(result(among, x), wanted, atol=2e-5 * float(jnp.abs(wanted).max()))


def test_without_a_gate_it_counts_whole():
    config = dataclasses.replace(CONFIG, shared_gate=False)
    made = experts(config)
    x = numbers(np.random.default_rng(1), jax.ShapeDtypeStruct((1, 2, SIZE), jnp.dtype("float32")))
    with_gate = shared_among(experts()).replace(shared_gate=None)
    np.testing.assert_array_equal(result(shared_among(made), x), result(with_gate, x))


def test_where_the_kernel_does_not_run_it_stays():
    made = experts(packed=False)
    assert in_order(made).shared is not None or jax.default_backend() == "gpu"


def test_what_does_not_fit_exactly_stays():
    made = experts()
    shared = made.shared
    uneven = shared.gate_up.replace(scale=shared.gate_up.scale.at[0, 0, 3].multiply(2))
    narrow = dataclasses.replace(CONFIG, shared_size=SIZE)
    latent = dataclasses.replace(CONFIG, latent=SIZE)
    of_groups = made.gate_up.replace(block=(1, 32))  # scales of as many columns, as MXFP8 has them
    none = dataclasses.replace(CONFIG, shared_size=0, shared_gate=False)
    for other in (
        made.replace(shared=shared.replace(gate_up=uneven)),
        made.replace(shared=shared.replace(down=as_linear(shared.down, jnp.dtype("float32")))),
        made.replace(gate_up=of_groups),
        experts(narrow),
        made.replace(config=latent),
        made.replace(shared=None, config=none),
    ):
        assert shared_among(other) is other
