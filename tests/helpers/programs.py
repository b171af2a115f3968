"""Options and helpers for compiled programs."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxspec import functional
from jaxspec.decoding.state import EngineState
from jaxspec.functional import EngineParams

FAST_COMPILE = {"xla_backend_optimization_level": "0"}  # of tests' time compiling takes the most


def new_jit(function: Callable[..., Any], *static: str) -> Any:
    """``function`` of (params, state, ...) with its state donated, and a trace cache of its own.

    (jax.jit of one and the same function shares its cache wherever it is called.) ``static`` names
    its static arguments.
    """
    wrapped = functools.partial(function)
    return jax.jit(wrapped, donate_argnums=1, static_argnames=static, compiler_options=FAST_COMPILE)


def traces(jitted: Any) -> int:
    return jitted._cache_size()


def decode_hlo(
    params: EngineParams, state: EngineState, *, donate: bool = True, **options: Any
) -> str:
    """An engine's decode program as XLA's CPU compiler left it; ``options`` are decode's."""
    decode = functools.partial(functional.decode, max_rounds=3, checked=False, **options)
    jitted = jax.jit(decode, donate_argnums=(1,) if donate else ())
    return _text(jitted.lower(params, state, 3))


def prefill_hlo(params: EngineParams, state: EngineState, **options: Any) -> str:
    """The prefill program as XLA's CPU compiler left it; ``options`` are prefill's."""
    prefill = functools.partial(functional.prefill, **options)
    return _text(jax.jit(prefill, donate_argnums=1).lower(params, state))


def _text(lowered: Any) -> str:
    text = lowered.compile(compiler_options=FAST_COMPILE).as_text()
    assert text is not None
    return text
