"""Documents that are checked: links between pages, the files they name, their length, variables."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("dynamiccl", "collect", "datasets", "train", "evaluate", "serve")
TOPS = (*PRODUCT, "examples", "benchmarks", "docs", "tests")
READMES = [ROOT / top / "README.md" for top in TOPS if top != "docs"]
PAGES = sorted(
    [
        *(*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/*/ORIGIN.md")),
        *(*READMES, ROOT / "serve" / "plugin" / "tuner" / "README.md"),
    ]
)
HOW_TO = sorted((ROOT / "docs").glob("add-*.md"))
_LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:)([^)#\s]*)#?([^)\s]*)\)")
#: A file of ours as pages name it, from the root.
_FILE = re.compile(rf"`((?:{'|'.join(TOPS)})/[\w/.-]+\.(?:py|h|cpp|c|toml|md|json|csv|png))`")


def test_the_page_of_variables_names_what_the_product_reads_and_nothing_else() -> None:
    """In C++ and Python a name is a literal of its own; shell expands it."""
    read: set[str] = set()
    for path in (path for top in PRODUCT for path in (ROOT / top).rglob("*")):
        place = str(path.relative_to(ROOT))
        is_code = path.suffix in {".py", ".cpp", ".h"} or place.startswith("serve/launch/")
        is_code &= path.suffix != ".pyc"
        if path.is_file() and is_code and not re.match(r"serve/plugin/(tests|bench|fuzz)/", place):
            read |= set(re.findall(r'(?:"|\$\{?)(DYNAMICCL_[A-Z_]+)\b', path.read_text("utf-8")))
    of_tests = {name for name in read if name.startswith("DYNAMICCL_TEST_")}
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\bDYNAMICCL_[A-Z_]*[A-Z]", page)) == read - of_tests


@pytest.mark.parametrize(("page", "limit"), [(p, 40) for p in READMES] + [(p, 45) for p in HOW_TO])
def test_a_page_of_one_screen_stays_one(page: Path, limit: int) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= limit


def test_the_readme_is_short_and_says_first_what_to_type_and_what_has_not_been_tried() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    for said in ("make demo", "make test", "no cluster of GPUs, has run it"):
        assert any(said in line for line in lines[:40])


def headings(target: Path) -> set[str]:
    """What a link's `#heading` may be: the page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page: Path) -> None:
    if page.name not in {"CHANGELOG.md", "ORIGIN.md"}:  # what there was, and what others have
        named = {n for n in _FILE.findall(page.read_text(encoding="utf-8")) if "l40s" not in n}
        places = (ROOT, page.parent)
        assert not {n for n in named if not any((place / n).exists() for place in places)}


def test_names_that_a_page_of_what_can_be_added_gives_are_there() -> None:
    files = [path for top in (*PRODUCT, "tests") for path in (ROOT / top).rglob("*.*")]
    sources = [path.read_text("utf-8") for path in files if path.suffix in {".py", ".cpp", ".h"}]
    words = set(re.findall(r"\w+", " ".join(sources)))
    pages = "".join(page.read_text(encoding="utf-8") for page in HOW_TO)
    assert set(re.findall(r"`(_[A-Za-z]\w+|[A-Z][A-Z_]{3,})`", pages)) <= words


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link, heading in _LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not heading or heading in headings(target), f"{link}#{heading}"


def test_every_make_target_of_the_pages_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)[` ]", page.read_text(encoding="utf-8")):
            assert target in targets, f"{page.name} names `make {target}`"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("learning_tables")


def test_the_page_of_results_is_that_of_the_figures(tables: Any) -> None:
    text = tables.page(json.loads(tables.FIGURES.read_text(encoding="utf-8")))
    assert text == tables.PAGE.read_text(encoding="utf-8"), "run learning_tables.py"


def test_the_page_of_the_seeds_is_that_of_its_figures(tables: Any) -> None:
    """And has one screen for each seed at most, and each of the 144 rows once."""
    text = tables.SEEDS_PAGE.read_text(encoding="utf-8")
    found = json.loads(tables.SEEDS_FIGURES.read_text(encoding="utf-8"))
    assert text == tables.seeds_page(found), "run learning_tables.py"
    assert len(text.splitlines()) <= 150
    assert sorted(row for _, row in tables.rows_of(text)) == list(range(1, 145))


def test_figures_of_the_seeds_have_three_digits_and_their_intervals(tables: Any) -> None:
    found = {"x": 0.0312, "x_lo": 0.005, "x_hi": 1.5, "y": 12345, "y_lo": None, "y_hi": None}
    assert tables.ci(found, "x") == "0.0312 [0.005, 1.50]"
    assert tables.ci(found, "x", "pct") == "3.1 [0.50, 150.0]"
    assert tables.ci(found, "y") == "12,345"
    told = tables.rows_of("* **Works** 1, 3-4: x\n* **Not taken** 2: y\n* **Bold** 9: z\n")
    assert told == [("Works", 1), ("Works", 3), ("Works", 4), ("Not taken", 2)]
