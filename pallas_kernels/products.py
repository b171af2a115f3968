"""Matrix products that accumulate in float32 and return float32 on every backend.

Float32 operands are multiplied as float32. By default a GPU would round them to TF32, which has a
mantissa of 10 bits.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

Product = Callable[..., Array]


def precision_of(*dtypes: jax.typing.DTypeLike) -> jax.lax.Precision | None:
    """The precision of a product of such operands: HIGHEST if all are float32, else the default."""
    if all(jnp.dtype(dtype) == jnp.float32 for dtype in dtypes):
        return jax.lax.Precision.HIGHEST
    return None


def einsum_f32(subscripts: str, x: Array, y: Array) -> Array:
    """``jnp.einsum`` of two operands with a float32 result.

    XLA's CPU backend has no bfloat16 product with a float32 result, so there the operands are
    widened first; elsewhere they are multiplied as they are.
    """
    return _widened_on_cpu(functools.partial(jnp.einsum, subscripts), x, y)


def input_last_product(x: Array, weight: Array, dtype: jax.typing.DTypeLike) -> Array:
    """x [..., K] times weight [..., K], whose input stands last, over K: [..., *out] in ``dtype``.

    Float32 results are accumulated as by ``einsum_f32``.
    """
    dimensions = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    if dtype == jnp.float32:
        return _widened_on_cpu(_dot_general(dimensions), x, weight)
    return jax.lax.dot_general(x, weight, dimensions).astype(dtype)


def split_k_product(x: Array, weight: Array, num_splits: int) -> Array:
    """Split-K partial sums of x [B, ..., K] times weight [K, ...]; their sum is the product.

    Each partial sum covers ``K / num_splits`` consecutive entries of K. Narrow products of few rows
    fill a GPU only when they are split. A kernel that adds up the partial sums as it reads them
    saves the launch that would otherwise do so.

    A single row is padded with a row of zeros. Otherwise XLA would compute elementwise products,
    which took twice as long as the matrix product on an H100.

    Returns float32 [num_splits, B, ...], where B is 2 for a single row.
    """
    if x.size == x.shape[-1]:
        x = jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1))
    rows = x.reshape(-1, num_splits, x.shape[-1] // num_splits)
    slices = weight.reshape(num_splits, weight.shape[0] // num_splits, -1)
    dimensions = (((2,), (1,)), ((1,), (0,)))
    partials = _widened_on_cpu(_dot_general(dimensions), rows, slices)
    return partials.reshape(num_splits, *x.shape[:-1], *weight.shape[1:])


def sum_partials(partials: Array, batch: int, dtype: jnp.dtype) -> Array:
    """The product [batch, ...] of partial sums [S, B, ...]; rows past ``batch`` are padding."""
    kept = partials[:, :batch]
    return kept[0].astype(dtype) if len(partials) == 1 else jnp.sum(kept, axis=0).astype(dtype)


def added_up(partials: Array, batch: int) -> Array:
    """The float32 product [batch, ...] of partial sums: as ``sum_partials``, in additions that XLA
    fuses with an elementwise reader."""
    return total_f32(list(partials[:, :batch]))


def total_f32(partials: Sequence[Array]) -> Array:
    """The float32 sum of separate arrays, in order. For kernels, which load them one by one."""
    return functools.reduce(jnp.add, (partial.astype(jnp.float32) for partial in partials))


def scores_f32(q: Array, k: Array) -> Array:
    """q [B, G, M, D] times k [B, G, S, D] over D: float32 [B, G, M, S].

    Uses dot_general because jnp.einsum may put the larger operand first. A softmax over scores laid
    out as [S, M] is slow on GPUs (measured on an H100: 37 us per layer, against 19).
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
