"""The corrections of block heads written out in NumPy: the specification that tests compare to.

They share nothing with jaxspec. Tensors are named and laid out as in a checkpoint ([out, in]), and
everything is computed in float64, one path at a time.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

Tensors = Mapping[str, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def of_part(tensors: Tensors, prefix: str) -> dict[str, np.ndarray]:
    """The tensors whose names begin so, in float64, without the prefix."""
    return {
        name.removeprefix(prefix): np.asarray(one, np.float64)
        for name, one in tensors.items()
        if name.startswith(prefix)
    }


def markov_path(
    tensors: Tensors,
    outputs: np.ndarray,  # [T, H]
    logits: np.ndarray,  # [T, V] not corrected
    path: Sequence[int],  # the root and the drafted tokens but the last
) -> np.ndarray:
    """DSpark's Markov head, of the kind whose tensors there are: the logits [T, V] along a path."""
    own = of_part(tensors, "markov_head.")
    state, found = np.zeros(own["markov_w1.weight"].shape[1]), []
    for token, hidden, base in zip(path, outputs, logits, strict=False):
        vector = own["markov_w1.weight"][token]
        if "gate_proj.weight" in own:
            read = np.concatenate([hidden, vector])
            vector = vector * sigmoid(own["gate_proj.weight"] @ read + own["gate_proj.bias"])
        if "joint_proj.weight" in own:
            read = np.concatenate([state, vector, hidden])
            joint = own["joint_proj.weight"] @ read + own["joint_proj.bias"]
            gate, candidate, result = np.split(joint, 3)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
            vector = np.tanh(result)
        found.append(base + own["markov_w2.weight"] @ vector)
    return np.stack(found)


def selector_scores(
    tensors: Tensors,
    outputs: np.ndarray,  # [T, H]
    logits: np.ndarray,  # [T, V]
    root: int,
    count: int,
) -> list[dict[tuple[int, int], float]]:
    """DFlash 2's selector: for each depth the score of each candidate behind each token that may be
    before it, by (token before, candidate)."""
    own = of_part(tensors, "candidate_selector.")
    found, before = [], [root]
    for hidden, base in zip(outputs, logits, strict=True):
        vector = own["hidden_projection.weight"] @ hidden
        candidates = np.argsort(-base)[:count].tolist()
        found.append(
            {
                (token, one): base[one]
                + (own["predecessor_codebook"][token] * vector) @ own["successor_codebook"][one]
                for token in before
                for one in candidates
            }
        )
        before = candidates
    return found


def domino_path(
    tensors: Tensors,
    outputs: np.ndarray,  # [T, H]
    logits: np.ndarray,  # [T, V]
    path: Sequence[int],
    embeddings: np.ndarray,  # [V, H] the target's
    first: int,  # the first depth that is corrected
) -> np.ndarray:
    """Domino's recurrent network: the logits [T, V] along a path."""
    own = of_part(tensors, "")
    of_token, of_state = own["prefix_gru.weight_ih_l0"], own["prefix_gru.weight_hh_l0"]
    state, found = np.zeros(of_state.shape[1]), []
    for depth, token in enumerate(path):
        read = np.split(of_token @ np.asarray(embeddings[token], np.float64), 3)
        held = np.split(of_state @ state, 3)
        reset, update = (sigmoid(read[gate] + held[gate]) for gate in (0, 1))
        new = np.tanh(read[2] + reset * held[2])
        state = (1 - update) * new + update * state
        units = own["embed_proj.0.weight"] @ np.concatenate([outputs[depth], state])
        added = own["embed_proj.2.weight"] @ (units * sigmoid(units))
        found.append(logits[depth] + (added if depth >= first else 0))
    return np.stack(found)


def xpress_logits(
    tensors: Tensors,
    outputs: np.ndarray,  # [1 + T, H] the root's first
    logits: np.ndarray,  # [T, V]
    before: Sequence[int],  # the token before the root, the root, and the drafted ones but the last
) -> np.ndarray:
    """XPress's refiner, all positions in one pass: the logits [T, V]."""
    own = of_part(tensors, "xpress_head.")
    mean, size = own["down_g.weight"] @ outputs.mean(axis=0), len(outputs)
    x = []
    for token, hidden in zip(before, outputs, strict=True):
        read = [own["down_h.weight"] @ hidden, mean, own["w1.weight"][token]]
        x.append(own["in_proj.weight"] @ np.concatenate(read))
    x = np.stack(x)  # [1 + T, r]
    x = x + np.einsum("rkj,jr->kr", np.tril(own["mix.L"])[:, :size, :size], x)
    gate = x @ own["mlp.gate_proj.weight"].T
    units = gate * sigmoid(gate) * (x @ own["mlp.up_proj.weight"].T)
    x = x + units @ own["mlp.down_proj.weight"].T
    return logits + x[1:] @ own["w2.weight"].T


def jacobi_passes(
    tensors: Tensors, outputs: np.ndarray, logits: np.ndarray, before: Sequence[int], passes: int
) -> list[int]:
    """The greedy tokens of XPress after so many passes over the whole block; ``before``: the token
    before the root, and the root."""
    tokens = logits.argmax(axis=1).tolist()
    for _ in range(passes):
        known = [*before, *tokens[:-1]]
        tokens = xpress_logits(tensors, outputs, logits, known).argmax(axis=1).tolist()
    return tokens


def lilicorr_scores(
    tensors: Tensors,
    outputs: np.ndarray,  # [T, H]
    logits: np.ndarray,  # [T, V]
    root: int,
    context: np.ndarray,  # [H] what the layers read of the context's last token
    embeddings: np.ndarray,  # [V, H]
    sizes: Mapping[str, float],  # count, heads, eps, vector_eps, scale
) -> list[dict[tuple[int, int], float]]:
    """LiLiCorr's transformer: for each depth the score of each candidate behind each token that may
    be before it, by (token before, candidate)."""
    own, count = of_part(tensors, "lilicorr."), int(sizes["count"])

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]

    def rms(name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + sizes["eps"]) * own[f"{name}.weight"]

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), sizes["vector_eps"])

    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    candidates = [np.argsort(-row)[:count].tolist() for row in logits]
    x, slots = [], []
    for depth, row in enumerate(candidates):
        for rank, token in enumerate(row):
            log, best = log_probs[depth, token], log_probs[depth, row[0]]
            features = np.array([log, np.exp(log), log - best, rank / (count - 1), rank == 0])
            centred = features - features.mean()
            features = centred / np.sqrt((centred**2).mean() + 1e-5)
            features = features * own["feature_mlp.0.weight"] + own["feature_mlp.0.bias"]
            units = linear("feature_mlp.1", features)
            embedded = np.asarray(embeddings[token], np.float64)
            x.append(
                (linear("token_proj", embedded) if "token_proj.weight" in own else embedded)
                + linear("pass_hidden_proj", outputs[depth])
                + linear("feature_mlp.3", units * sigmoid(units))
                + own["slot_embedding"][0, 0, depth, 0]
                + own["rank_embedding"][0, 0, 0, rank]
            )
            slots.append(depth)
    x, heads, middle = np.stack(x), int(sizes["heads"]), own["relative_slot_bias"].shape[1] // 2
    for index in range(len({name for name in own if name.endswith("in_proj_weight")})):
        name = f"layers.{index}."
        read = rms(f"{name}attn_norm", x)
        qkv = read @ own[f"{name}attn.in_proj_weight"].T + own[f"{name}attn.in_proj_bias"]
        q, k, v = (part.reshape(len(x), heads, -1) for part in np.split(qkv, 3, axis=1))
        mixed = np.zeros_like(q)
        for head, i in np.ndindex(heads, len(x)):
            scores = k[:, head] @ q[i, head] / np.sqrt(q.shape[2])
            scores += [own["relative_slot_bias"][head, slots[i] - j + middle] for j in slots]
            scores += [own["same_slot_bias"][head] * (slots[i] == j) for j in slots]
            weights = np.exp(scores - scores.max())
            mixed[i, head] = weights / weights.sum() @ v[:, head]
        x = x + linear(f"{name}attn.out_proj", mixed.reshape(x.shape))
        units = linear(f"{name}mlp.0", rms(f"{name}mlp_norm", x))
        x = x + linear(f"{name}mlp.2", units * sigmoid(units))
    x, anchor = rms("output_norm", x), rms("anchor_norm", linear("context_proj", context))
    around = np.broadcast_to(anchor, x.shape)
    units = linear("factor_input_proj", np.concatenate([x, around, x * around], axis=1))
    factors = units * sigmoid(units)
    outgoing, incoming = (unit(linear(name, factors)) for name in ("out_head", "in_head"))
    sources = {(-1, root): unit(linear("anchor_out_head", anchor))}
    found: list[dict[tuple[int, int], float]] = []
    for depth, row in enumerate(candidates):
        here = {token: incoming[depth * count + rank] for rank, token in enumerate(row)}
        found.append(
            {
                (before, token): sizes["scale"] * float(vector @ here[token])
                for (at, before), vector in sources.items()
                if at == depth - 1
                for token in row
            }
        )
        sources |= {(depth, t): outgoing[depth * count + rank] for rank, t in enumerate(row)}
    return found


PathLogits = Callable[[Tensors, np.ndarray, np.ndarray, Sequence[int]], np.ndarray]
