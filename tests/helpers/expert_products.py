"""What experts make of rows, in float64."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.expert_product.cases import Case

# Of the sum of absolute products: a hidden unit may round to its other neighbor in bfloat16.
ERROR = 2.0**-8


def exact(case: Case, arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    """[N, k, H] in float64, hidden units rounded; and the sums of their terms' absolute values.
    Zeros for experts that other devices have."""
    x, experts, gate_up, down = (np.asarray(one, np.float64) for one in arguments[:4])
    bias = np.zeros((case.num_experts, 2, case.units))
    if case.biased:
        bias = np.asarray(arguments[4], np.float64)
    results = np.zeros((2, *experts.shape, case.hidden))
    for (row, choice), expert in np.ndenumerate(experts.astype(int)):
        if expert == case.num_experts:
            continue
        gate, up = np.einsum("h,htf->tf", x[row], gate_up[expert]) + bias[expert]
        if case.clamp is not None:
            alpha, limit = case.clamp
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            units = (up + 1) * gate / (1 + np.exp(-alpha * gate))
        else:
            units = gate / (1 + np.exp(-gate)) * up
        rounded = units.astype(jnp.bfloat16).astype(np.float64)
        results[0, row, choice] = rounded @ down[expert]
        results[1, row, choice] = np.abs(rounded) @ np.abs(down[expert])
    return results[0], results[1]


def assert_exact(found: Any, case: Case, arguments: Any) -> None:
    wanted, terms = exact(case, arguments)
    assert found.shape == wanted.shape and found.dtype == jnp.float32
    here = np.asarray(arguments[1] < case.num_experts)
    # What stands at the others is not written: it may be a NaN that cannot even be cast.
    errors = np.asarray(found)[here].astype(np.float64) - wanted[here]
    assert (np.abs(errors) <= ERROR * terms[here]).all()
    assert np.linalg.norm(errors) <= 1e-3 * np.linalg.norm(wanted)
