"""A target's hidden states on disk, so that it runs once over the data, not once per epoch."""

import dataclasses
import functools
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.decoder import Decoder
from jaxspec.models.forward_pass import Attend
from jaxspec.parallel.bytes import megabytes
from jaxspec.training import fingerprint
from jaxspec.training.heads.data import Examples
from jaxspec.training.heads.loss import DraftBatch, target_states

SHARD_BYTES = 1 << 30  # about; one shard is held in memory while it is computed
MANIFEST = "states.json"
ADVICE = (
    "leave out --store-states (hidden states are then computed while training), take fewer or "
    "shorter rows"
)


@dataclasses.dataclass(frozen=True)
class StoredStates:
    """Shards ``features-00000.npy`` [n, T, C] and ``hidden-00000.npy`` [n, T, H] in a folder."""

    directory: Path
    dtype: str
    rows_per_shard: int

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(features [*rows.shape, T, C], hidden [*rows.shape, T, H]) of the rows given by index."""
        return self._gather("features", rows), self._gather("hidden", rows)

    def _gather(self, name: str, rows: np.ndarray) -> np.ndarray:
        flat, parts = rows.reshape(-1), []
        shards = {int(s): self._open(name, int(s)) for s in np.unique(flat // self.rows_per_shard)}
        for row in flat:
            shard, index = divmod(int(row), self.rows_per_shard)
            parts.append(shards[shard][index])
        stacked = np.stack(parts).view(jnp.dtype(self.dtype))
        return stacked.reshape(*rows.shape, *stacked.shape[1:])

    def _open(self, name: str, shard: int) -> np.ndarray:
        return np.load(self.directory / f"{name}-{shard:05d}.npy", mmap_mode="r")


def capture_states(
    target: Decoder,
    examples: Examples,
    capture: tuple[int, ...],
    attend: Attend,
    directory: Path,
    *,
    batch_size: int,
    deadline: float | None = None,
    report: Callable[[int, int], None] = lambda done, rows: None,
) -> StoredStates:
    """Run the target over all rows and store what a head reads, in the target's dtype.

    Complete shards of an interrupted call are reused.

    Args:
      deadline: time.monotonic() when all must be done; None: no limit.
      report: called after each batch with the rows done and the number of rows.

    Raises ValueError if the disk has too little space, the folder holds states of another model or
    other data, or the time of the first batches shows that the deadline cannot be met.
    """
    directory.mkdir(parents=True, exist_ok=True)
    dtype, length = target.embed.dtype, examples.tokens.shape[1]
    width = target.config.hidden_size * (len(capture) + 1)
    row_bytes = length * width * dtype.itemsize
    per_shard = max(1, min(len(examples), SHARD_BYTES // row_bytes))
    stored = StoredStates(directory, dtype.name, per_shard)
    described = _described(target, examples, capture, stored)
    manifest = directory / MANIFEST
    if manifest.exists() and json.loads(manifest.read_text()) != described:
        raise ValueError(
            f"{directory} holds hidden states of another model or other data: remove it"
        )
    missing = [s for s in range(-(-len(examples) // per_shard)) if not _done(directory, s)]
    todo = [
        np.arange(shard * per_shard, min((shard + 1) * per_shard, len(examples)))
        for shard in missing
    ]
    num_rows = sum(map(len, todo))
    _check_room(directory, num_rows, row_bytes)
    manifest.write_text(json.dumps(described))
    run = jax.jit(functools.partial(target_states, capture=capture, attend=attend))
    watch = _Watch(num_rows, len(examples), deadline, report)
    for shard, rows in zip(missing, todo, strict=True):
        features, hidden = _run_rows(run, target, examples, rows, batch_size, watch)
        _write(directory / f"hidden-{shard:05d}.npy", hidden)
        _write(directory / f"features-{shard:05d}.npy", features)  # last: marks a complete shard
    return stored


def _check_room(directory: Path, num_rows: int, row_bytes: int) -> None:
    """Raise ValueError if the disk has no space for more rows."""
    needed, free = num_rows * row_bytes, shutil.disk_usage(directory).free
    if needed > free:
        raise ValueError(
            f"hidden states of {num_rows} rows need {needed / 1e9:.1f} GB, "
            f"{megabytes(row_bytes)} each, and {directory} has {free / 1e9:.1f} GB "
            f"free, enough for {free // row_bytes} rows: {ADVICE}, or use a folder on a larger disk"
        )


class _Watch:
    """Counts rows, and raises an error once the rest cannot be done by the deadline."""

    def __init__(
        self, todo: int, rows: int, deadline: float | None, report: Callable[[int, int], None]
    ):
        self._todo, self._rows, self._deadline, self._report = todo, rows, deadline, report
        self._done, self._first = 0, (0, 0.0)
        report(rows - todo, rows)

    def ran(self, count: int) -> None:
        """``count`` more rows are done."""
        self._done, now = self._done + count, time.monotonic()
        self._report(self._rows - self._todo + self._done, self._rows)
        if self._done == count:  # the first batch: its time included the compilation
            self._first = count, now
            return
        first_done, first_time = self._first
        seconds = (now - first_time) / (self._done - first_done) * (self._todo - self._done)
        if self._deadline is not None and now + seconds > self._deadline:
            left = max(0.0, self._deadline - now)
            more = self._todo - self._done
            raise ValueError(
                f"hidden states of {more} more rows would take {seconds:.0f} s, and the time "
                f"budget leaves {left:.0f} s, enough for {int(more * left / seconds)} rows: "
                f"{ADVICE}, or give more time"
            )


def _described(
    target: Decoder, examples: Examples, capture: tuple[int, ...], stored: StoredStates
) -> dict[str, object]:
    content = {
        "dtype": stored.dtype,
        "rows_per_shard": stored.rows_per_shard,
        "target": fingerprint.of_weights(target),
        "capture": capture,
        "data": fingerprint.of_rows(examples.tokens),
    }
    return json.loads(json.dumps(content))


def _done(directory: Path, shard: int) -> bool:
    return (directory / f"features-{shard:05d}.npy").exists()


def _run_rows(
    run: Callable[..., tuple[jax.Array, jax.Array]],
    target: Decoder,
    examples: Examples,
    rows: np.ndarray,
    batch_size: int,
    watch: _Watch,
) -> tuple[np.ndarray, np.ndarray]:
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for start in range(0, len(rows), batch_size):
        chosen = rows[start : start + batch_size]
        padded = np.resize(chosen, batch_size)  # one batch shape, so one compiled program
        batch = DraftBatch(
            tokens=jnp.asarray(examples.tokens[padded]),
            learned=jnp.asarray(examples.learned[padded]),
        )
        features, hidden = run(target, batch)
        parts.append((np.asarray(features)[: len(chosen)], np.asarray(hidden)[: len(chosen)]))
        watch.ran(len(chosen))
    features, hidden = zip(*parts, strict=True)
    return np.concatenate(features), np.concatenate(hidden)


def _write(path: Path, values: np.ndarray) -> None:
    """Write an array as integers of its width, as .npy files have no bfloat16.

    The file gets its name only when it is complete.
    """
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.save(file, values.view(f"u{values.dtype.itemsize}"))
    partial.rename(path)
