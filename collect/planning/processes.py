"""The processes that measure a round, and their seconds by purpose."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dynamiccl.collect.planning.times import CallTimes
from dynamiccl.collect.programs import Program
from dynamiccl.collect.runner import Launch, LaunchMode
from dynamiccl.collect.schedule import (
    HALVES,
    Calls,
    Choice,
    Grid,
    Skips,
    calls_of,
    deal,
    lay_out,
    small_bytes,
    warmup_of,
)
from dynamiccl.collect.sweep.load import Sweep
from dynamiccl.collect.sweep.trial import Setting, Trial
from dynamiccl.nccl import ABSTAIN, Config

#: Guesses for the start of a process: NCCL starts in seconds on 8 GPUs and in about a minute on
#: 512.
START_S: Final = 4.0
START_S_PER_RANK: Final = 0.11
STARTS: Final = "starts of processes"
_WARM_UP: Final = "warm-up"
_READ_BACK: Final = "reading back what runs"
_ALIKE: Final = "NCCL runs as many channels as for another count, which is measured"
#: 2.17.3 or later, whose warm-up is known.
_PROGRAM: Final = Program("nccl-tests", frozenset("J"))
#: From which size on, bytes, and how a person writes it.
_BOUNDS: Final = ((0, "0"), (1 << 20, "1 MiB"), (64 << 20, "64 MiB"), (1 << 30, "1 GiB"))
_FEW_CHANNELS: Final = 2
_SOME_CHANNELS: Final = 8


@dataclass(frozen=True, slots=True)
class Process:
    """One process, and its walk over sizes."""

    launch: Launch
    grid: Grid


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of processes: seconds by purpose, and rank-seconds."""

    seconds: Mapping[str, float]
    gpu_seconds: float

    @property
    def total_s(self) -> float:
        """Seconds in all."""
        return sum(self.seconds.values())

    def times(self, factor: float) -> "Cost":
        """The cost multiplied by a factor."""
        longer = {word: seconds * factor for word, seconds in self.seconds.items()}
        return Cost(longer, self.gpu_seconds * factor)

    def __add__(self, other: "Cost") -> "Cost":
        """The sum of both."""
        words = dict.fromkeys((*self.seconds, *other.seconds))
        both = {w: self.seconds.get(w, 0.0) + other.seconds.get(w, 0.0) for w in words}
        return Cost(both, self.gpu_seconds + other.gpu_seconds)


#: What nothing takes.
NOTHING: Final = Cost({}, 0.0)


class Planner:
    """Lays out rounds of a sweep as its runner would, and estimates their cost."""

    def __init__(self, sweep: Sweep, times: CallTimes) -> None:
        """Take the sweep and the times of its calls."""
        self._file = sweep.file
        self._times = times
        self._skips = Skips(sweep.file.runner.slow_max, sweep.trials)
        self._choices = dict(self._read_back(sweep.trials))
        self._shapes = {(g.num_nodes, g.ranks_per_node) for g in sweep.file.groups}

    def reason_to_skip(self, trial: Trial) -> str | None:
        """Why a trial is skipped, by the simulator's prediction; or None."""
        return self._skips.reason(trial, self._choices)

    def needless(self, trials: Sequence[Trial]) -> dict[str, int]:
        """Number of skipped trials, by reason."""
        found: Counter[str] = Counter()
        for trial in trials:
            if trial.infeasible is None and self.reason_to_skip(trial) is not None:
                found[self._skips.reason(trial, {}) or _ALIKE] += 1
        return dict(sorted(found.items()))

    def processes(
        self,
        trials: Sequence[Trial],
        *,
        must_read_back: Callable[[Trial], bool],
        plays: bool | None = None,
    ) -> tuple[Process, ...]:
        """The processes of a round; `plays`: sweep mode, None = as the sweep file says."""
        laid_out = lay_out(
            0,
            trials,
            plays_schedules=self._file.runner.mode != "processes" if plays is None else plays,
            must_read_back=lambda trial: self._file.runner.read_back and must_read_back(trial),
            small_bytes=small_bytes(self._file),
        )
        return tuple(
            process
            for launch in laid_out
            for process in self._started(replace(launch, trials=self._needed(launch)))
        )

    def cost(self, processes: Iterable[Process]) -> Cost:
        """Cost of some processes."""
        return sum(map(self._cost, processes), start=NOTHING)

    def _read_back(self, trials: Sequence[Trial]) -> Iterator[tuple[str, Choice]]:
        """What a read-back of the trials would find, by the simulator."""
        for trial in trials if self._file.runner.read_back else ():
            # Only channel counts can run alike.
            if trial.infeasible is None and trial.config.num_channels is not None:
                setting = trial.setting
                size = setting.benchmark_bytes(trial.size_bytes)
                parts = self._times.of(setting).parts(size, trial.config)
                if parts is not None:
                    yield (
                        trial.key,
                        [parts.algorithm.wire, parts.protocol.wire, parts.num_channels],
                    )

    def _needed(self, launch: Launch) -> tuple[Trial, ...]:
        # What runs alike is known only once it was read back.
        known = {} if launch.mode is LaunchMode.READ_BACK else self._choices
        return tuple(t for t in launch.trials if self._skips.reason(t, known) is None)

    def _started(self, launch: Launch) -> Iterator[Process]:
        """A launch, and then launches for trials that its blocks could not hold."""
        while launch.trials:
            grid = deal(launch, max_blocks=self._file.runner.max_blocks)
            yield Process(launch, grid)
            launch = replace(launch, trials=grid.left_over)

    def _cost(self, process: Process) -> Cost:
        launch, grid = process.launch, process.grid
        calls = calls_of(launch, _PROGRAM, self._file)
        num_processes = launch.setting.hosts * launch.setting.ranks_per_host
        start_s = START_S + START_S_PER_RANK * num_processes
        found = {STARTS: start_s, _WARM_UP: self._warm_up_s(process, calls)}
        times = self._times.of(launch.setting)
        for cycle in grid.cycles:
            for trial, size in zip(cycle, grid.benchmark_bytes, strict=True):
                config = trial.config
                seconds = HALVES * calls.per_half * times.call_us(size, config) / 1e6
                is_timed = launch.mode is not LaunchMode.READ_BACK
                word = self._word(launch.setting, config, size) if is_timed else _READ_BACK
                found[word] = found.get(word, 0.0) + seconds
        return Cost(found, sum(found.values()) * num_processes)

    def _warm_up_s(self, process: Process, calls: Calls) -> float:
        setting, times = process.launch.setting, self._times.of(process.launch.setting)
        # A schedule leaves the warm-up to NCCL; what is forced by environment is so from the start.
        scheduled = process.launch.is_scheduled
        config = ABSTAIN if scheduled else process.launch.trials[0].config
        runs = warmup_of(setting, process.grid, calls)
        return sum(count * times.call_us(size, config) for size, count in runs) / 1e6

    def _word(self, setting: Setting, config: Config, size_bytes: int) -> str:
        shape = f" on {setting.num_nodes} x {setting.ranks_per_node}"
        return f"{_kind(config)}, {_range(size_bytes)}{shape if len(self._shapes) > 1 else ''}"


def _kind(config: Config) -> str:
    """The name of a config's class among configs that take similar time."""
    channels = config.num_channels or 0
    if config == ABSTAIN:
        return "NCCL's own choice"
    if 0 < channels <= _FEW_CHANNELS:
        return "1 or 2 channels"
    protocol = config.protocol.wire if config.protocol is not None else "any protocol"
    return f"{protocol} on 3 to 8 channels" if 0 < channels <= _SOME_CHANNELS else protocol


def _range(size_bytes: int) -> str:
    above = [at for at, (bound, _) in enumerate(_BOUNDS) if size_bytes >= bound]
    low = above[-1]
    if low + 1 == len(_BOUNDS):
        return f"{_BOUNDS[low][1]} and above"
    return f"{_BOUNDS[low][1]} to {_BOUNDS[low + 1][1]}" if low else f"below {_BOUNDS[1][1]}"
