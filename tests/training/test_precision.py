"""The dtype and attention that ``auto`` chooses, and the cast of weights."""

import jax.numpy as jnp
import pytest

from jaxspec.training import precision
from jaxspec.training.precision import cast_weights, resolve_precision


def test_auto_on_a_cpu_is_what_works_there():
    assert resolve_precision("auto", "auto", 64) == ("float32", "xla")
    assert resolve_precision("bfloat16", "auto", 64) == ("bfloat16", "xla")
    for dtype in ("auto", "bfloat16", "float32"):
        with pytest.raises(ValueError, match="needs bfloat16 and a GPU"):
            resolve_precision(dtype, "cudnn", 64)


def test_flash_attention_is_for_bfloat16(monkeypatch):
    monkeypatch.setattr(precision, "flash_attention_works", lambda head_dim: head_dim == 64)
    assert resolve_precision("bfloat16", "auto", 64) == ("bfloat16", "cudnn")
    assert resolve_precision("bfloat16", "cudnn", 64) == ("bfloat16", "cudnn")
    assert resolve_precision("bfloat16", "xla", 64) == ("bfloat16", "xla")
    assert resolve_precision("bfloat16", "auto", 63) == ("bfloat16", "xla")
    assert resolve_precision("float32", "auto", 64) == ("float32", "xla")
    with pytest.raises(ValueError, match="needs bfloat16"):
        resolve_precision("float32", "cudnn", 64)


def test_only_floats_are_cast():
    weights = {"ids": jnp.arange(3), "w": jnp.ones(3), "nothing": None}
    cast = cast_weights(weights, jnp.bfloat16)
    assert cast["w"].dtype == jnp.bfloat16 and cast["ids"].dtype == jnp.int32
    assert cast["nothing"] is None
