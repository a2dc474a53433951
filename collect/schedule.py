"""What a sweep's processes measure, in which order, and what the plugin says of it.

A *launch* is one process and the trials that it measures; it comes back with the rows of each. It
is what is committed: its rows are in the journal, or it runs again. One process of nccl-tests
measures all configs of a setting: it walks its sizes once in each cycle of `-N`, and the plugin
plays a schedule. A *block* is one (cycle, size), all calls of which get one config.
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
from dynamiccl.errors import DataError
from dynamiccl.nccl import ABSTAIN, Protocol
from dynamiccl.schedule import BlockState, PlayReport, Schedule, totals_of

SCHEDULE_NAME: Final = "schedule"
REPORT_NAME: Final = "report"
JSON_NAME: Final = "rows.json"
#: Out-of-place and in-place: every benchmark that NCCL asks a tuner about runs both.
HALVES: Final = 2
#: Variables that override the requested config (`src/graph/tuning.cc` reads them first).
CONFIG_VARIABLES: Final = ("NCCL_ALGO", "NCCL_PROTO")
#: Variables that only our launches may set.
PLUGIN_VARIABLES: Final = (
    "DYNAMICCL_MODE", "DYNAMICCL_SCHEDULE", "DYNAMICCL_SCHEDULE_HASH", "DYNAMICCL_SWEEP_REPORT",
)  # fmt: skip

#: A measurement as column -> value; columns that are missing take the schema's neutral value.
Row = Mapping[str, Any]
#: What NCCL ran, as plain data: algorithm, protocol, channels (None before NCCL 2.24).
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


#: Launches that no strategy picked, and no budget counts.
NOT_PICKED: Final = frozenset({LaunchMode.REFERENCE, LaunchMode.READ_BACK})


@dataclass(frozen=True, slots=True)
class Launch:
    """One process (or its simulation), the trials that it measures, and what came of them."""

    #: Unique within the sweep; laying out a round again gives the same ids.
    id: str
    round: int
    setting: Setting
    mode: LaunchMode
    trials: tuple[Trial, ...]
    #: Whether the plugin applies the configs; else NCCL chooses.
    is_scheduled: bool = False

    # What follows is empty until it has run.

    #: The rows of each trial: one for each buffer placement, or one with the failure.
    measured: tuple[tuple[Trial, tuple[Row, ...]], ...] = ()
    #: Trials to run again: a config hung or crashed before them, or a stop was requested.
    left: tuple[Trial, ...] = ()
    #: The trial at which it hung or crashed, and the row that says so; it is in `left`, too.
    culprit: tuple[Trial, Row] | None = None
    #: New facts about the setting, as plain data (read-back results, environment columns).
    facts: Mapping[str, Any] = field(default_factory=dict)
    #: Whether it reached a config.
    began: bool = False
    #: Why it reached none, where its configs or the machine may be to blame.
    never_began: str = ""

    @property
    def run(self) -> str:
        """The `run` column of its rows, one for each round: noise within a run is correlated."""
        return f"cycle-{self.round}"

    def again(self, trials: Sequence[Trial]) -> "Launch":
        """A further launch of the same kind, for trials that this one left."""
        name = f"{self.id}~"
        return Launch(name, self.round, self.setting, self.mode, tuple(trials), self.is_scheduled)


def trial_row(file: SweepFile, launch: Launch, trial: Trial) -> dict[str, Any]:
    """The identity, workload and requested-config columns of one attempt."""
    setting, config = launch.setting, trial.config
    # With our plugin loaded, which displaces a vendor's, NCCL's own choice is a default of its
    # profile; only a launch without us gives the untouched one.
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
        "requested_algorithm": config.algorithm.wire if config.algorithm is not None else None,
        "requested_protocol": config.protocol.wire if config.protocol is not None else None,
        "requested_num_channels": config.num_channels,
        "requested_chunk_bytes": config.chunk_bytes,
        "behaviour_probability": trial.probability,
    }


def lost_row(row: Row, status: Status, reason: str) -> dict[str, Any]:
    """The row of an attempt that gave no time, with the reason."""
    return {**row, "status": status.value, "reason": reason, "statistic": Statistic.NONE.value}


def lay_out(
    number: int,
    trials: Sequence[Trial],
    file: SweepFile,
    *,
    plays_schedules: bool,
    known: Container[str] = (),
) -> tuple[Launch, ...]:
    """The launches that measure the feasible `trials` of round `number` (pure).

    `plays_schedules`: the plugin plays configs; `known`: keys of trials that were read back. Small
    messages have a process of their own, with more calls (`-n` holds for all of a process).
    """
    found: list[Launch] = []
    small_bytes = _small_bytes(file)
    #: Sizes whose default is to be measured in a process without us.
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
    """A launch like `base` for each walk over sizes, small ones and large ones apart."""
    parts = grouped(trials, lambda trial: trial.size_bytes > small_bytes)
    for _, part in sorted(parts.items()):
        for walk in walks(trial.size_bytes for trial in part):
            held = tuple(trial for trial in part if trial.size_bytes in walk)
            place = f"{name}:{walk[0]}-{walk[-1]}"
            yield replace(base, id=f"{base.id}:{place}", trials=held)


def grouped(trials: Iterable[Trial], key: Callable[[Trial], _Key]) -> dict[_Key, list[Trial]]:
    """The trials by a key, in the order in which it first comes."""
    groups: dict[_Key, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(key(trial), []).append(trial)
    return groups


@dataclass(frozen=True, slots=True)
class Grid:
    """The blocks of one process: `cycles[c][s]` is measured in cycle c at `walk[s]`."""

    walk: Walk
    #: What nccl-tests prints as size, and NCCL's nBytes; shape as `walk`.
    benchmark_bytes: tuple[int, ...]
    cycles: tuple[tuple[Trial, ...], ...]
    #: Trials of the launch that did not fit (another walk, or too many blocks).
    left_over: tuple[Trial, ...]

    @property
    def blocks(self) -> tuple[Trial, ...]:
        """All blocks in the order in which nccl-tests prints their rows."""
        return tuple(trial for cycle in self.cycles for trial in cycle)

    def asked_from(self, block: int, launch: Launch) -> list[Trial]:
        """Trials of `launch` in the blocks from `block` on, without those that only fill gaps."""
        asked = {id(trial) for trial in launch.trials}
        return [trial for trial in self.blocks[block:] if id(trial) in asked]


def deal(launch: Launch, *, max_blocks: int = 20_000) -> Grid:
    """Deal the trials of a launch to cycles; the order of a size is seeded by its id (pure).

    Sizes with fewer trials than others, or none, get NCCL's default, which sharpens the noise band.
    What would be more blocks is left over, by whole cycles.
    """
    walk = max(walks(trial.size_bytes for trial in launch.trials), key=len)
    hands = []
    for size in walk:
        hand = [trial for trial in launch.trials if trial.size_bytes == size]
        random.Random(f"{launch.id}:{size}").shuffle(hand)
        hands.append(hand)
    depth = min(max(map(len, hands)), max(1, max_blocks // len(walk)))
    known = (trial.repeat for trial in launch.trials if trial.config == ABSTAIN)
    # Fillers of a continuing launch are numbered above those of the launch that it continues.
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
        """Calls in one half (in-place or out-of-place) of a block: sync, timed and checked ones."""
        return 1 + self.iterations + self.checks

    @property
    def per_block(self) -> int:
        """Calls of a block, which all get one config."""
        return HALVES * self.per_half

    def slow_s(self, size_bytes: int) -> float:
        """Seconds that a block of a size may take, at 0.5 GB/s, which is slow for any cluster.

        One channel of LL over two nodes of H100 makes 1.5: 44 calls of 4 GiB take 126 s, no hang.
        """
        return self.per_block * size_bytes / 0.5e9


def _small_bytes(file: SweepFile) -> int:
    """Sizes up to this many bytes get more iterations; 0 = all get the same number."""
    return file.small_max if file.small_iterations > file.iterations else 0


def calls_of(launch: Launch, file: SweepFile) -> Calls:
    """The iteration counts of this launch."""
    if launch.mode is LaunchMode.READ_BACK:
        return Calls(1, 1, 0)
    is_small = all(trial.size_bytes <= _small_bytes(file) for trial in launch.trials)
    iterations = file.small_iterations if is_small else file.iterations
    return Calls(iterations, file.warmup_iterations, 1)


def arguments(
    program: Sequence[str], launch: Launch, grid: Grid, file: SweepFile, *, gpus: int, folder: Path
) -> tuple[str, ...]:
    """The benchmark's argument vector: `gpus` of each process, JSON to `folder`.

    Of our own program (`Setting.is_beside`) the text has all digits and every column.
    """
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
    """The variables that a launch sets and those that it removes, by its mode.

    A reference launch is the user's own environment and nothing else. `folder` and `plugin` are as
    the ranks see them; `schedule_hash` is empty for a launch without the plugin.
    """
    # How nccl-tests makes several communicators (v2.14 to v2.19.6, `src/common.cu`, run). The mask
    # is read first, and would take precedence.
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
            # Each rank has a log of its own: host and process id.
            "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.log"),
        }
    return found, (*unset, *mask)


def schedule_of(setting: Setting, grid: Grid, calls: Calls) -> Schedule:
    """The schedule that the plugin applies, call by call (pure)."""
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
    """The warm-up as (nBytes, calls) runs: every doubling from the first size to the last.

    nccl-tests v2.16.9 to v2.19.6 `src/common.cu`, TimeTest: whatever the factor of the walk is.
    """
    first, last = grid.walk[0], grid.walk[-1]
    doublings = range((last // first).bit_length())
    return tuple((setting.benchmark_bytes(first << n), calls.warmup) for n in doublings)


def judge(
    launch: Launch, folder: Path, num_rows: int, patience_s: float = 0.0
) -> tuple[list[dict[str, Any]], bool]:
    """For each of the first blocks the columns that tell whether its times are its config's.

    `status` and `reason` are there where the plugin's report does not confirm a block. Also returns
    whether the launch reached its first block: then a failure is that of a config.

    A report that lacks the last row is waited for, up to `patience_s`: a client of a network file
    system may write pages 30 s after a process's end (`vm.dirty_expire_centisecs`), and ours looks
    again only when its attribute cache has expired (nfs(5), `acregmax`).
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
    """The plugin's report of the schedule in `folder`, or the reason why there is none."""
    try:
        content_hash, num_calls = totals_of((folder / SCHEDULE_NAME).read_bytes())
        played = PlayReport.from_bytes((folder / REPORT_NAME).read_bytes())
    except (OSError, DataError) as error:
        return str(error)
    if played.schedule_hash != content_hash:
        return f"it is about the schedule {played.schedule_hash}, not {content_hash}"
    if played.calls > num_calls:
        # With one size only, the plugin cannot notice a missing or additional block.
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
    """The sweep without trials that take long and do not win: they are infeasible, and say why.

    With large messages, LL, which in the published sweeps takes more than twice the best config's
    time from 4 MiB on (33 cells) and four times from 16 MiB on (23), and up to two channels, which
    do so over NVLink from 4 MiB on (16; over sockets 1.36 times, 8).
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
