"""Which keys of a ``config.json`` transformers reads, by the sources of its config classes.

The classes are not imported, as that loads torch where it is installed. Their fields are read from
the sources of the installed transformers: of a dataclass the annotated names, of an older class the
arguments of ``__init__``.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

COMPUTED = object()  # stands for a default that is no literal
ELSEWHERE = MappingProxyType({"step3p5": "step3p7"})  # classes in the folder of another model_type


@functools.cache
def declared_keys(model_type: str) -> Mapping[str, Any] | None:
    """The fields of transformers' config class of a ``model_type``, with their defaults, and the
    further names that it takes.

    None: the installed transformers has no such class.
    """
    folders = ELSEWHERE.get(model_type, model_type), model_type.removesuffix("_text")
    for folder in dict.fromkeys(folders):
        path = _models() / folder / f"configuration_{folder}.py"
        if path.is_file():
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and _assigned(node, "model_type") == model_type:
                    renamed = _assigned(node, "attribute_map")
                    others = (
                        *(renamed if isinstance(renamed, dict) else ()),
                        *_from_keywords(node),
                    )
                    return MappingProxyType(dict.fromkeys(others, COMPUTED) | dict(_fields(node)))
    return None


def _models() -> Path:
    """The folder of transformers' models. Finding a package does not import it."""
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "models"


def _assigned(node: ast.ClassDef, name: str) -> Any:
    """The value of a class attribute without an annotation; None: it has none."""
    for part in node.body:
        if isinstance(part, ast.Assign) and [ast.unparse(to) for to in part.targets] == [name]:
            return _literal(part.value)
    return None


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            if "ClassVar" not in ast.unparse(part.annotation):
                yield part.target.id, COMPUTED if part.value is None else _literal(part.value)
        elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
            given = part.args.args[1:]
            defaults = part.args.defaults
            required = len(given) - len(defaults)
            for index, argument in enumerate(given):
                has = index >= required
                yield argument.arg, _literal(defaults[index - required]) if has else COMPUTED


def _from_keywords(node: ast.ClassDef) -> Iterator[str]:
    """The names that a class takes from ``kwargs``, as it does with those of old files."""
    for call in ast.walk(node):
        match call:
            case ast.Call(
                func=ast.Attribute(value=ast.Name("kwargs")), args=[ast.Constant(name), *_]
            ):
                yield str(name)


def _literal(node: ast.expr) -> Any:
    """The value of a literal, or of a field whose ``default`` is one."""
    if isinstance(node, ast.Call):
        given = [word.value for word in node.keywords if word.arg == "default"]
        return _literal(given[0]) if given else COMPUTED
    try:
        return ast.literal_eval(node)
    except ValueError:
        return COMPUTED
