"""What the files of a checkpoint would call tensors that they lack.

tensor_names.py leads from names in files to those of the layers. Here is the way back: by the names
of the same tensor in other layers, else by the family's renames, read backwards.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from jaxspec.checkpoints.tensor_names import LM_HEAD, TEXT_MODEL, alone, renamed
from jaxspec.models.families.family import Family
from jaxspec.models.from_config.model import text_family
from jaxspec.models.json.values import read_json
from jaxspec.models.tensors import CheckpointTensor

# Parts of a quantized module, in the words of formats: the first ones in place of its weight.
WEIGHTS = ("values", "codes", "pairs")
OF_FORMATS = (*WEIGHTS, "scale", "zero", "groups", "blocks", "rounds", "inputs", "factor")
MOST_ALIKE = 4  # missing tensors of one name but for its numbers, that are listed each
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_NUMBER_OF_EXPERT = re.compile(r"\[\d+\]$")
# Parts of an expression of tensor_names: ends, groups with what may stand beside them, letters.
_PART = re.compile(
    r"(?P<end>\^|\$|\\b)|\(\?:(?P<other>[^()]*)\)(?P<optional>\??)"
    r"|\((?P<group>(?:[^()]|\(\?:[^()]*\)\??)*)\)|\\?(?P<letter>.)"
)


def missing_in_files(
    missing: Iterable[str], stored: Mapping[str, CheckpointTensor]
) -> dict[str, list[str]]:
    """Tensors that a model has and ``stored`` lacks, as files with its other tensors would name
    them: lists of those that differ in numbers alone."""
    files, found = _Files(stored), dict[str, list[str]]()
    for name in missing:
        in_file = files.name_of(name)
        key = _NUMBER_OF_EXPERT.sub("", _without_numbers(in_file))
        found.setdefault(key, []).append(in_file)
    return {key: list(dict.fromkeys(names)) for key, names in found.items()}


def said_missing(missing: Iterable[str], stored: Mapping[str, CheckpointTensor]) -> Iterator[str]:
    """A phrase for each missing tensor, one for many that differ in numbers alone."""
    for names in missing_in_files(missing, stored).values():
        if len(names) <= MOST_ALIKE:
            yield from (f"{name} is missing" for name in names)
        else:
            yield f"{names[0]} to {names[-1]} are missing ({len(names)} tensors)"


@dataclasses.dataclass(frozen=True)
class _Files:
    """The names in files, by those of the layers."""

    stored: Mapping[str, CheckpointTensor]

    def name_of(self, missing: str) -> str:
        like, old = self._alike(missing)
        name = _renumbered(old, like, missing)
        if name not in self._present:
            return name
        expert = _EXPERT.search(missing)  # of a tensor of all experts, which are fewer
        return missing if expert is None else f"{name}[{expert[1]}]"

    @functools.cached_property
    def _present(self) -> set[str]:
        return {_NUMBER_OF_EXPERT.sub("", tensor.name) for tensor in self.stored.values()}

    def _alike(self, missing: str) -> tuple[str, str]:
        """The name of another layer's tensor of this kind, and what a file calls it."""
        key = _without_numbers(missing)
        if key in self._others:
            return self._others[key]
        module, _, kind = key.rpartition(".")
        quantized = (f"{module}.{values}" for values in WEIGHTS if kind == "weight")
        found = next(filter(None, map(self._others.get, quantized)), None)
        if found is None:
            named = missing.removesuffix(kind) + self._part(kind)
            found = missing, self._by_renames(named)
        self._others[key] = found
        return found

    def _part(self, kind: str) -> str:
        """What files call a part of a quantized module."""
        ends = (old for name, old in self._others.values() if name.endswith(f".{kind}"))
        known = next(ends, None) if kind in OF_FORMATS else None
        return kind if known is None else known.rpartition(".")[2]

    @functools.cached_property
    def _others(self) -> dict[str, tuple[str, str]]:
        """By names without numbers: one of the stored ones, and what a file calls it."""
        return {
            _without_numbers(name): (name, _NUMBER_OF_EXPERT.sub("", tensor.name))
            for name, tensor in self.stored.items()
        }

    def _by_renames(self, missing: str) -> str:
        """The name that tensor_names makes this one of. Of several one whose words stand beside
        each other in other names, too, else the one that is renamed most."""
        candidates = [name for name in self._candidates(missing) if self._read_as(name) == missing]

        def rank(name: str) -> tuple[bool, bool, int]:
            first, *others = (pair not in self._pairs for pair in _pairs(name))
            changed = set(name.split(".")) ^ set(missing.split("."))
            return first, any(others), -len(changed)

        return min(sorted(candidates), key=rank, default=missing)

    @functools.cached_property
    def _pairs(self) -> set[tuple[str, str]]:
        """Words that stand beside each other in names in files."""
        return {pair for _, name in self._others.values() for pair in _pairs(name)}

    @functools.cached_property
    def _is_bare(self) -> bool:
        """Whether the files' names lack the prefix ``model.``."""
        pairs = [pair for pair in self._others.values() if pair[0].startswith("model.")]
        return bool(pairs) and all(name == f"model.{old}" for name, old in pairs)

    @functools.cached_property
    def _family(self) -> Family | None:
        folders = {tensor.file.parent for tensor in self.stored.values()}
        return _family_in(folders)

    def _read_as(self, name: str) -> str:
        """What tensor_names makes of a name in a file."""
        if self._is_bare:
            whole = name if name.startswith(LM_HEAD) else f"model.{name}"
        else:
            whole = alone(name)
        return whole if self._family is None else renamed(whole, self._family)

    def _candidates(self, missing: str) -> set[str]:
        names = {missing}
        for pattern, new in reversed(self._family.renames if self._family else ()):
            backwards, old = _backwards(pattern, new)
            names |= {backwards.sub(old, name) for name in names}
        if self._is_bare:
            names |= {name.removeprefix("model.") for name in names}
        for prefix, plain in TEXT_MODEL.items():
            model = prefix.removesuffix(plain)
            if any(old.startswith(model) for _, old in self._others.values()):
                text = (name for name in names if name.startswith(plain))
                names = names | {prefix + name.removeprefix(plain) for name in text}
        return names


def _family_in(folders: Collection[Path]) -> Family | None:
    """The family that the config.json of the only folder names."""
    paths = [folder / "config.json" for folder in folders]
    if len(paths) != 1 or not paths[0].exists():
        return None
    return text_family(read_json(paths[0]))


def _backwards(pattern: str, new: str) -> tuple[re.Pattern[str], str]:
    """A rename the other way round: an expression for what it makes, and what that was made of. Of
    what may stand there in several ways the first, or nothing."""
    groups, before, after, old = list[str](), "", "", ""
    for part in _PART.finditer(pattern):
        if part["end"]:
            before, after = (before, part["end"]) if old else (part["end"], after)
        elif part["group"] is not None:
            groups.append(part["group"])
            used = rf"\{len(groups)}" in new
            old += rf"\g<g{len(groups)}>" if used else part["group"].split("|")[0]
        elif part["other"] is not None:
            old += "" if part["optional"] else part["other"].split("|")[0].replace("\\", "")
        else:
            old += part["letter"]
    made = re.escape(new)
    for index, group in enumerate(groups, 1):
        made = made.replace(rf"\\{index}", f"(?P<g{index}>{group})")
    return re.compile(before + made + after), old


def _without_numbers(name: str) -> str:
    return ".".join("#" if part.isdecimal() else part for part in name.split("."))


def _pairs(name: str) -> list[tuple[str, str]]:
    words = ["", *_without_numbers(name).split(".")]
    return [*itertools.pairwise(words)]


def _renumbered(old: str, like: str, name: str) -> str:
    """``old``, a file's name of ``like``, with the numbers of ``name``."""
    both = zip(like.split("."), name.split("."), strict=True)
    numbers = [(number, new) for number, new in both if number.isdecimal()]
    parts = old.split(".")
    for place, part in enumerate(parts):
        found = next((i for i, (number, _) in enumerate(numbers) if number == part), None)
        if found is not None:
            parts[place] = numbers[found][1]
            numbers = numbers[found + 1 :]
    return ".".join(parts)
