"""What an installation holds: its name, its version, and types for type checkers.

The distribution is called jaxspec-decoding, since jaxspec is another project on PyPI. The package
keeps the name jaxspec.
"""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import jaxspec

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Where a reader may be told to install the package by name.
TEXTS = [
    *(path for name in ("jaxspec", "scripts", "examples") for path in ROOT.glob(f"{name}/**/*.py")),
    *(path for name in ("*.md", "docs/**/*.md", "Dockerfile") for path in ROOT.glob(name)),
]


def test_the_version_is_the_projects():
    assert metadata.version(PROJECT["name"]) == PROJECT["version"]
    assert jaxspec.__version__ == PROJECT["version"]


def test_whoever_is_told_to_install_an_extra_is_told_the_distributions_name():
    named = {
        (path.relative_to(ROOT).as_posix(), name, extra)
        for path in TEXTS
        for name, extra in re.findall(r"\b(jaxspec[\w-]*)\[([\w,{}]+)\]", path.read_text("utf-8"))
    }
    assert {name for _, name, _ in named} == {PROJECT["name"]}, named
    extras = {extra for _, _, extra in named if "{" not in extra}
    assert extras and extras <= set(PROJECT["optional-dependencies"])


def test_type_checkers_read_the_packages_annotations():
    """PEP 561: without this file they take everything in an installed package as unknown."""
    assert (ROOT / "jaxspec/py.typed").is_file()


def test_the_citation_names_the_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    [version] = re.findall(r"^version: (\S+)$", citation, re.MULTILINE)
    [licence] = re.findall(r"^license: (\S+)$", citation, re.MULTILINE)
    assert (version, licence) == (PROJECT["version"], PROJECT["license"])
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_workflows_use_major_versions_and_no_secrets():
    workflows = list(ROOT.glob(".github/workflows/*.yml"))
    texts = [path.read_text(encoding="utf-8") for path in workflows]
    used = [name for text in texts for name in re.findall(r"uses: (\S+)", text)]
    assert used and all(re.fullmatch(r"actions/[\w-]+@v\d+", name) for name in used), used
    assert not any("secrets." in text for text in texts)


def test_workflows_name_what_exists():
    for path in ROOT.glob(".github/workflows/*.yml"):
        for name in re.findall(r"tests/[\w/]+(?:\.py)?", path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{path.name}: {name}"
