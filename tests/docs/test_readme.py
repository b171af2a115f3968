"""The Python examples of README.md and docs/ run as they stand, page by page.

docs/extending.md has a test of its own, test_extending.py, and so has docs/integrations.md, whose
example needs Tunix: tests/integrations/test_tunix_package.py.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxspec.__main__ import COMMANDS
from tests.commands.test_command_line import SCRIPTS, module_of
from tests.helpers.marks import slow

ROOT = Path(__file__).parents[2]
MOST_LINES = 150  # of the README


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def links(page: str) -> list[str]:
    """Targets of the page's links that lie in this repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    return [target for target in found if not target.startswith(("http://", "https://"))]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings. Comments of its shell commands are none."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


PAGES = [
    *(path.name for path in ROOT.glob("*.md")),
    *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")),
    "examples/README.md",
    "examples/lm_eval/README.md",
]
WITH_EXAMPLES = {
    *("README.md", "docs/exactness.md", "docs/training.md", "docs/extending.md", "docs/serving.md"),
    *("docs/functional.md", "docs/integrations.md", "docs/rl.md"),
}  # fmt: skip


def command_lines(page: str) -> Iterator[tuple[str, list[str]]]:
    """Commands of the page's shell blocks, and their arguments, but for those with variables."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and "=" in words[0]:  # of the environment
            words = words[1:]
        if "$" in line or words[:1] not in (["jaxspec"], ["python3"]):
            continue
        program, *arguments = words
        if program == "jaxspec":
            count = next(n for n in (1, 2) if " ".join(arguments[:n]) in COMMANDS)
            yield " ".join(arguments[:count]), arguments[count:]
        else:
            yield SCRIPTS[Path(arguments[0]).stem], arguments[1:]


def test_no_page_is_left_out():
    assert {page for page in PAGES if examples(page)} == WITH_EXAMPLES
    assert len(examples("README.md")) >= 3


@pytest.mark.parametrize(
    "page",
    [
        "docs/exactness.md",
        *map(slow, ("README.md", "docs/training.md", "docs/serving.md")),
        *map(slow, ("docs/functional.md", "docs/rl.md")),
    ],
)
def test_examples_run(page: str):
    names: dict[str, Any] = {}
    for example in examples(page):
        exec(compile(example, page, "exec"), names)


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES, f"README.md has {len(lines)} lines: move something to docs/"


def test_commands_for_several_devices_have_the_options_that_they_are_given():
    """Most were never run as they stand: nobody had the devices."""
    pages = ("docs/parallel.md", "docs/results/parallel.md")
    found = [line for page in pages for line in command_lines(page)]
    for command, arguments in found:
        module = module_of(command)
        args = module.make_parser().parse_args(arguments)
        if command == "bench engine":
            assert module.choose(args)
    assert {"bench engine", "bench pipeline", "generate"} <= {command for command, _ in found}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    broken = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken, f"{page}: {', '.join(broken)}"
