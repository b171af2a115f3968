"""Our logits, to compare with transformers'."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import Geometry, page_slots, pages_for
from jaxspec.models import decoder
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import Decoder
from jaxspec.models.hf_config import load_model_config
from jaxspec.weights.safetensors_io import load_decoder
from pallas_kernels.selection import Kernels


def load(directory: Path) -> Decoder:
    return load_decoder(directory, load_model_config(directory), jnp.dtype(jnp.float32))


def assert_close(ours: jax.Array | np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


def paged_logits(
    model: Decoder,
    tokens: np.ndarray,
    page_size: int,
    step: int,
    kernels: Kernels = decoder.NO_KERNELS,
) -> np.ndarray:
    """Logits of a paged forward pass, ``step`` tokens at a time, pages in a random order."""
    batch, length = tokens.shape
    pages = pages_for(length, page_size)
    states = model.init_state(Geometry(1 + batch * pages, page_size, batch)).layers
    order = np.random.default_rng(2).permutation(batch * pages) + 1
    table = jnp.asarray(order.reshape(batch, pages), jnp.int32)

    @jax.jit
    def run(states, tokens, start):
        positions = jnp.broadcast_to(start + jnp.arange(step), tokens.shape)
        attend = PagedAttend(
            rows=jnp.arange(batch),
            page_table=table,
            context_lens=jnp.full((batch,), start),
            slots=page_slots(table, positions, jnp.ones_like(positions, bool), page_size),
            positions=positions,
            kv_lens=jnp.full((batch,), start + step),
        )
        hidden, states, _ = decoder.run(model, tokens, positions, states, attend, kernels=kernels)
        return decoder.logits(model, hidden), states

    parts = []
    for start in range(0, length, step):
        part, states = run(states, jnp.asarray(tokens[:, start : start + step]), start)
        parts.append(part)
    return np.concatenate(parts, axis=1)
