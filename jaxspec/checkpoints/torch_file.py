"""Small files of ``torch.save``, read without torch: a zip of a pickle and the bytes of storages.

Nothing of the pickle is run but what makes dicts and describes tensors; it may hold these, numbers
and strings.
"""

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxspec.checkpoints.checkpoint_files import DTYPES, StoredTensor
from jaxspec.models.json.values import one_line

_STORAGES: Mapping[str, str] = MappingProxyType(
    {"FloatStorage": "F32", "BFloat16Storage": "BF16", "HalfStorage": "F16"}
)
MOST = 1 << 20  # bytes of a pickle
# What a broken file of these kinds raises.
_ERRORS = (
    *(zipfile.BadZipFile, pickle.UnpicklingError, struct.error, OSError, EOFError),
    *(ValueError, LookupError, TypeError, AttributeError, OverflowError),
    *(RuntimeError, MemoryError, zlib.error),
)
_LOCAL_HEADER = struct.Struct("<26x2H")  # sizes of the name and of what follows it


class _Storage(NamedTuple):
    dtype: str
    key: str


class _View(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]


def _rebuild_tensor(storage: _Storage, offset: int, shape: Any, strides: Any, *_: Any) -> _View:
    step, contiguous = 1, []
    for size in reversed(shape):
        contiguous.insert(0, step)
        step *= size
    if list(strides) != contiguous:
        raise pickle.UnpicklingError("a tensor that is not contiguous")
    return _View(storage, offset, tuple(shape))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"an object {module}.{name}")
        return known[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        return _Storage(dtype=pid[1], key=str(pid[2]))


def read_torch_file(path: Path) -> Any:
    """What ``torch.save`` wrote, with a StoredTensor in place of each tensor of a dict, or of the
    file.

    Raises ValueError for a file that is not of its zip format, or holds other things.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            [pickled] = [name for name in names if name.endswith("data.pkl")]
            if archive.getinfo(pickled).file_size > MOST:
                raise ValueError(f"its description is longer than {MOST} bytes")
            found = _Unpickler(io.BytesIO(archive.read(pickled))).load()
            folder = pickled.removesuffix("data.pkl")
            if isinstance(found, dict):
                return {key: _placed(path, archive, folder, each) for key, each in found.items()}
            return _placed(path, archive, folder, found)
    except _ERRORS as error:
        reason = one_line(error) or type(error).__name__
        raise ValueError(f"{path} is not read without torch: {reason}") from None


def _placed(path: Path, archive: zipfile.ZipFile, folder: str, value: Any) -> Any:
    """A tensor's place in the file; anything else as it is."""
    if not isinstance(value, _View):
        return value
    entry = archive.getinfo(f"{folder}data/{value.storage.key}")
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its storages are compressed")
    dtype = value.storage.dtype
    first, size = value.offset, DTYPES[dtype].itemsize
    if first < 0 or min(value.shape, default=1) < 0:
        raise ValueError("a tensor of a negative size")
    if (first + math.prod(value.shape)) * size > entry.file_size:
        raise ValueError("a storage is shorter than its tensor")
    with path.open("rb") as file:
        file.seek(entry.header_offset)
        sizes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start = entry.header_offset + _LOCAL_HEADER.size + sum(sizes)
    return StoredTensor(
        file=path,
        name=path.name,
        shape=value.shape,
        dtype=dtype,
        start=start + first * size,
    )
