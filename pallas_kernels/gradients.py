"""Gradients of kernels, taken from their references."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def with_reference_gradient(
    kernel: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    """The kernel, with the gradient of its reference.

    Under reverse-mode differentiation the reference runs in place of the kernel, forward pass
    included.
    """

    function = jax.custom_vjp(kernel)
    forward = functools.partial(jax.vjp, reference)
    function.defvjp(forward, lambda pullback, cotangent: pullback(cotangent))
    return function
