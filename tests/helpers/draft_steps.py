"""Logits of MTP layers, step by step over whole sequences, against given ones."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import DraftHead
from tests.helpers.parity import assert_close


def assert_steps_have_logits(
    target: Decoder, heads: Sequence[DraftHead], tokens: np.ndarray, expected: Sequence[np.ndarray]
) -> None:
    """A head for each step, of which the second reads what the first recycles. Of tokens [B, T] a
    step has logits [B, T - step, V]."""
    shape = len(tokens), tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    ids = jnp.asarray(tokens)
    captured = decoder.run(
        *(target, ids, positions, target.no_states(), dense_causal_attend, heads[0].capture)
    )[2]
    assert captured is not None and captured.shape[-1] == heads[0].feature_size(target)
    hidden = heads[0].hidden(captured)
    for step, (head, logits) in enumerate(zip(heads, expected, strict=True), start=1):
        where = positions[:, : shape[1] - step]
        read = ids[:, step:], hidden[:, :-1], where, (None,), dense_causal_attend
        out = head.run(target, *read)
        assert_close(head.logits(target, out.normed), logits)
        hidden = out.hidden
