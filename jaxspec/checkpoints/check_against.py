"""A check that a target computes what a trainer's actor computes, for the start of a run."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.models.decoder import Decoder
from jaxspec.models.forward import forward

ROWS, LENGTH = 2, 64  # of the tokens that are tried; rotary angles differ more with the distance
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}  # by the target's dtype; rounding is a tenth of it

CAUSES = (
    "the first token's differ already: look at the layouts of the weights, at norms, biases, the "
    "scale of embeddings, and at LoRA weights (alpha, rank). MaxText computes in bfloat16 unless "
    "its dtype is float32, and divides logits of tied embeddings if normalize_embedding_logits is "
    "true",
    "the first token's agree: look at the rotary embedding (base, scaling, order of dimensions), "
    "and at attention (windows, masks). In Tunix Llama 3 and Qwen 3 have the base 1,000,000, "
    "whatever their config says. MaxText has rope_max_timescale and rope_use_scale for base and "
    "scaling; its Llama is maxtext.llama3.1 where rope_type or model_name begins with llama3.1, "
    "elsewhere maxtext.llama",
)


def check_against(
    actor_logits: Callable[[Any], Any],
    target: Decoder,
    tokens: Any = None,
    *,
    mesh: Mesh | None = None,
    tolerance: float | None = None,
) -> float:
    """Compare a target's logits with those of the actor whose weights it has. Once is enough: what
    differs is the computation, or the layout of the weights, and neither raises an error by itself.

    Args:
      actor_logits: called with ``tokens``, int32 [B, T], without padding; gives logits [B, T, V].
      tokens: what is tried. None: two rows of 64 random ids.
      mesh: of the target.
      tolerance: largest difference, in standard deviations of the actor's logits. None: 0.001, and
        0.1 of a target in bfloat16.

    Returns the largest difference in these units. Raises ValueError for a larger one, with what to
    look at, for logits that are not finite, and for logits of another shape.
    """
    vocab = target.config.vocab_size
    if tokens is None:
        tokens = np.random.default_rng(0).integers(vocab, size=(ROWS, LENGTH)).astype(np.int32)
    found = np.asarray(forward(target, jnp.asarray(tokens), mesh=mesh))
    wanted = np.asarray(actor_logits(jnp.asarray(tokens)), np.float32)
    if wanted.shape != found.shape:
        raise ValueError(
            f"actor_logits gave {list(wanted.shape)}, the target has logits {list(found.shape)}"
        )
    if not (np.isfinite(wanted).all() and np.isfinite(found).all()):
        raise ValueError("logits of the actor or the target are not finite numbers")
    unit = float(wanted.std()) or 1.0
    differences = np.abs(found - wanted).max(axis=(0, 2)) / unit  # [T]
    largest = float(differences.max())
    limit = TOLERANCES[target.dtype.name] if tolerance is None else tolerance
    if largest > limit:
        raise ValueError(
            f"the target's logits differ from the actor's by up to {largest:.2g} of their standard "
            f"deviation, at most {limit:g} is rounding: {CAUSES[bool(differences[0] <= limit)]}"
        )
    return largest
