"""What nccl-tests processes measure, in which order, and what the plugin says of it.

One process measures all configs of a setting: nccl-tests walks its sizes once in each cycle of
`-N`, and the plugin plays a schedule. A *block* is one (cycle, size), all calls of which get one
config. From the trials of a round to a verdict on each block:

    lay_out      trials of a round -> launches
    deal         trials of a launch -> blocks
    arguments, environment, schedule_of   what a launch starts
    judge        what the plugin's report says of each block
    Skips        which trials need no block
"""

import random
import subprocess
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from dynamiccl.collect.grid import Chain, LaunchProfile, Setting, Trial, walks
from dynamiccl.collect.programs import Program
from dynamiccl.collect.runner import Launch, LaunchMode
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.datasets.schema import DEFAULT_PROFILE, Status
from dynamiccl.errors import DataError
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.schedule import BlockState, PlayReport, Schedule

#: Files of a launch in its folder.
SCHEDULE_NAME: Final = "schedule"
REPORT_NAME: Final = "report"
JSON_NAME: Final = "rows.json"
TOPOLOGY_NAME: Final = "topology.xml"
GRAPH_NAME: Final = "graph.xml"
#: Each rank has a log of its own: host and process id.
_LOG_NAME: Final = "nccl.%h.%p.log"
#: Out-of-place and in-place: every benchmark that NCCL asks a tuner about runs both.
HALVES: Final = 2
#: Measurements of the reference default per size and round: an A/A pair.
REFERENCE_REPEATS: Final = 2
#: Repeat numbers of a continuing launch's fillers start above those of the launch it continues.
_FILLERS_OF_A_LAUNCH: Final = 1_000_000
#: Algorithm bandwidths that are slow for any cluster: one channel of LL over two nodes of H100
#: makes 1.5 GB/s, so that 44 calls of 4 GiB take 126 s and are no hang.
_SLOW_BYTES_PER_S: Final = 0.25e9
_PLAIN_BYTES_PER_S: Final = 1e9
#: Variables that override the requested config (`src/graph/tuning.cc` reads them first).
CONFIG_VARIABLES: Final = ("NCCL_ALGO", "NCCL_PROTO")
#: Variables that only our launches may set.
PLUGIN_VARIABLES: Final = (
    "DYNAMICCL_MODE",
    "DYNAMICCL_SCHEDULE",
    "DYNAMICCL_SCHEDULE_HASH",
    "DYNAMICCL_SWEEP_REPORT",
)
#: How nccl-tests makes several communicators (v2.14 to v2.19.6, `src/common.cu`, run).
_SPLIT: Final = "NCCL_TESTS_SPLIT"
_SPLIT_MASK: Final = "NCCL_TESTS_SPLIT_MASK"
#: How long the plugin's report may take over a network file system, and between two looks at it.
REPORT_S: Final = 45.0
_LOOK_S: Final = 0.2
#: Local file systems by `stat -f` (coreutils, `src/stat.c`): a write is seen at once.
_LOCAL: Final = frozenset(("ext2/ext3", "xfs", "btrfs", "zfs", "tmpfs", "overlayfs"))
#: What NCCL ran, as plain data: algorithm, protocol, channels (None before NCCL 2.24).
Choice = list[str | int | None]
_Key = TypeVar("_Key", bound=Hashable)


# --- The launches of a round ---


def lay_out(
    number: int,
    trials: Sequence[Trial],
    *,
    plays_schedules: bool,
    must_read_back: Callable[[Trial], bool],
    small_bytes: int = 0,
) -> tuple[Launch, ...]:
    """The launches of round `number` (pure).

    Args:
        number: of the round.
        trials: what is to be measured; feasible ones only.
        plays_schedules: whether a plugin can play many configs in one process.
        must_read_back: whether it is still to be found out what really runs for a trial.
        small_bytes: up to this size messages are timed in a process of their own, with more calls
            (`-n` holds for all that a process walks).
    """
    by_setting = _grouped(trials, lambda trial: trial.setting)
    found: list[Launch] = []
    for setting, of_setting in by_setting:
        once = {trial.key: replace(trial, repeat=0, probability=None) for trial in of_setting}
        is_tuned = setting.collective.tunable
        unknown = [trial for trial in once.values() if is_tuned and must_read_back(trial)]
        base = Launch(f"{number}:{setting.key}", number, setting, LaunchMode.FORCED, ())
        if plays_schedules and is_tuned:
            base = replace(base, mode=LaunchMode.SWEEP, is_scheduled=True)
            found += _walked(base, "sweep", of_setting, small_bytes)
            found += _walked(replace(base, mode=LaunchMode.READ_BACK), "read-back", unknown)
            continue
        for config, alike in _grouped(of_setting, lambda trial: trial.config):
            found += _walked(base, config.key, alike, small_bytes)
        base = replace(base, mode=LaunchMode.READ_BACK)
        for config, alike in _grouped(unknown, lambda trial: trial.config):
            found += _walked(base, f"read-back:{config.key}", alike)
    for setting, sizes in _untouched(by_setting, plays_schedules=plays_schedules).items():
        base = Launch(f"{number}:{setting.key}", number, setting, LaunchMode.REFERENCE, ())
        defaults = [
            Trial(setting, size, ABSTAIN, repeat=repeat)
            for size in sorted(sizes)
            for repeat in range(REFERENCE_REPEATS)
        ]
        found += _walked(base, "reference", defaults, small_bytes)
    return tuple(found)


def _walked(
    base: Launch, name: str, trials: Sequence[Trial], small_bytes: int = 0
) -> Iterator[Launch]:
    """A launch like `base` for each walk over sizes, small ones and large ones apart."""
    small = [trial for trial in trials if trial.size_bytes <= small_bytes]
    large = [trial for trial in trials if trial.size_bytes > small_bytes]
    for part in (small, large):
        for walk in walks(trial.size_bytes for trial in part):
            held = tuple(trial for trial in part if trial.size_bytes in walk.sizes)
            place = f"{name}:{walk.sizes[0]}-{walk.sizes[-1]}"
            yield replace(base, id=f"{base.id}:{place}", trials=held)


def _untouched(
    by_setting: Iterable[tuple[Setting, Sequence[Trial]]], *, plays_schedules: bool
) -> dict[Setting, set[int]]:
    """The settings, and sizes, whose default must be measured in a process of its own.

    A process without our plugin, in the untouched environment, is the reference already.
    """
    wanted: dict[Setting, set[int]] = {}
    there: set[Setting] = set()
    for setting, trials in by_setting:
        scheduled = plays_schedules and setting.collective.tunable
        if not scheduled:
            there.add(setting)
        if scheduled or setting.profile.name != DEFAULT_PROFILE:
            untouched = replace(setting, profile=LaunchProfile())
            wanted.setdefault(untouched, set()).update(trial.size_bytes for trial in trials)
    return {setting: sizes for setting, sizes in wanted.items() if setting not in there}


def _grouped(
    trials: Iterable[Trial], key: Callable[[Trial], _Key]
) -> list[tuple[_Key, list[Trial]]]:
    groups: dict[_Key, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(key(trial), []).append(trial)
    return list(groups.items())


# --- The blocks of a launch ---


@dataclass(frozen=True, slots=True)
class Grid:
    """The blocks of one process: `cycles[c][s]` is measured in cycle c at `chain.sizes[s]`."""

    chain: Chain
    #: What nccl-tests prints as size, and NCCL's nBytes; shape as `chain.sizes`.
    benchmark_bytes: tuple[int, ...]
    cycles: tuple[tuple[Trial, ...], ...]
    #: Trials of the launch that did not fit (another walk, or too many blocks).
    left_over: tuple[Trial, ...]

    @property
    def blocks(self) -> tuple[Trial, ...]:
        """All blocks in the order in which nccl-tests prints their rows."""
        return tuple(trial for cycle in self.cycles for trial in cycle)

    @property
    def configs(self) -> tuple[tuple[Config, ...], ...]:
        """The schedule of configs; shape [cycle][size]."""
        return tuple(tuple(trial.config for trial in cycle) for cycle in self.cycles)

    def asked_from(self, block: int, launch: Launch) -> list[Trial]:
        """Trials of `launch` in the blocks from `block` on, without those that only fill gaps."""
        asked = {id(trial) for trial in launch.trials}
        return [trial for trial in self.blocks[block:] if id(trial) in asked]


def deal(launch: Launch, *, max_blocks: int) -> Grid:
    """Deal the trials of a launch to cycles; the order of a size is seeded by its id (pure).

    Sizes with fewer trials than others, or none, get the launch's one config once more, or NCCL's
    default, which sharpens the noise band.
    """
    chain = max(walks(trial.size_bytes for trial in launch.trials), key=lambda c: len(c.sizes))
    hands = []
    for size in chain.sizes:
        hand = [trial for trial in launch.trials if trial.size_bytes == size]
        random.Random(f"{launch.id}:{size}").shuffle(hand)
        hands.append(hand)
    depth = min(max(map(len, hands)), max(1, max_blocks // len(chain.sizes)))
    configs = {trial.config for trial in launch.trials}
    config = next(iter(configs)) if len(configs) == 1 else ABSTAIN
    known = (trial.repeat for trial in launch.trials if trial.config == config)
    first = max(known, default=-1) + 1 + launch.id.count("~") * _FILLERS_OF_A_LAUNCH
    for hand, size in zip(hands, chain.sizes, strict=True):
        hand += [
            Trial(launch.setting, size, config, repeat=first + number)
            for number in range(depth - len(hand))
        ]
    cycles = tuple(tuple(hand[cycle] for hand in hands) for cycle in range(depth))
    used = {id(trial) for cycle in cycles for trial in cycle}
    return Grid(
        chain,
        tuple(map(launch.setting.benchmark_bytes, chain.sizes)),
        cycles,
        tuple(trial for trial in launch.trials if id(trial) not in used),
    )


def slow_seconds(grid: Grid, calls_per_half: int) -> list[float]:
    """Seconds that each block may take, in row order, at the least bandwidth of any cluster."""
    return [
        HALVES
        * calls_per_half
        * size
        / (_SLOW_BYTES_PER_S if is_slow(trial.config) else _PLAIN_BYTES_PER_S)
        for cycle in grid.cycles
        for trial, size in zip(cycle, grid.benchmark_bytes, strict=True)
    ]


def is_slow(config: Config) -> bool:
    """Whether a config is slow for large messages: LL, or one or two channels.

    In the published sweeps LL takes more than twice the best config's time from 4 MiB on (33 cells)
    and four times from 16 MiB on (23); so do up to two channels over NVLink from 4 MiB on (16; over
    sockets 1.36 times, 8).
    """
    return config.protocol is Protocol.LL or 0 < (config.num_channels or 0) <= 2


# --- What a launch starts ---


@dataclass(frozen=True, slots=True)
class Calls:
    """Iterations of the benchmark: `-n`, `-w` and `-c`."""

    iterations: int
    warmup: int
    checks: int

    @property
    def per_half(self) -> int:
        """Calls in one half (in-place or out-of-place) of a block: sync, timed and checked ones."""
        return 1 + self.iterations + self.checks


def small_bytes(file: SweepFile) -> int:
    """Sizes up to this many bytes get more iterations; 0 = all get the same number."""
    return file.small_max if file.small_iterations > file.iterations else 0


def calls_of(launch: Launch, program: Program, file: SweepFile) -> Calls:
    """The iteration counts of this launch.

    What a warm-up calls differs between releases before 2.16.9, which their help text does not
    tell; where calls are counted there is none then, and the synchronising calls connect.
    """
    read_back = launch.mode is LaunchMode.READ_BACK
    is_small = all(trial.size_bytes <= small_bytes(file) for trial in launch.trials)
    iterations = file.small_iterations if is_small else file.iterations
    calls = Calls(1, 1, 0) if read_back else Calls(iterations, file.warmup_iterations, 1)
    counted = read_back or launch.is_scheduled
    return calls if program.warms_up_each_size or not counted else replace(calls, warmup=0)


def arguments(
    program: Program, launch: Launch, grid: Grid, file: SweepFile, *, gpus: int, folder: Path
) -> tuple[str, ...]:
    """The benchmark's argument vector: `gpus` of each process, JSON to `folder` where it can."""
    calls = calls_of(launch, program, file)
    timed = launch.mode is not LaunchMode.READ_BACK
    argv = [program.path, *grid.chain.arguments, "-g", str(gpus)]
    argv += ["-n", str(calls.iterations), "-w", str(calls.warmup), "-c", str(calls.checks)]
    argv += ["-d", launch.setting.datatype]
    argv += file.runner.arguments
    if len(grid.cycles) > 1:
        argv += ["-N", str(len(grid.cycles))]
    if timed and program.has_iteration_times and file.runner.per_iteration:
        argv += ["-I", "1"]
    if timed and program.has_json:
        argv += ["-J", str(folder / JSON_NAME)]
    return tuple(argv)


def environment(
    launch: Launch, folder: Path, plugin: str, schedule_hash: str
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables that a launch sets and those that it removes, by its mode.

    A reference launch is the user's own environment and nothing else. `folder` and `plugin` are as
    the ranks see them; `schedule_hash` is empty for a launch that forces its one config.
    """
    split = {_SPLIT: launch.setting.split} if launch.setting.split else {}
    # NCCL_TESTS_SPLIT_MASK is read first, and would take precedence.
    mask = (_SPLIT_MASK,) if split else ()
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
        unset: tuple[str, ...] = CONFIG_VARIABLES
    else:
        forced = forced_config(launch.trials[0].config)
        found |= forced
        others = (name for name in CONFIG_VARIABLES if forced and name not in forced)
        unset = (*PLUGIN_VARIABLES, *others)
    if launch.mode is LaunchMode.READ_BACK:
        found |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING",
            "NCCL_DEBUG_FILE": str(folder / _LOG_NAME),
        }
        # Each communicator would write its dump to the same file.
        if not split:
            found["NCCL_TOPO_DUMP_FILE"] = str(folder / TOPOLOGY_NAME)
            found["NCCL_GRAPH_DUMP_FILE"] = str(folder / GRAPH_NAME)
    return found, (*unset, *mask)


def forced_config(config: Config) -> dict[str, str]:
    """The variables that force a config on a process; none for NCCL's default.

    NCCL user guide (`env.rst`, v2.30.7): NCCL_ALGO, NCCL_PROTO; NCCL_MIN_CTAS = NCCL_MAX_CTAS.
    """
    forced: dict[str, str] = {}
    if config.algorithm is not None:
        forced["NCCL_ALGO"] = config.algorithm.wire
    if config.protocol is not None:
        forced["NCCL_PROTO"] = config.protocol.wire
    if config.num_channels is not None:
        forced["NCCL_MIN_CTAS"] = forced["NCCL_MAX_CTAS"] = str(config.num_channels)
    return forced


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
        cycles=grid.configs,
    )


def warmup_of(setting: Setting, grid: Grid, calls: Calls) -> tuple[tuple[int, int], ...]:
    """The warm-up as (nBytes, calls) runs: every doubling from the first size to the last.

    nccl-tests v2.16.9 to v2.19.6 `src/common.cu`, TimeTest: whatever the factor of the walk is.
    """
    if calls.warmup == 0:
        return ()
    runs = []
    size = grid.chain.sizes[0]
    while size <= grid.chain.sizes[-1]:
        runs.append((setting.benchmark_bytes(size), calls.warmup))
        size *= 2
    return tuple(runs)


# --- What the plugin's report says ---


def judge(launch: Launch, folder: Path, num_rows: int) -> list[dict[str, Any]]:
    """For each of the first blocks the columns that tell whether its times are its config's.

    `status` and `reason` are there where they are not. Without a schedule the config is forced by
    environment, which NCCL obeys or refuses. With one, the plugin's report tells which configs were
    applied: the times of a block that it does not confirm are not used.
    """
    if not launch.is_scheduled:
        return [{} for _ in range(num_rows)]
    played = read_report(folder)
    if isinstance(played, str):
        reason = f"the plugin wrote no report, so the configs are not known: {played}"
        return [failed(reason) for _ in range(num_rows)]
    return [_verdict(played, number) for number in range(num_rows)]


def failed(reason: str) -> dict[str, Any]:
    """The columns of a block whose times are not its config's."""
    return {"status": Status.FAILED.value, "reason": reason}


def await_report(launch: Launch, folder: Path, num_rows: int, patience_s: float) -> None:
    """Wait until the plugin's report covers the last row; the file is re-read each time.

    A client of a network file system may write the mapped pages of an ended process as late as 30 s
    after its end (`vm.dirty_expire_centisecs`), and ours looks at the server again only after its
    attribute cache has expired (nfs(5), `acregmax`).
    """
    deadline = time.monotonic() + patience_s
    while launch.is_scheduled and num_rows and not _tells_of(read_report(folder), num_rows):
        if time.monotonic() >= deadline:
            return
        time.sleep(_LOOK_S)


def is_local(path: Path) -> bool:
    """Whether a path lies on a local file system; False when that is not known."""
    asked = ("stat", "--file-system", "--format=%T", str(path))
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() in _LOCAL


def has_begun(launch: Launch, folder: Path) -> bool:
    """Whether the plugin reached the first block: if so, a failure is that of a config."""
    played = read_report(folder) if launch.is_scheduled else ""
    return not isinstance(played, str) and played.states[0] is not BlockState.NOT_REACHED


def read_report(folder: Path) -> PlayReport | str:
    """The plugin's report of the schedule in `folder`, or the reason why there is none."""
    try:
        schedule = Schedule.from_bytes((folder / SCHEDULE_NAME).read_bytes())
        played = PlayReport.from_bytes((folder / REPORT_NAME).read_bytes())
    except (OSError, DataError) as error:
        return str(error)
    if played.schedule_hash != schedule.content_hash:
        return f"it is about the schedule {played.schedule_hash}, not {schedule.content_hash}"
    if played.calls > schedule.num_calls:
        # With one size only, the plugin cannot notice a missing or additional block.
        return f"the benchmark made {played.calls} calls and not {schedule.num_calls}"
    return played


def _tells_of(played: PlayReport | str, num_rows: int) -> bool:
    if isinstance(played, str):
        return False
    last = played.states[min(num_rows, len(played.states)) - 1]
    return played.stopped_at_call is not None or last is not BlockState.NOT_REACHED


def _verdict(played: PlayReport, number: int) -> dict[str, Any]:
    state = played.states[number]
    if state in {BlockState.PLAYED, BlockState.ABSTAINED}:
        return {"actual_chunk_bytes": played.chunk_bytes[number] or None}
    if state is BlockState.UNAVAILABLE:
        reason = "NCCL's cost table has no such cell here"
        return {"status": Status.INFEASIBLE.value, "reason": reason}
    if state is BlockState.MIXED:
        return failed("the plugin could play it in some of its calls only")
    stopped = played.stopped_at_call
    where = "" if stopped is None else f" (it stopped at call {stopped})"
    return failed(f"the plugin did not play this block{where}")


# --- Which trials need no block ---


class Skips:
    """Which trials of a sweep are skipped: too slow to win, or the same as another one."""

    def __init__(self, slow_max_bytes: int, trials: Iterable[Trial] = ()) -> None:
        """Take up to which size the slowest configs are measured, and the sweep's trials."""
        self._slow_max_bytes = slow_max_bytes
        #: Trials that differ in the number of channels only.
        self._families: dict[tuple[Any, ...], list[Trial]] = {}
        for trial in trials:
            if trial.config.num_channels is not None and trial.infeasible is None:
                self._families.setdefault(_family(trial), []).append(trial)

    def reason(self, trial: Trial, choices: Mapping[str, Choice | None]) -> str | None:
        """Why a trial is skipped, or None; `choices`: trial key -> what NCCL runs for it."""
        if is_slow(trial.config) and trial.size_bytes > self._slow_max_bytes:
            return (
                f"left out above {self._slow_max_bytes} bytes, where LL and up to two channels "
                "take long and do not win (runner.slow_max)"
            )
        choice = choices.get(trial.key)
        family = self._families.get(_family(trial))
        if choice is None or family is None or trial.config.num_channels is None:
            return None
        alike = [other for other in family if choices.get(other.key) == choice]
        channels = choice[2]

        def is_worse(other: Trial) -> tuple[bool, int]:
            count = other.config.num_channels or 0
            return count != channels, count

        first = min(alike, key=is_worse)
        if first.key == trial.key:
            return None
        return f"NCCL runs it as {first.config.key}, which is measured"


def _family(trial: Trial) -> tuple[Setting, int, Algorithm | None, Protocol | None, int | None]:
    config = trial.config
    return (*trial.task, config.algorithm, config.protocol, config.chunk_bytes)
