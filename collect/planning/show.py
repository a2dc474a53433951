"""Prints a plan as text."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from dynamiccl.collect.planning.plan import ADAPTIVE, Plan
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
    most = "at most " if plan.strategy == ADAPTIVE else ""
    return [
        f"sweep {plan.sweep} on {plan.system}: {plan.feasible} feasible trials of {plan.trials}, "
        f"{plan.strategy}, {most}{plan.rounds} rounds, about {plan.measurements} measurements",
        f"{plan.launches} processes: {plan.launches_timed} timed, {plan.launches_reference} for "
        f"NCCL's untouched default, {plan.launches_read_back} to read back what runs; one process "
        f"for each config would be {plan.launches_one_per_config} "
        f"({plan.launches_saved_ratio:g} times as many)",
        f"{most or 'about '}{plan.hours:g} hours, {plan.gpu_hours:g} GPU-hours: times of the "
        f"simulator's system {plan.model}; yours may differ: name another with [simulator] system; "
        f"{START_S:g} s and {START_S_PER_RANK:g} s a rank for each start are a guess",
        *(f"not in the model: {rule}" for rule in plan.rules),
        *_budget_lines(plan),
    ]


def _budget_lines(plan: Plan) -> Iterator[str]:
    if plan.max_hours is not None and plan.max_hours < plan.hours:
        yield f"[budget] max_hours = {plan.max_hours:g} ends it before that"
