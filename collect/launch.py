"""The nccl-tests runner: starts one benchmark process after the other and makes rows of its output.

A launch works in a folder of its own under the journal, on a file system that all nodes share. Its
schedule is written there, the plugin reports there what it played, and timed launches print nothing
but their table; which config NCCL really ran is read back once for each trial, from the log of an
untimed launch.

A config that hangs or crashes is the launch's culprit: what follows it runs again. A launch that
reached no config at all is started once more; whether its configs or the machine are to blame is
the sweep's to find out (run.py).
"""

import logging
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from dynamiccl.collect.disturb import Disturber
from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.launchers import Ranks, command, find_launcher, map_into_container
from dynamiccl.collect.nodes import Nodes, SiteFacts, Watch
from dynamiccl.collect.output import hosts_of, rank_lines
from dynamiccl.collect.process import Finished, Interrupt, Limits, Line, run_process
from dynamiccl.collect.programs import Program, Site, can_play, find_program
from dynamiccl.collect.read_back import (
    choices_of,
    comm_logs,
    environment_in,
    is_impossible,
    is_row,
    keep_set_up,
    last_words,
    of_members,
    read_rows,
    wrong_comms,
)
from dynamiccl.collect.runner import Launch, LaunchMode, Row, lost_row, trial_row
from dynamiccl.collect.schedule import (
    JSON_NAME,
    REPORT_S,
    SCHEDULE_NAME,
    Choice,
    Grid,
    Skips,
    arguments,
    await_report,
    calls_of,
    deal,
    environment,
    failed,
    has_begun,
    is_local,
    judge,
    lay_out,
    schedule_of,
    slow_seconds,
    small_bytes,
    warmup_of,
)
from dynamiccl.collect.sweep import RunnerSettings, SweepFile
from dynamiccl.datasets.schema import Source, Status
from dynamiccl.errors import InvalidSweep
from dynamiccl.nccl import Collective

_log = logging.getLogger(__name__)

#: Beginning of the name of a launch's folder.
_FOLDER: Final = "launch-"
#: What nccl-tests prints below its rows (v2.13 to v2.19.6, `src/common.cu`), and how near the end.
_FOOTER: Final = "# Avg bus bandwidth"
_FOOTER_LINES: Final = 50
#: Exit codes after SIGTERM or SIGKILL, as seen by us and as reported by a launcher.
_ENDED_FROM_OUTSIDE: Final = frozenset({-signal.SIGTERM, -signal.SIGKILL, 128 + 15, 128 + 9})
#: Seconds that the same signal may take to reach us.
_HEARING_S: Final = 2.0
_LOOK_S: Final = 0.05


class NcclTestsRunner:
    """Runs nccl-tests through a launcher."""

    name = "nccl-tests"

    def __init__(
        self,
        file: SweepFile,
        site: Site,
        interrupt: Interrupt | None = None,
        *,
        watch: Watch | None = None,
        facts: SiteFacts | None = None,
    ) -> None:
        """Keep the sweep's settings and the site; starts nothing.

        `interrupt` tells when to stop, `watch` how healthy the nodes were, `facts` what hardware
        they have.
        """
        self._file = file
        self._site = site
        self._interrupt = interrupt
        self._launcher = find_launcher(site.launcher.kind)
        self._watch = watch or Watch()
        known = facts or SiteFacts({}, None)
        self._disturber = Disturber(Nodes(site.launcher), known.num_gpus)
        self._environment = dict(known.columns)
        self._choices: dict[str, Choice | None] = {}
        self._skips = Skips(file.runner.slow_max)
        self._programs: dict[Collective, Program] = {}
        self._plays = False

    def check(self, trials: Sequence[Trial]) -> None:
        """Find the binaries and choose the mode; raises for trials that cannot be measured here."""
        self._skips = Skips(self._file.runner.slow_max, trials)
        for setting in dict.fromkeys(trial.setting for trial in trials):
            self._check_setting(setting)
            if setting.collective not in self._programs:
                program = find_program(setting.collective, self._site)
                self._programs[setting.collective] = program
        self._plays = can_play(self._file, self._site.plugin, self._programs.values())
        if not self._plays and any(trial.config.chunk_bytes for trial in trials):
            raise InvalidSweep("chunk_sizes need the sweep mode: NCCL has no variable for them")

    def launches(self, number: int, trials: Sequence[Trial]) -> tuple[Launch, ...]:
        """The launches that measure the trials of a round."""
        return lay_out(
            number,
            trials,
            plays_schedules=self._plays,
            must_read_back=lambda trial: (
                self._file.runner.read_back and trial.key not in self._choices
            ),
            small_bytes=small_bytes(self._file),
        )

    def measurements(self, launch: Launch) -> int:
        """Number of blocks: the trials, and the default where the walk leaves a gap."""
        return len(self._deal(launch).blocks) if launch.trials else 0

    def reason_to_skip(self, trial: Trial) -> str | None:
        """Why a trial is skipped (too slow to win, same as another), or None."""
        return self._skips.reason(trial, self._choices)

    def run(self, launch: Launch, progress: Callable[[int], None]) -> Launch:
        """Run one launch, and once more where it reached no config at all."""
        done = self._attempt(launch, progress)
        if not done.never_began:
            return done
        wait_s = self._file.runner.retry_after_s
        _log.warning("%s never began (%s); again in %g s", launch.id, done.never_began, wait_s)
        if not self._pause(wait_s):
            return replace(launch, left=launch.trials)
        return self._attempt(launch, progress)

    def learn(self, facts: Mapping[str, Any]) -> None:
        """Take in what an earlier launch read back, or its output named."""
        self._choices.update(facts.get("read_back", {}))
        self._environment.update(facts.get("environment", {}))

    def environment(self) -> Row:
        """The environment columns known so far."""
        known = {
            "source": Source.NCCL_TESTS_TEXT.value,
            "timestamp": datetime.now(UTC),
            "nccl_version": self._file.nccl_version,
        }
        return {**known, **self._environment}

    def close(self) -> None:
        """Remove the folders of launches, of killed runs too: rows are in the journal by now."""
        for folder in self._site.work.glob(f"{_FOLDER}*"):
            shutil.rmtree(folder, ignore_errors=True)

    # --- One process ---

    def _attempt(self, launch: Launch, progress: Callable[[int], None]) -> Launch:
        self.close()
        self._site.work.mkdir(parents=True, exist_ok=True)
        # Another one each time: on NFS a file that a rank still has open keeps its folder.
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=self._site.work))
        grid = self._deal(launch)
        if launch.mode is LaunchMode.READ_BACK:
            ran = self._start(launch, grid, folder, lambda _: None)
            return self._read_back(launch, grid, folder, ran)
        program = self._programs[launch.setting.collective]
        with self._disturber.disturb(launch.setting, program.path) as disturbance:
            ran = self._start(launch, grid, folder, progress)
            alone = disturbance.lost
        return self._timed(launch, grid, folder, ran, alone)

    def _deal(self, launch: Launch) -> Grid:
        return deal(launch, max_blocks=self._file.runner.max_blocks)

    def _start(
        self, launch: Launch, grid: Grid, folder: Path, progress: Callable[[int], None]
    ) -> "_Process":
        """Run the process of a launch in `folder`; calls `progress` for each row."""
        container = self._site.launcher.container
        inside = Path(map_into_container(str(folder.resolve()), container))
        program = self._programs[launch.setting.collective]
        calls = calls_of(launch, program, self._file)
        digest = plugin = ""
        if launch.is_scheduled:
            schedule = schedule_of(launch.setting, grid, calls)
            (folder / SCHEDULE_NAME).write_bytes(schedule.to_bytes())
            digest = schedule.content_hash
            plugin = map_into_container(str(self._site.plugin), container)
        gpus = 1 if self._launcher.needs_mpi else launch.setting.ranks_per_host
        argv = arguments(program, launch, grid, self._file, gpus=gpus, folder=inside)
        env, unset = environment(launch, inside, plugin, digest)
        ranks = self._ranks(launch.setting, argv, env, unset)
        return self._follow(ranks, slow_seconds(grid, calls.per_half), progress)

    def _ranks(
        self,
        setting: Setting,
        argv: tuple[str, ...],
        env: Mapping[str, str] | None = None,
        unset: tuple[str, ...] = (),
    ) -> Ranks:
        return Ranks(argv, env or {}, setting.hosts, setting.ranks_per_host, unset=unset)

    def _follow(
        self, ranks: Ranks, slow_s: Sequence[float], progress: Callable[[int], None]
    ) -> "_Process":
        """Read output until the process ends or hangs; `slow_s`: extra seconds for each row."""
        ran = _Process(time.time(), slow_s)

        def take(line: Line) -> bool:
            ran.lines.append(line)
            if not is_row(line.text):
                return False
            ran.row_times.append(line.arrived_s)
            progress(1)
            if self._interrupt is not None and self._interrupt.requested:
                raise _Enough
            return True

        settings = self._file.runner
        limits = Limits(
            settings.startup_timeout_s,
            settings.stall_timeout_s,
            self._launcher.grace_s,
            ran.more_s,
        )
        started = command(ranks, self._site.launcher)
        _log.debug("%s", started.text)
        try:
            finished = run_process(started, limits, take, self._interrupt)
        except _Enough:
            return ran
        if not self._was_cancelled(finished):
            ran.finished = finished
        return ran

    def _was_cancelled(self, finished: Finished) -> bool:
        """Whether the batch system ended it together with us: no config is to blame.

        Slurm signals the steps of a job and its batch script at once, and we hear of it when the
        step may be gone already.
        """
        if self._interrupt is None or finished.returncode not in _ENDED_FROM_OUTSIDE:
            return False
        return not self._pause(_HEARING_S)

    def _pause(self, seconds: float) -> bool:
        """Wait so many seconds; False when a stop was requested meanwhile."""
        deadline = time.monotonic() + seconds
        while True:
            if self._interrupt is not None and self._interrupt.requested:
                return False
            if time.monotonic() >= deadline:
                return True
            time.sleep(_LOOK_S)

    # --- What came of it ---

    def _timed(
        self, launch: Launch, grid: Grid, folder: Path, ran: "_Process", alone: str | None
    ) -> Launch:
        """The rows of a launch; `alone` says why what was to run beside it did not."""
        blocks = read_rows(
            ran.texts,
            folder / JSON_NAME,
            collective=launch.setting.collective,
            sizes=grid.benchmark_bytes,
        )[: len(grid.blocks)]
        facts = {"environment": found} if (found := environment_in(blocks)) else {}
        self.learn(facts)
        hosts = hosts_of(rank_lines(ran.texts))
        verdicts = self._verdicts(launch, folder, blocks, ran.texts, alone)
        measured = self._rows(launch, grid, ran, blocks, verdicts, hosts)
        reached = len(blocks)
        rest = grid.asked_from(reached, launch)
        began = has_begun(launch, folder) if launch.is_scheduled else reached > 0
        done = replace(
            launch, measured=measured, left=(*rest, *grid.left_over), facts=facts, began=began
        )
        # If all rows were printed, one was torn by another rank's output: what follows runs again.
        if rest and not (ran.told_to_stop or (reached and ran.came_to_its_end)):
            culprit = grid.blocks[reached]
            status, reason = ran.what_happened(self._file.runner)

            def lost(trial: Trial) -> dict[str, Any]:
                return lost_row(self._base(launch, trial) | {"hosts": hosts}, status, reason)

            if launch.is_scheduled and (began or reached):
                done = replace(done, culprit=(culprit, lost(culprit)))
            else:
                # It never started, or has a single config: trying again would not help.
                others = [trial for trial in rest if trial is not culprit]
                rows = tuple((trial, (lost(trial),)) for trial in (culprit, *others))
                done = replace(done, measured=(*measured, *rows), left=grid.left_over)
        if began or ran.told_to_stop or alone is not None or is_impossible(ran.texts):
            return done
        why = verdicts[0]["reason"] if verdicts else ran.what_happened(self._file.runner)[1]
        return replace(done, never_began=why)

    def _verdicts(
        self,
        launch: Launch,
        folder: Path,
        blocks: Sequence[Sequence[dict[str, Any]]],
        lines: Sequence[str],
        alone: str | None,
    ) -> list[dict[str, Any]]:
        """The columns of each block that has rows: a status and a reason if it does not count."""
        wrong = alone or wrong_comms(launch.setting, lines)
        if wrong is not None:
            return [failed(wrong) for _ in blocks]
        await_report(launch, folder, len(blocks), 0.0 if is_local(folder) else REPORT_S)
        verdicts = judge(launch, folder, len(blocks))
        for number, block in enumerate(blocks):
            why = of_members(block, launch.setting)
            if why is not None:
                verdicts[number] = failed(why)
        return verdicts

    def _rows(
        self,
        launch: Launch,
        grid: Grid,
        ran: "_Process",
        blocks: Sequence[Sequence[dict[str, Any]]],
        verdicts: Sequence[Row],
        hosts: str | None,
    ) -> tuple[tuple[Trial, tuple[Row, ...]], ...]:
        stretches = ran.stretches_of(len(blocks))
        healths = self._watch.health(stretches)
        if unwell := sum(bool(health["throttled"] or health["ecc_errors"]) for health in healths):
            _log.warning(
                "%s: heat, power or memory errors of GPUs in %d of %d blocks, whose times are not "
                "used",
                *(launch.id, unwell, len(healths)),
            )
        measured = []
        for number, block in enumerate(blocks):
            trial = grid.blocks[number]
            base = {
                **self._base(launch, trial),
                "hosts": hosts,
                "partial_launch": len(blocks) < len(grid.blocks),
                "timestamp": datetime.fromtimestamp(stretches[number][0], UTC),
                **healths[number],
                **verdicts[number],
            }
            if "status" in verdicts[number]:
                rows = [lost_row(base, Status(base["status"]), base["reason"])]
            else:
                base |= self._actual(trial)
                rows = [base | half | _wrong(half) for half in block]
            measured.append((trial, tuple(rows)))
        return tuple(measured)

    def _base(self, launch: Launch, trial: Trial) -> dict[str, Any]:
        return {**trial_row(self._file, launch, trial), **self.environment()}

    def _actual(self, trial: Trial) -> dict[str, Any]:
        choice = self._choices.get(trial.key)
        if choice is None:
            return {"verified": False}
        algorithm, protocol, channels = choice
        return {
            "actual_algorithm": algorithm,
            "actual_protocol": protocol,
            "actual_num_channels": channels,
            "verified": True,
        }

    def _read_back(self, launch: Launch, grid: Grid, folder: Path, ran: "_Process") -> Launch:
        """What NCCL's log says of each block; of a read-back launch there are no rows."""
        logs = comm_logs(folder)
        calls = calls_of(launch, self._programs[launch.setting.collective], self._file)
        found = choices_of(
            logs,
            grid,
            num_ranks=launch.setting.num_ranks,
            warmup_calls=sum(count for _, count in warmup_of(launch.setting, grid, calls)),
            calls_per_block=2 * calls.per_half,
        )
        features = keep_set_up(self._site.out, self._file, launch, folder, logs[0], ran.texts)
        if ran.told_to_stop:
            return replace(launch, left=launch.trials)
        reached = len(found)
        rest = grid.asked_from(reached, launch)
        went_wrong = ran.finished is not None and ran.finished.returncode != 0
        crashed = went_wrong and has_begun(launch, folder)
        done = replace(launch, left=(*rest, *grid.left_over), began=bool(found) or crashed)
        if rest and crashed:
            status, reason = ran.what_happened(self._file.runner)
            row = lost_row(self._base(launch, rest[0]), status, reason)
            done = replace(done, culprit=(rest[0], row))
        elif rest:
            # The log has an unexpected format, or it never started: trying again would not help.
            done = replace(done, left=grid.left_over)
            if not went_wrong:
                _log.warning(
                    "%s: NCCL's log does not name what ran from block %d of %d on (%s); those "
                    "rows stay unverified",
                    *(launch.id, reached, len(grid.blocks), last_words(ran.texts)),
                )
        again = {id(trial) for trial in done.left}
        choices: dict[str, Choice | None] = {
            trial.key: None for trial in launch.trials if id(trial) not in again
        }
        verdicts = judge(launch, folder, reached)
        for trial, choice, verdict in zip(grid.blocks, found, verdicts, strict=False):
            if "status" not in verdict:
                choices[trial.key] = choice
        done = replace(done, facts={"read_back": choices, "environment": features})
        if went_wrong and not done.began and not is_impossible(ran.texts):
            return replace(done, never_began=ran.what_happened(self._file.runner)[1])
        return done

    def _check_setting(self, setting: Setting) -> None:
        """Raise InvalidSweep for a setting that cannot be started here."""
        launcher, container = self._site.launcher, self._site.launcher.container
        if setting.interference.kind == "congestion":
            raise InvalidSweep(
                "interference kind 'congestion' is for the simulator; here the network is "
                "measured as it is: choose from none, cpu, gemm, traffic"
            )
        if setting.interference.kind == "traffic" and container is not None:
            raise InvalidSweep(
                "interference kind 'traffic' runs nccl-tests outside of the container, which has "
                "them inside: choose from none, cpu, gemm, or sweep without a container"
            )
        if setting.split and not self._launcher.needs_mpi:
            raise InvalidSweep(
                f"split '{setting.split}' shares out processes, and launcher '{launcher.kind}' "
                "starts one for all GPUs; take mpirun, srun or sbatch"
            )
        command(self._ranks(setting, ("true",)), launcher)
        map_into_container(str(self._site.work.resolve()), container)
        if self._site.plugin is not None and self._file.runner.mode != "processes":
            map_into_container(str(self._site.plugin), container)


class _Enough(Exception):
    """Raised inside a running launch when a stop was requested and a block is done."""


@dataclass(slots=True)
class _Process:
    """A benchmark process: what it printed, and how it ended."""

    #: When it was started, seconds since the epoch.
    began_s: float
    #: Seconds that each row may take on top of the limits.
    slow_s: Sequence[float]
    lines: list[Line] = field(default_factory=list)
    #: When each row arrived, seconds since the epoch.
    row_times: list[float] = field(default_factory=list)
    #: How it ended; None when it was told to stop.
    finished: Finished | None = None

    def more_s(self) -> float:
        """Seconds added to the time limit for the row that is awaited."""
        row = len(self.row_times)
        return self.slow_s[row] if row < len(self.slow_s) else 0.0

    @property
    def texts(self) -> list[str]:
        """All output lines."""
        return [line.text for line in self.lines]

    @property
    def told_to_stop(self) -> bool:
        """Whether it ended early because a stop was requested."""
        return self.finished is None

    @property
    def came_to_its_end(self) -> bool:
        """Whether the benchmark printed its final summary."""
        return any(line.text.startswith(_FOOTER) for line in self.lines[-_FOOTER_LINES:])

    def stretches_of(self, num_rows: int) -> list[tuple[float, float]]:
        """(begin, end) in Unix seconds of each of the first rows, from the row before it on.

        A row that was not seen to arrive (another rank spoke on its line) takes the last one's.
        """
        seen = list(pairwise([self.began_s, *self.row_times]))[:num_rows]
        last = seen[-1] if seen else (self.began_s, self.began_s)
        return seen + [last] * (num_rows - len(seen))

    def what_happened(self, limits: RunnerSettings) -> tuple[Status, str]:
        """Status and reason for the config that was running when it ended early."""
        assert self.finished is not None, "a launch that was told to stop has no culprit"
        words = last_words(self.texts)
        if self.finished.reason is not None:
            if self.row_times:
                waited_s = limits.stall_timeout_s + self.more_s()
                return Status.TIMED_OUT, f"no new row for {waited_s:.3g} s"
            waited_s = limits.startup_timeout_s + self.more_s()
            return Status.TIMED_OUT, f"no row within {waited_s:.3g} s: {words}"
        status = Status.INFEASIBLE if is_impossible(self.texts) else Status.FAILED
        return status, f"exit code {self.finished.returncode}: {words}"


def _wrong(half: Row) -> dict[str, Any]:
    if half.get("status") != Status.WRONG_VALUES.value:
        return {}
    return {"reason": f"{half.get('wrong_values')} wrong values"}
