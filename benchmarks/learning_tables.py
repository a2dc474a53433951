"""Writes docs/results.md and docs/seeds.md: the text of a template with the figures of a JSON file.

    python benchmarks/learning_tables.py          # both pages
    python benchmarks/learning_tables.py a3c      # prints one part of docs/seeds.md, and no more

Figures come from out/bench/, where a benchmark has been run, else from docs/results.json and
docs/seeds.json, which are written with what the pages show. Figures of the text, too, come from
there: a page cannot say what was not measured.

docs/seeds.md is seeds.md.jinja around a part for each seed, seeds/NAME.md.jinja, which sees the
figures of out/bench/NAME.json as `f`. A line of a part that begins with `* **Works** 1, 3-5:`,
`* **Not taken** 2:` or `* **Waits** 6:` says what became of those rows of what the seeds promise.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jinja2
from harness import OUT

HERE: Final = Path(__file__).resolve().parent
DOCS: Final = HERE.parent / "docs"
PAGE: Final = DOCS / "results.md"
FIGURES: Final = DOCS / "results.json"
SEEDS_PAGE: Final = DOCS / "seeds.md"
SEEDS_FIGURES: Final = DOCS / "seeds.json"
#: The seeds in the order of their rows, and the titles of their columns.
SEEDS: Final = {
    "pensieve": "Pensieve",
    "a3c": "A3C",
    "mvfst": "mvfst-rl",
    "netsense": "NetSenseML",
    "autoccl": "AutoCCL",
}
STATUSES: Final = ("Works", "Misses", "Not taken", "Waits")
_ROWS: Final = re.compile(rf"^\* \*\*({'|'.join(STATUSES)})\*\* ([\d, -]+):", re.MULTILINE)


class Rows(dict[str, Any]):
    """Rows of a data set; `shown` are the names that were asked for."""

    def __getitem__(self, name: str) -> Any:
        """Note it."""
        self.shown = {*getattr(self, "shown", ()), name}
        return super().__getitem__(name)


def main() -> None:
    """Write the pages and their figures, or print the parts that are asked for."""
    figures = seed_figures()
    if sys.argv[1:]:
        for name in sys.argv[1:]:
            print(seed_part(name, figures))
        return
    measured = OUT / "learning.json"
    text, found = page(measured if measured.exists() else FIGURES)
    PAGE.write_text(text, encoding="utf-8")
    FIGURES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    SEEDS_PAGE.write_text(seeds_page(figures), encoding="utf-8")
    SEEDS_FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def page(path: Path) -> tuple[str, dict[str, Any]]:
    """The page of a file, and the figures in it; jinja2.UndefinedError where one is missing."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    sets = {name: Rows(rows) for name, rows in found["data_sets"].items()}
    found["data_sets"] = sets
    text = _template("results.md.jinja").render(found, f=found)
    shown = {
        name: {row: rows[row] for row in rows if row in rows.shown} for name, rows in sets.items()
    }
    return text, found | {"data_sets": shown}


def seed_figures() -> dict[str, Any]:
    """The figures of each seed's benchmark: those of out/bench/, where there are any."""
    found: dict[str, Any] = {}
    if SEEDS_FIGURES.exists():
        found = json.loads(SEEDS_FIGURES.read_text(encoding="utf-8"))
    for name in SEEDS:
        measured = OUT / f"{name}.json"
        if measured.exists():
            found[name] = json.loads(measured.read_text(encoding="utf-8"))
    return {name: found[name] for name in SEEDS if name in found}


def seeds_page(figures: Mapping[str, Any]) -> str:
    """The page of the seeds; SystemExit where a part or its figures are missing."""
    parts = {name: seed_part(name, figures) for name in SEEDS}
    counts = {
        status: [sum(row[0] == status for row in rows_of(part)) for part in parts.values()]
        for status in STATUSES
    }
    return _template("seeds.md.jinja").render(parts=parts, counts=counts, titles=SEEDS)


def seed_part(name: str, figures: Mapping[str, Any]) -> str:
    """One seed's part of the page."""
    if name not in SEEDS:
        sys.exit(f"no seed {name}; choose from {', '.join(SEEDS)}")
    template = HERE / "seeds" / f"{name}.md.jinja"
    if not template.exists():
        sys.exit(f"no {template.relative_to(HERE.parent)}: write it (benchmarks/README.md)")
    run = f"run `python benchmarks/bench_{name}.py`"
    if name not in figures:
        sys.exit(f"no figures of {name} in out/bench or docs/seeds.json: {run}")
    try:
        return _template(f"seeds/{name}.md.jinja").render(f=figures[name])
    except (jinja2.UndefinedError, KeyError) as error:
        sys.exit(f"{template.name} asks for a figure that is not there ({error}): {run}")


def rows_of(text: str) -> list[tuple[str, int]]:
    """What became of rows, and their numbers, as a page has them."""
    found = []
    for status, numbers in _ROWS.findall(text):
        for each in numbers.split(","):
            first, _, last = each.strip().partition("-")
            found += [(status, row) for row in range(int(first), int(last or first) + 1)]
    return found


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(percent=percent, pct=percent, num=number)
    environment.globals.update(interval=interval, less=less, ci=ci)
    return environment.get_template(name)


def percent(fraction: float) -> str:
    """A fraction in %, to 0.1, or 0.01 below 1; the column or the text says %."""
    return f"{100.0 * fraction:.{1 if abs(fraction) >= 0.01 else 2}f}"


def number(value: float) -> str:
    """Three digits, or all before the point, and no exponent."""
    if isinstance(value, int) or abs(value) >= 100.0:
        return f"{value:,.0f}"
    return f"{value:.{2 if abs(value) < 10.0 else 1}f}" if abs(value) >= 1.0 else f"{value:.3g}"


def ci(row: Mapping[str, Any], key: str, form: str = "num") -> str:
    """A figure with its interval, where it has one: "num", or a fraction in % with "pct"."""
    write = {"num": number, "pct": percent}[form]
    low, high = row.get(f"{key}_lo"), row.get(f"{key}_hi")
    ends = "" if low is None or high is None else f" [{write(low)}, {write(high)}]"
    return write(row[key]) + ends


def interval(row: Mapping[str, float], key: str) -> str:
    """A fraction in % with its interval; raises KeyError where the row has none of that name."""
    return f"{percent(row[key])} [{percent(row[f'{key}_lo'])}, {percent(row[f'{key}_hi'])}]"


def less(row: Mapping[str, float], key: str) -> str:
    """The same of a figure that says how much more: how much less."""
    ends = percent(-row[f"{key}_hi"]), percent(-row[f"{key}_lo"])
    return f"{percent(-row[key])} [{', '.join(ends)}]"


if __name__ == "__main__":
    main()
