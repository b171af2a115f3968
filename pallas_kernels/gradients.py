"""Gradients of kernels, taken from their references."""

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

    def forward(*arguments: Any) -> tuple[Any, Any]:
        return jax.vjp(reference, *arguments)

    def backward(pullback: Any, cotangent: Any) -> Any:
        return pullback(cotangent)

    function = jax.custom_vjp(kernel)
    function.defvjp(forward, backward)
    return function
