"""The dtype that training computes in, and the attention that goes with it."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.dense_attention import dense_causal_attention
from jaxspec.models.forward_pass import Attend

ComputeDtype = Literal["bfloat16", "float32"]
Attention = Literal["xla", "cudnn"]


def resolve_precision(
    dtype: ComputeDtype | Literal["auto"], attention: Attention | Literal["auto"], head_dim: int
) -> tuple[ComputeDtype, Attention]:
    """(dtype, attention) with ``auto`` replaced: bfloat16 on a GPU, and cudnn where it works.

    Raises ValueError if cudnn is asked for and does not work.
    """
    if dtype == "auto":
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    if attention == "xla":
        return dtype, "xla"
    if dtype == "bfloat16" and flash_attention_works(head_dim):
        return dtype, "cudnn"
    if attention == "cudnn":
        raise ValueError(
            "cudnn attention needs bfloat16 and a GPU whose cuDNN supports it: choose auto or xla"
        )
    return dtype, "xla"


def flash_attention_works(head_dim: int) -> bool:
    """Whether cuDNN's attention and its gradient compile and run on this machine."""
    if jax.default_backend() != "gpu":
        return False
    x = jnp.ones((1, 128, 1, head_dim), jnp.bfloat16)

    def total(x: jax.Array) -> jax.Array:
        return dense_causal_attention(x, x, x, implementation="cudnn").astype(jnp.float32).sum()

    try:
        jax.block_until_ready(jax.jit(jax.grad(total))(x))
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return True


def attention_of(implementation: Attention) -> Attend:
    return functools.partial(dense_causal_attend, implementation=implementation)


def cast_weights[T](weights: T, dtype: DTypeLike) -> T:
    """Weights in ``dtype``; leaves that are not floats, such as token ids, are not changed."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, weights
    )
