"""Writes docs/results.md: the text of results.md.jinja with the figures of docs/results.json.

    python benchmarks/learning_tables.py

copies out/bench/learning.json, if there is one, to docs/results.json, and writes the page from it.
Figures of the text, too, come from there, so that a page cannot say what was not measured.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jinja2
from harness import OUT

HERE: Final = Path(__file__).resolve().parent
PAGE: Final = HERE.parent / "docs" / "results.md"
FIGURES: Final = HERE.parent / "docs" / "results.json"


def main() -> None:
    """Copy the figures, and write the page."""
    if (OUT / "learning.json").exists():
        shutil.copy(OUT / "learning.json", FIGURES)
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page; raises jinja2.UndefinedError for a figure that is missing."""
    found: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters["percent"] = percent
    template = environment.from_string((HERE / "results.md.jinja").read_text(encoding="utf-8"))
    return template.render(found, f=found, interval=interval, less=less)


def percent(fraction: float) -> str:
    """A fraction in %, to 0.1, or 0.01 below 1; the column or the text says %."""
    return f"{100.0 * fraction:.{1 if abs(fraction) >= 0.01 else 2}f}"


def interval(row: Mapping[str, float], key: str) -> str:
    """A fraction in % with its interval; raises KeyError where the row has none of that name."""
    return f"{percent(row[key])} [{percent(row[f'{key}_lo'])}, {percent(row[f'{key}_hi'])}]"


def less(row: Mapping[str, float], key: str) -> str:
    """The same of a figure that says how much more: how much less."""
    ends = percent(-row[f"{key}_hi"]), percent(-row[f"{key}_lo"])
    return f"{percent(-row[key])} [{', '.join(ends)}]"


if __name__ == "__main__":
    main()
