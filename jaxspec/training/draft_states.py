"""A target's hidden states on disk, so that it runs once however often a head sees its data."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.decoder import Decoder
from jaxspec.models.forward import Attend
from jaxspec.training import fingerprint
from jaxspec.training.draft_data import Examples
from jaxspec.training.draft_loss import DraftBatch, target_states

SHARD_BYTES = 1 << 30  # about; a shard is held in memory while it is made
MANIFEST = "states.json"


@dataclasses.dataclass(frozen=True)
class StoredStates:
    """Shards ``features-00000.npy`` [n, T, C] and ``hidden-00000.npy`` [n, T, H] in a folder."""

    directory: Path
    dtype: str
    rows_per_shard: int

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(features [*rows, T, C], hidden [*rows, T, H]) of some rows."""
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
    report: Callable[[int, int], None] = lambda done, rows: None,
) -> StoredStates:
    """Run the target over all rows and keep what a head reads, in the target's dtype.

    Shards that an interrupted call left complete are kept. ``report`` is told rows done and in all.

    Raises ValueError if the disk has no room, or the folder holds states of something else.
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
    needed = len(missing) * per_shard * row_bytes
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise ValueError(
            f"hidden states need {needed / 1e9:.1f} GB and {directory} has {free / 1e9:.1f} GB "
            "free: leave them to be computed on the fly"
        )
    manifest.write_text(json.dumps(described))
    run = jax.jit(functools.partial(target_states, capture=capture, attend=attend))
    for shard in missing:
        start = shard * per_shard
        rows = np.arange(start, min(start + per_shard, len(examples)))
        features, hidden = _run_rows(run, target, examples, rows, batch_size)
        _write(directory / f"hidden-{shard:05d}.npy", hidden)
        _write(directory / f"features-{shard:05d}.npy", features)  # last: it marks the shard done
        report(int(rows[-1]) + 1, len(examples))
    return stored


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
) -> tuple[np.ndarray, np.ndarray]:
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for start in range(0, len(rows), batch_size):
        chosen = rows[start : start + batch_size]
        padded = np.resize(chosen, batch_size)  # one shape, one program
        batch = DraftBatch(
            tokens=jnp.asarray(examples.tokens[padded]),
            learned=jnp.asarray(examples.learned[padded]),
        )
        features, hidden = run(target, batch)
        parts.append((np.asarray(features)[: len(chosen)], np.asarray(hidden)[: len(chosen)]))
    features, hidden = zip(*parts, strict=True)
    return np.concatenate(features), np.concatenate(hidden)


def _write(path: Path, values: np.ndarray) -> None:
    """As integers: NumPy's files know no bfloat16. Complete or not there at all."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.save(file, values.view(f"u{values.dtype.itemsize}"))
    partial.rename(path)
