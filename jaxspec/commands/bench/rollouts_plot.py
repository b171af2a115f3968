"""The picture of `jaxspec bench rollouts`: tokens a round, and the policy's reward, by step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

MOST_POINTS = 40  # of a line; each is the mean of some steps


def plot_rollouts(results: Mapping[str, Any], path: Path) -> None:
    """Two panels over the steps: tokens a round of each engine, and mean rewards."""
    rows = results["rows"]
    figure = Figure(figsize=(10, 4), layout="constrained")
    drafts, rewards = figure.subplots(1, 2)
    for name in dict.fromkeys(row["engine"] for row in rows):
        of_engine = [row for row in rows if row["engine"] == name]
        drafts.plot(*means([row["tokens_per_round"] for row in of_engine]), ".-", label=name)
    first = rows[0]["engine"]
    learned = [row["learned"]["reward"] for row in rows if row["engine"] == first]
    rewards.plot(*means(learned), ".-")
    drafts.set(xlabel="step", ylabel="tokens a round", ylim=(0.9, None))
    rewards.set(xlabel="step", ylabel="reward: share that compiles", ylim=(0, 1))
    figure.legend(loc="outside lower center", ncols=4)  # lines may run anywhere
    for axes in (drafts, rewards):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def means(values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """(steps, means) of as many equal parts as a line has points."""
    parts = np.array_split(np.arange(len(values)), min(MOST_POINTS, len(values)))
    return (
        np.array([part.mean() for part in parts]),
        np.array([np.mean([values[step] for step in part]) for part in parts]),
    )
