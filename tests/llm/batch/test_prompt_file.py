"""Files of prompts: counted once, read in parts."""

from pathlib import Path

import pytest

from jaxspec.llm.batch.prompt_file import Shard, open_prompts, parse_line, read_shard

ARRAY = {
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_ARRAY_TASK_COUNT": "8",
    "SLURM_ARRAY_TASK_MIN": "0",
    "SLURM_ARRAY_TASK_MAX": "7",
}


@pytest.mark.parametrize(("total", "count"), [(10, 3), (8, 8), (3, 5), (100_003, 7)])
def test_shards_in_order_are_the_whole(total: int, count: int):
    parts = [Shard(index, count).part(total) for index in range(count)]
    assert [index for part in parts for index in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_results_of_shards_sort_by_name():
    paths = [Shard(index, 12).path(Path("a/out.jsonl")) for index in range(12)]
    assert paths == sorted(paths) and paths[3] == Path("a/out-00003-of-00012.jsonl")
    assert Shard().path(Path("a/out.jsonl")) == Path("a/out.jsonl")


def test_a_shard_is_named_or_that_of_an_array_job():
    assert read_shard(None, ARRAY) == Shard()
    assert read_shard("2/4", {}) == Shard(2, 4)
    assert read_shard("slurm", ARRAY) == Shard(3, 8)


@pytest.mark.parametrize("text", ["4/4", "1", "a/b", "-1/4", "1/0", "1/4/5"])
def test_other_shards_are_refused(text: str):
    with pytest.raises(ValueError, match="--shard must be I/N with I from 0 to N - 1, or slurm"):
        read_shard(text, {})


def test_some_tasks_of_an_array_are_no_shards():
    again = ARRAY | {"SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_MIN": "3"}
    with pytest.raises(ValueError, match="give --shard 3/N"):
        read_shard("slurm", again)
    with pytest.raises(ValueError, match="SLURM_ARRAY_TASK_ID is not set"):
        read_shard("slurm", {})


def test_indexes_count_prompts_and_not_blank_lines(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n  \r\n{"prompt": "b"}\r\n{"prompt": "c"}')
    prompts = open_prompts(path)
    assert prompts.count == 3
    lines = [(index, parse_line(text)["prompt"]) for index, text in prompts.lines(range(3))]
    assert lines == [(0, "a"), (1, "b"), (2, "c")]
    assert [index for index, _ in prompts.lines(range(1, 2))] == [1]
    assert list(prompts.lines(range(0))) == []


def test_a_file_that_shrinks_is_seen(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' * 3)
    prompts = open_prompts(path)
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match="has changed"):
        list(prompts.lines(range(3)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no prompts: give one JSON object a line"),
        (b"\n\n", "has no prompts"),
        (b"def f(x):\n", "is no file of prompts, one a line: the line is not JSON"),
        (b'[\n{"prompt": "a"}\n]\n', "is no file of prompts, one a line: the line is not JSON"),
        (b'["a", "b"]\n', "the line must be a JSON object"),
        (b"\xff\xff\xff\n", "the line is not JSON"),
        (b"[" * 100_000 + b"\n", "the line is not JSON"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_prompts(path)


def test_what_cannot_be_read_twice_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot read .*: No such file"):
        open_prompts(tmp_path / "none.jsonl")
    for path in (tmp_path, Path("/dev/null")):
        with pytest.raises(ValueError, match="must be a plain file"):
            open_prompts(path)
