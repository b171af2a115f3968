"""Prose names what exists: pages, docstrings and comments that mention a file, a folder, a module,
a function or a command of this repository.

Code that moves breaks its imports, and somebody notices. A sentence that says where to look breaks
silently. The changelog is left out: it tells of what is gone.
"""

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from jaxspec.__main__ import COMMANDS
from tests.helpers.source_trees import nodes, parse

ROOT = Path(__file__).parents[2]
CODE = ("jaxspec", "pallas_kernels", "scripts", "tests", "examples")
FOLDERS = (*CODE, "docs", ".ci", ".github")
# Files of vLLM, which our pages and docstrings cite.
FOREIGN = {"deepseek_mtp.py", "mimo.py", "mimo_mtp.py", "qwen3_5_mtp.py", "qwen3_next_mtp.py"}
FOREIGN |= {"step3p5.py", "step3p5_mtp.py", "ernie_mtp.py", "hy_v3_mtp.py"}
FOREIGN |= {"exaone_moe.py", "exaone_moe_mtp.py", "exaone4_5_mtp.py"}
FOREIGN |= {"minimax_m3/mtp.py"}
FOREIGN |= {"deepseek_nextn.py", "deepseek_v4_nextn.py", "hunyuan_v3_nextn.py"}  # SGLang
FOREIGN |= {"ernie4_5_mtp.py"}  # of FastDeploy
FOREIGN |= {"jaxspec/compilation"}  # a folder in a user's cache directory

FILE = re.compile(r"(?<![\w./<{*~-])(?:[\w-]+/)*[\w-]+\.(?:py|md|sbatch)\b(?!\()")
PLACE = re.compile(rf"(?<![\w./~-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*\w(?![\w*<{{])")
MODULE = re.compile(r"(?<![\w./-])(?:jaxspec|pallas_kernels)(?:\.[A-Za-z_]\w*)+")
SEE = re.compile(r"\b[Ss]ee `*([a-z_]\w*(?:\.[A-Za-z_]\w*)+)")
COMMAND = re.compile(r"`jaxspec ([a-z]+(?:-[a-z]+)*(?: [a-z]+)?)")


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def places() -> set[str]:
    """Files and folders of this repository."""
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    inside = {label(path) for path in found if "__pycache__" not in path.parts}
    return inside | {path.name for path in ROOT.iterdir()}


@functools.cache
def endings() -> set[str]:
    """Every way to name a file by the end of its path."""
    split = (place.split("/") for place in places())
    return {"/".join(parts[first:]) for parts in split for first in range(len(parts))}


@functools.cache
def sources() -> tuple[Path, ...]:
    return tuple(sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py")))


def defined(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that statements define, those in conditions included."""
    for statement in statements:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case ast.If(body=body, orelse=other) | ast.Try(body=body, orelse=other):
                yield from defined([*body, *other])
            case ast.Assign() | ast.AnnAssign() | ast.TypeAlias():
                stored = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
                yield from (node.id for node in stored if isinstance(node.ctx, ast.Store))


@functools.cache
def modules() -> dict[str, list[set[str]]]:
    """What modules define, by every ending of their dotted names: several may have the same."""
    found: dict[str, list[set[str]]] = {}
    for path in sources():
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        names = set(defined(parse(path).body))
        if "*" in names:  # jaxspec/functional.py hands on what this package lists
            names |= set(defined(parse(ROOT / "jaxspec/decoding/functional/__init__.py").body))
        for first in range(len(parts)):
            found.setdefault(".".join(parts[first:]), []).append(names)
    return found


@functools.cache
def members() -> dict[str, set[str]]:
    """Names of the members of each class without bases, and of all that are called the same."""
    found: dict[str, set[str]] = {}
    with_bases: set[str] = set()
    for path in sources():
        for node in nodes(parse(path)):
            if isinstance(node, ast.ClassDef):
                attributes = (inner for inner in ast.walk(node) if isinstance(inner, ast.Attribute))
                stored = {inner.attr for inner in attributes if isinstance(inner.ctx, ast.Store)}
                found.setdefault(node.name, set()).update(defined(node.body), stored)
                with_bases |= {node.name} if node.bases else set()
    return {name: names for name, names in found.items() if name not in with_bases}


def names_something(dotted: str) -> bool:
    """Whether it is a module, a name in one, or a member of a class there."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        rest = parts[end:]
        for names in modules().get(".".join(parts[:end]), ()):
            if not rest or (len(rest) == 1 and rest[0] in names):
                return True
            # Of a class that is not known all members are.
            if len(rest) > 1 and rest[0] in names and rest[1] in members().get(rest[0], rest):
                return True
        if parts[0] in CODE and ".".join(parts[:end]) in modules():
            return False  # a whole path: the package that holds this module does not say more
    return False


def is_command(words: str) -> bool:
    return words in COMMANDS or words.split()[0] in {*COMMANDS, *(c.split()[0] for c in COMMANDS)}


def stale(text: str) -> Iterator[tuple[int, str]]:
    """Names in ``text`` that nothing has, with their place in it."""
    for found in FILE.finditer(text):
        if found.group() not in endings() and found.group() not in FOREIGN:
            yield found.start(), found.group()
    for found in PLACE.finditer(text):
        if found.group() not in places() and found.group() not in FOREIGN:
            yield found.start(), found.group()
    for found in (*MODULE.finditer(text), *SEE.finditer(text)):
        dotted = found.group(found.lastindex or 0)
        if not dotted.endswith((".py", ".md")) and not names_something(dotted):
            yield found.start(), dotted
    for found in COMMAND.finditer(text):
        if not is_command(found.group(1)):
            yield found.start(), found.group()


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes(parse(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body[:1]:
                case [ast.Expr(value=ast.Constant(value=str(text)), lineno=line)]:
                    yield line, text


def comments(path: Path) -> Iterator[tuple[int, str]]:
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if found := re.search(r"(?:^\s*|  )# .*", text):
            yield line, found.group()


def stale_names(path: Path) -> list[str]:
    """``file:line: name`` of each stale name in a page, or in the prose of a source."""
    if path.suffix == ".py":
        prose = [*docstrings(path), *comments(path)]
    else:
        prose = [(1, path.read_text(encoding="utf-8"))]
    return [
        f"{label(path)}:{line + text.count(chr(10), 0, place)}: {name}"
        for line, text in prose
        for place, name in stale(text)
    ]


def test_pages_name_what_exists():
    pages = [path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"]
    pages += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")]
    assert len(pages) > 15
    found = [name for page in pages for name in stale_names(page)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", CODE)
def test_docstrings_and_comments_name_what_exists(folder: str):
    inside = [path for path in sources() if label(path).startswith(f"{folder}/")]
    assert inside
    found = [name for path in inside for name in stale_names(path)]
    assert not found, "\n".join(found)


GONE = (
    *("`models/gone.py`", "gone.py", "(tests/models/test_gone.py)", "scripts/slurm/gone.sbatch"),
    *("docs/gone.md", "docs/gone.png", "`jaxspec gone`", "jaxspec.gone"),
    *("``jaxspec.functional.gone``", "jaxspec.SamplingParams.gone", "see functional.gone"),
    "See models.gone.run",
)
THERE = (
    *("`__main__.py`", "README.md", "tests/docs/test_prose_names.py", "tests/*.py"),
    *("MODEL/config.json", "https://example.org/docs/gone.md", "`jaxspec bench engine`"),
    *("`jaxspec --help`", "`jaxspec.load`", "see functional.decode", "jaxspec.Engine.add"),
    *("jaxspec.decoding.functional.decode", "see jaxspec.EngineConfig"),
    "jaxspec.SamplingParams.temperature",
)


@pytest.mark.parametrize("text", [*GONE, *THERE])
def test_only_names_of_nothing_are_found(text: str):
    assert bool(list(stale(f"It says: {text}, as before."))) == (text in GONE)
