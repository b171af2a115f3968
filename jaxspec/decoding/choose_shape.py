"""Which draft tree pays, by what a round is expected to cost and to commit."""

from collections.abc import Sequence

from jaxspec.config.speculation import FIRST_ACCEPTANCE, PLAIN, TREE_POWER, TreeShape
from jaxspec.decoding.functional import EngineParams
from jaxspec.decoding.prior_costs import prior_costs

CHAINS = (1, 3)  # tokens of the chains that are choices besides plain decoding and the largest


def choose_shape(
    params: EngineParams, num_rows: int, acceptance: float = FIRST_ACCEPTANCE
) -> TreeShape:
    """The draft tree, or PLAIN, that is expected to commit the most tokens a second.

    Costs are those of the weights' bytes and operations on this kind of device; nothing is run.
    The choices are PLAIN, short chains, and the largest tree, ``params.speculation``. Give it to
    ``decode(shape=...)``; under ``vmap``, count all rows that run together.

    Args:
      num_rows: rows that decode together, on all devices.
      acceptance: chance that the next token of a chain is accepted, if those before it are.

    Raises ValueError for numbers of rows below 1 and chances outside 0 to 1.
    """
    if isinstance(num_rows, bool) or not isinstance(num_rows, int) or num_rows < 1:
        raise ValueError(f"num_rows must be an integer, at least 1, got {num_rows!r}")
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance must be a chance from 0 to 1, got {acceptance!r}")
    rates = _rates(params, num_rows, acceptance)
    return max(rates, key=rates.__getitem__)


def expected_gain(params: EngineParams, num_rows: int, acceptance: float) -> float:
    """Tokens a second with the best tree, as a multiple of plain decoding's; see choose_shape."""
    rates = _rates(params, num_rows, acceptance)
    return max(rates.values()) / rates[PLAIN]


def _rates(params: EngineParams, num_rows: int, acceptance: float) -> dict[TreeShape, float]:
    """Expected tokens a second of a row, by shape."""
    costs = prior_costs(params.target, params.drafter)
    rows = -(-num_rows // params.data_parallel)
    return {
        shape: _tokens(shape, acceptance) / costs.seconds(rows, shape) for shape in choices(params)
    }


def choices(params: EngineParams, chains: Sequence[int] = CHAINS) -> tuple[TreeShape, ...]:
    """PLAIN, ``chains`` of so many tokens and the largest tree, with fewer nodes first."""
    largest = params.round_options().speculation.shape
    if largest.is_plain:
        return (PLAIN,)
    shorter = [TreeShape(k + 1, k, 1) for k in chains if k < largest.max_depth]
    return (PLAIN, *shorter, largest)


def _tokens(shape: TreeShape, acceptance: float) -> float:
    """Expected tokens of a round."""
    each = acceptance if shape.is_chain else 1 - (1 - acceptance) ** TREE_POWER
    return sum(each**depth for depth in range(shape.max_depth + 1))
