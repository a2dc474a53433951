"""The plan of a sweep: what would run, what is left out and why, how long it takes (pure).

Also `shapes`, NCCL's modelled cost tables of shapes that nobody has measured (3,330 recorded costs
of 2.27 to 2.30 come out of it, dynamiccl/simulator/ORIGIN.md).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from math import log2
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from dynamiccl import cli
from dynamiccl.collect import schedule
from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.nccl_log import write_costs
from dynamiccl.collect.schedule import Grid, Launch, LaunchMode
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.sweep import Sweep, SweepFile
from dynamiccl.datasets.schema import DEFAULT_PROFILE, MODELLED_SWEEP
from dynamiccl.datasets.store import check_slug
from dynamiccl.errors import UserError
from dynamiccl.nccl import ABSTAIN, Collective, Config, NcclVersion
from dynamiccl.simulator.cost_model import CostModel
from dynamiccl.simulator.machine import find_machine, machine_names
from dynamiccl.simulator.system import UNTOUCHED, Call, Group
from dynamiccl.simulator.systems import System, find_system

#: Guesses: NCCL starts in seconds on 8 GPUs, in about a minute on 512.
START_S: Final = 4.0
START_S_PER_RANK: Final = 0.11
#: For what no model knows: a middling network.
LATENCY_US: Final = 50.0
GBYTES_PER_S: Final = 10.0
_RULE: Final = f"{LATENCY_US:g} us and {GBYTES_PER_S:g} GB/s for each call"
#: Its times stand for so many times its nodes at most.
_MOST_TIMES_NODES: Final = 16
Plan = dict[str, Any]
#: Microseconds, by setting, nBytes and config.
CallTimes = Callable[[Setting, int, Config], float]


def make_plan(sweep: Sweep) -> Plan:
    """Plan as if each round were like the first. Raises UserError for an unknown group."""
    file, rules = sweep.file, dict[str, None]()
    model = find_system(file.simulator.system)
    known = schedule.without_slow(sweep).trials
    strategy = make_strategy(file, known)
    asked = strategy.next_picks(0, ()) or ()
    trials = tuple(trial for trial in asked if trial.infeasible is None)
    is_adaptive = file.strategy.kind == "adaptive"
    rounds = file.strategy.max_rounds if is_adaptive else file.cycles
    expected = strategy.expected_picks()
    # Adaptive rounds differ in size.
    share = expected / (rounds * len(trials)) if is_adaptive and trials else 1.0
    launches: Counter[LaunchMode] = Counter()
    gpu_seconds, seconds = 0.0, defaultdict[str, float](float)
    call_us = call_times(model, rules)
    for launch, grid in _processes(sweep, trials):
        times = 1 if launch.mode is LaunchMode.READ_BACK else rounds
        launches[launch.mode] += times
        processes = launch.setting.hosts * launch.setting.ranks_per_host
        for what, spent_s in _seconds(launch, grid, file, call_us):
            seconds[what] += share * times * spent_s
            gpu_seconds += share * times * spent_s * processes
    total_seconds = sum(seconds.values())
    reasons = Counter(t.infeasible for t in sweep.trials if t.infeasible is not None)
    left_out = Counter(trial.infeasible for trial in known if trial.infeasible is not None)
    measured = max(0, expected - left_out.total()) if is_adaptive else rounds * len(trials)
    return {
        "sweep": file.name,
        "system": file.system,
        "strategy": file.strategy.kind,
        "trials": len(sweep.trials),
        "feasible": len(sweep.trials) - reasons.total(),
        "infeasible": dict(sorted(reasons.items())),
        "too_slow": dict(sorted((left_out - reasons).items())),
        # Of an adaptive sweep the most that it may take.
        "rounds": rounds,
        "measurements": measured,
        "launches": launches.total(),
        "launches_timed": launches[LaunchMode.SWEEP] + launches[LaunchMode.PLAIN],
        "launches_reference": launches[LaunchMode.REFERENCE],
        "launches_read_back": launches[LaunchMode.READ_BACK],
        "hours": float(f"{total_seconds / 3600:.3g}"),
        "gpu_hours": float(f"{gpu_seconds / 3600:.3g}"),
        "dominates": [
            {"what": what, "share": round(spent_s / total_seconds, 4)}
            for what, spent_s in sorted(seconds.items(), key=lambda spent: -spent[1])
        ],
        "model": model.name,
        "rules": sorted(rules),
        "max_hours": file.budget.max_hours,
        # Why `run` refuses it, but on the simulator.
        "refused": file.too_old if any(trial.config != ABSTAIN for trial in trials) else None,
    }


def _processes(sweep: Sweep, trials: Sequence[Trial]) -> Iterator[tuple[Launch, Grid]]:
    file = sweep.file
    plays = any(trial.config != ABSTAIN for trial in sweep.trials)
    for launch in schedule.lay_out(0, trials, file, plays_schedules=plays):
        left = launch.trials
        while left:  # what the blocks of one process cannot hold goes to another one
            part = replace(launch, trials=left)
            grid = schedule.deal(part)
            yield part, grid
            left = grid.left_over


def _seconds(
    launch: Launch, grid: Grid, file: SweepFile, call_us: CallTimes
) -> Iterator[tuple[str, float]]:
    setting, calls = launch.setting, schedule.calls_of(launch, file)
    processes = setting.hosts * setting.ranks_per_host
    yield "starts of processes", START_S + START_S_PER_RANK * processes
    for size, count in schedule.warmup_of(setting, grid, calls):
        yield "warm-up", count * call_us(setting, size, ABSTAIN) / 1e6
    what = "reading back" if launch.mode is LaunchMode.READ_BACK else "measurements"
    for trial, size in zip(grid.blocks, cycle(grid.benchmark_bytes), strict=False):
        yield what, calls.per_block * call_us(setting, size, trial.config) / 1e6


def call_times(system: System, rules: dict[str, None]) -> CallTimes:
    """Quiet times of a simulated system; what stood in is added to `rules`, once.

    The nearest group of a kind (one node, or several) lends its times, else _RULE holds; NCCL's own
    choice stands in for a config. Profiles and interference slow nothing. Raises UserError.
    """

    @cache
    def known_us(group: Group, collective: Collective, size: int, config: Config) -> float | None:
        try:
            return system.parts(Call(group, collective, size), config, UNTOUCHED).quiet_us
        except KeyError:  # the model has no such cell
            return None

    @cache
    def group_of(setting: Setting) -> Group | None:
        group, shape = _nearest(system, setting), Group(setting.num_nodes, setting.ranks_per_node)
        asked = f"{shape.num_nodes} x {shape.ranks_per_node}"
        if group is None:
            rules[f"{system.name} has no {setting.collective.wire} of {asked}: {_RULE}"] = None
        elif group != shape:
            lent = f"{group.num_nodes} x {group.ranks_per_node}"
            rules[f"{system.name} has no group of {asked}: the times of {lent}"] = None
        return group

    def call_us(setting: Setting, size_bytes: int, config: Config) -> float:
        group, collective = group_of(setting), setting.collective
        time_us = None if group is None else known_us(group, collective, size_bytes, config)
        if time_us is None and group is not None:
            words = " ".join(w.wire for w in (config.algorithm, config.protocol) if w is not None)
            rule = f"has no {words} for {collective.wire}: NCCL's own choice runs there"
            rules[f"{system.name} {rule}"] = None
            time_us = known_us(group, collective, size_bytes, ABSTAIN)
        return LATENCY_US + size_bytes / (1000.0 * GBYTES_PER_S) if time_us is None else time_us

    return call_us


def _nearest(system: System, setting: Setting) -> Group | None:
    """The setting's shape, or the nearest of its kind; None without one."""
    if setting.collective not in system.collectives():
        return None
    nodes, ranks = setting.num_nodes, setting.ranks_per_node
    found = min(
        (g for g in system.groups() if (g.num_nodes > 1) == (nodes > 1)),
        key=lambda g: abs(log2(g.num_nodes / nodes)) + abs(log2(g.ranks_per_node / ranks)),
        default=None,
    )
    if found is not None and nodes > _MOST_TIMES_NODES * found.num_nodes:
        raise UserError(
            f"nothing is known of a group of {nodes} nodes: the largest that "
            f"{system.name} models has {found.num_nodes}, and hours made of its times would mean "
            f"nothing; plan for up to {_MOST_TIMES_NODES * found.num_nodes} nodes, or name another "
            "[simulator] system"
        )
    return found


def plan_lines(plan: Plan) -> list[str]:
    """A plan in lines for people."""
    most = "at most " if plan["strategy"] == "adaptive" else ""
    lines = [
        f"sweep {plan['sweep']} on {plan['system']}: {plan['feasible']} feasible trials of "
        f"{plan['trials']}, {plan['strategy']}, {most}{plan['rounds']} rounds, about "
        f"{plan['measurements']} measurements",
        f"{plan['launches']} processes: {plan['launches_timed']} timed, "
        f"{plan['launches_reference']} for NCCL's untouched default, "
        f"{plan['launches_read_back']} to read back what runs",
        f"{most or 'about '}{plan['hours']:g} hours, {plan['gpu_hours']:g} GPU-hours: times of the "
        f"simulator's system {plan['model']}, in an untouched environment, alone; yours may "
        f"differ: name another with [simulator] system; {START_S:g} s and {START_S_PER_RANK:g} s a "
        "rank for each start are a guess",
        *(f"not in the model: {rule}" for rule in plan["rules"]),
        *(f"{one['share']:6.0%} of the time: {one['what']}" for one in plan["dominates"]),
    ]
    left_out = (plan["infeasible"] | plan["too_slow"]).items()
    lines += [f"{count:6} trials left out: {reason}" for reason, count in left_out]
    if plan["max_hours"] is not None and plan["max_hours"] < plan["hours"]:
        lines.append(f"[budget] max_hours = {plan['max_hours']:g} ends it before that")
    if plan["refused"]:
        lines.append(f"run refuses it, but with --runner simulator: {plan['refused']}")
    return lines


def shapes_command(
    system: Annotated[str, typer.Option(help="Name of the system in the data.")],
    machine: Annotated[
        str, typer.Option(help=f"One of {', '.join(machine_names())}, or FILE.toml.")
    ],
    nccl: Annotated[str, typer.Option(metavar="VERSION", help="NCCL release of the jobs.")],
    group: Annotated[list[str], typer.Option(metavar="NODESxRANKS", help="May be repeated.")],
    out: Annotated[Path, typer.Option("--out", help="Data directory to add to.")],
) -> None:
    """Add NCCL's modelled cost tables for group shapes to a data set; needs no machine.

    Example: dynamiccl-collect shapes --system lab --machine h100-ib --nccl 2.29.7 --group 16x8
    --out data
    """
    check_slug(system, "system")
    model = CostModel(NcclVersion.parse(nccl), find_machine(machine))
    for text in group:
        shape = Group(*cli.parse_group(text))
        try:
            lines = model.lines(shape)
        except ValueError as error:
            raise UserError(f"--group {text}: {error}") from error
        known = {
            "system": system,
            "sweep": MODELLED_SWEEP,
            "source_file": f"modelled: {model.machine.name}",
            "nccl_version": str(NcclVersion.parse(nccl)),
            **{name: getattr(shape, name) for name in ("num_ranks", "num_nodes", "ranks_per_node")},
            "launch_profile": DEFAULT_PROFILE,
        }
        [path] = write_costs(out, lines, known, program="shapes")
        Console().print(f"{text}: {len(lines)} costs in {path}", soft_wrap=True)
