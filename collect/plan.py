"""The plan of a sweep: what would run, what is left out and why, how long it takes (pure).

Call times are those of the simulator's model of the sweep's communicators. Where it has none, a
rule stands in, and is in the plan:

* the nearest group of the same kind (one node, or several) lends its times, to groups of up to
  sixteen times its nodes; to a larger one nothing is lent, and there is no plan;
* a collective that the model lacks, or a kind of group, takes 50 us and 10 GB/s;
* a config for which NCCL has no cell takes what NCCL's own choice takes, since that runs then;

A launch profile takes the times of the untouched environment, and what runs beside slows nothing.

Also here: the sweep that a gate needs; and `shapes`, NCCL's modelled cost tables of shapes that
nobody has measured (3,330 recorded costs of 2.27 to 2.30 come out of it, dynamiccl/simulator/
ORIGIN.md). A log of such a job is better: `dynamiccl-collect import` takes NCCL's costs from any.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, product
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from dynamiccl import cli
from dynamiccl.collect.grid import RANK_GRAIN_BYTES, Setting, Trial, octave_ladder
from dynamiccl.collect.nccl_log import write_costs
from dynamiccl.collect.schedule import (
    HALVES,
    Grid,
    Launch,
    LaunchMode,
    calls_of,
    deal,
    lay_out,
    needs_plugin,
    small_bytes,
    too_slow,
    warmup_of,
)
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.sweep import Sizes, Sweep, SweepFile, parse_sweep, sweep_text
from dynamiccl.datasets.schema import DEFAULT_PROFILE, MODELLED_SWEEP
from dynamiccl.datasets.store import check_slug
from dynamiccl.errors import MissingPath, UserError
from dynamiccl.nccl import ABSTAIN, Collective, Config, NcclVersion
from dynamiccl.simulator.default import CostModel, find_machine, machine_names, read_machine
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.parts import QUIET
from dynamiccl.simulator.system import UNTOUCHED, Call, System
from dynamiccl.simulator.systems import find_system
from dynamiccl.sizes import bin_center_bytes, bin_first_byte, size_bin

#: Guesses for the start of a process: NCCL starts in seconds on 8 GPUs, in about a minute on 512.
START_S: Final = 4.0
START_S_PER_RANK: Final = 0.11
#: A call that no model knows has a latency and the bandwidth of a middling network.
LATENCY_US: Final = 50.0
GBYTES_PER_S: Final = 10.0
_RULE: Final = f"{LATENCY_US:g} us and {GBYTES_PER_S:g} GB/s for each call"
#: A group lends its times to groups of so many times its nodes at most.
_MOST_TIMES_NODES: Final = 16
_stdout = Console()


#: A plan as plain data, as `plan --json` prints it (`make_plan`).
Plan = dict[str, Any]


def make_plan(sweep: Sweep) -> Plan:
    """Plan a sweep as if each round were like the first.

    Raises UserError where nothing is known of a group so large, or of the simulated system.
    """
    file, planner = sweep.file, _Planner(sweep)
    strategy = make_strategy(file, sweep.trials)
    asked = strategy.next_picks(0, ()) or ()
    trials = tuple(trial for trial in asked if trial.infeasible is None)
    is_adaptive = file.strategy.kind == "adaptive"
    rounds = file.strategy.max_rounds if is_adaptive else file.cycles
    processes = planner.processes(trials)
    by_mode = Counter(launch.mode for launch, _ in processes)
    read_backs = by_mode[LaunchMode.READ_BACK]
    # What runs is read back once.
    total = read_backs + (len(processes) - read_backs) * rounds
    # NCCL's own choice in its profile is the reference too, where that is the untouched one.
    total_single = sum(
        len({trial.config for trial in launch.trials})
        * (1 if launch.mode is LaunchMode.READ_BACK else rounds)
        for launch, _ in processes
        if launch.mode is not LaunchMode.REFERENCE
    )
    reasons = Counter(t.infeasible for t in sweep.trials if t.infeasible is not None)
    feasible = [trial for trial in sweep.trials if trial.infeasible is None]
    skipped = Counter(why for t in feasible if (why := too_slow(t, file)) is not None)
    # A strategy picks what cannot run once, so that it becomes a row.
    expected = strategy.expected_picks()
    needed = sum(too_slow(trial, file) is None for trial in trials)
    # Later rounds of an adaptive sweep are smaller than the first.
    share = min(1.0, expected / (rounds * len(trials))) if is_adaptive and trials else 1.0
    seconds: dict[str, float] = defaultdict(float)
    gpu_seconds = 0.0
    for launch, grid in processes:
        times = share if launch.mode is LaunchMode.READ_BACK else share * rounds
        for what, spent_s in planner.seconds(launch, grid):
            seconds[what] += times * spent_s
            gpu_seconds += times * spent_s * _num_processes(launch.setting)
    return {
        "sweep": file.name,
        "system": file.system,
        "strategy": file.strategy.kind,
        "trials": len(sweep.trials),
        "feasible": len(feasible),
        # Trials that cannot run, and those that are not measured, by reason.
        "infeasible": dict(sorted(reasons.items())),
        "needless": dict(sorted(skipped.items())),
        # Of an adaptive sweep the most that it may take: rounds, measurements and hours.
        "rounds": rounds,
        "measurements": max(0, expected - reasons.total()) if is_adaptive else rounds * needed,
        "launches": total,
        "launches_timed": rounds * (by_mode[LaunchMode.SWEEP] + by_mode[LaunchMode.PLAIN]),
        "launches_reference": rounds * by_mode[LaunchMode.REFERENCE],
        "launches_read_back": read_backs,
        # What one process for each config would start, its own read-backs included.
        "launches_one_per_config": total_single,
        "launches_saved_ratio": round(total_single / total, 2) if total else 1.0,
        # Inside processes.
        "hours": _hours(sum(seconds.values())),
        "gpu_hours": _hours(gpu_seconds),
        "dominates": [
            {"what": what, "share": round(spent_s / sum(seconds.values()), 4)}
            for what, spent_s in sorted(seconds.items(), key=lambda spent: -spent[1])
        ],
        # The simulated system whose times were taken, and what stood in where it has none.
        "model": planner.model.name,
        "rules": planner.rules(),
        # The sweep file's own limit, of which the hours above know nothing.
        "max_hours": file.budget.max_hours,
    }


def _hours(seconds: float) -> float:
    """Hours, to three digits."""
    return float(f"{seconds / 3600:.3g}")


def _num_processes(setting: Setting) -> int:
    return setting.hosts * setting.ranks_per_host


class _Planner:
    """Lays out rounds of a sweep as its runner would, and estimates what they take."""

    def __init__(self, sweep: Sweep) -> None:
        self.model = find_system(sweep.file.simulator.system)
        self._file = sweep.file
        self._times: dict[Setting, SettingTimes] = {}
        self._plays = needs_plugin(sweep.trials)

    def rules(self) -> list[str]:
        """The rules that stood in where the model has no time, each once."""
        return list(dict.fromkeys(rule for times in self._times.values() for rule in times.rules))

    def processes(self, trials: Sequence[Trial]) -> list[tuple[Launch, Grid]]:
        """The processes of a round and their walks."""
        found = []
        for launch in lay_out(
            0,
            trials,
            plays_schedules=self._plays,
            must_read_back=lambda _: self._file.runner.read_back,
            small_bytes=small_bytes(self._file),
        ):
            left = tuple(t for t in launch.trials if too_slow(t, self._file) is None)
            while left:  # what the blocks of one process cannot hold goes to another one
                part = replace(launch, trials=left)
                found.append((part, deal(part, max_blocks=self._file.runner.max_blocks)))
                left = found[-1][1].left_over
        return found

    def seconds(self, launch: Launch, grid: Grid) -> Iterator[tuple[str, float]]:
        """What a process does, and the seconds that it takes."""
        setting, times = launch.setting, self._times_of(launch.setting)
        calls = calls_of(launch, self._file)
        yield "starts of processes", START_S + START_S_PER_RANK * _num_processes(setting)
        for size, count in warmup_of(setting, grid, calls):
            yield "warm-up", count * times.call_us(size, ABSTAIN) / 1e6
        what = "reading back" if launch.mode is LaunchMode.READ_BACK else "measurements"
        for trial, size in zip(grid.blocks, cycle(grid.benchmark_bytes), strict=False):
            yield what, HALVES * calls.per_half * times.call_us(size, trial.config) / 1e6

    def _times_of(self, setting: Setting) -> "SettingTimes":
        if setting not in self._times:
            self._times[setting] = SettingTimes(self.model, setting)
        return self._times[setting]


class SettingTimes:
    """Call times of one setting on a simulated system, by size and config."""

    def __init__(self, system: System, setting: Setting) -> None:
        """Find the modelled shape that stands for the setting's; UserError without a near one."""
        self._system, self._setting = system, setting
        self._group = _nearest(system, setting)
        self._times: dict[tuple[int, Config], float | None] = {}
        #: Rules that stood in, each once, in order.
        self.rules: dict[str, None] = {}
        shape, collective = (setting.num_nodes, setting.ranks_per_node), setting.collective.wire
        if self._group is None:
            self._note(f"has no {collective} of {shape[0]} x {shape[1]}: {_RULE}")
            return
        if self._group != Group(*shape):
            lent = f"{self._group.num_nodes} x {self._group.ranks_per_node}"
            self._note(f"has no group of {shape[0]} x {shape[1]}: the times of {lent}")

    def call_us(self, size_bytes: int, config: Config) -> float:
        """Microseconds of a call of `size_bytes` (NCCL's nBytes) under `config`, without noise."""
        time_us = self._known_us(size_bytes, config)
        if time_us is None and self._group is not None:
            time_us = self._known_us(size_bytes, ABSTAIN)
            words = (w.wire for w in (config.algorithm, config.protocol) if w is not None)
            self._note(
                f"has no {' '.join(words)} for {self._setting.collective.wire}: NCCL's own choice "
                "runs there"
            )
        return LATENCY_US + size_bytes / (1000.0 * GBYTES_PER_S) if time_us is None else time_us

    def _known_us(self, size_bytes: int, config: Config) -> float | None:
        """The model's time; None where it has no cell."""
        key = size_bytes, config
        if key not in self._times:
            self._times[key] = None
            if self._group is not None and size_bytes > 0:
                call = Call(self._group, self._setting.collective, size_bytes)
                with suppress(KeyError):
                    parts = self._system.parts(call, config, UNTOUCHED)
                    self._times[key] = parts.time_us(QUIET)
        return self._times[key]

    def _note(self, rule: str) -> None:
        self.rules[f"{self._system.name} {rule}"] = None


def _nearest(system: System, setting: Setting) -> Group | None:
    """The setting's shape in the model, or the nearest one of its kind; None without one."""
    if setting.collective not in system.collectives():
        return None
    asked = Group(setting.num_nodes, setting.ranks_per_node)

    def apart(group: Group) -> float:
        nodes = math.log2(group.num_nodes / asked.num_nodes)
        return abs(nodes) + abs(math.log2(group.ranks_per_node / asked.ranks_per_node))

    alike = [g for g in system.groups() if (g.num_nodes > 1) == (asked.num_nodes > 1)]
    found = min(alike, key=apart, default=None)
    if found is not None and asked.num_nodes > _MOST_TIMES_NODES * found.num_nodes:
        raise UserError(
            f"nothing is known of a group of {asked.num_nodes} nodes: the largest that "
            f"{system.name} models has {found.num_nodes}, and hours made of its times would mean "
            f"nothing; plan for up to {_MOST_TIMES_NODES * found.num_nodes} nodes, or name another "
            "[simulator] system"
        )
    return found


def plan_lines(plan: Plan) -> list[str]:
    """A plan in lines for people: counts, hours by purpose, what is left out."""
    most = "at most " if plan["strategy"] == "adaptive" else ""
    lines = [
        f"sweep {plan['sweep']} on {plan['system']}: {plan['feasible']} feasible trials of "
        f"{plan['trials']}, {plan['strategy']}, {most}{plan['rounds']} rounds, about "
        f"{plan['measurements']} measurements",
        f"{plan['launches']} processes: {plan['launches_timed']} timed, "
        f"{plan['launches_reference']} for NCCL's untouched default, "
        f"{plan['launches_read_back']} to read back what runs; one process for each config would "
        f"be {plan['launches_one_per_config']} ({plan['launches_saved_ratio']:g} times as many)",
        f"{most or 'about '}{plan['hours']:g} hours, {plan['gpu_hours']:g} GPU-hours: times of the "
        f"simulator's system {plan['model']}, in an untouched environment, alone; yours may "
        f"differ: name another with [simulator] system; {START_S:g} s and {START_S_PER_RANK:g} s a "
        "rank for each start are a guess",
        *(f"not in the model: {rule}" for rule in plan["rules"]),
        *(f"{one['share']:6.0%} of the time: {one['what']}" for one in plan["dominates"]),
    ]
    left_out = (plan["infeasible"] | plan["needless"]).items()
    lines += [f"{count:6} trials left out: {reason}" for reason, count in left_out]
    if plan["max_hours"] is not None and plan["max_hours"] < plan["hours"]:
        lines.append(f"[budget] max_hours = {plan['max_hours']:g} ends it before that")
    return lines


@dataclass(frozen=True, slots=True)
class FreshTask:
    """One config in some size bins of one collective and group shape."""

    collective: Collective
    num_nodes: int
    ranks_per_node: int
    config: Config
    bins: Sequence[int]


def check_target(write: Path) -> None:
    """Raise UserError or MissingPath when the file cannot be created."""
    if write.exists():
        raise UserError(f"--plan {write}: it exists already; name another file, or remove it")
    if not write.parent.is_dir():
        raise MissingPath("directory", write.parent, "make it, or write elsewhere")


def write_fresh(
    base: Sweep, name: str, asked: Sequence[FreshTask], cycles: int, write: Path
) -> Plan:
    """Write the sweep of the requested tasks, `cycles` times over, and return its plan.

    Single trials of the base's grid, NCCL's default beside each config. All else is the base's:
    launcher, runner, iterations. Other launch profiles and what runs beside are left out, as a gate
    takes neither. Raises UserError where no size can be measured, and InvalidSweep where the base's
    grid lacks a config.
    """
    file, trials = base.file, list[Trial]()
    groups = [group for group in file.groups if group.split is None]
    for one, group, datatype in product(asked, groups, file.datatypes):
        shape = group.num_nodes, group.ranks_per_node
        setting = Setting(one.collective, *shape, datatype, num_hosts=group.num_hosts or 0)
        if shape == (one.num_nodes, one.ranks_per_node):
            sizes = (_size_in(each, setting) for each in one.bins)
            trials += [Trial(setting, size, one.config) for size in sizes if size is not None]
    if not trials:
        raise UserError("none of the size bins holds a size of whole shares of a rank")
    both = [t for trial in trials for t in (replace(trial, config=ABSTAIN), trial)]
    plain = ("profiles", "interference", "strategy", "budget")
    update = {key: SweepFile.model_fields[key].default for key in plain} | {
        "name": name,
        "sizes": Sizes(list=tuple(sorted({trial.size_bytes for trial in trials}))),
        "only": tuple(dict.fromkeys(trial.key for trial in both)),
        "cycles": cycles,
        # Other noise, as other runs have.
        "simulator": file.simulator.model_copy(update={"seed": file.simulator.seed + 1}),
    }
    head = f"Fresh runs of sweep {file.name} for a gate, by dynamiccl-evaluate gate --plan."
    text = sweep_text(file.model_copy(update=update), head=head)
    plan = make_plan(parse_sweep(text, where="the fresh sweep"))
    write.write_text(text, encoding="utf-8")
    return plan


def _size_in(index: int, setting: Setting) -> int | None:
    """A size that is in the bin after nccl-tests' rounding; None if there is none."""
    first, end = bin_first_byte(index), bin_first_byte(index + 1)
    whole = RANK_GRAIN_BYTES * setting.num_ranks
    # The ladder's sizes double exactly, so one process walks many of them.
    tried = (*octave_ladder(first, end - 1, 4), -(-bin_center_bytes(index) // whole) * whole)
    return next((s for s in tried if size_bin(setting.benchmark_bytes(s)) == index), None)


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
    described = read_machine(Path(machine)) if machine.endswith(".toml") else find_machine(machine)
    model = CostModel(NcclVersion.parse(nccl), described)
    for text in group:
        shape = Group(*cli.parse_group(text))
        try:
            lines = model.lines(shape)
        except ValueError as error:
            raise UserError(f"--group {text}: {error}") from error
        known = {
            "system": system,
            "sweep": MODELLED_SWEEP,
            "source_file": f"modelled: {described.name}",
            "nccl_version": str(NcclVersion.parse(nccl)),
            "num_ranks": shape.num_ranks,
            "num_nodes": shape.num_nodes,
            "ranks_per_node": shape.ranks_per_node,
            "launch_profile": DEFAULT_PROFILE,
        }
        [path] = write_costs(out, lines, known, program="shapes")
        _stdout.print(f"{text}: {len(lines)} costs in {path}", soft_wrap=True)
