"""An EAGLE-3 or EAGLE-3.1 draft head written out in NumPy: the specification that tests compare to.

It shares nothing with jaxspec. Tensors are named and laid out as in a checkpoint ([out, in]), and
everything is computed in float64, one entry (token) at a time.

The entry of token ``i`` pairs the token's embedding with the hidden state of token ``i - 1``. Its
key and value go to slot ``i``; there is no entry 0, and slot 0 holds NaN so that a read would show.
While it reads the prompt the hidden state is the target's: the captured states, fused. While it
drafts, the hidden state is what the head itself recycled at the entry before.

EAGLE-3.1 (arXiv 2605.09992) is EAGLE-3 with any of these in its config:

- ``fc_norm``: each captured state has an RMSNorm of its own before ``fc``;
- ``norm_before_fc``: one RMSNorm over the concatenation of them instead;
- ``norm_output``: the head recycles its output after the final norm, not before it. The LM head
  reads the normed output either way, and norms it once only.

``norm_before_residual`` (vLLM's speculators): the residual starts from the normed hidden state.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.helpers.block_reference import norm, rotate

Tensors = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a head's config.json says, as far as the arithmetic depends on it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    num_captured: int  # how many of the target's hidden states fc reads
    fc_norm: bool
    norm_before_fc: bool
    norm_output: bool
    norm_before_residual: bool


def read_settings(config: Mapping[str, Any]) -> Settings:
    """From a flat config, or from that of vLLM's speculators, whose layer is a config inside."""
    speculators = "speculators_model_type" in config
    layer = config["transformer_layer_config"] if speculators else config
    nested = config.get("eagle_config") or {}
    rope = layer.get("rope_parameters") or layer
    kind = (layer.get("rope_scaling") or rope).get("rope_type", "default")
    if layer.get("num_hidden_layers", 1) != 1 or kind != "default":
        raise ValueError("the reference has one layer and the default rotary embedding only")

    def either(key: str) -> Any:
        return nested[key] if nested.get(key) is not None else config.get(key)

    num_captured = either("num_aux_hidden_states")
    if num_captured is None:
        num_captured = len(either("eagle_aux_hidden_state_layer_ids") or (0, 0, 0))
    before_residual = config.get("norm_before_residual")
    num_heads = layer["num_attention_heads"]
    settings = Settings(
        num_heads=num_heads,
        num_kv_heads=layer["num_key_value_heads"],
        head_dim=layer.get("head_dim") or layer["hidden_size"] // num_heads,
        eps=layer["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
        num_captured=num_captured,
        fc_norm=bool(either("fc_norm")),
        norm_before_fc=bool(either("norm_before_fc")),
        norm_output=bool(either("norm_output")),
        norm_before_residual=speculators if before_residual is None else before_residual,
    )
    if settings.fc_norm and settings.norm_before_fc:
        raise ValueError("fc_norm and norm_before_fc exclude each other")
    return settings


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What the head makes of E entries."""

    recycled: np.ndarray  # [E, H] the next entry's hidden state, if the head goes on by itself
    normed: np.ndarray  # [E, H] what the LM head reads
    logits: np.ndarray  # [E, W] over the draft vocabulary


@dataclasses.dataclass(frozen=True)
class Result:
    prompt: Outputs  # row i is the entry of token i; row 0 is NaN
    drafts: Outputs  # row j is the entry whose logits draft j is the argmax of
    tokens: np.ndarray  # [k] drafts, as ids of the target


def read_and_draft(
    tensors: Tensors,
    config: Mapping[str, Any],
    embeddings: np.ndarray,  # [V, H] the target's; a head with its own ignores them
    tokens: np.ndarray,  # [T] the committed tokens, T >= 2
    captured: np.ndarray,  # [T, C] the target's states at each of them; the last row is not read
    positions: np.ndarray,  # [T] their rotary positions
    num_drafts: int,  # at least 1
) -> Result:
    """Read the tokens, then draft ``num_drafts`` more, each the likeliest after the one before.

    A later round is the same call with more tokens: what the head wrote while it drafted is
    overwritten by entries made from the target's states.
    """
    settings = read_settings(config)
    _check_names(tensors, settings)
    weights = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    embeddings = weights.get("embed_tokens.weight", np.asarray(embeddings, np.float64))  # [V, H]
    head_ids = np.arange(len(weights["lm_head.weight"]))  # [W] draft ids
    target_ids = head_ids + np.asarray(tensors["d2t"]) if "d2t" in tensors else head_ids

    shape = (len(tokens) + num_drafts - 1, settings.num_kv_heads, settings.head_dim)
    keys, values = np.full(shape, np.nan), np.full(shape, np.nan)  # [S, G, D]

    def entry(slot: int, token: int, hidden: np.ndarray, position: int) -> list[np.ndarray]:
        embedding = embeddings[token]  # [H]
        return _entry(weights, settings, embedding, hidden, slot, position, keys, values)

    def likeliest(row: list[np.ndarray]) -> int:
        return int(target_ids[row[2].argmax()])

    rows = []
    for i in range(1, len(tokens)):
        hidden = fuse(weights, settings, np.asarray(captured[i - 1], np.float64))  # [H]
        rows.append(entry(i, tokens[i], hidden, positions[i - 1]))
    unread = [np.full_like(part, np.nan) for part in rows[-1]]

    drafted, draft_tokens = [rows[-1]], [likeliest(rows[-1])]
    for j in range(num_drafts - 1):
        recycled = drafted[-1][0]  # [H]
        drafted.append(entry(len(tokens) + j, draft_tokens[-1], recycled, positions[-1] + j))
        draft_tokens.append(likeliest(drafted[-1]))
    return Result(_stack([unread, *rows]), _stack(drafted), np.array(draft_tokens))


def _stack(rows: list[list[np.ndarray]]) -> Outputs:
    recycled, normed, logits = (np.array(parts) for parts in zip(*rows, strict=True))
    return Outputs(recycled, normed, logits)


def fuse(weights: Tensors, settings: Settings, captured: np.ndarray) -> np.ndarray:
    """One token's captured states, concatenated in the order of the layers: [C] -> [H]."""
    if settings.norm_before_fc:
        captured = norm(captured, weights["input_norm.weight"], settings.eps)
    if settings.fc_norm:
        states = captured.reshape(settings.num_captured, -1)  # [n, Ht]
        captured = np.concatenate(
            [
                norm(state, weights[f"fc_norm.{i}.weight"], settings.eps)
                for i, state in enumerate(states)
            ]
        )
    return _linear(weights, "fc", captured)


def _entry(
    weights: Tensors,
    settings: Settings,
    embedding: np.ndarray,  # [H]
    hidden: np.ndarray,  # [H]
    slot: int,
    position: int,
    keys: np.ndarray,  # [S, G, D], written at slot
    values: np.ndarray,
) -> list[np.ndarray]:
    """The recycled state [H], the normed one [H] and the logits [W] of one entry."""
    layer, eps = _layer_name(weights), settings.eps
    normed_hidden = norm(hidden, weights[f"{layer}.hidden_norm.weight"], eps)
    normed_embedding = norm(embedding, weights[f"{layer}.input_layernorm.weight"], eps)
    residual = normed_hidden if settings.norm_before_residual else hidden

    attention_input = np.concatenate([normed_embedding, normed_hidden])  # [2H]
    residual = residual + _attention(
        weights, settings, f"{layer}.self_attn", attention_input, slot, position, keys, values
    )
    mlp_input = norm(residual, weights[f"{layer}.post_attention_layernorm.weight"], eps)
    gate = _linear(weights, f"{layer}.mlp.gate_proj", mlp_input)  # [F]
    up = _linear(weights, f"{layer}.mlp.up_proj", mlp_input)
    gated = gate / (1 + np.exp(-gate)) * up
    residual = residual + _linear(weights, f"{layer}.mlp.down_proj", gated)

    normed = norm(residual, weights["norm.weight"], eps)
    recycled = normed if settings.norm_output else residual
    return [recycled, normed, _linear(weights, "lm_head", normed)]


def _attention(
    weights: Tensors,
    settings: Settings,
    prefix: str,
    x: np.ndarray,  # [2H]
    slot: int,
    position: int,
    keys: np.ndarray,  # [S, G, D]
    values: np.ndarray,
) -> np.ndarray:
    """One query attends to slots 1 .. ``slot``: [2H] -> [H]."""
    groups, head_dim = settings.num_kv_heads, settings.head_dim
    queries = _linear(weights, f"{prefix}.q_proj", x).reshape(groups, -1, head_dim)  # [G, Q/G, D]
    key = _linear(weights, f"{prefix}.k_proj", x).reshape(groups, head_dim)  # [G, D]
    keys[slot] = rotate(key, position, settings.rope_theta)
    values[slot] = _linear(weights, f"{prefix}.v_proj", x).reshape(groups, head_dim)
    queries = rotate(queries, position, settings.rope_theta)

    heads = []
    for group in range(groups):
        seen_keys, seen_values = keys[1 : slot + 1, group], values[1 : slot + 1, group]  # [s, D]
        for query in queries[group]:
            scores = seen_keys @ query / np.sqrt(head_dim)  # [s]
            shares = np.exp(scores - scores.max())
            heads.append(shares @ seen_values / shares.sum())  # [D]
    return _linear(weights, f"{prefix}.o_proj", np.concatenate(heads))


def _linear(weights: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    y = weights[f"{name}.weight"] @ x
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _layer_name(tensors: Tensors) -> str:
    return "midlayer" if any(name.startswith("midlayer.") for name in tensors) else "layers.0"


def _check_names(tensors: Tensors, settings: Settings) -> None:
    """Raises ValueError unless the tensors are those that the settings call for."""
    layer = _layer_name(tensors)
    projections = [f"{layer}.self_attn.{name}_proj" for name in "qkvo"]
    needed = {"fc", "norm", "lm_head", *projections}
    needed |= {f"{layer}.mlp.{name}_proj" for name in ("gate", "up", "down")}
    needed |= {
        f"{layer}.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    }
    if settings.norm_before_fc:
        needed.add("input_norm")
    if settings.fc_norm:
        needed |= {f"fc_norm.{i}" for i in range(settings.num_captured)}
    needed = {f"{name}.weight" for name in needed}
    allowed = needed | {"d2t", "t2d", "embed_tokens.weight", "fc.bias"}
    allowed |= {f"{name}.bias" for name in projections}
    missing, surplus = needed - tensors.keys(), tensors.keys() - allowed
    if missing or surplus:
        raise ValueError(f"missing tensors: {sorted(missing)}; surplus: {sorted(surplus)}")
