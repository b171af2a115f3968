"""Scores text by a checkpoint, one layer at a time."""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxspec.evaluation.perplexity import Scores
from jaxspec.models import decoder
from jaxspec.models.decoder import Decoder
from jaxspec.models.layer import Layer
from jaxspec.models.norms import layer_norm, rms_norm
from jaxspec.quantize.checkpoint import Streamed, layer_kinds
from jaxspec.quantize.compiled import program
from jaxspec.quantize.layers import LayerKind, on_host, run_layer


def score(
    directory: Path,
    tokens: np.ndarray,
    counted: np.ndarray,
    batch: int,
    report: Callable[[int, int], None] | None = None,
) -> Scores:
    """Score sequences of tokens, int [N, T], by a checkpoint, computing in float32.

    Args:
      counted: bool [N, T], the tokens to predict; a sequence's first never is.
      batch: sequences that a layer runs over at a time.
      report: called with the layers done and their number.

    Raises ValueError for a checkpoint that cannot be read, and if no token is counted.
    """
    counted = counted[:, 1:]
    if not counted.any():
        raise ValueError("no token is left to measure perplexity on: give more text")
    model = Streamed(directory)
    ends, kinds = model.ends(), layer_kinds(model.config)
    rows = [slice(start, start + batch) for start in range(0, len(tokens), batch)]
    states = [np.asarray(decoder.embed(ends, jnp.asarray(tokens[each]))) for each in rows]
    for index, kind in enumerate(kinds):
        layer = model.layer(index)
        states = list(on_host(_after_layer(layer, each, kind) for each in states))
        if report is not None:
            report(index + 1, len(kinds))
    pairs = zip(states, rows, strict=True)
    nats = on_host(
        _nats(ends, hidden[:, :-1], tokens[each, 1:], counted[each]) for hidden, each in pairs
    )
    return Scores(np.concatenate(list(nats)).astype(np.float64), counted.sum(1))


@functools.partial(program, static_argnames=("kind",))
def _after_layer(layer: Layer, states: Array, kind: LayerKind) -> Array:
    return run_layer(layer, kind, states)


@program
def _nats(ends: Decoder, states: Array, targets: Array, counted: Array) -> Array:
    """Sums over the counted targets, [B, T] each, of states [B, T, H] before the last norm."""

    def of_row(row: tuple[Array, Array, Array]) -> Array:
        hidden, wanted, kept = row
        norm = layer_norm if ends.config.centred else rms_norm
        normed = norm(hidden, ends.norm, ends.config.rms_norm_eps)
        scores = jax.nn.log_softmax(decoder.logits(ends, normed))
        chosen = jnp.take_along_axis(scores, wanted[:, None], axis=-1)[:, 0]
        return -jnp.sum(jnp.where(kept, chosen, 0.0))

    return lax.map(of_row, (states, targets, counted))
