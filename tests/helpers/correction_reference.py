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


PathLogits = Callable[[Tensors, np.ndarray, np.ndarray, Sequence[int]], np.ndarray]
