"""Products that accumulate and return float32 on every backend.

Float32 operands are multiplied as float32: by default a GPU rounds them to TF32, of 10 bits.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

Product = Callable[..., Array]


def precision_of(*dtypes: jax.typing.DTypeLike) -> jax.lax.Precision | None:
    """What a product of such operands asks for: HIGHEST if all are float32, else the default."""
    if all(jnp.dtype(dtype) == jnp.float32 for dtype in dtypes):
        return jax.lax.Precision.HIGHEST
    return None


def einsum_f32(subscripts: str, x: Array, y: Array) -> Array:
    """``jnp.einsum`` of two operands with a float32 result.

    XLA's CPU backend has no bfloat16 product with a float32 result, so there the operands are
    widened first; elsewhere they are multiplied as they are.
    """
    return _widened_on_cpu(functools.partial(jnp.einsum, subscripts), x, y)


def product_parts(x: Array, weight: Array, num_parts: int) -> Array:
    """Parts of x [B, ..., K] times weight [K, ...], each over a run of K; their sum is the product.

    Returns float32 [num_parts, B, ...]. Narrow products of few rows fill a GPU only when they are
    divided; a kernel that reads all the parts spares a launch for their sum. A single row gets a
    second one of zeros, lest XLA make elementwise products of it: on an H100 they took twice as
    long as the matrix product.
    """
    if x.size == x.shape[-1]:
        x = jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1))
    rows = x.reshape(-1, num_parts, x.shape[-1] // num_parts)
    runs = weight.reshape(num_parts, weight.shape[0] // num_parts, -1)
    dimensions = (((2,), (1,)), ((1,), (0,)))
    parts = _widened_on_cpu(_dot_general(dimensions), rows, runs)
    return parts.reshape(num_parts, *x.shape[:-1], *weight.shape[1:])


def sum_parts(parts: Array, batch: int, dtype: jnp.dtype) -> Array:
    """A product [batch, ...] from its parts [S, B, ...], whose rows past ``batch`` are padding."""
    kept = parts[:, :batch]
    return kept[0].astype(dtype) if len(parts) == 1 else jnp.sum(kept, axis=0).astype(dtype)


def total_f32(parts: Sequence[Array]) -> Array:
    """The parts' float32 sum, in order; for kernels, which hold each part by itself."""
    return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))


def scores_f32(q: Array, k: Array) -> Array:
    """q [B, G, M, D] times k [B, G, S, D] over D: float32 [B, G, M, S].

    A plain dot_general, because jnp.einsum may put the larger operand first, and a softmax over
    scores laid out [S, M] is slow on GPUs (measured on an H100: 37 us a layer against 19).
    """
    dimensions = (((3,), (3,)), ((0, 1), (0, 1)))
    return _widened_on_cpu(_dot_general(dimensions), q, k)


def weighted_sum_f32(weights: Array, v: Array) -> Array:
    """weights [B, G, M, S] times v [B, G, S, D] over S: float32 [B, G, M, D]."""
    dimensions = (((3,), (2,)), ((0, 1), (0, 1)))
    return _widened_on_cpu(_dot_general(dimensions), weights, v)


def _dot_general(dimensions: jax.lax.DotDimensionNumbers) -> Product:
    return functools.partial(jax.lax.dot_general, dimension_numbers=dimensions)


def _widened_on_cpu(product: Product, x: Array, y: Array) -> Array:
    precision = precision_of(x.dtype, y.dtype)
    product = functools.partial(product, precision=precision, preferred_element_type=jnp.float32)

    def widened(x: Array, y: Array) -> Array:
        return product(x.astype(jnp.float32), y.astype(jnp.float32))

    if x.dtype == y.dtype == jnp.float32:
        return product(x, y)
    return jax.lax.platform_dependent(x, y, cpu=widened, default=product)
