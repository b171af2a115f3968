"""A device with the costs of an H100 and synthetic acceptance, to judge policies by."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxspec.config.speculation import PLAIN, TreeShape
from jaxspec.scheduling.round_costs import RoundCosts
from jaxspec.scheduling.tree_policy import TreePolicy

CHAINS = tuple(TreeShape.parse(f"chain:{tokens}") for tokens in (1, 3, 5, 7))
TREE = TreeShape(60, 7, 10)
SHAPES = (PLAIN, *CHAINS, TREE)

# Milliseconds a round of the 8B shape on an H100. Plain and the chain of 5 up to 64 rows and the
# tree up to 32 are measured (docs/benchmarks.md). The rest is modelled: other chains on a line
# between plain and the chain of 5 (the chain of 3, measured up to 32 rows, is within 0.5 % of it),
# more rows by arithmetic at 585 TFLOP/s.
PLAIN_MS = {1: 5.60, 8: 5.86, 32: 6.80, 64: 8.13, 128: 10.8}
CHAIN_OF_5_MS = {1: 7.14, 8: 7.85, 32: 9.95, 64: 15.19, 128: 27.8}
TREE_MS = {1: 8.66, 8: 15.46, 32: 53.62, 64: 107.0, 128: 214.0}
TREE_MISSES = 1.8  # a tree misses a token where the chain does, to this power


def h100_costs() -> RoundCosts:
    milliseconds = {}
    for rows, plain in PLAIN_MS.items():
        level = (CHAIN_OF_5_MS[rows] - plain) / 5
        milliseconds |= {(rows, chain): plain + level * chain.max_depth for chain in CHAINS}
        milliseconds |= {(rows, PLAIN): plain, (rows, TREE): TREE_MS[rows]}
    return RoundCosts({point: 1e-3 * value for point, value in milliseconds.items()})


@dataclasses.dataclass(frozen=True)
class Phase:
    """Some time with one number of rows and one kind of text.

    Attributes:
      levels: chance to accept the next token of a chain; each request has one of them.
      tokens: work to be done, of all rows together.
    """

    rows: int
    levels: tuple[float, ...]
    tokens: int


def draw_accepted(
    random: np.random.Generator, levels: np.ndarray, shape: TreeShape, rounds: int
) -> np.ndarray:
    """Tokens accepted, int [C, B], where each row has its level [B]."""
    hazard = levels if shape.is_chain else 1 - (1 - levels) ** TREE_MISSES
    matched = random.random((shape.max_depth, rounds, len(levels))) < hazard
    return np.cumprod(matched, axis=0).sum(axis=0)


def cut(accepted: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Tokens committed, int [C, B], of texts that end after ``room`` [B] more tokens."""
    before = np.cumsum(accepted + 1, axis=0) - (accepted + 1)
    return np.clip(room - before, 0, accepted + 1)


def simulate(
    policy: TreePolicy | TreeShape,
    phases: Sequence[Phase],
    *,
    rounds: int = 8,
    length: int = 768,
    seed: int = 0,
    fixed: int = 1,
    call: float = 0.0,
) -> list[float]:
    """Tokens a second of each phase, by a policy or always with the same shape.

    Calls have so many rounds, and are observed one call late, as in the engine. A request that has
    ended is replaced before the next call; texts have between half of ``length`` tokens and all.

    Programs run ``fixed`` rounds or one, so a call may launch several; each launch costs ``call``
    seconds besides its rounds.
    """
    random, costs = np.random.default_rng(seed), h100_costs()
    rates, next_row, late = [], 0, None
    for phase in phases:
        keys = np.arange(next_row, next_row + phase.rows)
        next_row += phase.rows
        levels = random.choice(phase.levels, phase.rows)
        room = random.integers(1, length + 1, phase.rows)  # they began at different times
        tokens, seconds = 0, 0.0
        while tokens < phase.tokens:
            count = rounds
            if isinstance(policy, TreeShape):
                shape = policy
            else:
                count = min(rounds, policy.most_rounds or rounds)
                shape = policy.choose(keys.tolist(), costs, rounds=count)
            accepted = draw_accepted(random, levels, shape, count)
            committed = cut(accepted, room)
            launches = count // fixed + count % fixed if call else 0
            seconds += count * costs.seconds(phase.rows, shape) + launches * call
            tokens += int(committed.sum())
            room = room - committed.sum(axis=0)
            if late is not None and isinstance(policy, TreePolicy):
                policy.estimate.observe(*late)
            late = keys.tolist(), shape, accepted, committed
            for place in np.flatnonzero(room == 0):
                if isinstance(policy, TreePolicy):
                    policy.estimate.forget(int(keys[place]))
                keys[place], next_row = next_row, next_row + 1
                levels[place] = random.choice(phase.levels)
                room[place] = random.integers(length // 2, length + 1)
        rates.append(tokens / seconds)
    return rates


def steady(rows: int, level: float, seconds: float = 20.0) -> Phase:
    """So many seconds' work of plain decoding."""
    rate = rows / h100_costs().seconds(rows, PLAIN)
    return Phase(rows, (level,), int(rate * seconds))


# Load that changes: a quiet night of easy texts, a crowd with hard ones, and what lies between.
MIXED = (
    steady(1, 0.9),
    steady(128, 0.2),
    steady(8, 0.7),
    steady(64, 0.1),
    steady(32, 0.9),
    steady(4, 0.3),
    steady(128, 0.85),
    steady(1, 0.95),
)


def overall(rates: Sequence[float], phases: Sequence[Phase]) -> float:
    """Tokens a second of all phases together."""
    tokens = [phase.tokens for phase in phases]
    return sum(tokens) / sum(t / rate for t, rate in zip(tokens, rates, strict=True))
