"""Writes docs/results.md: the text of results.md.jinja with the figures of docs/results.json.

    python benchmarks/learning_tables.py

writes the page from out/bench/learning.json, if there is one, and docs/results.json, with the rows
that the page shows and no other. Figures of the text, too, come from there: a page cannot say what
was not measured.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jinja2
from harness import OUT

HERE: Final = Path(__file__).resolve().parent
PAGE: Final = HERE.parent / "docs" / "results.md"
FIGURES: Final = HERE.parent / "docs" / "results.json"


class Rows(dict[str, Any]):
    """Rows of a data set; `shown` are the names that were asked for."""

    def __getitem__(self, name: str) -> Any:
        """Note it."""
        self.shown = {*getattr(self, "shown", ()), name}
        return super().__getitem__(name)


def main() -> None:
    """Write the page and its figures."""
    measured = OUT / "learning.json"
    text, found = page(measured if measured.exists() else FIGURES)
    PAGE.write_text(text, encoding="utf-8")
    FIGURES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def page(path: Path) -> tuple[str, dict[str, Any]]:
    """The page of a file, and the figures in it; jinja2.UndefinedError where one is missing."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    sets = {name: Rows(rows) for name, rows in found["data_sets"].items()}
    found["data_sets"] = sets
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters["percent"] = percent
    template = environment.from_string((HERE / "results.md.jinja").read_text(encoding="utf-8"))
    text = template.render(found, f=found, interval=interval, less=less)
    shown = {
        name: {row: rows[row] for row in rows if row in rows.shown} for name, rows in sets.items()
    }
    return text, found | {"data_sets": shown}


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
