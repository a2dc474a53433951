"""Prints a plan as text."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from dynamiccl.collect.planning.adaptive import ADAPTIVE
from dynamiccl.collect.planning.plan import AdaptivePlan, Plan
from dynamiccl.collect.planning.processes import START_S, START_S_PER_RANK


def show_plan(plan: Plan, console: Console) -> None:
    """Print a plan: counts, hours by purpose, what is left out."""
    for line in plan_lines(plan):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if plan.dominates:
        table = Table("what takes the time", "share")
        for part in plan.dominates:
            table.add_row(part.what, f"{part.share:.0%}")
        console.print(table)
    left_out = plan.infeasible | plan.needless
    if left_out:
        table = Table("left out because", "trials")
        for reason, count in left_out.items():
            table.add_row(reason, str(count))
        console.print(table)


def plan_lines(plan: Plan) -> list[str]:
    """A plan in a few lines for people."""
    rounds = "at most " if plan.strategy == ADAPTIVE else ""
    return [
        f"sweep {plan.sweep} on {plan.system}: {plan.feasible} feasible trials of {plan.trials}, "
        f"{plan.strategy}, {rounds}{plan.rounds} rounds, about {plan.measurements} measurements",
        f"{plan.launches} processes: {plan.launches_timed} timed, {plan.launches_reference} for "
        f"NCCL's untouched default, {plan.launches_read_back} to read back what runs; one process "
        f"for each config would be {plan.launches_one_per_config} "
        f"({plan.launches_saved_ratio:g} times as many)",
        f"about {plan.hours:g} hours, {plan.gpu_hours:g} GPU-hours: times of the simulator's "
        f"system {plan.model}; yours may differ: name another with [simulator] system; "
        f"{START_S:g} s and {START_S_PER_RANK:g} s a rank for each start are a guess",
        *(f"not in the model: {rule}" for rule in plan.rules),
        *_adaptive_lines(plan),
        *_budget_lines(plan),
    ]


def _adaptive_lines(plan: Plan) -> Iterator[str]:
    found = plan.adaptive
    if found is None:
        return
    if plan.strategy == ADAPTIVE:
        yield f"the hours are of {_how(found)}"
    else:
        yield (
            f"adaptive would take about {found.hours:g} hours, {found.gpu_hours:g} GPU-hours "
            f"({_how(found)})"
        )


def _how(found: AdaptivePlan) -> str:
    played = (
        f"a run in the simulator: {found.rounds} rounds, {found.measurements} measurements, "
        "where times differ as the model says and noise is [simulator]'s"
    )
    if found.settings_played == found.settings:
        return played
    return (
        f"{played}; {found.settings_played} of {found.settings} settings were run, the others "
        "taken to need the same share of their exhaustive time"
    )


def _budget_lines(plan: Plan) -> Iterator[str]:
    if plan.max_hours is not None and plan.max_hours < plan.hours:
        yield f"[budget] max_hours = {plan.max_hours:g} ends it before that"
