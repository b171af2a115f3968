"""Small random assistants of Gemma 4 targets."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.checkpoints.assistant import ORDERING
from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.mixers import AttentionConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.assistant import assistant_config
from jaxspec.models.heads.assistant import Assistant, OrderedHead, assistant_shapes
from jaxspec.models.tensors import splitting
from jaxspec.parallel import ONE_SHARD
from tests.helpers.gemma4_checkpoints import ASSISTANT
from tests.helpers.random_models import random_arrays

GROUPS, CHOSEN = 8, 6


def assistant_keys(target: Decoder, *, ordered: bool) -> dict[str, Any]:
    """The ``config.json`` of an assistant whose layers are as wide as the target's."""
    kv_heads = {
        layer.mixer.window is None: layer.mixer.num_kv_heads
        for layer in target.config.layers
        if isinstance(layer.mixer, AttentionConfig)
    }
    return {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target.config.hidden_size,
        "use_ordered_embeddings": ordered,
        "num_centroids": GROUPS,
        "centroid_intermediate_top_k": CHOSEN,
        "text_config": ASSISTANT
        | {"vocab_size": target.config.vocab_size, "eos_token_id": None}
        | {"attention_k_eq_v": True, "num_key_value_heads": kv_heads[False]}
        | {"num_global_key_value_heads": kv_heads[True]},
    }


def random_assistant(target: Decoder, *, ordered: bool) -> Assistant:
    """One that reads mostly the token's embedding, and has the LM head of a target whose texts
    follow from that mostly."""
    config = assistant_config(assistant_keys(target, ordered=ordered), target.config)
    made = random_arrays(assistant_shapes(config, jnp.dtype(jnp.float32), ONE_SHARD), 3)
    size, lm_head = target.config.hidden_size, target.lm_head
    assert lm_head is not None
    rows: Array = lm_head.weight.T[: target.config.vocab_size]
    both = np.concatenate([np.eye(size), 0.05 * np.asarray(made.entry.weight[size:])])
    made = made.replace(entry=made.entry.replace(weight=jnp.asarray(both, jnp.float32)))
    if not ordered:
        return made.replace(lm_head=made.lm_head.replace(weight=rows.T))
    tokens = np.random.default_rng(5).permutation(len(rows)).reshape(GROUPS, -1)
    centroids = made.lm_head.centroids.replace(weight=rows[tokens].mean(axis=1).T)
    groups = jnp.asarray(tokens, jnp.int32)
    return made.replace(
        lm_head=made.lm_head.replace(centroids=centroids, embed=rows, tokens=groups)
    )


def save_assistant(directory: Path, assistant: Assistant, keys: dict[str, Any]) -> Path:
    """A checkpoint with the names of published ones."""
    extra: dict[str, np.ndarray] = {}
    if isinstance(assistant.lm_head, OrderedHead):
        extra[ORDERING] = np.asarray(assistant.lm_head.tokens, np.int64).reshape(-1)
        assistant = assistant.replace(lm_head=assistant.lm_head.replace(tokens=None))
    directory.mkdir()
    save_tree(directory, assistant, assistant.mapped(splitting()), keys, extra)
    return directory
