"""Measures a drafter's acceptance on real prompts, with confidence intervals."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxspec.config.sampling_params import SamplingParams, with_distinct_seeds
from jaxspec.evaluation import bootstrap
from jaxspec.llm.completion import Completion, decode_rate
from jaxspec.llm.llm import LLM


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Acceptance over some prompts. Intervals are 95 % bootstrap intervals over prompts.

    Attributes:
      length: mean tokens committed per round, bonus included.
      by_depth: share of rounds that accepted at least 1, 2, ... drafted tokens.
    """

    prompts: int
    tokens: int
    rounds: int
    length: float
    length_interval: tuple[float, float]
    by_depth: list[float]
    by_depth_intervals: list[tuple[float, float]]
    decode_tokens_per_second: float


def measure_acceptance(
    llm: LLM, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> Acceptance:
    """Generate from every token prompt, each with its own seed, and count accepted tokens."""
    return summarize(llm.generate(list(prompts), with_distinct_seeds(sampling, len(prompts))))


def summarize(completions: Sequence[Completion], seed: int = 0) -> Acceptance:
    """The acceptance of completions. Those that ended before any round are not counted.

    Raises ValueError if all of them did.
    """
    rounds = np.array([c.num_rounds for c in completions])  # [N]
    drafted = np.array([len(c.token_ids) - 1 for c in completions])  # [N] committed by rounds
    by_depth = np.array([c.acceptance_by_depth for c in completions])  # [N, A]
    if rounds.sum() == 0:
        raise ValueError("every text ended with its first token: nothing was drafted")
    accepted = by_depth * rounds[:, None]
    length, length_interval = bootstrap.ratio(drafted, rounds, seed)
    depths = [bootstrap.ratio(column, rounds, seed) for column in accepted.T]
    return Acceptance(
        prompts=len(completions),
        tokens=int(drafted.sum()),
        rounds=int(rounds.sum()),
        length=length,
        length_interval=length_interval,
        by_depth=[share for share, _ in depths],
        by_depth_intervals=[interval for _, interval in depths],
        decode_tokens_per_second=decode_rate(completions),
    )


def summarize_kinds(
    completions: Sequence[Completion], kinds: Sequence[str], seed: int = 0
) -> dict[str, Acceptance]:
    """The acceptance of each kind of completions, by name; ``kinds`` has the name of each.

    A kind whose texts all ended before any round has no acceptance, and is left out.
    """
    groups: dict[str, list[Completion]] = collections.defaultdict(list)
    for completion, kind in zip(completions, kinds, strict=True):
        groups[kind].append(completion)
    return {
        kind: summarize(groups[kind], seed)
        for kind in sorted(groups)
        if any(completion.num_rounds for completion in groups[kind])
    }
