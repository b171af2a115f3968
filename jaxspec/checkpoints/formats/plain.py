"""Lists of modules that are not quantized, compared with the tensors.

Tensors alone decide what is quantized: names in lists are those of the class that wrote the file,
and often wrong for a text model. But a projection that has no scales and that the list does not
name may have lost them.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.checkpoints.formats.four_bits import E4M3
from jaxspec.checkpoints.formats.views import MOST_PROBLEMS, Tensors
from jaxspec.config.checks import Problems
from jaxspec.models.json.values import shown

# Projections of attention and MLPs, which are those that checkpoints quantize. Lists do not always
# name MTP layers, which some quantizers do not know and copy. An indexer's weights of heads are not
# quantized; the list of GLM-5.2 has another name for them.
PROJECTION = re.compile(
    r"(?!mtp\.)(?:.*\.)?layers\.\d+\.\w+\.(?:.*\.)?(?:(?<!indexer\.)\w+_proj|w[123])"
)
QUANTIZED = (E4M3, "I8", "U8")  # dtypes that mean nothing without scales
PLACE = re.compile(r"(?:^|\.)(layers\.\d+\..*)")


def _is_part_of_scaled(module: str, stored: Tensors) -> bool:
    """Whether a module is a part of a table whose parts have one scale together."""
    table, _, number = module.rpartition(".shard_")
    return number.isdecimal() and f"{table}.weight_scale" in stored


def check_plain(
    config: Mapping[str, Any],
    keys: tuple[str, ...],
    stored: Tensors,
    tensors: Tensors,
    is_meant: Callable[[str], bool] = lambda module: True,
) -> None:
    """Raise ValueError for a weight of 8 bits that has no scales, and for a projection without
    them that the config's list does not name, if there is such a list.

    Args:
      keys: of the list in ``config``; the first that is there counts.
      stored: what the checkpoint has.
      tensors: what was made of it; weights that are the same are not quantized.
      is_meant: whether the config means to quantize a module, by its name.
    """
    key = next((key for key in keys if config.get(key)), None)
    listed, problems = _names_in(config[key], key) if key else [], Problems()
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module == name or stored.get(name) is not tensor:
            continue
        in_file = tensor.name.removesuffix(".weight")
        if tensor.dtype in QUANTIZED and not _is_part_of_scaled(module, stored):
            problems.add(
                f"{tensor.name} is {tensor.dtype}, but the scales of {in_file} are missing"
            )
            continue
        if not listed or not PROJECTION.fullmatch(module) or not is_meant(module):
            continue
        # Lists have the names of the file, some of which are others than the package's.
        names = (module, in_file)
        if not any(_names(entry, n) for entry in listed for n in (*names, *map(_place, names))):
            problems.add(
                f"{tensor.name} is {tensor.dtype} and {in_file} has no scales, but "
                f"quantization_config: {key} does not name it: name it there if it is not quantized"
            )
    problems.raise_all(MOST_PROBLEMS)


def _place(module: str) -> str:
    """The name of a module from ``layers`` on."""
    found = PLACE.search(module)
    return found[1] if found else module


def _names_in(listed: Any, key: str) -> list[str]:
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"quantization_config: {key} must be a list of names, got {shown(listed)}")
    return listed


def _names(entry: str, place: str) -> bool:
    """Whether an entry of a list means the module ``place``, a whole name or one from ``layers``
    on. Entries may begin with the prefix of another class that wraps the model, be an expression,
    have asterisks, be the last names of a module, or name a module that holds it."""
    if entry.startswith("mtp"):
        return False
    if entry.startswith("re:"):
        try:
            return re.search(entry.removeprefix("re:"), place) is not None
        except re.error:
            return False
    found = re.search(r"(^|\.)(layers\.[\d*]+(\..*)?)$", entry)
    entry = (found[2] if found else entry).strip(".")
    if "*" in entry:
        return any(fnmatch.fnmatchcase(f".{place}.", f"*.{entry}{end}") for end in (".", ".*"))
    return f".{entry}." in f".{place}."
