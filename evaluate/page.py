"""The HTML page of a report: one self-contained file, no script, no fetch."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import jinja2

from dynamiccl.evaluate.blocks import Section
from dynamiccl.evaluate.metrics import Summary

HEADS: Final = (
    "policy",
    "tasks",
    "mean regret",
    "cross-fitted, 95 % interval",
    "p50",
    "p95",
    "max",
    "time-weighted",
    "ratio to default",
    "abstained",
    "slower than default",
    "probes a task",
    "channels over default's",
)
#: For a cross-fitted regret without independent runs enough.
NO_INTERVAL: Final = "-"


def cells(summary: Summary) -> list[str]:
    """One summary as the texts of a table row, in the order of HEADS."""
    slower = summary.slower_than_default
    return [
        summary.policy,
        str(summary.tasks),
        f"{summary.mean:.2%}",
        crossfit_text(summary),
        f"{summary.p50:.2%}",
        f"{summary.p95:.2%}",
        f"{summary.max:.2%}",
        f"{summary.time_weighted:.2%}",
        f"{summary.ratio_to_default:.4f}",
        f"{summary.abstained:.0%}",
        "noise unknown" if slower is None else f"{slower:.0%}",
        f"{summary.probes:.0f}",
        "-" if summary.channels is None else f"{summary.channels:.2f}",
    ]


def crossfit_text(summary: Summary) -> str:
    """The cross-fitted mean regret with its interval; a dash without independent runs."""
    if summary.interval is None:
        return NO_INTERVAL
    low, high = summary.interval
    return f"{summary.crossfit:.2%} ({low:.2%} to {high:.2%})"


def render(sections: Sequence[Section], header: Mapping[str, Any], page: str = "report") -> str:
    """The text of the page that the template `page`.html.jinja makes."""
    folder = resources.files("dynamiccl.evaluate")
    loader = jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8"))
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=loader
    )
    return environment.get_template(f"{page}.html.jinja").render(sections=sections, **header)


def write_page(
    out: Path, page: str, data: Any, sections: Sequence[Section], header: Mapping[str, Any]
) -> Path:
    """Write `page`.json, `data`, and `page`.html into `out`; returns the path of the latter."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{page}.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    path = out / f"{page}.html"
    path.write_text(render(sections, header, page), encoding="utf-8")
    return path
