"""Workloads for a serving engine: when requests arrive, what they ask, and how much they want."""

import dataclasses
import itertools
import json
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request to come, ``time`` seconds after the start.

    ``structured``: a grammar restricts its tokens.
    """

    time: float
    prompt: tuple[int, ...]
    new_tokens: int
    structured: bool = False


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt, and new ones."""

    prompt: int
    new: int


def arrival_times(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds after the start: a Poisson process of ``rate`` a second; None: all at once."""
    if rate is None:
        return [0.0] * count
    if not 0 < rate < float("inf"):
        raise ValueError(f"--rate must be a positive number of requests a second, got {rate:g}")
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return (np.cumsum(gaps) - gaps[0]).tolist()


def drawn_lengths(count: int, middle: Lengths, spread: float, seed: int) -> list[Lengths]:
    """Lengths drawn evenly from those at most a share ``spread`` off the middle."""
    if not 0 <= spread < 1:
        raise ValueError(f"--spread must be a share in [0, 1), got {spread:g}")
    rng = np.random.default_rng(seed)

    def draw(length: int) -> int:
        return max(1, round(length * rng.uniform(1 - spread, 1 + spread)))

    return [Lengths(draw(middle.prompt), draw(middle.new)) for _ in range(count)]


def read_conversations(path: Path) -> list[tuple[str, str]]:
    """The first question and answer of each conversation of a file like ShareGPT's.

    The file is a JSON list of objects with ``conversations``, a list of objects with ``from`` and
    ``value``. Conversations of fewer than two turns are left out.

    Raises ValueError for a file of another form, or without a conversation.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        turns = [[str(turn["value"]) for turn in entry["conversations"][:2]] for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not a JSON list of objects with conversations of from and value: {error!r}"
        ) from None
    pairs = [(turn[0], turn[1]) for turn in turns if len(turn) == 2]
    if not pairs:
        raise ValueError(f"{path}: no conversation has two turns")
    return pairs


def tokenized_conversations(
    path: Path, encode: Callable[[str], list[int]], count: int, most_tokens: int, seed: int
) -> list[tuple[list[int], int]]:
    """Prompts of a file's questions, and how many tokens their answers have.

    Drawn at random from those of at least 4 tokens each and at most ``most_tokens`` together; some
    come again if they are fewer than ``count``.

    Raises ValueError if there is none.
    """
    pairs = read_conversations(path)
    order = np.random.default_rng(seed).permutation(len(pairs))
    found: list[tuple[list[int], int]] = []
    for index in order:
        prompt, new = encode(pairs[index][0]), len(encode(pairs[index][1]))
        if min(len(prompt), new) >= 4 and len(prompt) + new <= most_tokens:
            found.append((prompt, new))
        if len(found) == count:
            break
    if not found:
        raise ValueError(f"{path}: no question and answer have 4 to {most_tokens} tokens")
    return list(itertools.islice(itertools.cycle(found), count))


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(vocab_size, size=length).tolist() for length in lengths]


def source_prompts(
    lengths: Sequence[int], encode: Callable[[str], list[int]], seed: int
) -> list[list[int]]:
    """Prompts cut from the source files of Python's standard library, in a random order."""
    tokens = _source_tokens(encode, seed)
    return [list(itertools.islice(tokens, length)) for length in lengths]


def _source_tokens(encode: Callable[[str], list[int]], seed: int) -> Iterator[int]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not files:
        raise ValueError("this Python has no source files to take prompts from: give --lengths")
    rng = np.random.default_rng(seed)
    while True:
        for index in rng.permutation(len(files)):
            yield from encode(files[index].read_text(encoding="utf-8"))
