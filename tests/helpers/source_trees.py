"""Python sources as syntax trees: read, and walked, once for all checks of a process."""

import ast
import functools
from pathlib import Path


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All of them, in the order of ast.walk."""
    return tuple(ast.walk(tree))
