"""A file of prompts: one JSON object a line."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part ``index`` of ``count`` (from 0), for jobs that share a file."""

    index: int = 0
    count: int = 1

    def part(self, total: int) -> range:
        """Its indexes: a run of neighbours, so that the parts' results in order are the whole."""
        return range(self.index * total // self.count, (self.index + 1) * total // self.count)

    def path(self, path: Path) -> Path:
        """Where its results go, such as out-00003-of-00008.jsonl; the only shard's to the path."""
        if self.count == 1:
            return path
        return path.with_name(f"{path.stem}-{self.index:05}-of-{self.count:05}{path.suffix}")


def read_shard(text: str | None, environment: Mapping[str, str]) -> Shard:
    """The shard that ``I/N`` or ``slurm`` (the task of a SLURM array) names. None: the only one.

    A SLURM array counts as N shards only if it has all tasks from 0 to N - 1: where some tasks of
    an array are submitted again, SLURM counts those alone. Raises ValueError for other texts.
    """
    if text is None:
        return Shard()
    if text == "slurm":
        task, count, first, last = (_slurm(name, environment) for name in _SLURM)
        if (first, last) != (0, count - 1):
            raise ValueError(
                f"--shard slurm needs an array of all tasks from 0 on, and this one has {count} "
                f"from {first} to {last}: give --shard {task}/N, of the N of all tasks"
            )
        return Shard(task, count)
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"--shard must be I/N with I from 0 to N - 1, or slurm, got {text!r}")
    return Shard(int(index), int(count))


_SLURM = tuple(f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "COUNT", "MIN", "MAX"))


def _slurm(name: str, environment: Mapping[str, str]) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise ValueError(f"--shard slurm needs an array job of SLURM: {name} is not set")
    return int(value)


@dataclasses.dataclass(frozen=True)
class PromptFile:
    """A file of prompts that was read once; it is never held as a whole.

    Attributes:
      count: of its prompts: lines that are not blank.
      digest: SHA-256 of its bytes.
    """

    path: Path
    count: int
    digest: str

    def lines(self, part: range) -> Iterator[tuple[int, bytes]]:
        """Index and text of each prompt of this part. Indexes count from 0, without blank lines.

        Raises ValueError if the file has become shorter.
        """
        index = -1
        with self.path.open("rb") as file:
            for line in filter(bytes.strip, file):
                index += 1
                if index >= part.stop:
                    return
                if index >= part.start:
                    yield index, line
        if index + 1 < part.stop:
            raise ValueError(f"{self.path} has changed while it was read")


def open_prompts(path: Path) -> PromptFile:
    """Count the prompts of a file.

    Raises ValueError for a file that cannot be read, or has none, and where the first line is no
    JSON object: such a file is of another kind. What is wrong with later lines, their results say.
    """
    digest, count = hashlib.sha256(), 0
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} must be a plain file, as it is read twice")
    try:
        with path.open("rb") as file:
            for line in file:
                digest.update(line)
                if line.strip():
                    if not count:
                        _check_first(path, line)
                    count += 1
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if not count:
        raise ValueError(f"{path} has no prompts: give one JSON object a line")
    return PromptFile(path, count, digest.hexdigest())


def _check_first(path: Path, line: bytes) -> None:
    try:
        parse_line(line)
    except ValueError as error:
        raise ValueError(f"{path} is no file of prompts, one a line: {error}") from error


def parse_line(line: bytes) -> dict[str, Any]:
    """The object of a line. Raises ValueError if it is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line is not JSON: {error}") from error
    if not isinstance(value, dict):
        example = '{"prompt": "..."}'
        raise ValueError(f"the line must be a JSON object such as {example}, got {value!r:.80}")
    return value
