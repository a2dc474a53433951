"""Reports and simulations in a terminal of 100 columns; their pages and JSON have the rest."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from dynamiccl.datasets.cells import left_out_text
from dynamiccl.evaluate.metrics import Summary
from dynamiccl.evaluate.page import render
from dynamiccl.evaluate.report import Report, first_lines
from dynamiccl.evaluate.simulate.compare import Comparison
from dynamiccl.evaluate.systems import SystemReport
from dynamiccl.train.commands.options import wide_stdout

_REPORT_HEADS: Final = (
    "policy",
    "mean\nregret %",
    "cross-fitted\n% (95 % interval)",
    "p95\n%",
    "ratio to\ndefault",
    "abstains\n%",
    "slower\n%",
)


def print_report(report: Report) -> None:
    """The sentences of the first screen, then a table and verdicts for each system."""
    console = wide_stdout()
    names = list(report.systems[0].sentences)
    for line in first_lines(report.systems, names):
        mark = " (simulated)" if line["simulated"] else ""
        _say(console, f"{line['system']}{mark}, noise band {line['band']}:")
        for name, sentence in line["sentences"]:
            _say(console, f"  {name}: {sentence}")
    for system in report.systems:
        _print_system(console, system)
    _say(console, f"rows in no task: {left_out_text(report.left_out)}")
    _say(console, f"{report.page}\n{report.results}")


def print_mean(mean: Mapping[str, Mapping[str, float]]) -> None:
    """A line for each policy, of what `mean_over_turns` says."""
    for name, each in mean.items():
        text = f"{name}: mean regret over turns {each['mean']:.2%}, at most {each['most']:.2%}"
        _say(wide_stdout(), text)


def _print_system(console: Console, system: SystemReport) -> None:
    mark = " (simulated)" if system.simulated else ""
    title = f"{system.system}{mark}, {system.summaries[0].tasks} test tasks"
    table = _table(title, _REPORT_HEADS)
    for summary in system.summaries:
        table.add_row(*_report_cells(summary))
    console.print(table)
    for line in system.verdicts:
        _say(console, line)
    if system.unscored.height:
        _say(console, f"{system.unscored.height} tasks listed and not scored (see the page)")


def _report_cells(summary: Summary) -> tuple[str, ...]:
    crossed = "-"
    if summary.interval is not None and summary.crossfit is not None:
        low, high = summary.interval
        crossed = f"{100 * summary.crossfit:.1f} ({100 * low:.1f} to {100 * high:.1f})"
    slower = summary.slower_than_default
    return (
        summary.policy,
        f"{100 * summary.mean:.2f}",
        crossed,
        f"{100 * summary.p95:.2f}",
        f"{summary.ratio_to_default:.4f}",
        f"{100 * summary.abstained:.0f}",
        "?" if slower is None else f"{100 * slower:.0f}",
    )


def print_comparison(found: Comparison, out: Path) -> None:
    """What a simulation says in words, and its rows."""
    _say(wide_stdout(), render([], {**found, "path": out / "simulate.html"}, "simulate.txt"))


def _table(title: str, heads: tuple[str, ...]) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False
    )
    for index, head in enumerate(heads):
        side: Literal["right", "left"] = "right" if index else "left"
        table.add_column(head, no_wrap=index > 0, justify=side, overflow="fold")
    return table


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)
