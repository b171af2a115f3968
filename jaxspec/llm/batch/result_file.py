"""The results of a file of prompts: whole, or not there.

While a run is under way, results are added to ``OUT.partial`` as they come. When all are there,
they are written to ``OUT`` in the order of their prompts, at once. ``OUT.run.json`` says of what
run they are, so that another one does not go on with them.
"""

import array
import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

MISSING = -1


class ResultFile:
    """Results by index. A context manager.

    A line that was cut off when a run was killed is dropped, with all after it.

    Args:
      record: what the results depend on. A run whose record is another one is refused.
      part: the indexes of all results.

    Attributes:
      complete: whether ``path`` has them all.
      num_done: how many there are.

    Raises ValueError where results of another run are in the way, another process adds to these,
    and where no file can be written.
    """

    def __init__(self, path: Path, record: Mapping[str, Any], part: range):
        if path.is_dir() or not path.parent.is_dir():
            reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise ValueError(f"cannot write {path}: {reason}")
        self.path, self._part = path, part
        self._partial = path.with_name(f"{path.name}.partial")
        self._record_path = path.with_name(f"{path.name}.run.json")
        # Where the line of each result begins.
        self._offsets = array.array("q", [MISSING]) * len(part)
        self._record = json.loads(json.dumps(record))
        self.num_done = 0
        self.complete = path.exists()
        if self.complete:
            self._check_record()
            self.num_done = len(part)
            self._partial.unlink(missing_ok=True)
            return
        self._file = self._open()
        try:
            self._read()
            if self.num_done:
                self._check_record()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """What was not finished stays for the next run."""
        if not self.complete:
            self._file.close()
            if not self.num_done:
                self._partial.unlink(missing_ok=True)

    def has(self, index: int) -> bool:
        return self.complete or self._offsets[index - self._part.start] != MISSING

    def add(self, index: int, result: Mapping[str, Any]) -> None:
        """Add the result of a prompt. Raises OSError if the disk takes no more."""
        if not self.num_done:
            self._write_record()
        offset = self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps({"index": index, **result}).encode() + b"\n")
        self._file.flush()
        self._keep(index, offset)

    def finish(self) -> None:
        """Write the file of all results. Does nothing if it is there."""
        if self.complete:
            return
        assert self.num_done == len(self._part)
        if not self.num_done:
            self._write_record()
        whole = self.path.with_name(f"{self.path.name}.new")
        with whole.open("wb") as file:
            for offset in self._offsets:
                self._file.seek(offset)
                file.write(self._file.readline())
            file.flush()
            os.fsync(file.fileno())
        os.replace(whole, self.path)
        self._file.close()
        self._partial.unlink()
        self.complete = True

    def _open(self) -> BinaryIO:
        """The file of what there is, locked: two runs would do the same work twice."""
        try:
            file = self._partial.open("a+b")
        except OSError as error:
            raise ValueError(f"cannot write {self._partial}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(f"another run is writing {self._partial}: let it end") from None
        except OSError:
            pass  # a file system without locks, as some of clusters are
        return file

    def _read(self) -> None:
        end = 0
        self._file.seek(0)
        for line in self._file:
            index = _index(line)
            if index not in self._part:
                break
            if not self.has(index):
                self._keep(index, end)
            end += len(line)
        self._file.truncate(end)

    def _keep(self, index: int, offset: int) -> None:
        self._offsets[index - self._part.start] = offset
        self.num_done += 1

    def _check_record(self) -> None:
        try:
            found = json.loads(self._record_path.read_bytes())
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict):
            raise ValueError(
                f"{self.path} has results of something else, as there is no {self._record_path}: "
                "choose another --out"
            )
        for name in (*self._record, *found):
            wanted, begun = (json.dumps(record.get(name)) for record in (self._record, found))
            if wanted != begun:
                raise ValueError(
                    f"{self.path} was begun with {name} {begun}, not {wanted}: go on as it was "
                    "begun, or choose another --out"
                )

    def _write_record(self) -> None:
        new = self._record_path.with_name(f"{self._record_path.name}.new")
        with new.open("w") as file:
            json.dump(self._record, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._record_path)


def _index(line: bytes) -> int:
    """The index in a line of the file of results; MISSING if the line is none."""
    with contextlib.suppress(ValueError, RecursionError):
        result = json.loads(line) if line.endswith(b"\n") else None
        index = result.get("index") if isinstance(result, dict) else None
        return index if isinstance(index, int) else MISSING
    return MISSING
