"""The Python examples of README.md and docs/ run as they stand, page by page.

docs/extending.md has a test of its own, test_extending.py.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.marks import slow

ROOT = Path(__file__).parent.parent
MOST_LINES = 150  # of the README


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def links(page: str) -> list[str]:
    """Targets of the page's links that lie in this repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    return [target for target in found if not target.startswith(("http://", "https://"))]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
WITH_EXAMPLES = {"README.md", "docs/training.md", "docs/extending.md", "docs/serving.md"}


def test_no_page_is_left_out():
    assert {page for page in PAGES if examples(page)} == WITH_EXAMPLES
    assert len(examples("README.md")) >= 3


@pytest.mark.parametrize(
    "page", [slow(f"{name}.md") for name in ("README", "docs/training", "docs/serving")]
)
def test_examples_run(page: str):
    names: dict[str, Any] = {}
    for example in examples(page):
        exec(compile(example, page, "exec"), names)


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES, f"README.md has {len(lines)} lines: move something to docs/"


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_lead_somewhere(page: str):
    broken = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken, f"{page}: {', '.join(broken)}"
