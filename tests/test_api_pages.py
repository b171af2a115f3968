"""The API reference: every public name stands on one page, and the table of pages is right."""

import importlib
import re
from collections import Counter
from typing import Any

import jaxspec
from jaxspec import functional
from tests.test_layering import ROOT

PAGES = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/api/*.md"))}
TABLE = ROOT / "docs/api/index.md"
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
NAMES = Counter(name for text in PAGES.values() for name in DIRECTIVE.findall(text))


def resolved(path: str) -> Any:
    """The object of a dotted path, whose first names are modules."""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def test_every_public_name_is_on_one_page():
    for name in sorted({*jaxspec.__all__, *functional.__all__}):  # both have some, the same objects
        count = NAMES[f"jaxspec.{name}"] + NAMES[f"jaxspec.functional.{name}"]
        assert count == 1, f"{name} is {count} times in docs/api"


def test_names_are_there_once_and_lead_to_an_object_with_a_docstring():
    for name, count in NAMES.items():
        assert count == 1, f"{name} is {count} times in docs/api"
        assert (resolved(name).__doc__ or "").strip(), f"{name} has no docstring"


def test_the_table_of_pages_has_all_pages_and_their_names():
    rows = re.findall(r"^\| \[(.+)\]\((.+)\) \| (.+) \|$", PAGES[TABLE], re.MULTILINE)
    listed = {page: (title, re.findall(r"`(\w+)`", names)) for title, page, names in rows}
    expected = {
        path.name: (
            text.splitlines()[0].removeprefix("# "),
            [name.rpartition(".")[2] for name in DIRECTIVE.findall(text)],
        )
        for path, text in PAGES.items()
        if path != TABLE
    }
    assert listed == expected
