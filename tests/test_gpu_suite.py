"""Parts of `pytest -m gpu`, and the record of those that passed; nothing here needs a GPU."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import chosen_part
from tests.helpers.gpu_suite import (
    SEVERAL_GPUS,
    Part,
    after_part,
    file_of,
    gpu_of_worker,
    ids_of,
    read_record,
    selects_all,
    visible_gpus,
)

ROOT = Path(__file__).parent.parent
TESTS = [
    *(f"tests/kernels/test_top_k.py::test_it[{n}]" for n in range(100)),
    *(f"tests/decoding/test_exactness_of_kernels.py::test_it[{n}]" for n in range(10)),
    "tests/parallel/test_several_gpus.py::test_it",
    "tests/kernels/test_reduce_add_rms_norm.py::test_it[2]",
]
FACTS = {"commit": "abc", "device": "NVIDIA H100", "jax": "0.11.2"}
PASSED = {"command": "pytest -m gpu --gpu-part 1/2", "passed": 3, "skipped": 0}


def test_each_test_is_in_one_part():
    for count in (2, 3, 5):
        parts = [ids_of(Part(k, count), TESTS) for k in range(1, count + 1)]
        assert sorted(test for part in parts for test in part) == sorted(TESTS)
        assert parts == [ids_of(Part(k, count), TESTS[::-1])[::-1] for k in range(1, count + 1)], (
            "another order of the tests changes the parts"
        )
        assert {file_of(test) for test in parts[-1]} <= SEVERAL_GPUS
        seconds = [sum(3.0 if "top_k" in test else 60.0 for test in part) for part in parts[:-1]]
        assert max(seconds) - min(seconds) <= 60.0
    assert ids_of(Part(1, 1), TESTS) == TESTS


@pytest.mark.parametrize("text", ["3", "0/4", "5/4", "a/b", "1/0", "/", "1/2/3"])
def test_a_part_is_k_of_n(text: str):
    with pytest.raises(ValueError, match=f"--gpu-part must be K/N.*got {text}"):
        Part.parse(text)
    assert Part.parse("2/4") == (2, 4) and str(Part(2, 4)) == "2/4"


def test_the_record_is_complete_with_all_parts_of_a_commit():
    record = after_part({}, FACTS, Part(2, 2), PASSED)
    assert record == {**FACTS, "complete": False, "parts": {"2/2": PASSED}}
    record = after_part(record, FACTS, Part(1, 2), PASSED)
    assert record["complete"] and list(record["parts"]) == ["1/2", "2/2"]
    for name in FACTS:
        other = after_part(record, FACTS | {name: "another"}, Part(1, 2), PASSED)
        assert not other["complete"] and list(other["parts"]) == ["1/2"]
        assert other[name] == "another"
    assert list(after_part(record, FACTS, Part(1, 3), PASSED)["parts"]) == ["1/3"]
    assert after_part(record, FACTS, Part(1, 1), PASSED)["complete"]


def test_a_part_that_fails_is_no_longer_in_the_record():
    record = after_part({}, FACTS, Part(1, 1), PASSED)
    assert after_part(record, FACTS, Part(1, 1), None) == {**FACTS, "complete": False, "parts": {}}


def test_workers_of_one_gpu_each_take_turns():
    gpus = ["0", "1", "2", "3"]
    workers = [gpu_of_worker(f"gw{n}", Part(1, 3), gpus) for n in range(6)]
    assert workers == ["0", "1", "2", "3", "0", "1"]
    assert gpu_of_worker("gw1", Part(3, 3), gpus) is None  # it needs all
    assert gpu_of_worker("gw1", None, gpus) is gpu_of_worker(None, Part(1, 3), gpus) is None
    assert gpu_of_worker("gw1", Part(1, 3), []) is None


def test_gpus_are_those_of_the_variable_or_of_the_folder(tmp_path: Path):
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus(None, tmp_path) == ["0", "2", "10"]
    assert visible_gpus("3,1", tmp_path) == ["3", "1"] and visible_gpus("", tmp_path) == []


def test_only_a_run_of_everything_is_recorded():
    options = argparse.Namespace(keyword="", deselect=None, ignore=None, lf=False)
    assert selects_all(options, paths_given=False) and not selects_all(options, paths_given=True)
    for changed in ({"keyword": "tp2"}, {"deselect": ["a"]}, {"lf": True}):
        assert not selects_all(argparse.Namespace(**vars(options) | changed), paths_given=False)


def test_the_record_of_the_documentation_can_be_added_to():
    record = read_record(ROOT / "docs/gpu_tests.json")
    assert record["complete"] == (len(record["parts"]) == Part.parse(min(record["parts"])).count)
    facts = {name: record[name] for name in FACTS}
    assert after_part(record, facts, Part(1, 9), PASSED)["parts"] == {"1/9": PASSED}


def test_parts_are_for_the_gpu_mark():
    class Config:
        option = argparse.Namespace(markexpr="slow", gpu_part="1/4")

    config: Any = Config()
    with pytest.raises(pytest.UsageError, match="--gpu-part is for -m gpu: give both"):
        chosen_part(config)
    config.option.markexpr = "gpu"
    assert chosen_part(config) == Part(1, 4)
    config.option.gpu_part = "5/4"
    with pytest.raises(pytest.UsageError, match="from 1 to N, got 5/4"):
        chosen_part(config)
    config.option.gpu_part = None
    assert chosen_part(config) is None


def collected(*options: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only"]
    result = subprocess.run(
        [*command, "-m", "gpu", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [line for line in result.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_the_parts_of_the_suite_are_the_suite():
    suite = collected()
    assert {file_of(test) for test in suite} >= SEVERAL_GPUS
    assert collected("--gpu-part", "2/4") == ids_of(Part(2, 4), suite) != suite
