"""The architecture, as checks: who may import whom, and a few rules that keep files readable.

Nothing here needs a device. Imports are read from the source with `ast`, so a broken rule is
reported as `file:line` whether or not the code would ever run.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pallas_kernels.selection import OPERATIONS

ROOT = Path(__file__).resolve().parent.parent

# Lowest layer first. A module may import from its own layer and from lower ones, listed before it.
LAYERS = (
    "pallas_kernels",
    "jaxspec.lazy",
    "jaxspec.version",
    "jaxspec.number_text",
    "jaxspec.byte_letters",
    "jaxspec.built_in",
    "jaxspec.pytree",
    "jaxspec.config",
    "jaxspec.parallel",
    "jaxspec.collectives",
    "jaxspec.weight_places",
    "jaxspec.cache",
    "jaxspec.tensors",
    "jaxspec.wrapped_sources",
    "jaxspec.models",
    "jaxspec.quantization",
    "jaxspec.weights",
    "jaxspec.detokenizer",
    "jaxspec.tokenizer",
    "jaxspec.noise",
    "jaxspec.sampling",
    "jaxspec.past_text",
    "jaxspec.state",
    "jaxspec.speculation",
    "jaxspec.functional",
    "jaxspec.exchanges",
    "jaxspec.program_weights",
    "jaxspec.processes",
    "jaxspec.memory",
    "jaxspec.draft_reads",
    "jaxspec.drafter_loading",
    "jaxspec.loading",
    "jaxspec.compiler_options",
    "jaxspec.benchmarking",
    "jaxspec.structured",
    "jaxspec.scheduling",
    "jaxspec.generation",
    "jaxspec.program_sizes",
    "jaxspec.deterministic",
    "jaxspec.new_rows",
    "jaxspec.calls",
    "jaxspec.pipeline_use",
    "jaxspec.programs",
    "jaxspec.pipeline",
    "jaxspec.shared_programs",
    "jaxspec.masked_programs",
    "jaxspec.masked_rounds",
    "jaxspec.swapping",
    "jaxspec.row_snapshots",
    "jaxspec.past_outputs",
    "jaxspec.plan_timer",
    "jaxspec.plan_runner",
    "jaxspec.ahead",
    "jaxspec.logprobs",
    "jaxspec.round_trees",
    "jaxspec.draft_watch",
    "jaxspec.progress",
    "jaxspec.engine_limits",
    "jaxspec.warm_up",
    "jaxspec.measuring",
    "jaxspec.adaptive_shapes",
    "jaxspec.engine",
    "jaxspec.async_engine",
    "jaxspec.engine_load",
    "jaxspec.load_test",
    "jaxspec.client_load",
    "jaxspec.completion",
    "jaxspec.prompt_checks",
    "jaxspec.llm",
    "jaxspec.async_llm",
    "jaxspec.replicated_llm",
    "jaxspec.bootstrap",
    "jaxspec.text_scores",
    "jaxspec.evaluation",
    "jaxspec.comparison",
    "jaxspec.kv_calibration",
    "jaxspec.batch",
    "jaxspec.training",
    "jaxspec.quantizer",
    "jaxspec",  # the package's own __init__.py: the public names
    "jaxspec.serving",
    "jaxspec.commands",
    "jaxspec.__main__",
    "scripts",
    "tests",
)
# Host code. It may use nothing of jaxspec but these, and only these may use it.
SCHEDULING = "jaxspec.scheduling"
STRUCTURED = "jaxspec.structured"
HOST_MAY_USE = {
    STRUCTURED: {STRUCTURED, "jaxspec.byte_letters"},
    SCHEDULING: {SCHEDULING, STRUCTURED, "jaxspec.config"},
}
SCHEDULING_USERS = {SCHEDULING, *LAYERS[LAYERS.index("jaxspec.generation") :]}
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax", "pallas_kernels"}

# The one place where model code calls kernels by operation name; mixers and MLPs know none.
KERNEL_CALLERS = {"jaxspec.models.forward", "jaxspec.models.attention"}

JIT_NAMES = {"jit", "pjit", "pmap"}
JIT_HOMES = {"jaxspec.programs", "jaxspec.pipeline", "jaxspec.training", "jaxspec.benchmarking"}
JIT_HOMES |= {"jaxspec.quantizer"}

MAX_LINES = 400


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


SOURCES = python_files("pallas_kernels", "jaxspec", "scripts")
LIBRARY_SOURCES = python_files("pallas_kernels", "jaxspec")
JAXSPEC_SOURCES = python_files("jaxspec")
HOST_SOURCES = python_files("jaxspec/scheduling", "jaxspec/structured")


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Every import as (line, dotted name), relative ones resolved; `from a import b` is `a.b`."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    return imports(parse(path), module_name(path), is_package=path.name == "__init__.py")


def broken_import_rule(importer: str, imported: str) -> str | None:
    """Why module `importer` must not import `imported`, or None if it may."""
    above, below = layer_of(importer), layer_of(imported)
    if above in HOST_MAY_USE and imported.split(".")[0] in DEVICE_LIBRARIES:
        return f"{above} is host code and never touches device code; let engine.py translate"
    if below is None or above is None:
        return None
    if LAYERS.index(below) > LAYERS.index(above):
        return (
            f"{below} is a layer above {above}, and imports point down only. Move what both need "
            "to the lower one, or pass it in as an argument"
        )
    if above in HOST_MAY_USE and below not in HOST_MAY_USE[above]:
        return f"{above} is host code; of jaxspec it may use {sorted(HOST_MAY_USE[above])} only"
    if below == SCHEDULING and above not in SCHEDULING_USERS:
        return "device code never sees a request object; only the engine and above know scheduling/"
    return None


def imports_inside_functions(tree: ast.Module) -> list[int]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    lines = {
        inner.lineno
        for outer in ast.walk(tree)
        if isinstance(outer, functions)
        for inner in ast.walk(outer)
        if isinstance(inner, (ast.Import, ast.ImportFrom))
    }
    return sorted(lines)


def jit_uses(tree: ast.Module) -> list[int]:
    """Lines that name jit: a call, a decorator, inside `partial`, or `from jax import jit`."""
    lines = set()
    for node in ast.walk(tree):
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


@pytest.mark.parametrize(
    "folder",
    ["pallas_kernels", "jaxspec", "jaxspec/scheduling", "jaxspec/structured", "scripts"],
)
def test_the_sources_are_found(folder: str):
    assert python_files(folder), f"no Python file in {folder}/: the rules below would check nothing"


def test_imports_point_down():
    broken = [
        f"{label(path)}:{line}: imports {name}: {reason}"
        for path in SOURCES
        for line, name in imports_of(path)
        if (reason := broken_import_rule(module_name(path), name))
    ]
    assert not broken, "\n".join(broken)


def test_every_module_has_a_layer():
    names = {".".join(module_name(path).split(".")[:2]) for path in JAXSPEC_SOURCES}
    missing = sorted(names - {*LAYERS})
    assert not missing, (
        f"{missing} have no place in the architecture yet. Add them to LAYERS in "
        "tests/test_layering.py, as low as what they import allows, and to the files in "
        "docs/architecture.md"
    )


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
    others = [path for path in JAXSPEC_SOURCES if layer_of(module_name(path)) not in JIT_HOMES]
    broken = [f"{label(path)}:{line}" for path in others for line in jit_uses(parse(path))]
    assert not broken, (
        f"jit outside programs.py: {', '.join(broken)}. Write a pure function here and jit it in "
        "engine.py, where donation, static arguments and trace counts are seen in one place"
    )


def test_model_code_calls_kernels_in_two_files():
    called = {
        module_name(path): name
        for path in python_files("jaxspec/models")
        for _, name in imports_of(path)
        if name.startswith("pallas_kernels.") and name.split(".")[1] in OPERATIONS
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
    modules = [m for m in map(module_name, JAXSPEC_SOURCES) if layer_of(m) != "jaxspec.training"]
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


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("pallas_kernels.paged_attention", "jaxspec.config.cache.CacheConfig", False),
        ("pallas_kernels.paged_attention", "jax.numpy", True),
        ("jaxspec.cache.pages", "jaxspec.models.decoder", False),
        ("jaxspec.models.decoder", "jaxspec.cache.pages", True),
        ("jaxspec.models.decoder", "jaxspec.LLM", False),
        ("jaxspec.speculation.drafters.eagle", "jaxspec.speculation.tree", True),
        ("jaxspec.state", "jaxspec.speculation.tree", False),
        ("jaxspec.scheduling.pages", "jax.numpy", False),
        ("jaxspec.scheduling.pages", "jaxspec.sampling", False),
        ("jaxspec.scheduling.pages", "jaxspec.config.cache.CacheConfig", True),
        ("jaxspec.scheduling.requests", "jaxspec.structured.StructuredOutput", True),
        ("jaxspec.structured.matcher", "jax.numpy", False),
        ("jaxspec.structured.matcher", "jaxspec.tokenizer", False),
        ("jaxspec.training.loop", "jaxspec.scheduling.request", True),
        ("jaxspec.engine", "jaxspec.scheduling.request", True),
        ("jaxspec", "jaxspec.llm.LLM", True),
        ("jaxspec.engine", "tests.helpers", False),
        ("jaxspec.commands.generate", "jaxspec.LLM", True),
        ("jaxspec.llm", "jaxspec.commands.generate", False),
        ("scripts.generate", "jaxspec.__main__.main", True),
    ],
)
def test_the_import_rule(importer: str, imported: str, allowed: bool):
    assert (broken_import_rule(importer, imported) is None) == allowed


@pytest.mark.parametrize(
    ("source", "is_package", "expected"),
    [
        ("import jaxspec.engine", False, "jaxspec.engine"),
        ("from jaxspec import engine", False, "jaxspec.engine"),
        ("from . import pages", False, "jaxspec.cache.pages"),
        ("from .. import engine", False, "jaxspec.engine"),
        ("from ..models import decoder", False, "jaxspec.models.decoder"),
        ("from .write import scatter", True, "jaxspec.cache.write.scatter"),
        ("def f():\n    import jax", False, "jax"),
    ],
)
def test_imports_are_resolved(source: str, is_package: bool, expected: str):
    module = "jaxspec.cache" if is_package else "jaxspec.cache.gather"
    assert [name for _, name in imports(ast.parse(source), module, is_package)] == [expected]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import jax\nif True:\n    import numpy", []),
        ("def f():\n    import jax", [2]),
        ("class A:\n    async def f(self):\n        from jax import numpy", [3]),
    ],
)
def test_imports_inside_functions_are_seen(source: str, lines: list[int]):
    assert imports_inside_functions(ast.parse(source)) == lines


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import jax\njax.vmap(f)\njitter(f)", []),
        ("jax.jit(f)", [1]),
        ("@partial(jax.jit, static_argnums=0)\ndef f(): ...", [1]),
        ("from jax import jit", [1]),
    ],
)
def test_jit_is_seen(source: str, lines: list[int]):
    assert jit_uses(ast.parse(source)) == lines
