"""The site of documents: its hook for links that leave docs/, and its table of pages.

`.ci/run` builds the site. These tests need no mkdocs.
"""

import importlib.util
import logging
import re
from types import ModuleType, SimpleNamespace

import pytest

from tests.test_layering import ROOT

SITE = ROOT / "docs/site"


def load_hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("outside_links", SITE / "outside_links.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


def on_site(markdown: str, page: str = "results/kernels.md") -> str:
    path = ROOT / "docs" / page
    file = SimpleNamespace(abs_src_path=str(path), src_uri=page)
    config = SimpleNamespace(docs_dir=str(ROOT / "docs"))
    return load_hook().on_page_markdown(
        markdown, page=SimpleNamespace(file=file), config=config, files=()
    )


def test_links_that_leave_the_documents_become_paths():
    kernel = "../../pallas_kernels/top_k/reference.py"
    assert on_site(f"see [its code]({kernel}#L3).") == (
        "see its code (`pallas_kernels/top_k/reference.py`)."
    )
    assert on_site(f"see [reference.py]({kernel})") == (
        "see reference.py (`pallas_kernels/top_k/reference.py`)"
    )
    assert on_site("[CONTRIBUTING.md](../CONTRIBUTING.md)", "exactness.md") == "CONTRIBUTING.md"
    for kept in ("[speed](../kernels.md#each)", "![a round](../round.png)", "[jax](https://x.y)"):
        assert on_site(kept) == kept


def test_a_link_to_a_file_that_is_missing_is_a_warning(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        on_site("[old](../../jaxspec/no_such_file.py)")
    assert "results/kernels.md links to ../../jaxspec/no_such_file.py" in caplog.text


def test_the_table_of_contents_of_the_site_has_all_pages():
    listed = re.findall(
        r"- (?:\w+: )?([\w/-]+\.md)$", (SITE / "mkdocs.yml").read_text(), re.MULTILINE
    )
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")]
    assert sorted(listed) == sorted(pages), "give a new page its place in docs/site/mkdocs.yml"
