"""`dynamiccl-collect plan`: the plan of a sweep, and what fits in given hours."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dynamiccl.cli import print_json
from dynamiccl.collect.planning.adaptive import ADAPTIVE, play, with_strategy
from dynamiccl.collect.planning.fitting import Fitted, check_hours, fit_to_hours
from dynamiccl.collect.planning.plan import Plan, make_plan
from dynamiccl.collect.planning.show import show_plan
from dynamiccl.collect.planning.times import CallTimes
from dynamiccl.collect.sweep.load import Sweep
from dynamiccl.errors import MissingPath, UserError

HoursOption = Annotated[
    float | None,
    typer.Option(metavar="H", help="Choose sizes, configs and strategy that fit in H hours."),
]
WriteOption = Annotated[
    Path | None, typer.Option(metavar="FILE.toml", help="Write the sweep that fits; with --hours.")
]


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a sweep, and the shorter sweep that fits in the hours asked for."""

    plan: Plan
    hours: float | None = None
    fitted: Fitted | None = None
    fitted_plan: Plan | None = None
    written: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data; `fitted` is null without --hours."""
        document: dict[str, Any] = {**self.plan.to_json(), "fitted": None}
        if self.fitted is not None and self.fitted_plan is not None:
            document["fitted"] = {
                "hours": self.hours,
                "left_out": list(self.fitted.left_out),
                "plan": self.fitted_plan.to_json(),
                "toml": self.fitted.sweep.text,
                "written": None if self.written is None else str(self.written),
            }
        return document


def plan_sweep(sweep: Sweep, *, hours: float | None = None, write: Path | None = None) -> Planned:
    """Plan a sweep; with `hours` also what fits in them, written to the file `write`.

    Raises UserError for hours that are none or too few, and for a file that cannot be written.
    """
    if hours is not None:
        check_hours(hours)
    if write is not None:
        _check_target(write, hours)
    times = CallTimes(sweep.file.simulator.system)
    played = play(with_strategy(sweep, ADAPTIVE), times)
    plan = make_plan(sweep, times, played=played)
    if hours is None:
        return Planned(plan)
    fitted = fit_to_hours(sweep, hours, times, played)
    if write is not None:
        write.write_text(fitted.sweep.text, encoding="utf-8")
    # With times of its own: rules that only the whole sweep needed are not its.
    fitted_plan = make_plan(fitted.sweep, played=fitted.played) if fitted.left_out else plan
    return Planned(plan, hours, fitted, fitted_plan, write)


def _check_target(write: Path, hours: float | None) -> None:
    if hours is None:
        raise UserError(f"--write {write} writes what fits in given hours; add e.g. --hours 2")
    if write.exists():
        raise UserError(f"--write {write}: it exists already; name another file, or remove it")
    if not write.parent.is_dir():
        raise MissingPath("directory", write.parent, "make it, or write elsewhere")


def show_planned(planned: Planned, console: Console, *, as_json: bool) -> None:
    """Print the plan as text, or as one JSON document."""
    if as_json:
        print_json(planned.to_json())
        return
    show_plan(planned.plan, console)
    if planned.fitted is None or planned.fitted_plan is None:
        return
    lines = [f"it fits in {planned.hours:g} hours as it is: nothing is left out"]
    if planned.fitted.left_out:
        lines = [f"what fits in {planned.hours:g} hours leaves out:"]
        lines += [f"  {word}" for word in planned.fitted.left_out]
    console.print()
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if planned.fitted.left_out:
        console.print()
        show_plan(planned.fitted_plan, console)
    if planned.written is not None:
        console.print(f"-> {planned.written}", soft_wrap=True, highlight=False, markup=False)
    elif planned.fitted.left_out:
        console.print("\nThe sweep file (--write FILE.toml writes it):\n", highlight=False)
        console.print(planned.fitted.sweep.text, soft_wrap=True, highlight=False, markup=False)
