"""docs/architecture.md: the table of packages is whole, and the files that the page names exist."""

import re

from tests.test_layering import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+) \| `(\w+)/` \| (.+) \|$", re.MULTILINE)
PACKAGE = ROOT / "jaxspec"


def test_the_table_has_all_packages_from_the_top_level_down():
    rows = ROW.findall(PAGE)
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {name for _, name, _ in rows} == packages, "give a new package its level in the table"
    levels = [int(level) for level, _, _ in rows]
    assert levels == sorted(levels, reverse=True)


def test_the_files_that_the_page_names_exist():
    table = PAGE.split("## Where things are")[1].split("\n## ")[0]
    missing = []
    for line in table.splitlines():
        folder = ""  # that of the file before: names without a folder are beside it
        for name in re.findall(r"`((?:\w+/)*(?:\w+\.py)?)`", line.split("|", 2)[-1]):
            if not name:
                continue
            folder = name.rpartition("/")[0] or folder
            path = name if "/" in name else f"{folder}/{name}"
            if not any((base / path).exists() for base in (PACKAGE, ROOT)):
                missing.append(path)
    assert not missing, f"docs/architecture.md names what is not there: {', '.join(missing)}"
