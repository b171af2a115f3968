"""docs/architecture.md: the table of packages is whole."""

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
