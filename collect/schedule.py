"""What a sweep's processes measure, in which order, and what the plugin says of it.

A *launch* is one process and its trials. It is what is committed: its rows are in the journal, or
it runs again. nccl-tests walks its sizes once in each cycle of `-N`, and the plugin plays a
schedule. A *block* is one (cycle, size), all calls of which get one config.
"""

import random
import time
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from dynamiccl.collect.grid import LaunchProfile, Setting, Trial, Walk, walks
from dynamiccl.collect.sweep import Sweep, SweepFile
from dynamiccl.datasets.schema import DEFAULT_PROFILE, DefaultScope, Statistic, Status
from dynamiccl.datasets.store import requested
from dynamiccl.errors import DataError
from dynamiccl.nccl import ABSTAIN, Protocol
from dynamiccl.schedule import BlockState, PlayReport, Schedule, totals_of

SCHEDULE_NAME: Final = "schedule"
REPORT_NAME: Final = "report"
JSON_NAME: Final = "rows.json"
#: Blocks of one process; a longer schedule is cut by cycles.
_MOST_BLOCKS: Final = 20_000
#: Out-of-place and in-place, which every tunable benchmark runs.
HALVES: Final = 2
#: Override the requested config (`src/graph/tuning.cc`).
CONFIG_VARIABLES: Final = ("NCCL_ALGO", "NCCL_PROTO")
#: Only our launches may set these.
PLUGIN_VARIABLES: Final = (
    "DYNAMICCL_MODE", "DYNAMICCL_SCHEDULE", "DYNAMICCL_SCHEDULE_HASH", "DYNAMICCL_SWEEP_REPORT",
)  # fmt: skip

#: Missing columns take the schema's neutral value.
Row = Mapping[str, Any]
#: Algorithm, protocol, channels (None before NCCL 2.24).
Choice = list[str | int | None]
_Key = TypeVar("_Key", bound=Hashable)


class LaunchMode(StrEnum):
    """How a launch sets the config.

    reference  the user's untouched environment, nothing of ours loaded: the reference default
    sweep      the plugin applies a schedule: many configs in one process
    plain      NCCL's own choice in its profile, without the plugin
    read-back  as sweep or plain, untimed: NCCL's log says what really runs
    simulated  no process at all
    """

    REFERENCE = "reference"
    SWEEP = "sweep"
    PLAIN = "plain"
    READ_BACK = "read-back"
    SIMULATED = "simulated"


#: No strategy picked them, and no budget counts them.
NOT_PICKED: Final = frozenset({LaunchMode.REFERENCE, LaunchMode.READ_BACK})


@dataclass(frozen=True, slots=True)
class Launch:
    """One process (or its simulation), its trials, and what came of them."""

    #: Laying out a round again gives the same ids.
    id: str
    round: int
    setting: Setting
    mode: LaunchMode
    trials: tuple[Trial, ...]
    is_scheduled: bool = False

    # Empty until it has run; of each trial a row for each placement, or one with the failure.
    measured: tuple[tuple[Trial, tuple[Row, ...]], ...] = ()
    left: tuple[Trial, ...] = ()
    #: Where it hung or crashed (in `left`, too), and the row that says so.
    culprit: tuple[Trial, Row] | None = None
    #: New facts, as plain data (read-back, environment columns).
    facts: Mapping[str, Any] = field(default_factory=dict)
    began: bool = False
    #: Why it reached no config, where its configs or the machine may be to blame.
    never_began: str = ""

    @property
    def run(self) -> str:
        """The `run` column, one for each round: noise within a run is correlated."""
        return f"cycle-{self.round}"

    def again(self, trials: Sequence[Trial]) -> "Launch":
        """A launch of the same kind, for trials that this one left."""
        name = f"{self.id}~"
        return Launch(name, self.round, self.setting, self.mode, tuple(trials), self.is_scheduled)


def trial_row(file: SweepFile, launch: Launch, trial: Trial) -> dict[str, Any]:
    """Identity, workload and requested config of one attempt."""
    setting, config = launch.setting, trial.config
    # Our plugin displaces a vendor's: only without us NCCL's own choice is the untouched one.
    ours = launch.mode is LaunchMode.SWEEP or setting.profile.name != DEFAULT_PROFILE
    return {
        "system": file.system,
        "sweep": file.name,
        "run": launch.run,
        "repeat": trial.repeat,
        "round": launch.round,
        "launch": launch.id,
        "collective": setting.collective.wire,
        "size_bytes": trial.size_bytes,
        "datatype": setting.datatype,
        "num_ranks": setting.num_ranks,
        "num_nodes": setting.num_nodes,
        "num_hosts": setting.hosts,
        "ranks_per_node": setting.ranks_per_node,
        "num_comms": None if setting.comms is None else len(setting.comms),
        "comm_split": setting.split or None,
        "launch_profile": setting.profile.name,
        "interference_kind": setting.interference.kind,
        "interference_level": setting.interference.level,
        "default_scope": (DefaultScope.PROFILE if ours else DefaultScope.UNTOUCHED).value,
        "is_default": config == ABSTAIN,
        **requested(config),
        "behaviour_probability": trial.probability,
    }


def lost_row(row: Row, status: Status, reason: str) -> dict[str, Any]:
    """The row of an attempt that gave no time."""
    return {**row, "status": status.value, "reason": reason, "statistic": Statistic.NONE.value}


def lay_out(
    number: int,
    trials: Sequence[Trial],
    file: SweepFile,
    *,
    plays_schedules: bool,
    known: Container[str] = (),
) -> tuple[Launch, ...]:
    """The launches for the feasible `trials` of a round (pure); `known`: keys that were read back.

    Small messages have a process of their own, with more calls: `-n` holds for all of a process.
    """
    found: list[Launch] = []
    small_bytes = _small_bytes(file)
    untouched: dict[Setting, set[int]] = {}
    for setting, of_setting in grouped(trials, lambda trial: trial.setting).items():
        once = {trial.key: replace(trial, repeat=0, probability=None) for trial in of_setting}
        reads_back = file.runner.read_back and setting.collective.tunable
        unknown = [trial for key, trial in once.items() if reads_back and key not in known]
        plays = plays_schedules and setting.collective.tunable
        mode = LaunchMode.SWEEP if plays else LaunchMode.PLAIN
        timed = Launch(f"{number}:{setting.key}", number, setting, mode, (), plays)
        found += _walked(timed, mode.value, of_setting, small_bytes)
        found += _walked(replace(timed, mode=LaunchMode.READ_BACK), "read-back", unknown)
        if plays or setting.profile.name != DEFAULT_PROFILE:
            sizes = untouched.setdefault(replace(setting, profile=LaunchProfile()), set())
            sizes |= {trial.size_bytes for trial in of_setting}
    there = {launch.setting for launch in found if launch.mode is LaunchMode.PLAIN}
    for setting in (one for one in untouched if one not in there):
        base = Launch(f"{number}:{setting.key}", number, setting, LaunchMode.REFERENCE, ())
        defaults = [
            Trial(setting, size, ABSTAIN, repeat=repeat)
            for size in sorted(untouched[setting])
            for repeat in range(max(2, file.strategy.repeats))  # an A/A pair at least
        ]
        found += _walked(base, "reference", defaults, small_bytes)
    return tuple(found)


def _walked(
    base: Launch, name: str, trials: Sequence[Trial], small_bytes: int = 0
) -> Iterator[Launch]:
    parts = grouped(trials, lambda trial: trial.size_bytes > small_bytes)
    for _, part in sorted(parts.items()):
        for walk in walks(trial.size_bytes for trial in part):
            held = tuple(trial for trial in part if trial.size_bytes in walk)
            place = f"{name}:{walk[0]}-{walk[-1]}"
            yield replace(base, id=f"{base.id}:{place}", trials=held)


def grouped(trials: Iterable[Trial], key: Callable[[Trial], _Key]) -> dict[_Key, list[Trial]]:
    """Trials by key, in the order in which it first comes."""
    groups: dict[_Key, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(key(trial), []).append(trial)
    return groups


@dataclass(frozen=True, slots=True)
class Grid:
    """The blocks of one process: in cycle c at `walk[s]` runs `cycles[c][s]`."""

    walk: Walk
    #: NCCL's nBytes, which nccl-tests prints; shape as `walk`.
    benchmark_bytes: tuple[int, ...]
    cycles: tuple[tuple[Trial, ...], ...]
    #: Of another walk, or too many.
    left_over: tuple[Trial, ...]

    @property
    def blocks(self) -> tuple[Trial, ...]:
        """All blocks, in the order of nccl-tests' rows."""
        return tuple(trial for cycle in self.cycles for trial in cycle)

    def asked_from(self, block: int, launch: Launch) -> list[Trial]:
        """Trials of `launch` from `block` on, without those that only fill gaps."""
        asked = {id(trial) for trial in launch.trials}
        return [trial for trial in self.blocks[block:] if id(trial) in asked]


def deal(launch: Launch) -> Grid:
    """Deal trials to cycles, a size's order seeded by the launch's id; the default fills gaps."""
    walk = max(walks(trial.size_bytes for trial in launch.trials), key=len)
    hands = []
    for size in walk:
        hand = [trial for trial in launch.trials if trial.size_bytes == size]
        random.Random(f"{launch.id}:{size}").shuffle(hand)
        hands.append(hand)
    depth = min(max(map(len, hands)), max(1, _MOST_BLOCKS // len(walk)))
    known = (trial.repeat for trial in launch.trials if trial.config == ABSTAIN)
    # Fillers of a continuing launch are numbered above the first one's.
    first = max(known, default=-1) + 1 + launch.id.count("~") * 1_000_000
    for hand, size in zip(hands, walk, strict=True):
        hand += [
            Trial(launch.setting, size, ABSTAIN, repeat=first + number)
            for number in range(depth - len(hand))
        ]
    cycles = tuple(tuple(hand[cycle] for hand in hands) for cycle in range(depth))
    used = {id(trial) for cycle in cycles for trial in cycle}
    left_over = tuple(trial for trial in launch.trials if id(trial) not in used)
    return Grid(walk, tuple(map(launch.setting.benchmark_bytes, walk)), cycles, left_over)


class Calls(NamedTuple):
    """Iterations of the benchmark: `-n`, `-w` and `-c`."""

    iterations: int
    warmup: int
    checks: int

    @property
    def per_half(self) -> int:
        """Calls in one half of a block: sync, timed and checked ones."""
        return 1 + self.iterations + self.checks

    @property
    def per_block(self) -> int:
        """Calls of a block, all with one config."""
        return HALVES * self.per_half

    def slow_s(self, size_bytes: int) -> float:
        """Seconds for a block at 0.5 GB/s (one channel of LL over two nodes of H100 makes 1.5)."""
        return self.per_block * size_bytes / 0.5e9


def _small_bytes(file: SweepFile) -> int:
    return file.small_max if file.small_iterations > file.iterations else 0


def calls_of(launch: Launch, file: SweepFile) -> Calls:
    """Iteration counts of a launch."""
    if launch.mode is LaunchMode.READ_BACK:
        return Calls(1, 1, 0)
    is_small = all(trial.size_bytes <= _small_bytes(file) for trial in launch.trials)
    iterations = file.small_iterations if is_small else file.iterations
    return Calls(iterations, file.warmup_iterations, 1)


def arguments(
    program: Sequence[str], launch: Launch, grid: Grid, file: SweepFile, *, gpus: int, folder: Path
) -> tuple[str, ...]:
    """The benchmark's argument vector: `gpus` of each process, JSON to `folder`."""
    calls, walk = calls_of(launch, file), grid.walk
    argv = [*program, "-b", str(walk[0]), "-e", str(walk[-1])]
    argv += ["-f", str(walk[1] // walk[0])] if len(walk) > 1 else []
    argv += ["-g", str(gpus)]
    argv += ["-n", str(calls.iterations), "-w", str(calls.warmup), "-c", str(calls.checks)]
    argv += ["-d", launch.setting.datatype]
    if len(grid.cycles) > 1:
        argv += ["-N", str(len(grid.cycles))]
    if launch.mode is not LaunchMode.READ_BACK and not launch.setting.is_beside:
        argv += ["-I", "1"] if file.runner.per_iteration else []
        argv += ["-J", str(folder / JSON_NAME)]
    return tuple(argv)


def environment(
    launch: Launch, folder: Path, plugin: str, schedule_hash: str
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Variables to set and to remove; `folder` and `plugin` are as the ranks see them."""
    # nccl-tests v2.14 to v2.19.6 (`src/common.cu`, run); the mask would take precedence.
    split = {"NCCL_TESTS_SPLIT": launch.setting.split} if launch.setting.split else {}
    mask = ("NCCL_TESTS_SPLIT_MASK",) if split else ()
    if launch.mode is LaunchMode.REFERENCE:
        return split, (*PLUGIN_VARIABLES, *mask)
    # Without NCCL_DEBUG a failure prints no details.
    found = {"NCCL_DEBUG": "WARN", **dict(launch.setting.profile.environment), **split}
    if schedule_hash:
        found |= {
            "NCCL_TUNER_PLUGIN": plugin,
            "DYNAMICCL_MODE": "sweep",
            "DYNAMICCL_SCHEDULE": str(folder / SCHEDULE_NAME),
            "DYNAMICCL_SCHEDULE_HASH": schedule_hash,
            "DYNAMICCL_SWEEP_REPORT": str(folder / REPORT_NAME),
        }
    unset = CONFIG_VARIABLES if schedule_hash else PLUGIN_VARIABLES
    if launch.mode is LaunchMode.READ_BACK:
        found |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING",
            # Host and process id: a log for each rank.
            "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.log"),
        }
    return found, (*unset, *mask)


def schedule_of(setting: Setting, grid: Grid, calls: Calls) -> Schedule:
    """What the plugin applies, call by call (pure)."""
    return Schedule(
        collective=setting.collective,
        num_ranks=setting.num_ranks,
        num_nodes=setting.num_nodes,
        warmup=warmup_of(setting, grid, calls),
        halves=HALVES,
        calls_per_half=calls.per_half,
        sizes=grid.benchmark_bytes,
        cycles=tuple(tuple(trial.config for trial in cycle) for cycle in grid.cycles),
    )


def warmup_of(setting: Setting, grid: Grid, calls: Calls) -> tuple[tuple[int, int], ...]:
    """(nBytes, calls): nccl-tests doubles whatever the factor is (v2.16.9 to v2.19.6, TimeTest)."""
    first, last = grid.walk[0], grid.walk[-1]
    doublings = range((last // first).bit_length())
    return tuple((setting.benchmark_bytes(first << n), calls.warmup) for n in doublings)


def judge(
    launch: Launch, folder: Path, num_rows: int, patience_s: float = 0.0
) -> tuple[list[dict[str, Any]], bool]:
    """Columns of each of the first blocks, with `status` where the report does not confirm it.

    Also whether the first block was reached: then a failure is that of a config. A report without
    the last row is waited for: an NFS client may write pages 30 s after a process's end
    (`vm.dirty_expire_centisecs`), and ours caches attributes (nfs(5), `acregmax`).
    """
    if not launch.is_scheduled:
        return [{} for _ in range(num_rows)], num_rows > 0
    deadline = time.monotonic() + patience_s
    while True:
        played = read_report(folder)
        states = () if isinstance(played, str) else played.states
        reached = sum(state is not BlockState.NOT_REACHED for state in states)
        is_over = not isinstance(played, str) and played.stopped_at_call is not None
        if reached >= num_rows or is_over or time.monotonic() >= deadline:
            break
        time.sleep(0.2)
    if isinstance(played, str):
        reason = f"the plugin wrote no report, so the configs are not known: {played}"
        return [{"status": Status.FAILED.value, "reason": reason}] * num_rows, False
    return [_verdict(played, number) for number in range(num_rows)], reached > 0


def read_report(folder: Path) -> PlayReport | str:
    """The plugin's report of `folder`, or why there is none."""
    try:
        content_hash, num_calls = totals_of((folder / SCHEDULE_NAME).read_bytes())
        played = PlayReport.from_bytes((folder / REPORT_NAME).read_bytes())
    except (OSError, DataError) as error:
        return str(error)
    if played.schedule_hash != content_hash:
        return f"it is about the schedule {played.schedule_hash}, not {content_hash}"
    if played.calls > num_calls:
        # With one size the plugin cannot notice a block more or less.
        return f"the benchmark made {played.calls} calls and not {num_calls}"
    return played


def _verdict(played: PlayReport, number: int) -> dict[str, Any]:
    state = played.states[number]
    if state in {BlockState.PLAYED, BlockState.ABSTAINED}:
        return {"actual_chunk_bytes": played.chunk_bytes[number] or None}
    if state is BlockState.UNAVAILABLE:
        reason = "NCCL's cost table has no such cell here"
        return {"status": Status.INFEASIBLE.value, "reason": reason}
    stopped = played.stopped_at_call
    where = "" if stopped is None else f"; it stopped at call {stopped}"
    reason = f"the plugin did not play all calls of this block ({state.name}{where})"
    return {"status": Status.FAILED.value, "reason": reason}


def without_slow(sweep: Sweep) -> Sweep:
    """Mark as infeasible what takes long and does not win at large sizes.

    In the published sweeps LL takes more than twice the best time from 4 MiB on (33 cells) and four
    times from 16 MiB on (23); up to two channels do over NVLink from 4 MiB on (16 cells; over
    sockets 1.36 times, 8).
    """
    most = sweep.file.runner.slow_max
    why = "where LL and up to two channels take long and do not win (runner.slow_max)"

    def told(trial: Trial) -> Trial:
        config = trial.config
        is_slow = config.protocol is Protocol.LL or 0 < (config.num_channels or 0) <= 2
        if trial.infeasible or not is_slow or trial.size_bytes <= most:
            return trial
        return replace(trial, infeasible=f"above {most} bytes, {why}")

    return replace(sweep, trials=tuple(map(told, sweep.trials)))
