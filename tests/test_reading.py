"""How the code reads, as checks: names, docstrings, and how long functions and their lists of
parameters are."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.source_trees import nodes, parse
from tests.test_layering import ROOT, SOURCES, label

Function = ast.FunctionDef | ast.AsyncFunctionDef

# Names that say nothing, or had several meanings; and words that have another one here.
EMPTY_NAMES = {"own", "one", "next_", "judge", "settle", "settled", "room", "apart"}
RETIRED = re.compile(r"\b(un)?settle[sd]?\b|\brooms?\b|\bapart\b|\bjudg(e[sd]?|ing)\b")

MOST_PARAMETERS = 8
# What users call: options by keyword.
ENTRY_POINTS = {
    "jaxspec/config/model.py": {"dense_model"},
    "jaxspec/decoding/functional/admission.py": {"admit"},
    "jaxspec/decoding/functional/constrained.py": {"verify_drafts"},
    "jaxspec/decoding/functional/decode.py": {"decode"},
    "jaxspec/decoding/functional/prefill.py": {"prefill"},
    "jaxspec/decoding/functional/sample.py": {"sample"},
    "jaxspec/decoding/functional/verify_prefix.py": {"verify_prefix"},
    "jaxspec/decoding/functional/whole_prompts.py": {"prefill_all"},
    "jaxspec/decoding/sampling/controls.py": {"make_controls"},
    "jaxspec/decoding/token_logprobs.py": {"token_logprobs"},
}
# Bodies of kernels have a parameter for each array.
KERNEL_BODY = re.compile(r"(_kernel|_body)$")

MOST_LINES = 60  # of a function, without its docstring: about a screen
# A GPU kernel reads best in one piece.
LONG_KERNELS = ("/mosaic_gpu.py", "/paged_attention/attend.py")


def functions(path: Path) -> Iterator[Function]:
    return (node for node in nodes(parse(path)) if isinstance(node, Function))


def parameters(function: Function) -> int:
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return sum(each.arg not in ("self", "cls") for each in named)


def lines(function: Function) -> int:
    """Without its docstring."""
    assert function.end_lineno is not None
    docstring = ast.get_docstring(function, clean=False)
    return function.end_lineno - function.lineno + 1 - len((docstring or "").splitlines())


def assigned(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The names that a module gives: to variables, parameters, functions and classes."""
    for node in nodes(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name


def without_subject(tree: ast.AST) -> Iterator[str]:
    """The docstrings that begin with what is said of something that they do not name."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in nodes(tree):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        if text and re.match(r"(Of|As)\b", text):
            yield text.splitlines()[0]


def test_names_say_something():
    broken = [
        f"{label(path)}:{line}: {name}"
        for path in SOURCES
        for line, name in assigned(parse(path))
        if name in EMPTY_NAMES
    ]
    assert not broken, f"name what it is: {', '.join(broken)}"


def test_words_have_one_meaning():
    broken = [
        f"{label(path)}:{number}: {found[0]}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := RETIRED.search(line.replace("_", " ")))
    ]
    assert not broken, (
        f"these words had several meanings, take another: {', '.join(broken)}; the words of this "
        "project are in docs/architecture.md"
    )


def test_docstrings_have_a_subject():
    broken = [f"{label(path)}: {text}" for path in SOURCES for text in without_subject(parse(path))]
    assert not broken, "\n".join(broken)


def test_functions_have_few_parameters():
    many = {
        f"{label(path)}: {function.name}": parameters(function)
        for path in SOURCES
        for function in functions(path)
        if parameters(function) > MOST_PARAMETERS
        and function.name not in ENTRY_POINTS.get(label(path), set())
        and not (path.is_relative_to(ROOT / "pallas_kernels") and KERNEL_BODY.search(function.name))
    }
    assert not many, f"more than {MOST_PARAMETERS} parameters: {many}; some belong together"
    known = {(path, name) for path, names in ENTRY_POINTS.items() for name in names}
    found = {(label(path), each.name) for path in SOURCES for each in functions(path)}
    assert known <= found, f"no functions any more: {known - found}"


def test_functions_fit_a_screen():
    long = {
        f"{label(path)}: {function.name}": lines(function)
        for path in SOURCES
        if not f"/{label(path)}".endswith(LONG_KERNELS)
        for function in functions(path)
        if lines(function) > MOST_LINES
    }
    assert not long, f"more than {MOST_LINES} lines: {long}; name the parts"


def test_the_checks_can_fail():
    body = '    """Of all rows."""\n    one = own\n    return one\n'
    tree = ast.parse(f"def f(own, a, b, c, d, e, f, g, h):\n{body}")
    [function] = [node for node in ast.walk(tree) if isinstance(node, Function)]
    assert (parameters(function), lines(function)) == (9, 3)
    assert {name for _, name in assigned(tree)} >= {"own", "one", "f"}
    assert list(without_subject(tree)) == ["Of all rows."]
    assert RETIRED.search("is settled") and not RETIRED.search("a bathroom")
