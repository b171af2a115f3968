"""Files of results: whole or not there, and what a killed run leaves."""

import json
from pathlib import Path

import pytest

from jaxspec.llm.batch.result_file import ResultFile

RECORD = {"prompt_file_sha256": "abc", "temperature": 0.5}


def out(folder: Path) -> Path:
    return folder / "out.jsonl"


def partial(folder: Path) -> Path:
    return folder / "out.jsonl.partial"


def add(folder: Path, *indexes: int, record=RECORD, part: range = range(4)) -> None:
    """A run that is cut off after these."""
    with ResultFile(out(folder), record, part) as results:
        for index in indexes:
            assert not results.has(index)
            results.add(index, {"text": f"text {index}"})


def finish(folder: Path, part: range = range(4)) -> list[int]:
    """What a run adds that ends."""
    with ResultFile(out(folder), RECORD, part) as results:
        missing = [index for index in part if not results.has(index)]
        for index in missing:
            results.add(index, {"text": f"text {index}"})
        results.finish()
    return missing


def indexes(folder: Path) -> list[int]:
    return [json.loads(line)["index"] for line in out(folder).read_text().splitlines()]


def test_results_come_at_once_and_in_order(tmp_path: Path):
    add(tmp_path, 3, 1)
    assert not out(tmp_path).exists()
    assert finish(tmp_path) == [0, 2]
    lines = [json.loads(line) for line in out(tmp_path).read_text().splitlines()]
    assert lines == [{"index": index, "text": f"text {index}"} for index in range(4)]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["out.jsonl", "out.jsonl.run.json"]


def test_a_whole_file_is_left_alone(tmp_path: Path):
    finish(tmp_path)
    before = out(tmp_path).read_bytes()
    assert finish(tmp_path) == [] and out(tmp_path).read_bytes() == before


def test_indexes_of_a_shard_do_not_begin_at_0(tmp_path: Path):
    add(tmp_path, 12, part=range(10, 14))
    assert finish(tmp_path, range(10, 14)) == [10, 11, 13]


def test_an_empty_shard_has_a_file(tmp_path: Path):
    assert finish(tmp_path, range(0)) == []
    assert out(tmp_path).read_bytes() == b""
    assert finish(tmp_path, range(0)) == []


@pytest.mark.parametrize(
    "torn",
    [
        b'{"index": 3, "te',
        b'{"index": 3, "text": "a"}',  # whole, but nobody knows
        b"\0" * 100 + b"\n",
        b'{"index": 9}\n',
        b'{"text": "no index"}\n{"index": 3, "text": "a"}\n',
        b'{"index": [3]}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_torn_line_and_what_follows_are_dropped(tmp_path: Path, torn: bytes):
    add(tmp_path, 2, 0)
    with partial(tmp_path).open("ab") as file:
        file.write(torn)
    assert finish(tmp_path) == [1, 3]
    assert indexes(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("size", range(0, 80, 7))
def test_a_run_goes_on_wherever_it_was_cut(tmp_path: Path, size: int):
    add(tmp_path, 2, 0, 1)
    with partial(tmp_path).open("r+b") as file:
        file.truncate(size)
    finish(tmp_path)
    assert indexes(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("ended", [False, True])
def test_another_run_does_not_go_on_with_it(tmp_path: Path, ended: bool):
    finish(tmp_path) if ended else add(tmp_path, 1)
    with pytest.raises(ValueError, match=r"was begun with temperature 0.5, not 0.7: go on as it"):
        add(tmp_path, record=RECORD | {"temperature": 0.7})
    with pytest.raises(ValueError, match='was begun with prompt_file_sha256 "abc", not "def"'):
        add(tmp_path, record=RECORD | {"prompt_file_sha256": "def"})
    with pytest.raises(ValueError, match=r"was begun with temperature 0.5, not null"):
        add(tmp_path, record={"prompt_file_sha256": "abc"})


def test_a_run_without_a_result_leaves_nothing(tmp_path: Path):
    add(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_not_overwritten(tmp_path: Path):
    out(tmp_path).write_text("mine")
    with pytest.raises(ValueError, match="has results of something else"):
        add(tmp_path)
    assert out(tmp_path).read_text() == "mine"
    (tmp_path / "out.jsonl.run.json").write_text("{")
    with pytest.raises(ValueError, match="has results of something else"):
        add(tmp_path)


def test_two_runs_do_not_write_one_file(tmp_path: Path):
    with ResultFile(out(tmp_path), RECORD, range(4)) as results:
        with pytest.raises(ValueError, match="another run is writing"):
            add(tmp_path)
        results.add(0, {})
    assert finish(tmp_path) == [1, 2, 3]


def test_a_file_that_cannot_be_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="there is no folder"):
        ResultFile(tmp_path / "no" / "out.jsonl", RECORD, range(1))
    with pytest.raises(ValueError, match="it is a folder"):
        ResultFile(tmp_path, RECORD, range(1))
