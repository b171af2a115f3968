"""Files of torch.save are read without torch, or refused in one line, however broken they are."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from jaxspec.checkpoints.checkpoint_files import StoredTensor
from jaxspec.checkpoints.torch_file import read_torch_file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_those_that_were_saved(dtype: torch.dtype, tmp_path: Path):
    whole = torch.arange(24, dtype=dtype).reshape(4, 6)
    saved = {"whole": whole, "rows": whole[2:], "number": 7, "word": "x"}
    torch.save(saved, tmp_path / "a.pt")
    found = read_torch_file(tmp_path / "a.pt")
    assert (found["number"], found["word"]) == (7, "x")
    for name in ("whole", "rows"):
        assert isinstance(found[name], StoredTensor)
        read = found[name].read().astype(np.float32)
        np.testing.assert_array_equal(read, saved[name].to(torch.float32).numpy())


def test_others_are_refused(tmp_path: Path):
    path = tmp_path / "a.pt"
    for value, reason in (
        (torch.arange(6.0).reshape(2, 3).T, "a tensor that is not contiguous"),
        ({"a": torch.arange(3)}, "an object torch.LongStorage"),
        (torch.nn.Linear(2, 2), "an object torch.nn.modules.linear.Linear"),
    ):
        torch.save(value, path)
        with pytest.raises(ValueError, match=f"a.pt is not read without torch: {reason}"):
            read_torch_file(path)


def test_a_storage_that_is_too_short(tmp_path: Path):
    torch.save({"a": torch.zeros(8)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data[:8] if "/data/" in name else data)
    with pytest.raises(ValueError, match="a storage is shorter than its tensor"):
        read_torch_file(tmp_path / "b.pt")


def test_broken_bytes_are_read_or_refused_in_one_line(tmp_path: Path):
    path, rng = tmp_path / "a.pt", np.random.default_rng(0)
    torch.save({"mask_token_id": 3, "embedding": torch.ones(16)}, path)
    good, refused = path.read_bytes(), 0
    for _ in range(200):
        broken = bytearray(good)
        for place in rng.integers(0, len(good), rng.integers(1, 6)):
            broken[place] = rng.integers(256)
        path.write_bytes(broken if rng.random() < 0.9 else broken[: rng.integers(len(good))])
        try:
            read_torch_file(path)
        except ValueError as error:
            refused += 1
            assert str(error).startswith(f"{path} is not read") and "\n" not in str(error)
    assert refused > 50
