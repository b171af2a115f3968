"""Our logits, to compare with transformers'."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.cache import Geometry, LayerStates, page_slots
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.config.cache import pages_for
from jaxspec.models import decoder
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import load_model_config
from jaxspec.models.heads import DraftHead
from pallas_kernels.selection import Kernels


def load(directory: Path) -> Decoder:
    return load_decoder(directory, load_model_config(directory), jnp.dtype(jnp.float32))


def assert_close(ours: Array | np.ndarray, theirs: np.ndarray) -> None:
    """Logits of a few units, within 2e-4."""
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)


def paged_logits(
    model: Decoder,
    tokens: np.ndarray,
    page_size: int,
    step: int,
    kernels: Kernels = decoder.NO_KERNELS,
) -> np.ndarray:
    """Logits of a paged forward pass, ``step`` tokens at a time, pages in a random order."""

    def run(states: LayerStates, attend: PagedAttend, tokens: Array) -> tuple[Array, LayerStates]:
        hidden, states, _ = decoder.run(
            model, tokens, attend.positions, states, attend, kernels=kernels
        )
        return decoder.logits(model, hidden), states

    return _in_pieces(model, run, page_size, step, tokens)


def paged_head_logits(
    head: DraftHead,
    target: Decoder,
    tokens: np.ndarray,
    hidden: np.ndarray,
    page_size: int,
    step: int,
) -> np.ndarray:
    """The same of a draft head, over tokens and the target's hidden states before them."""

    def run(
        states: LayerStates, attend: PagedAttend, tokens: Array, hidden: Array
    ) -> tuple[Array, LayerStates]:
        out = head.run(target, tokens, hidden, attend.positions, states, attend)
        return head.logits(target, out.normed), out.states

    return _in_pieces(head, run, page_size, step, tokens, hidden)


def _in_pieces(
    model: Decoder | DraftHead,
    run: Callable[..., tuple[Array, LayerStates]],
    page_size: int,
    step: int,
    *inputs: np.ndarray,  # [B, T, ...]
) -> np.ndarray:
    batch, length = inputs[0].shape[:2]
    pages = pages_for(length, page_size)
    states = model.init_state(Geometry(1 + batch * pages, page_size, batch)).layers
    order = np.random.default_rng(2).permutation(batch * pages) + 1
    table = jnp.asarray(order.reshape(batch, pages), jnp.int32)

    @jax.jit
    def piece(states: LayerStates, start: int, *inputs: Array) -> tuple[Array, LayerStates]:
        positions = jnp.broadcast_to(start + jnp.arange(step), (batch, step))
        attend = PagedAttend(
            rows=jnp.arange(batch),
            page_table=table,
            context_lens=jnp.full((batch,), start),
            slots=page_slots(table, positions, jnp.ones_like(positions, bool), page_size),
            positions=positions,
            kv_lens=jnp.full((batch,), start + step),
        )
        return run(states, attend, *inputs)

    parts = []
    for start in range(0, length, step):
        own = [jnp.asarray(x[:, start : start + step]) for x in inputs]
        part, states = piece(states, start, *own)
        parts.append(part)
    return np.concatenate(parts, axis=1)
