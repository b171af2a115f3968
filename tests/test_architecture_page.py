"""docs/architecture.md: the table of rooms is whole, and the files that the page names exist."""

import re

from tests.test_layering import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
ROOM = re.compile(r"^\| (\d+) \| `(\w+)/` \| (.+) \|$", re.MULTILINE)
PACKAGE = ROOT / "jaxspec"


def test_the_table_of_rooms_has_all_packages_from_the_top_floor_down():
    rooms = ROOM.findall(PAGE)
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {name for _, name, _ in rooms} == packages, "give a new package its floor in the table"
    floors = [int(floor) for floor, _, _ in rooms]
    assert floors == sorted(floors, reverse=True)


def test_the_files_that_the_page_names_exist():
    table = PAGE.split("## Where things are")[1].split("\n## ")[0]
    missing = []
    for line in table.splitlines():
        folder = ""  # of the file before: `a/b.py`, `c.py` are in one folder
        for name in re.findall(r"`((?:\w+/)*(?:\w+\.py)?)`", line.split("|", 2)[-1]):
            if not name:
                continue
            folder = name.rpartition("/")[0] or folder
            path = name if "/" in name else f"{folder}/{name}"
            if not any((base / path).exists() for base in (PACKAGE, ROOT)):
                missing.append(path)
    assert not missing, f"docs/architecture.md names what is not there: {', '.join(missing)}"
