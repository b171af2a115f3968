"""Where the host waits for the device: each place costs time in which nothing is launched."""

import ast
from pathlib import Path

PLANS = Path(__file__).resolve().parents[2] / "jaxspec" / "engine" / "plans"
# What is waited for: what a plan emitted; copies that were started a plan before; the first swap,
# which is timed; the trees of requests that the host restricts or drafts for.
WAITS = {
    "wait_for_device.wait_for_device",
    "host_copies.finish_saving",
    "host_copies.finish",
    "host_copies.move",
    "structured_rounds.verify",
}


def waits(node: ast.AST, function: str = "") -> set[str]:
    """The functions that call device_get or block_until_ready."""
    if isinstance(node, ast.FunctionDef):
        function = node.name
    found = {function for name in ("device_get", "block_until_ready") if calls(node, name)}
    return found.union(*(waits(child, function) for child in ast.iter_child_nodes(node)))


def calls(node: ast.AST, name: str) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr == name


def test_plans_wait_for_the_device_where_it_is_meant():
    found = {
        f"{path.stem}.{function}"
        for path in PLANS.glob("*.py")
        for function in waits(ast.parse(path.read_text()))
    }
    assert found == WAITS
    engine = PLANS.parent / "engine.py"
    assert not waits(ast.parse(engine.read_text()))
