"""Documents that are checked: the README's tree, links between pages, what pages may not say."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.tree import render, written

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/*/ORIGIN.md")])
_LINK = re.compile(r"\[[^\]]*\]\((?!https?:|#|mailto:)([^)#\s]+)")


def test_readme_tree_is_the_real_one() -> None:
    assert written() == render(), "run: make tree"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    broken = [
        link
        for link in _LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert not broken


def test_readme_starts_with_the_two_commands() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").split("\n")[:40])
    assert "make demo" in first_screen
    assert "make test" in first_screen


def test_every_make_target_of_the_pages_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)[` ]", page.read_text(encoding="utf-8")):
            assert target in targets, f"{page.name} names `make {target}`"


def test_the_tables_of_results_are_those_of_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = import_module("learning_tables")
    for path in tables.PAGES:
        page = path.read_text(encoding="utf-8")
        assert page.count("<!-- table ") > 2
        assert tables.with_tables(page, tables.figures()) == page, "run learning_tables.py"
