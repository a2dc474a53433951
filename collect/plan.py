"""The plan of a sweep: what would run, what is left out and why, how long it takes (pure).

Call times are those of the simulator's model of the sweep's communicators. Each gap of it has a
rule, and each rule that was used is in the plan:

* another group of the same kind (one node, or several) lends its times, the nearest one in nodes
  and ranks per node; to one of over sixteen times its nodes nothing is lent, and there is no plan;
* a collective that the model lacks, or a kind of group, takes 50 us and 10 GB/s;
* a config for which NCCL has no cell takes what NCCL's own choice takes, since that runs then;
* a launch profile that is not modelled takes the times of the untouched environment, and what runs
  beside on purpose slows nothing, but for the simulator's own congestion.

Also here: the sweep that a gate needs; and `shapes`, NCCL's cost tables of shapes that nobody has
measured, as NCCL would log them, by the simulator's model of NCCL: 3,330 recorded costs of 2.27 to
2.30 come out of it (dynamiccl/simulator/ORIGIN.md). A log of such a job is better, where there is
one: `dynamiccl-collect import` takes NCCL's costs from any.
"""

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from dynamiccl import cli
from dynamiccl.collect.grid import RANK_GRAIN_BYTES, SIMULATED, Setting, Trial, octave_ladder
from dynamiccl.collect.nccl_log import as_logged, write_costs
from dynamiccl.collect.schedule import (
    HALVES,
    Choice,
    Grid,
    Launch,
    LaunchMode,
    Skips,
    calls_of,
    deal,
    lay_out,
    small_bytes,
    warmup_of,
)
from dynamiccl.collect.simulated import launch_of, surroundings_of
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.sweep import (
    OnlySettings,
    Sizes,
    Sweep,
    SweepFile,
    parse_sweep,
    sweep_text,
)
from dynamiccl.datasets.schema import DEFAULT_PROFILE, MODELLED_SWEEP, QUIET
from dynamiccl.datasets.store import check_slug
from dynamiccl.errors import InvalidSweep, MissingPath, UserError
from dynamiccl.nccl import ABSTAIN, Collective, Config, NcclVersion
from dynamiccl.simulator.default import CostModel, find_machine, machine_names, read_machine
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.parts import Parts
from dynamiccl.simulator.system import UNTOUCHED, Call, System
from dynamiccl.simulator.systems import find_system
from dynamiccl.sizes import bin_center_bytes, bin_first_byte, size_bin

#: Guesses for the start of a process: NCCL starts in seconds on 8 GPUs and in about a minute on
#: 512.
START_S: Final = 4.0
START_S_PER_RANK: Final = 0.11
#: A call that no model knows has a latency and the bandwidth of a middling network.
LATENCY_US: Final = 50.0
GBYTES_PER_S: Final = 10.0
_RULE: Final = f"{LATENCY_US:g} us and {GBYTES_PER_S:g} GB/s for each call"
#: A group lends its times to groups of so many times its nodes at most.
_MOST_TIMES_NODES: Final = 16
_ADAPTIVE: Final = "adaptive"
_ALIKE: Final = "NCCL runs as many channels as for another count, which is measured"
#: Lines of the table of what dominates.
_LINES: Final = 5
#: From which size on, bytes, and how a person writes it.
_BOUNDS: Final = ((0, "0"), (1 << 20, "1 MiB"), (64 << 20, "64 MiB"), (1 << 30, "1 GiB"))
_T = TypeVar("_T")
_stdout = Console()


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a sweep."""

    sweep: str
    system: str
    strategy: str
    trials: int
    feasible: int
    #: Trials left out, by reason.
    infeasible: dict[str, int]
    #: Trials that can run and are not measured, by reason; by the model where it is about NCCL.
    needless: dict[str, int]
    #: Rounds of an exhaustive or random sweep; the most that an adaptive one may take.
    rounds: int
    #: Measurements in all rounds, NCCL's default included; for adaptive a guess from above.
    measurements: int
    #: Processes that are started: timed ones, those of the reference default, read-backs.
    launches: int
    launches_timed: int
    launches_reference: int
    launches_read_back: int
    #: What one process for each config would start, its own read-backs included.
    launches_one_per_config: int
    launches_saved_ratio: float
    #: Inside processes; of an adaptive sweep the most, which few need.
    hours: float
    #: The same times the ranks of each process.
    gpu_hours: float
    #: What the time goes to, and its share of the hours, largest first.
    dominates: dict[str, float]
    #: The simulated system whose times were taken.
    model: str
    #: Rules that stood in where it has no time.
    rules: tuple[str, ...]
    #: The sweep file's own limit, of which the hours above know nothing.
    max_hours: float | None

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        shares = [{"what": what, "share": share} for what, share in self.dominates.items()]
        return asdict(self) | {"dominates": shares}


def make_plan(sweep: Sweep) -> Plan:
    """Plan a sweep as if the plugin could play schedules and each round were like the first.

    Raises UserError where nothing is known of a group so large, or of the simulated system.
    """
    file, planner = sweep.file, _Planner(sweep)
    strategy = make_strategy(file, sweep.trials)
    asked = strategy.next_picks(0, ()) or ()
    trials = tuple(trial for trial in asked if trial.infeasible is None)
    is_adaptive = file.strategy.kind == _ADAPTIVE
    rounds = file.strategy.max_rounds if is_adaptive else file.cycles
    processes = planner.processes(trials, plays=file.runner.mode != "processes")
    by_mode = Counter(launch.mode for launch, _ in processes)
    read_backs = by_mode[LaunchMode.READ_BACK]
    # What runs is read back once.
    total = read_backs + (len(processes) - read_backs) * rounds
    single = [launch.mode for launch, _ in planner.processes(trials, plays=False)]
    total_single = sum(1 if mode is LaunchMode.READ_BACK else rounds for mode in single)
    reasons = Counter(t.infeasible for t in sweep.trials if t.infeasible is not None)
    # A strategy picks what cannot run once, so that it becomes a row.
    expected = strategy.expected_picks()
    needed = sum(planner.reason_to_skip(trial) is None for trial in trials)
    # Later rounds of an adaptive sweep are smaller than the first.
    share = min(1.0, expected / (rounds * len(trials))) if is_adaptive and trials else 1.0
    seconds: dict[str, float] = defaultdict(float)
    gpu_seconds = 0.0
    for launch, grid in processes:
        times = share if launch.mode is LaunchMode.READ_BACK else share * rounds
        for what, spent_s in planner.seconds(launch, grid):
            seconds[what] += times * spent_s
            gpu_seconds += times * spent_s * _num_processes(launch.setting)
    return Plan(
        sweep=file.name,
        system=file.system,
        strategy=file.strategy.kind,
        trials=len(sweep.trials),
        feasible=len(sweep.trials) - reasons.total(),
        infeasible={str(reason): count for reason, count in sorted(reasons.items())},
        needless=planner.needless(),
        rounds=rounds,
        measurements=max(0, expected - reasons.total()) if is_adaptive else rounds * needed,
        launches=total,
        launches_timed=rounds * (by_mode[LaunchMode.SWEEP] + by_mode[LaunchMode.FORCED]),
        launches_reference=rounds * by_mode[LaunchMode.REFERENCE],
        launches_read_back=read_backs,
        launches_one_per_config=total_single,
        launches_saved_ratio=round(total_single / total, 2) if total else 1.0,
        hours=_hours(sum(seconds.values())),
        gpu_hours=_hours(gpu_seconds),
        dominates=_dominating(seconds),
        model=planner.model.name,
        rules=planner.rules(),
        max_hours=file.budget.max_hours,
    )


def _dominating(seconds: dict[str, float]) -> dict[str, float]:
    total_s = sum(seconds.values())
    shares = {what: round(s / total_s, 4) for what, s in seconds.items() if s > 0}
    ranked = sorted(shares.items(), key=lambda share: (-share[1], share[0]))
    rest = round(sum(share for _, share in ranked[_LINES:]), 4)
    return dict(ranked[:_LINES]) | ({"everything else": rest} if rest else {})


def _hours(seconds: float) -> float:
    """Hours, to three digits."""
    return float(f"{seconds / 3600:.3g}")


def _num_processes(setting: Setting) -> int:
    return setting.hosts * setting.ranks_per_host


class _Planner:
    """Lays out rounds of a sweep as its runner would, and estimates what they take."""

    def __init__(self, sweep: Sweep) -> None:
        self.model = find_system(sweep.file.simulator.system)
        self._file, self._trials = sweep.file, sweep.trials
        self._times: dict[Setting, SettingTimes] = {}
        self._skips = Skips(sweep.file.runner.slow_max, sweep.trials)
        self._choices = dict(self._read_back())
        self._is_one_shape = len({(g.num_nodes, g.ranks_per_node) for g in self._file.groups}) == 1

    def rules(self) -> tuple[str, ...]:
        """The rules that stood in where the model has no time, each once."""
        return tuple(dict.fromkeys(rule for times in self._times.values() for rule in times.rules))

    def reason_to_skip(self, trial: Trial) -> str | None:
        """Why a trial is skipped, by the simulator's prediction; or None."""
        return self._skips.reason(trial, self._choices)

    def needless(self) -> dict[str, int]:
        """Number of skipped trials, by reason."""
        found = Counter(
            self._skips.reason(trial, {}) or _ALIKE
            for trial in self._trials
            if trial.infeasible is None and self.reason_to_skip(trial) is not None
        )
        return dict(sorted(found.items()))

    def processes(self, trials: Sequence[Trial], *, plays: bool) -> list[tuple[Launch, Grid]]:
        """The processes of a round and their walks; `plays`: many configs in one process."""
        found = []
        for launch in lay_out(
            0,
            trials,
            plays_schedules=plays,
            must_read_back=lambda _: self._file.runner.read_back,
            small_bytes=small_bytes(self._file),
        ):
            # What runs alike is known only once it was read back.
            known = {} if launch.mode is LaunchMode.READ_BACK else self._choices
            left = tuple(t for t in launch.trials if not self._skips.reason(t, known))
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
        # A schedule leaves the warm-up to NCCL; what is forced by environment is so from the start.
        warmed = ABSTAIN if launch.is_scheduled else launch.trials[0].config
        for size, count in warmup_of(setting, grid, calls):
            yield "warm-up", count * times.call_us(size, warmed) / 1e6
        on = "" if self._is_one_shape else f" on {setting.num_nodes} x {setting.ranks_per_node}"
        for trial, size in zip(grid.blocks, cycle(grid.benchmark_bytes), strict=False):
            config = trial.config
            what = f"{_kind(config)}, {_range(size)}{on}"
            if launch.mode is LaunchMode.READ_BACK:
                what = "reading back what runs"
            yield what, HALVES * calls.per_half * times.call_us(size, config) / 1e6

    def _read_back(self) -> Iterator[tuple[str, Choice]]:
        """What a read-back of the trials would find, by the simulator."""
        for trial in self._trials if self._file.runner.read_back else ():
            # Only channel counts can run alike.
            if trial.infeasible is None and trial.config.num_channels is not None:
                size = trial.setting.benchmark_bytes(trial.size_bytes)
                ran = self._times_of(trial.setting).parts(size, trial.config)
                if ran is not None:
                    yield trial.key, [ran.algorithm.wire, ran.protocol.wire, ran.num_channels]

    def _times_of(self, setting: Setting) -> "SettingTimes":
        if setting not in self._times:
            self._times[setting] = SettingTimes(self.model, setting)
        return self._times[setting]


def _kind(config: Config) -> str:
    """The name of a config's class among configs that take similar time."""
    channels = config.num_channels or 0
    if config == ABSTAIN:
        return "NCCL's own choice"
    if 0 < channels <= 2:
        return "1 or 2 channels"
    protocol = config.protocol.wire if config.protocol is not None else "any protocol"
    return f"{protocol} on 3 to 8 channels" if 0 < channels <= 8 else protocol


def _range(size_bytes: int) -> str:
    low = max(at for at, (bound, _) in enumerate(_BOUNDS) if size_bytes >= bound)
    if low + 1 == len(_BOUNDS):
        return f"{_BOUNDS[low][1]} and above"
    return f"{_BOUNDS[low][1]} to {_BOUNDS[low + 1][1]}" if low else f"below {_BOUNDS[1][1]}"


class SettingTimes:
    """Call times of one setting on a simulated system, by size and config."""

    def __init__(self, system: System, setting: Setting) -> None:
        """Find the modelled shape that stands for the setting's; UserError without a near one."""
        self._system, self._setting = system, setting
        self._group = _nearest(system, setting)
        self._launch = UNTOUCHED
        self._around = surroundings_of(setting.interference)
        self._parts: dict[tuple[int, Config], Parts | None] = {}
        #: Rules that stood in, each once.
        self.rules: dict[str, None] = {}
        asked = Group(setting.num_nodes, setting.ranks_per_node)
        if setting.collective not in system.collectives():
            self._note(f"{system.name} has no {setting.collective.wire}: {_RULE}")
        elif self._group is None:
            nodes = "several nodes" if asked.num_nodes > 1 else "one node"
            self._note(f"{system.name} has no group of {nodes}: {_RULE}")
        elif self._group != asked:
            wanted, lent = (f"{g.num_nodes} x {g.ranks_per_node}" for g in (asked, self._group))
            self._note(f"{system.name} has no group of {wanted}: the times of {lent}")
        try:
            self._launch = launch_of(setting.profile, system)
        except InvalidSweep:
            if self._group is not None:
                self._note(
                    f"{system.name} does not model the profile '{setting.profile.name}': the times "
                    "of the untouched environment"
                )
        if setting.interference.kind not in {QUIET, *SIMULATED}:
            self._note(f"what '{setting.interference.kind}' beside slows is not in it")

    def call_us(self, size_bytes: int, config: Config) -> float:
        """Microseconds of a call of `size_bytes` (NCCL's nBytes) under `config`, without noise."""
        parts = self.parts(size_bytes, config)
        if parts is None and self._group is not None:
            parts = self.parts(size_bytes, ABSTAIN)
            words = (config.algorithm, config.protocol)
            self._note(
                f"{self._system.name} has no {' '.join(w.wire for w in words if w is not None)} "
                f"for {self._setting.collective.wire}: NCCL's own choice runs there"
            )
        if parts is None:
            return LATENCY_US + size_bytes / (1000.0 * GBYTES_PER_S)
        return parts.time_us(self._around)

    def parts(self, size_bytes: int, config: Config) -> Parts | None:
        """The config that runs and its time in parts; None where the model has no cell."""
        key = size_bytes, config
        if key not in self._parts:
            self._parts[key] = None
            if self._group is not None and size_bytes > 0:
                call = Call(self._group, self._setting.collective, size_bytes)
                with contextlib.suppress(KeyError):
                    self._parts[key] = self._system.parts(call, config, self._launch)
        return self._parts[key]

    def _note(self, rule: str) -> None:
        self.rules[rule] = None


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


def show_plan(plan: Plan, console: Console) -> None:
    """Print a plan: counts, hours by purpose, what is left out."""
    for line in plan_lines(plan):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    shares = {what: f"{share:.0%}" for what, share in plan.dominates.items()}
    left_out = {reason: str(n) for reason, n in (plan.infeasible | plan.needless).items()}
    for heads, rows in (
        (("what takes the time", "share"), shares),
        (("left out because", "trials"), left_out),
    ):
        if rows:
            table = Table(*heads)
            for row in rows.items():
                table.add_row(*row)
            console.print(table)


def plan_lines(plan: Plan) -> list[str]:
    """A plan in a few lines for people."""
    most = "at most " if plan.strategy == _ADAPTIVE else ""
    lines = [
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
    ]
    if plan.max_hours is not None and plan.max_hours < plan.hours:
        lines.append(f"[budget] max_hours = {plan.max_hours:g} ends it before that")
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

    Single tasks of the base's grid, two configs each. All else is the base's: launcher, runner,
    iterations. Other launch profiles and what runs beside are left out, as a gate takes neither.
    Raises UserError where no size can be measured.
    """
    only = tuple(entry for one in asked if (entry := _entry(one)) is not None)
    if not only:
        raise UserError("none of the size bins holds a size of whole shares of a rank")
    file = base.file
    shapes = {(one.num_nodes, one.ranks_per_node) for one in only}
    groups = [g for g in file.groups if (g.num_nodes, g.ranks_per_node) in shapes]
    plain = ("profiles", "interference", "strategy", "budget")
    update = {key: SweepFile.model_fields[key].default for key in plain} | {
        "name": name,
        "collectives": _each(one.collective for one in only),
        "groups": tuple(group for group in groups if group.split is None),
        "sizes": Sizes(list=tuple(sorted({size for one in only for size in one.sizes}))),
        "algorithms": _each(one.algorithm for one in only),
        "protocols": _each(one.protocol for one in only),
        "num_channels": _each(one.num_channels for one in only),
        "chunk_sizes": _each(one.chunk_size for one in only),
        "only": only,
        "cycles": cycles,
        # Other noise, as other runs have.
        "simulator": file.simulator.model_copy(update={"seed": file.simulator.seed + 1}),
    }
    head = f"Fresh runs of sweep {file.name} for a gate, by dynamiccl-evaluate gate --plan."
    text = sweep_text(file.model_copy(update=update), head=head)
    plan = make_plan(parse_sweep(text, where="the fresh sweep"))
    write.write_text(text, encoding="utf-8")
    return plan


def _entry(asked: FreshTask) -> OnlySettings | None:
    """The `only` entry of the sweep file; None where no bin holds a valid size."""
    setting = Setting(asked.collective, asked.num_nodes, asked.ranks_per_node)
    sizes = tuple(size for each in asked.bins if (size := _size_in(each, setting)) is not None)
    config = asked.config
    if not sizes or config.algorithm is None or config.protocol is None:
        return None
    return OnlySettings(
        collective=asked.collective.wire,
        num_nodes=asked.num_nodes,
        ranks_per_node=asked.ranks_per_node,
        sizes=sizes,
        algorithm=config.algorithm.wire,
        protocol=config.protocol.wire,
        num_channels=config.num_channels or 0,
        chunk_size=config.chunk_bytes or 0,
    )


def _size_in(index: int, setting: Setting) -> int | None:
    """A size that is in the bin after nccl-tests' rounding; None if there is none."""
    first, end = bin_first_byte(index), bin_first_byte(index + 1)
    whole = RANK_GRAIN_BYTES * setting.num_ranks
    # The ladder's sizes double exactly, so one process walks many of them.
    tried = (*octave_ladder(first, end - 1, 4), -(-bin_center_bytes(index) // whole) * whole)
    return next((s for s in tried if size_bin(setting.benchmark_bytes(s)) == index), None)


def _each(values: Iterable[_T]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(values))


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
        [path] = write_costs(out, as_logged(lines), known, program="shapes")
        _stdout.print(f"{text}: {len(lines)} costs in {path}", soft_wrap=True)
