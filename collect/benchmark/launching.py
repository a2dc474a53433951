"""Starts one launch: writes its schedule, builds its command, follows its output row by row."""

import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from dynamiccl.collect.benchmark import command as commands
from dynamiccl.collect.benchmark.blocks import SCHEDULE_NAME
from dynamiccl.collect.benchmark.grid import Grid, slow_seconds
from dynamiccl.collect.benchmark.output import is_row
from dynamiccl.collect.benchmark.programs import Program
from dynamiccl.collect.benchmark.schedules import schedule_of
from dynamiccl.collect.launchers import (
    LauncherSettings,
    Ranks,
    command,
    find_launcher,
    map_into_container,
)
from dynamiccl.collect.process import Finished, Interrupt, Limits, Line, run_process
from dynamiccl.collect.runner import Launch
from dynamiccl.collect.sweep.settings import SweepFile
from dynamiccl.collect.sweep.trial import Setting
from dynamiccl.errors import InvalidSweep

_log = logging.getLogger(__name__)


#: What nccl-tests prints below its rows (v2.13 to v2.19.6, `src/common.cu`), and how near the end.
_FOOTER: Final = "# Avg bus bandwidth"
_FOOTER_LINES: Final = 50
#: Exit codes after SIGTERM or SIGKILL, as seen by us and as reported by a launcher.
_ENDED_FROM_OUTSIDE: Final = frozenset({-signal.SIGTERM, -signal.SIGKILL, 128 + 15, 128 + 9})
#: Seconds that the same signal may take to reach us.
_HEARING_S: Final = 2.0


class _Enough(Exception):
    """Raised inside a running launch when a stop was requested and a block is done."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where nccl-tests runs: launcher, directories, plugin."""

    #: Data directory; topology dumps go there, too.
    out: Path
    #: Folder for the files of launches, on a file system shared by all nodes.
    work: Path
    #: Where the binaries are; None = PATH.
    nccl_tests_dir: Path | None
    #: The tuner plugin that plays schedules; None = there is none.
    plugin: Path | None
    launcher: LauncherSettings


@dataclass(slots=True)
class ProcessOutput:
    """The output and the exit of one benchmark process."""

    #: When it was started, seconds since the epoch.
    began_s: float
    lines: list[Line] = field(default_factory=list)
    #: When each row arrived, seconds since the epoch.
    row_times: list[float] = field(default_factory=list)
    #: Seconds added to the time limit for the last awaited row.
    more_s: float = 0.0
    #: How it ended; None when we were asked to stop it.
    finished: Finished | None = None

    def take(self, line: Line) -> bool:
        """Keep a line of output; returns whether it is a result row, which counts as progress."""
        self.lines.append(line)
        if not is_row(line.text):
            return False
        self.row_times.append(line.arrived_s)
        return True

    @property
    def texts(self) -> list[str]:
        """All output lines."""
        return [line.text for line in self.lines]

    def stretches_of(self, num_rows: int) -> list[tuple[float, float]]:
        """(begin, end) in Unix seconds of each of the first rows, from the row before it on.

        A row that was not seen to arrive (another rank spoke on its line) takes the last one's.
        """
        seen = list(pairwise([self.began_s, *self.row_times]))[:num_rows]
        last = seen[-1] if seen else (self.began_s, self.began_s)
        return seen + [last] * (num_rows - len(seen))

    @property
    def came_to_its_end(self) -> bool:
        """Whether the benchmark printed its final summary."""
        return any(line.text.startswith(_FOOTER) for line in self.lines[-_FOOTER_LINES:])

    @property
    def told_to_stop(self) -> bool:
        """Whether it ended early because a stop was requested."""
        return self.finished is None


class Starter:
    """Starts benchmark processes at one site."""

    def __init__(self, file: SweepFile, site: Site, interrupt: Interrupt | None) -> None:
        """Take the sweep's settings, the site, and what tells when to stop."""
        self._file = file
        self._site = site
        self._interrupt = interrupt

    def check(self, setting: Setting) -> None:
        """Raise InvalidSweep for a setting that cannot be started here."""
        if setting.interference.kind == "congestion":
            raise InvalidSweep(
                "interference kind 'congestion' is for the simulator; here the network is "
                "measured as it is: choose from none, cpu, gemm, traffic"
            )
        if setting.interference.kind == "traffic" and self._site.launcher.container is not None:
            raise InvalidSweep(
                "interference kind 'traffic' runs nccl-tests outside of the container, which has "
                "them inside: choose from none, cpu, gemm, or sweep without a container"
            )
        if setting.split and not find_launcher(self._site.launcher.kind).needs_mpi:
            raise InvalidSweep(
                f"split '{setting.split}' shares out processes, and launcher "
                f"'{self._site.launcher.kind}' starts one for all GPUs; take mpirun, srun or sbatch"
            )
        ranks = self._ranks(setting, ("true",), commands.Environment({}))
        command(ranks, self._site.launcher)
        container = self._site.launcher.container
        map_into_container(str(self._site.work.resolve()), container)
        if self._site.plugin is not None and self._file.runner.mode != "processes":
            map_into_container(str(self._site.plugin), container)

    def start(
        self,
        launch: Launch,
        grid: Grid,
        program: Program,
        folder: Path,
        progress: Callable[[int], None],
    ) -> ProcessOutput:
        """Run a launch in `folder`; calls `progress` for each row."""
        container = self._site.launcher.container
        inside = Path(map_into_container(str(folder.resolve()), container))
        places = commands.Places.under(inside)
        digest = ""
        calls = commands.calls_of(launch, program, self._file)
        if launch.is_scheduled:
            schedule = schedule_of(launch.setting, grid, calls)
            (folder / SCHEDULE_NAME).write_bytes(schedule.to_bytes())
            digest = schedule.content_hash
        plugin = map_into_container(str(self._site.plugin), container) if digest else ""
        environment = commands.environment(launch, places, plugin, digest)
        mpi = find_launcher(self._site.launcher.kind).needs_mpi
        gpus = 1 if mpi else launch.setting.ranks_per_host
        argv = commands.arguments(program, launch, grid, self._file, gpus=gpus, json=places.json)
        ranks = self._ranks(launch.setting, argv, environment)
        return self._follow(ranks, slow_seconds(grid, calls.per_half), progress)

    def pause(self, seconds: float) -> bool:
        """Wait so many seconds; False when a stop was requested meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._interrupt is not None and self._interrupt.requested:
                return False
            time.sleep(0.05)
        return True

    def _ranks(self, setting: Setting, argv: tuple[str, ...], env: commands.Environment) -> Ranks:
        shape = (setting.hosts, setting.ranks_per_host)
        return Ranks(argv, env.set, *shape, unset=env.unset)

    def _follow(
        self, ranks: Ranks, slow_s: Sequence[float], progress: Callable[[int], None]
    ) -> ProcessOutput:
        """Read output until the process ends or hangs; `slow_s`: extra seconds for each row."""
        ran = ProcessOutput(time.time())

        def more_s() -> float:
            row = len(ran.row_times)
            ran.more_s = slow_s[row] if row < len(slow_s) else 0.0
            return ran.more_s

        def take(line: Line) -> bool:
            if not ran.take(line):
                return False
            progress(1)
            if self._interrupt is not None and self._interrupt.requested:
                raise _Enough
            return True

        limits = Limits(
            self._file.runner.startup_timeout_s,
            self._file.runner.stall_timeout_s,
            find_launcher(self._site.launcher.kind).grace_s,
            more_s,
        )
        started = command(ranks, self._site.launcher)
        _log.debug("%s", started.text)
        try:
            ran.finished = run_process(started, limits, take, self._interrupt)
        except _Enough:
            return ran
        if self._was_cancelled(ran.finished):
            ran.finished = None
        return ran

    def _was_cancelled(self, finished: Finished) -> bool:
        """Whether the batch system ended it together with us: no config is to blame.

        Slurm signals the steps of a job and its batch script at once, and we hear of it when the
        step may be gone already.
        """
        if self._interrupt is None or finished.returncode not in _ENDED_FROM_OUTSIDE:
            return False
        deadline = time.monotonic() + _HEARING_S
        while not self._interrupt.requested and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._interrupt.requested
