"""The architecture, as checks: who may import whom, and a few rules that keep files readable.

Nothing here needs a device. Imports are read from the source with `ast`, so a broken rule is
reported as `file:line` whether or not the code would ever run.
"""

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pallas_kernels.selection import OPERATIONS
from tests.helpers.source_trees import nodes, parse

ROOT = Path(__file__).resolve().parent.parent

# The packages, lowest first. A module may import from its own package and from those before it.
LAYERS = (
    "pallas_kernels",
    "jaxspec._lazy",
    "jaxspec._version",
    "jaxspec.config",
    "jaxspec.scheduling",
    "jaxspec.parallel",
    "jaxspec.cache",
    "jaxspec.models",
    "jaxspec.decoding",
    "jaxspec.functional",  # the name under which programs import decoding.functional
    "jaxspec.checkpoints",
    "jaxspec.engine",
    "jaxspec.llm",
    "jaxspec",  # the package's own __init__.py: the public names
    "jaxspec.integrations",
    "jaxspec.evaluation",
    "jaxspec.training",
    "jaxspec.serving",
    "jaxspec.quantize",
    "jaxspec.commands",
    "jaxspec.__main__",
    "scripts",
    "tests",
)
MOST_AT_THE_TOP = 24  # packages and files of jaxspec/
# Host code. It may use nothing of jaxspec but these, and only these may use scheduling.
SCHEDULING = "jaxspec.scheduling"
STRUCTURED = "jaxspec.engine.structured"
HOST_MAY_USE = {
    STRUCTURED: (STRUCTURED, "jaxspec.config"),
    SCHEDULING: (SCHEDULING, "jaxspec.config"),
}
SCHEDULING_USERS = {SCHEDULING, *LAYERS[LAYERS.index("jaxspec.engine") :]}
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax", "pallas_kernels"}

# Where model code calls kernels by operation name; mixers and MLPs know none. A Linear of
# models/quantized has a product of its own. Functions of a reference.py are jnp, not kernels.
KERNEL_CALLERS = {
    "jaxspec.models.forward_pass",
    "jaxspec.models.attention",
    "jaxspec.models.block_heads",  # blocks of positions
    "jaxspec.models.entry_heads",  # a window, and entries of spans
    "jaxspec.models.sparse_choice",  # which positions are attended to
    "jaxspec.models.one_launch",  # several blocks of a layer
    "jaxspec.models.readers",  # norms that round
    "jaxspec.models.mlps.slots",  # experts in passes of an engine
}

JIT_NAMES = {"jit", "pjit", "pmap"}
JIT_HOMES = (
    *("jaxspec.engine.programs", "jaxspec.training", "jaxspec.evaluation.benchmarks"),
    *("jaxspec.quantize", "jaxspec.integrations"),
)

MAX_LINES = 400


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


SOURCES = python_files("pallas_kernels", "jaxspec", "scripts")
LIBRARY_SOURCES = python_files("pallas_kernels", "jaxspec")
JAXSPEC_SOURCES = python_files("jaxspec")
HOST_SOURCES = python_files("jaxspec/scheduling", "jaxspec/engine/structured")


@functools.cache
def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str | None:
    """The layer a dotted name belongs to; None for third-party code."""
    parts = module.split(".")
    for name in (".".join(parts[:2]), parts[0]):
        if name in LAYERS:
            return name
    return None


def imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Every import as (line, dotted name), relative ones resolved; `from a import b` is `a.b`."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


@functools.cache
def imports_of(path: Path) -> tuple[tuple[int, str], ...]:
    is_package = path.name == "__init__.py"
    return tuple(imports(parse(path), module_name(path), is_package))


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def broken_import_rule(importer: str, imported: str) -> str | None:
    """Why module `importer` must not import `imported`, or None if it may."""
    above, below = layer_of(importer), layer_of(imported)
    host = next((name for name in HOST_MAY_USE if within(importer, name)), None)
    if host and imported.split(".")[0] in DEVICE_LIBRARIES:
        return f"{host} is host code and never touches device code; let the engine translate"
    if below is None or above is None:
        return None
    if LAYERS.index(below) > LAYERS.index(above):
        return (
            f"{below} is a package above {above}, and imports point down only. Move what both need "
            "to the lower one, or pass it in as an argument"
        )
    if host and not within(imported, *HOST_MAY_USE[host]):
        return f"{host} is host code; of jaxspec it may use {HOST_MAY_USE[host]} only"
    if below == SCHEDULING and above not in SCHEDULING_USERS:
        return "device code never sees the scheduler; only the engine and above know scheduling/"
    return None


def module_graph() -> dict[str, set[str]]:
    """The modules of jaxspec that each imports. A name of a package is its ``__init__.py``."""
    known = {module_name(path) for path in JAXSPEC_SOURCES}

    def module_of(name: str) -> str:
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next(prefix for prefix in prefixes if prefix in known)

    return {
        module_name(path): {
            module_of(name) for _, name in imports_of(path) if name.startswith("jaxspec.")
        }
        - {module_name(path)}
        for path in JAXSPEC_SOURCES
    }


def imports_inside_functions(tree: ast.Module) -> list[int]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in nodes(tree)
        if isinstance(node, functions)
    ]
    lines = {node.lineno for node in nodes(tree) if isinstance(node, (ast.Import, ast.ImportFrom))}
    return sorted(line for line in lines if any(line in body for body in bodies))


def jit_uses(tree: ast.Module) -> list[int]:
    """Lines that name jit: a call, a decorator, inside `partial`, or `from jax import jit`."""
    lines = set()
    for node in nodes(tree):
        if isinstance(node, ast.Attribute):
            names = {node.attr}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
        else:
            continue
        if names & JIT_NAMES:
            lines.add(node.lineno)
    return sorted(lines)


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


# The rules on the source.


def test_the_sources_are_found():
    folders = ("pallas_kernels", "jaxspec", "jaxspec/scheduling", "scripts")
    folders += ("jaxspec/engine/structured",)
    empty = [folder for folder in folders if not python_files(folder)]
    assert not empty, f"no Python file in {empty}: the rules below would check nothing"


def test_imports_point_down():
    broken = [
        f"{label(path)}:{line}: imports {name}: {reason}"
        for path in SOURCES
        for line, name in imports_of(path)
        if (reason := broken_import_rule(module_name(path), name))
    ]
    assert not broken, "\n".join(broken)


def test_no_modules_import_each_other():
    try:
        graphlib.TopologicalSorter(module_graph()).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_every_module_has_a_package():
    names = {".".join(module_name(path).split(".")[:2]) for path in JAXSPEC_SOURCES}
    missing = sorted(names - {*LAYERS})
    assert not missing, (
        f"{missing} are no packages. Put a module into one of the folders of jaxspec/; "
        "docs/architecture.md says what each is for"
    )
    assert len([*(ROOT / "jaxspec").glob("[!_]*")]) <= MOST_AT_THE_TOP


def test_imports_stand_at_the_top():
    broken = [
        f"{label(path)}:{line}"
        for path in LIBRARY_SOURCES
        for line in imports_inside_functions(parse(path))
    ]
    assert not broken, (
        f"import inside a function: {', '.join(broken)}. It hides a dependency; if it is there to "
        "break a circle, one of the two modules stands in the wrong layer"
    )


def test_jit_is_called_in_one_module():
    others = [path for path in JAXSPEC_SOURCES if not within(module_name(path), *JIT_HOMES)]
    broken = [f"{label(path)}:{line}" for path in others for line in jit_uses(parse(path))]
    assert not broken, (
        f"jit outside of {JIT_HOMES}: {', '.join(broken)}. Write a pure function here and jit it "
        "in engine/programs, where donation, static arguments and traces are seen in one place"
    )


def test_model_code_calls_kernels_in_few_files():
    called = {
        module_name(path): name
        for path in python_files("jaxspec/models")
        if not within(module_name(path), "jaxspec.models.quantized")
        for _, name in imports_of(path)
        if name.startswith("pallas_kernels.")
        and name.split(".")[1] in OPERATIONS
        and ".reference." not in name
    }
    assert set(called) == KERNEL_CALLERS, (
        f"of model code only {sorted(KERNEL_CALLERS)} call kernels; use a method of ForwardPass, "
        f"or add one, in {called}"
    )


def test_files_stay_short():
    lengths = {label(path): len(path.read_text().splitlines()) for path in SOURCES}
    # A GPU kernel reads best in one piece.
    long = {
        name: lines
        for name, lines in lengths.items()
        if lines > MAX_LINES and not name.endswith("/mosaic_gpu.py")
    }
    assert not long, f"more than {MAX_LINES} lines: {long}: each does two things, split it"


def test_no_lock_file_is_tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "*uv.lock"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not tracked, (
        f"{tracked.strip()} is tracked: jaxspec is a library, its bounds live in pyproject.toml"
    )


def test_ci_runs_the_command_of_the_readme():
    ci = (ROOT / ".ci/run").read_text()
    (command,) = [line for line in ci.splitlines() if line.startswith("python3 -m venv")]
    command = command.removesuffix("\\").strip()
    assert command in (ROOT / "README.md").read_text().splitlines(), (
        f"README.md and .ci/run must give the same test command; .ci/run has:\n{command}"
    )


# The rules at run time.


def test_importing_jaxspec_does_not_import_torch():
    others = ("jaxspec.training", "jaxspec.integrations")  # the latter need libraries of others
    modules = [m for m in map(module_name, JAXSPEC_SOURCES) if layer_of(m) not in others]
    result = run_python(
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'importing {name} imports torch'\n",
        *modules,
    )
    assert result.returncode == 0, result.stderr


def test_host_code_runs_without_jax():
    # None in sys.modules makes `import jax` fail. The empty root stands for jaxspec/__init__.py,
    # which offers the engine and so does import jax.
    result = run_python(
        "import importlib, sys, types\n"
        "sys.modules['jax'] = None\n"
        "sys.modules['jaxspec'] = root = types.ModuleType('jaxspec')\n"
        "root.__path__ = ['jaxspec']\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n",
        *map(module_name, HOST_SOURCES),
    )
    assert result.returncode == 0, (
        f"host code, or something that it imports, needs jax:\n{result.stderr}"
    )


# The checkers themselves: each must be able to fail.


def test_the_import_rule():
    cases = (
        ("pallas_kernels.paged_attention", "jaxspec.config.cache.CacheConfig", False),
        ("pallas_kernels.paged_attention", "jax.numpy", True),
        ("jaxspec.cache.pages", "jaxspec.models.decoder", False),
        ("jaxspec.models.decoder", "jaxspec.cache.pages", True),
        ("jaxspec.models.decoder", "jaxspec.LLM", False),
        ("jaxspec.decoding.drafters.eagle", "jaxspec.decoding.trees.tree", True),
        ("jaxspec.models.decoder", "jaxspec.decoding.trees.tree", False),
        ("jaxspec.scheduling.pages", "jax.numpy", False),
        ("jaxspec.scheduling.pages", "jaxspec.decoding.sampling", False),
        ("jaxspec.scheduling.pages", "jaxspec.config.cache.CacheConfig", True),
        ("jaxspec.scheduling.sequence", "jaxspec.engine.generation", False),
        ("jaxspec.engine.structured.matcher", "jax.numpy", False),
        ("jaxspec.engine.structured.matcher", "jaxspec.engine.generation", False),
        ("jaxspec.decoding.round", "jaxspec.scheduling.plan", False),
        ("jaxspec.engine.engine", "jaxspec.scheduling.plan", True),
        ("jaxspec", "jaxspec.llm.llm.LLM", True),
        ("jaxspec.engine.engine", "tests.helpers", False),
        ("jaxspec.commands.generate", "jaxspec.LLM", True),
        ("jaxspec.llm", "jaxspec.commands.generate", False),
        ("scripts.generate", "jaxspec.__main__.main", True),
    )
    wrong = [case for case in cases if (broken_import_rule(case[0], case[1]) is None) != case[2]]
    assert not wrong, f"(importer, imported, allowed): {wrong}"


def test_imports_are_resolved():
    cases = (
        ("import jaxspec.engine", False, "jaxspec.engine"),
        ("from jaxspec import engine", False, "jaxspec.engine"),
        ("from . import pages", False, "jaxspec.cache.pages"),
        ("from .. import engine", False, "jaxspec.engine"),
        ("from ..models import decoder", False, "jaxspec.models.decoder"),
        ("from .write import scatter", True, "jaxspec.cache.write.scatter"),
        ("def f():\n    import jax", False, "jax"),
    )
    for source, is_package, expected in cases:
        module = "jaxspec.cache" if is_package else "jaxspec.cache.gather"
        found = [name for _, name in imports(ast.parse(source), module, is_package)]
        assert found == [expected], source


def test_imports_inside_functions_are_seen():
    cases = (
        ("import jax\nif True:\n    import numpy", []),
        ("def f():\n    import jax", [2]),
        ("class A:\n    async def f(self):\n        from jax import numpy", [3]),
    )
    for source, lines in cases:
        assert imports_inside_functions(ast.parse(source)) == lines, source


def test_jit_is_seen():
    cases = (
        ("import jax\njax.vmap(f)\njitter(f)", []),
        ("jax.jit(f)", [1]),
        ("@partial(jax.jit, static_argnums=0)\ndef f(): ...", [1]),
        ("from jax import jit", [1]),
    )
    for source, lines in cases:
        assert jit_uses(ast.parse(source)) == lines, source
