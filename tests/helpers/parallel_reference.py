"""A P-EAGLE head (arXiv 2602.01469) written out in NumPy: the specification that tests compare to.

It shares nothing with jaxspec. Tensors are named and laid out as in a checkpoint ([out, in]), and
everything is computed in float64. The entry of token ``i`` pairs its embedding with the target's
states at token ``i - 1``. Behind the last token stand entries of masks, and each entry attends to
itself and to those before it. The output of an entry is the token after it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.helpers.block_reference import norm, rotate

Tensors = Mapping[str, np.ndarray]


def parallel_logits(
    tensors: Tensors,
    config: Mapping[str, Any],
    embeddings: np.ndarray,  # [V, H] the target's; a head with its own ignores them
    tokens: np.ndarray,  # [T] the committed tokens
    captured: np.ndarray,  # [T - 1, C] the target's states at all of them but the last
    depth: int,
) -> np.ndarray:
    """Draft logits of the tokens after the last one: [depth, W]."""
    weights = {name: np.asarray(one, np.float64) for name, one in tensors.items()}
    eps, masks = config["rms_norm_eps"], depth - 1
    table = weights.get("embed_tokens.weight", np.asarray(embeddings, np.float64))
    embedded = table[[*tokens[1:], *[config["mask_token_id"]] * masks]]  # [E, H]
    states = np.concatenate([captured, np.repeat(weights["mask_hidden"][0], masks, axis=0)])
    hidden = states @ weights["fc.weight"].T
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        read = norm(embedded if index == 0 else hidden, own["input_layernorm.weight"], eps)
        if index == 0:
            normed = norm(hidden, own["hidden_norm.weight"], eps)
            read = np.concatenate([read, normed], axis=1)
            hidden = normed if config.get("norm_before_residual") else hidden
        hidden = hidden + _attended(own, config, read)
        read = norm(hidden, own["post_attention_layernorm.weight"], eps)
        gate, up = (read @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj.weight"].T
    return norm(hidden[-depth:], weights["norm.weight"], eps) @ weights["lm_head.weight"].T


def _attended(own: Tensors, config: Mapping[str, Any], read: np.ndarray) -> np.ndarray:
    """Causal attention of consecutive entries from position 0, projected: [E, in] -> [E, H]."""
    groups, head_dim = config["num_key_value_heads"], config["head_dim"]
    queries, keys, values = (
        (read @ own[f"self_attn.{name}_proj.weight"].T).reshape(len(read), -1, head_dim)
        for name in "qkv"
    )
    theta = config["rope_theta"]
    queries, keys = (
        np.stack([rotate(x, position, theta) for position, x in enumerate(heads)])
        for heads in (queries, keys)
    )
    share, out = queries.shape[1] // groups, np.zeros_like(queries)
    for entry in range(len(read)):
        for head, query in enumerate(queries[entry]):
            scores = keys[: entry + 1, head // share] @ query / np.sqrt(head_dim)
            shares = np.exp(scores - scores.max())
            out[entry, head] = shares @ values[: entry + 1, head // share] / shares.sum()
    return out.reshape(len(read), -1) @ own["self_attn.o_proj.weight"].T
