"""The API reference: every public name stands on one page, and the table of pages is right."""

import importlib
import re
from collections import Counter
from typing import Any

import jaxspec
from jaxspec import functional
from tests.test_layering import ROOT

PAGES = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/api/*.md"))}
TABLE = ROOT / "docs/api/README.md"
# The path that mkdocstrings reads, and the heading where it is not that path.
DIRECTIVE = re.compile(r"^::: (\S+)(?:\n    options:\n      heading: (\S+))?", re.MULTILINE)


def shown(page: str) -> list[str]:
    """The paths that a page shows in its headings."""
    return [heading or path for path, heading in DIRECTIVE.findall(page)]


SHOWN = Counter(path for page in PAGES.values() for path in shown(page))


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
        count = SHOWN[f"jaxspec.{name}"] + SHOWN[f"jaxspec.functional.{name}"]
        assert count == 1, f"{name} is {count} times in docs/api"


def test_names_are_there_once_and_have_a_docstring():
    for path, count in SHOWN.items():
        assert count == 1, f"{path} is {count} times in docs/api"
        assert (resolved(path).__doc__ or "").strip(), f"{path} has no docstring"


def test_functions_that_are_called_like_their_module_have_its_path():
    """Read without being run, `functional.decode` is the module. A heading says what to import."""
    for page in PAGES.values():
        for path, _ in DIRECTIVE.findall(page):
            found = resolved(path)
            module, name = getattr(found, "__module__", ""), getattr(found, "__name__", "")
            package, _, last = module.rpartition(".")
            if name and last == name and vars(importlib.import_module(package))[name] is found:
                assert path == f"{module}.{name}", f"{path}: give {module}.{name}, and a heading"


def test_the_table_of_pages_has_all_pages_and_their_names():
    rows = re.findall(r"^\| \[(.+)\]\((.+)\) \| (.+) \|$", PAGES[TABLE], re.MULTILINE)
    listed = {page: (title, re.findall(r"`(\w+)`", names)) for title, page, names in rows}
    expected = {
        path.name: (
            page.splitlines()[0].removeprefix("# "),
            [name.rpartition(".")[2] for name in shown(page)],
        )
        for path, page in PAGES.items()
        if path != TABLE
    }
    assert listed == expected
