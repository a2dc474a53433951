"""Writes the tables of docs/results.md and docs/results-tables.md from the figures.

    python benchmarks/learning_tables.py

copies out/bench/learning.json to docs/results.json and writes the pages' tables from it; each
stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from harness import OUT

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
#: What to use when, and everything behind it.
PAGES: Final = (DOCS / "results.md", DOCS / "results-tables.md")
FIGURES: Final = DOCS / "results.json"
#: Column -> key of a figure, and whether it is a fraction.
COLUMNS: Final = {
    "mean regret": ("mean_regret", True),
    "p95": ("p95_regret", True),
    "time / default": ("ratio_to_default", False),
    "slower than default": ("share_worse_than_default", True),
}
WORLDS: Final = {
    "mean regret": ("mean_regret", True),
    "where NCCL loses over 1 %": ("headroom_regret", True),
    "slower than default": ("share_worse", True),
    "gain kept": ("gain_kept", True),
}
RIVALS: Final = {name: key for name, key in WORLDS.items() if key[0] != "headroom_regret"}
JOBS: Final = {
    "communication, s a job": ("seconds", False),
    "over NCCL's choice": ("over_default", True),
    "whole job over NCCL's": ("job_over_default", True),
    "over the oracle": ("regret", True),
    "slower than NCCL's": ("share_slower_than_default", True),
    "changes / 1,000 calls": ("changes_per_1000_calls", False),
    "alarms / 100,000 calls": ("alarms_per_1e5_calls", False),
}
#: Tables of the first page: rows, and of each column its head, data set, figure.
BRIEF: Final[Mapping[str, tuple[Sequence[str], Sequence[tuple[str, str, str]]]]] = {
    "scenarios": (
        (
            *("gaussian-process + Trigger", "threshold rule, fitted", "threshold rule, true times"),
            *("filter that knows the scenario", "gaussian-process", "best quiet table"),
            *("AutoCCL search", "AutoCCL that reopens on alarms", "random"),
        ),
        (
            ("as recorded", "scenarios, as recorded", "gain_of_delayed_oracle"),
            ("shifted", "scenarios, shifted", "gain_of_delayed_oracle"),
        ),
    ),
}
#: What the belief is worth: keys, or how they begin.
BELIEF: Final = (
    *("few_shot_worlds", "probes_", "random_probes_", "interpolated_probes_", "few_shot_share"),
    *("coverage", "grid_mean_regret", "grid_gain_kept", "grid_share_worse"),
    *("grid_interpolated", "small_sweep_gain", "small_sweep_share", "small_sweep_left_out"),
    *("small_sweep_near", "noisy_", "shape_left_out_"),
    *("public_mean", "public_share", "public_interpolated", "public_nccl"),
)
_MARKED: Final = re.compile(r"(<!-- table (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Copy the figures, and write the tables into the pages."""
    shutil.copy(OUT / "learning.json", FIGURES)
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), figures()), encoding="utf-8")


def figures() -> dict[str, Any]:
    """All figures of the pages."""
    read: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return read


def with_tables(page: str, found: Mapping[str, Any]) -> str:
    """The page with all marked tables replaced; raises KeyError for missing figures."""

    def write(match: re.Match[str]) -> str:
        return f"{match[1]}{table(match[2], found)}{match[3]}"

    return _MARKED.sub(write, page)


def table(name: str, found: Mapping[str, Any]) -> str:
    """One table in Markdown: a data set's policies, or figures by name."""
    if name in found["data_sets"]:
        columns = columns_of(name, found["data_sets"][name])
        rows = [
            [policy, *(cell(row, *each) for each in columns.values())]
            for policy, row in found["data_sets"][name].items()
        ]
        return markdown([["policy", *columns], *rows])
    if name in BRIEF:
        return brief(found["data_sets"], *BRIEF[name])
    if name == "real_notes":
        return notes(found["real_notes"])
    if name in {"few_shot", "few_shot_kinds"}:
        return curves(found[name])
    starts = BELIEF if name == "belief" else (name,)
    told = [key for key in found if not key.endswith(("_lo", "_hi"))]
    keys = [key for start in starts for key in told if key.startswith(start)]
    if not keys:
        raise KeyError(f"no figures for table '{name}'")
    return markdown([["figure", "value"], *([f"`{k}`", cell(found, k, False)] for k in keys)])


def columns_of(
    data_set: str, rows: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, tuple[str, bool]]:
    """The columns of a data set: sweeps, rivals, whole jobs, or scenarios."""
    if data_set.startswith("scenarios, "):
        return scenario_columns(rows)
    kinds = {"jobs": JOBS, "rivals": RIVALS, "narrow": WORLDS}
    return kinds.get(data_set.rpartition(", ")[2], COLUMNS)


def scenario_columns(
    rows: Mapping[str, Mapping[str, Any]],
) -> Mapping[str, tuple[str, bool]]:
    """The ratio of sums, and the gain in each setting."""
    first = "gain_of_delayed_oracle"
    places = [key for key in next(iter(rows.values())) if not key.startswith(first)]
    return {"of the late oracle's gain": (first, True), **{name: (name, True) for name in places}}


def brief(
    data_sets: Mapping[str, Any], rows: Sequence[str], columns: Sequence[tuple[str, str, str]]
) -> str:
    """Some policies, and figures of several data sets beside each other."""
    body = [
        [name, *(cell(data_sets[of][name], key, True) for _, of, key in columns)] for name in rows
    ]
    return markdown([["policy", *(head for head, _, _ in columns)], *body])


def notes(systems: Mapping[str, Mapping[str, Any]]) -> str:
    """Notes on the figures of measured systems."""
    head = ["system", "test tasks", "of them with runs enough", "noise band", "statistic"]
    rows = [
        [
            name,
            str(note["tasks"]),
            str(note["tasks_with_runs"]),
            "unknown (no repeats)" if note["noise_band"] is None else f"{note['noise_band']:.2%}",
            note["statistic"] if note["tasks"] else "nothing to score",
        ]
        for name, note in systems.items()
        if not name.endswith(", left out")
    ]
    return markdown([head, *rows])


def curves(found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Mean regret in %, and in brackets the share of sizes that are slower of those that act."""
    looks = [str(look) for look in next(iter(found.values()))["looks"]]
    rows = [
        [
            name,
            *(
                f"{100.0 * regret:.1f} ({100.0 * worse:.1f})"
                for regret, worse in zip(curve["regret"], curve["share_worse"], strict=True)
            ),
        ]
        for name, curve in found.items()
    ]
    return markdown([["% after so many probes", *looks], *rows])


def cell(row: Mapping[str, Any], key: str, is_fraction: bool) -> str:
    """A figure, with its interval if it has one."""
    value, low, high = (row.get(each) for each in (key, f"{key}_lo", f"{key}_hi"))
    if value is None:
        return "-"
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_said(each)}" for name, each in value.items())
    if low is None or high is None:
        return _text(value, is_fraction)
    return f"{_text(value, is_fraction)} [{_text(low, is_fraction)}, {_text(high, is_fraction)}]"


def _said(value: Any) -> str:
    return cell(value, "mean", True) if isinstance(value, dict) else _text(value, False)


def _text(value: float | str, is_fraction: bool) -> str:
    if isinstance(value, str):
        return value
    if is_fraction:
        return f"{value:.2%}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of rows, header first."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    main()
