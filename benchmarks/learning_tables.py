"""Writes docs/results.md and docs/seeds.md: the text of a template with the figures of a JSON file.

    python benchmarks/learning_tables.py          # both pages
    python benchmarks/learning_tables.py a3c      # prints one part of docs/seeds.md, and no more

Figures come from out/bench/, where a benchmark has been run, else from docs/results.json and
docs/seeds.json, which are written with the pages. A part of docs/seeds.md, seeds/NAME.md.jinja,
sees those of out/bench/NAME.json as `f`. Its lines that begin with `* **Works** 1, 3-5:` or another
of STATUSES say what became of those rows of what the seeds promise.
"""

import json
import re
import sys
from collections.abc import Mapping
from functools import partial
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


def main() -> None:
    """Write the pages and their figures, or print the parts that are asked for."""
    figures = json.loads(SEEDS_FIGURES.read_text(encoding="utf-8"))
    figures |= {name: found for name in SEEDS if (found := measured(name))}
    if sys.argv[1:]:
        print(*(seed_part(name, figures) for name in sys.argv[1:]), sep="\n")
        return
    results = measured("learning") or json.loads(FIGURES.read_text(encoding="utf-8"))
    for path, found in ((FIGURES, results), (SEEDS_FIGURES, figures)):
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")
    SEEDS_PAGE.write_text(seeds_page(figures), encoding="utf-8")


def measured(name: str) -> Any:
    """The figures of a benchmark that has been run here, else None."""
    path = OUT / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def page(figures: Mapping[str, Any]) -> str:
    """The page of results; jinja2.UndefinedError where a figure is missing."""
    return _template("results.md.jinja").render(figures, f=figures)


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
    try:
        return _template(f"seeds/{name}.md.jinja").render(f=figures[name])
    except (jinja2.UndefinedError, KeyError) as error:
        run = f"run `python benchmarks/bench_{name}.py`"
        sys.exit(f"{name}.md.jinja asks for a figure that is not there ({error}): {run}")


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
    environment.filters.update(pct=percent, num=number)
    environment.globals.update(ci=ci, interval=partial(ci, form="pct"), less=less)
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


def less(row: Mapping[str, float], key: str) -> str:
    """How much less, in %, of a figure that says how much more."""
    ends = {"": key, "_lo": f"{key}_hi", "_hi": f"{key}_lo"}
    return ci({f"less{end}": -row[name] for end, name in ends.items()}, "less", "pct")


if __name__ == "__main__":
    main()
