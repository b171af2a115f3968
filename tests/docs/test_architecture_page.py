"""The table of files in docs/architecture.md: whole, and in the order of layers."""

import re

from tests.test_layering import LAYERS, ROOT


def test_the_table_of_files_has_all_layers_in_their_order():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = page.split("## Files")[1].split("A module imports")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[4:] if line]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    listed = [name.removesuffix("/").removesuffix(".py") for name in names if name != "jaxspec/"]
    own = [name.removeprefix("jaxspec.") for name in LAYERS if name not in ("jaxspec", "tests")]
    assert listed == own, "give a new module its place in the table, too"
