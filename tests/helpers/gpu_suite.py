"""`pytest -m gpu` in parts that each fit a short lease of a machine, and the record of what passed.

The last part has the tests of several GPUs, so that no other test shares these meanwhile. The
others take the tests of every file by turns. A test is in the same part on every machine.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SEVERAL_GPUS = frozenset(
    {
        "test_several_gpus",
        "test_long_runs_on_gpus",
        "test_reduce_add_rms_norm",
        "test_sequence_parallel",
    }
)
SAME = ("commit", "device", "jax")  # of all parts of a record


class Part(NamedTuple):
    """One of so many parts, counted from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """``2/4``. Raises ValueError for anything else."""
        number, slash, count = text.partition("/")
        if slash and number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count):
            return cls(int(number), int(count))
        raise ValueError(f"--gpu-part must be K/N, with K from 1 to N, got {text}")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def has_several_gpus(self) -> bool:
        """Whether its tests use several GPUs at once."""
        return self.number == self.count


WHOLE = Part(1, 1)


def file_of(test: str) -> str:
    """The name of the file, without its ending, in a test's id."""
    return Path(test.partition("::")[0]).stem


def ids_of(part: Part, tests: Sequence[str]) -> list[str]:
    """The ids of a part, out of those of the whole suite, in the suite's order."""
    several = {test for test in tests if file_of(test) in SEVERAL_GPUS}
    if part == WHOLE:
        return list(tests)
    if part.has_several_gpus:
        return [test for test in tests if test in several]
    chosen = set(sorted(set(tests) - several)[part.number - 1 :: part.count - 1])
    return [test for test in tests if test in chosen]


def gpu_of_worker(worker: str | None, part: Part | None, gpus: Sequence[str]) -> str | None:
    """The GPU that a worker of pytest-xdist ("gw3") sees alone; None: all that there are.

    Args:
      worker: None without pytest-xdist.
    """
    alone = part is not None and not part.has_several_gpus
    if worker is None or not alone or not gpus:
        return None
    return gpus[int(worker.removeprefix("gw")) % len(gpus)]


def visible_gpus(chosen: str | None, devices: Path = Path("/dev")) -> list[str]:
    """Numbers of the GPUs, without asking a driver: ``chosen`` (CUDA_VISIBLE_DEVICES) or all."""
    if chosen is not None:
        return [number for number in chosen.split(",") if number]
    found = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia*"))
    return sorted((number for number in found if number.isdigit()), key=int)


# The record.


def after_part(
    record: Mapping[str, Any],
    facts: Mapping[str, str],
    part: Part,
    passed: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The record after a run of a part. Parts of another commit, device or jax, or of another
    number of parts, are left out.

    Args:
      facts: the commit, device and jax version of the run.
      passed: what the record says of the part: its command, date and counts. None: it failed.
    """
    same = all(record.get(name) == facts[name] for name in SAME)
    kept = {
        name: entry
        for name, entry in (record.get("parts", {}) if same else {}).items()
        if Part.parse(name).count == part.count and name != str(part)
    }
    if passed is not None:
        kept[str(part)] = dict(passed)
    parts = {name: kept[name] for name in sorted(kept, key=Part.parse)}
    return {**{name: facts[name] for name in SAME}, "complete": len(parts) == part.count} | {
        "parts": parts
    }


def read_record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n")


def selects_all(options: Any, paths_given: bool) -> bool:
    """Whether pytest was asked for all tests of a mark: no path, no -k, and nothing left out."""
    narrowing = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "ff", "stepwise")
    return not paths_given and not any(getattr(options, name, None) for name in narrowing)
