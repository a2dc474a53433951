"""The HTML page of a report: one self-contained file, no script, no fetch."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import jinja2

from dynamiccl.evaluate.blocks import Section
from dynamiccl.evaluate.metrics import Summary
from dynamiccl.sizes import size_label

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
    """The text that a template makes: `page` is its name, .html or what else it ends in."""
    folder = resources.files("dynamiccl.evaluate")
    is_text = "." in page
    loader = jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8"))
    environment = jinja2.Environment(
        autoescape=jinja2.select_autoescape(("html.jinja",)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=is_text,
        lstrip_blocks=is_text,
        loader=loader,
    )
    environment.filters |= {"percent": percent, "saved": saved_text, "size": size_label}
    name = f"{page}.jinja" if is_text else f"{page}.html.jinja"
    return environment.get_template(name).render(sections=sections, **header)


def percent(fraction: float) -> str:
    """A share in words.

    >>> percent(0.404), percent(0.0123), percent(0.0)
    ('40 %', '1.2 %', '0 %')
    """
    value = 100.0 * fraction
    return f"{value:.0f} %" if value >= 9.95 or value == 0.0 else f"{value:.1f} %"


def saved_text(mean: float, low: float | None = None, high: float | None = None) -> str:
    """Time saved and its interval in per cent, for a table; below 0 is more time.

    >>> saved_text(0.1, 0.05, 0.152), saved_text(-0.004)
    ('10.0 (5.0 to 15.2)', '-0.4')
    """
    ends = [100.0 * each for each in (mean, low, high) if each is not None]
    first, *interval = (f"{round(each, 1) + 0.0:.1f}" for each in ends)
    return f"{first} ({interval[0]} to {interval[1]})" if interval else first


def write_page(
    out: Path, page: str, data: Any, sections: Sequence[Section], header: Mapping[str, Any]
) -> Path:
    """Write `page`.json, `data`, and `page`.html into `out`; returns the path of the latter."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{page}.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    path = out / f"{page}.html"
    path.write_text(render(sections, header, page), encoding="utf-8")
    return path
