"""A block head written out in NumPy: the specification that tests compare to.

It shares nothing with jaxspec. Tensors are named and laid out as in a checkpoint ([out, in]), and
everything is computed in float64, one query at a time, from DFlash's (arXiv 2602.06036) and
DSpark's (arXiv 2607.05147) equations.

The context of a layer are keys and values of all committed tokens but the last, projected from
``hidden_norm(fc(captured))`` without the layer's input norm. The block is the last token and masks.
Every one of its tokens attends to the whole context and to the whole block, but for windows, which
go along with the token, and for causal layers. MiMo's heads rotate a part of each head, scale
values, and have a score for attending to nothing; its mask may have an embedding of its own.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]


def block_outputs(
    tensors: Tensors,
    config: Mapping[str, Any],
    embeddings: np.ndarray,  # [V, H] the target's
    captured: np.ndarray,  # [S, C] the target's states at the committed tokens but the last
    root: int,  # the last committed token, at position S
    depth: int,
    mask: np.ndarray | None = None,  # [H] the mask's embedding, if it is not the target's
    with_root: bool = False,  # where no token is drafted at the root, its output comes first
) -> np.ndarray:
    """The normed output of each drafted position: [depth, H]. Its product with the target's LM head
    is the logits before a correction."""
    weights = {name: np.asarray(one, np.float64) for name, one in tensors.items()}
    options = config.get("dflash_config") or config
    is_dspark = config["architectures"] in (["Qwen3DSparkModel"], ["DSparkDraftModel"])
    shifted = options.get("shift_label", False)  # Domino's: its last mask drafts nothing
    eps, size = config["rms_norm_eps"], len(captured)
    tokens = [root] + [options["mask_token_id"]] * (depth - 1 if is_dspark else depth)
    fused = np.asarray(captured, np.float64) @ weights["fc.weight"].T
    context = norm(fused, weights["hidden_norm.weight"], eps)  # [S, H]
    x = np.asarray(embeddings, np.float64)[tokens]  # [T, H]
    if mask is not None:
        x[1:] = mask
    for index in range(config["num_hidden_layers"]):
        own = {
            name.removeprefix(f"layers.{index}."): one
            for name, one in weights.items()
            if name.startswith(f"layers.{index}.")
        }
        read = norm(x, own["input_layernorm.weight"], eps)
        taps = _taps(own, "attention_conv.", read)
        read = _convolved(read, taps, 0)
        keys, values = _keys_and_values(own, config, np.concatenate([context, read]))
        mixed = []
        for position in range(size, size + len(tokens)):
            seen = sees(config, index, position, len(keys))
            mixed.append(
                _attended(own, config, read[position - size], position, keys[seen], values[seen])
            )
        x = x + _convolved(np.stack(mixed) @ own["self_attn.o_proj.weight"].T, taps, 1)
        read = norm(x, own["post_attention_layernorm.weight"], eps)
        taps = _taps(own, "mlp_conv.", read)
        read = _convolved(read, taps, 0)
        gate, up = (read @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        units = gate / (1 + np.exp(-gate)) * up
        x = x + _convolved(units @ own["mlp.down_proj.weight"].T, taps, 1)
    out = norm(x, weights["norm.weight"], eps)
    if shifted:
        return out[:-1]
    return out if is_dspark or with_root else out[1:]


def _taps(own: Tensors, prefix: str, read: np.ndarray) -> np.ndarray | None:
    """DFlash 2: what a block's tokens [T, H] weigh themselves and those before them with, [T, 2,
    taps, H]; None: there are no convolutions."""
    base = own.get(f"{prefix}base_kernel")
    if base is None:
        return None
    said = read @ own[f"{prefix}kernel_projection.weight"].T
    said = said.reshape(len(read), *base.shape[:2], -1)
    return base + np.repeat(said, base.shape[2] // said.shape[3], axis=3)


def _convolved(x: np.ndarray, taps: np.ndarray | None, side: int) -> np.ndarray:
    """What goes into an attention or an MLP (side 0), or comes out of it, mixed: [T, H]."""
    if taps is None:
        return x
    out = np.zeros_like(x)
    for token in range(len(x)):
        for back in range(min(taps.shape[2], token + 1)):
            out[token] += taps[token, side, back] * x[token - back]
    return out


def sees(config: Mapping[str, Any], layer: int, position: int, size: int) -> np.ndarray:
    """The indices of the ``size`` tokens that one at a position sees in a layer."""
    options, kinds = config.get("dflash_config") or {}, config.get("layer_types") or []
    slides = layer < len(kinds) and kinds[layer] == "sliding_attention"
    window = config["sliding_window"] if slides else size
    causal = slides
    if options.get("use_swa") and "sliding_attention" not in kinds:
        window = options["swa_window_size"]
    for flag in (config.get("is_causal"), options.get("causal"), options.get("causal_head")):
        causal = causal if flag is None else flag
    first = max(position - window + 1, 0)
    return np.arange(first, position + 1 if causal else size)


def confidence(tensors: Tensors, outputs: np.ndarray, before: list[int]) -> np.ndarray:
    """How likely the tokens of each depth are accepted, from outputs [depth, H] and the tokens
    before: [depth]."""
    weights = {name: np.asarray(one, np.float64) for name, one in tensors.items()}
    read = np.concatenate([outputs, weights["markov_head.markov_w1.weight"][before]], axis=1)
    logits = read @ weights["confidence_head.proj.weight"][0]
    return 1 / (1 + np.exp(-logits - weights["confidence_head.proj.bias"]))


def markov_logits(tensors: Tensors, token: int) -> np.ndarray:
    """What a token adds to the logits of the one after it: [V]."""
    before, after = (
        np.asarray(tensors[f"markov_head.markov_{name}.weight"], np.float64)
        for name in ("w1", "w2")
    )
    return after @ before[token]


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Heads [..., D] at a position."""
    half = x.shape[-1] // 2
    angles = position * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _keys_and_values(
    own: Tensors, config: Mapping[str, Any], read: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of consecutive tokens from position 0: [S, G, D] each."""
    shape = (len(read), config["num_key_value_heads"], config["head_dim"])
    keys = (read @ own["self_attn.k_proj.weight"].T).reshape(shape)
    values = (read @ own["self_attn.v_proj.weight"].T).reshape(shape)
    keys = norm(keys, own["self_attn.k_norm.weight"], config["rms_norm_eps"])
    values = values * (config.get("dflash_config") or {}).get("attention_value_scale", 1)
    return np.stack([_rotated(key, i, config) for i, key in enumerate(keys)]), values


def _rotated(x: np.ndarray, position: int, config: Mapping[str, Any]) -> np.ndarray:
    """Heads [..., D], of which the first entries are rotated."""
    size = int(x.shape[-1] * config.get("partial_rotary_factor", 1))
    return np.concatenate(
        [rotate(x[..., :size], position, config["rope_theta"]), x[..., size:]], axis=-1
    )


def _attended(
    own: Tensors,
    config: Mapping[str, Any],
    read: np.ndarray,  # [H]
    position: int,
    keys: np.ndarray,
    values: np.ndarray,
) -> np.ndarray:
    """What one token attends to, of all heads: [Q * D]."""
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    queries = (own["self_attn.q_proj.weight"] @ read).reshape(heads, head_dim)
    queries = norm(queries, own["self_attn.q_norm.weight"], config["rms_norm_eps"])
    queries = _rotated(queries, position, config)
    share = heads // config["num_key_value_heads"]
    out = []
    for head, query in enumerate(queries):
        scores = keys[:, head // share] @ query / np.sqrt(head_dim)
        weights = np.exp(scores - scores.max())
        total = weights.sum()
        if (sinks := own.get("self_attn.attention_sink_bias")) is not None:
            total += np.exp(sinks[head] - scores.max())
        out.append(weights / total @ values[:, head // share])
    return np.concatenate(out)
