"""The nccl-tests runner: starts one benchmark process after the other and makes rows of its output.

A launch works in a folder of its own under the journal, on a file system that all nodes share.
Timed launches log nothing but their table; which config NCCL really ran is read back once for each
trial, from the log of an untimed launch.
"""

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from dynamiccl.collect.benchmark.blocks import Verdict, has_begun, judge_blocks
from dynamiccl.collect.benchmark.command import calls_of, small_bytes
from dynamiccl.collect.benchmark.costs import keep_costs
from dynamiccl.collect.benchmark.endings import (
    SecondChances,
    suspect,
    warn_of_unwell,
    what_happened,
)
from dynamiccl.collect.benchmark.grid import Grid, deal
from dynamiccl.collect.benchmark.inside import find_benchmark
from dynamiccl.collect.benchmark.launching import ProcessOutput, Site, Starter
from dynamiccl.collect.benchmark.layout import lay_out
from dynamiccl.collect.benchmark.mode import can_play
from dynamiccl.collect.benchmark.needless import Needless
from dynamiccl.collect.benchmark.output import (
    Output,
    is_impossible,
    last_words,
    read_output,
)
from dynamiccl.collect.benchmark.programs import Program
from dynamiccl.collect.benchmark.read_back import PlainChoice, agreed_choices, comm_logs
from dynamiccl.collect.benchmark.rows import RowMaker
from dynamiccl.collect.benchmark.schedules import warmup_of
from dynamiccl.collect.benchmark.topology import keep_dumps, topology_features
from dynamiccl.collect.benchmark.verdicts import of_members, verdicts_of
from dynamiccl.collect.disturb import Disturber
from dynamiccl.collect.launchers import find_launcher
from dynamiccl.collect.nodes import Nodes, NoWatch, SiteFacts, Watch
from dynamiccl.collect.processes.interrupt import Interrupt
from dynamiccl.collect.runner import (
    Launch,
    LaunchMode,
    LaunchResult,
    Measured,
    Pick,
    Quarantined,
    Round,
    Row,
)
from dynamiccl.collect.sweep.settings import SweepFile
from dynamiccl.collect.sweep.trial import Trial
from dynamiccl.datasets.schema import Status
from dynamiccl.errors import InvalidSweep, MachineError
from dynamiccl.nccl import ABSTAIN, Collective

_log = logging.getLogger(__name__)
#: Beginning of the name of a launch's folder.
_FOLDER: Final = "launch-"


class _NeverBegan(Exception):
    """Raised when a launch reached no block; `result` has the rows if its configs are to blame."""

    def __init__(self, reason: str, result: LaunchResult) -> None:
        super().__init__(reason)
        self.result = result


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
        self._starter = Starter(file, site, interrupt)
        self._needless = Needless(file.runner.slow_max)
        self._programs: dict[Collective, Program] = {}
        self._plays = False
        self._chances = SecondChances()
        #: Whether the plugin applies the configs -> the last launch that started.
        self._begun: dict[bool, Launch] = {}
        self._watch = watch or NoWatch()
        known = facts or SiteFacts({}, None)
        self._rows = RowMaker(file, known.columns)
        self._disturber = Disturber(Nodes(site.launcher), known.num_gpus)

    def check(self, trials: Sequence[Trial]) -> None:
        """Find the binaries and choose the mode; raises for trials that cannot be measured here."""
        self._needless.know(trials)
        mpi = find_launcher(self._site.launcher.kind).needs_mpi
        for setting in dict.fromkeys(trial.setting for trial in trials):
            self._starter.check(setting)
            if setting.collective not in self._programs:
                program = find_benchmark(setting.collective, self._site, mpi=mpi)
                self._programs[setting.collective] = program
        self._plays = can_play(self._file, self._site.plugin, self._programs.values())
        if not self._plays and any(trial.config.chunk_bytes for trial in trials):
            raise InvalidSweep("chunk_sizes need the sweep mode: NCCL has no variable for them")

    def launches(self, round_: Round) -> tuple[Launch, ...]:
        """The launches of a round."""
        return lay_out(
            round_,
            plays_schedules=self._plays,
            must_read_back=self._must_read_back,
            small_bytes=small_bytes(self._file),
        )

    def measurements(self, launch: Launch) -> int:
        """Number of blocks: the picks, and the default where the walk leaves a gap."""
        return len(self._deal(launch).blocks) if launch.picks else 0

    def reason_to_skip(self, trial: Trial) -> str | None:
        """Why a trial is skipped (too slow to win, same as another), or None."""
        return self._needless.reason(trial, self._rows.choices)

    def run(self, launch: Launch, progress: Callable[[int], None]) -> LaunchResult:
        """Run one launch; a hang or crash becomes rows, and what was not reached is left over.

        A launch that does not start is tried once more. If it fails again, its configs are marked
        as failed only if another launch still starts; otherwise the machine is at fault and this
        raises MachineError.
        """
        try:
            return self._attempt(launch, progress)
        except _NeverBegan as problem:
            wait_s = self._file.runner.retry_after_s
            _log.warning("%s never began (%s); again in %g s", launch.id, problem, wait_s)
            if not self._starter.pause(wait_s):
                return LaunchResult((), launch.picks)
        try:
            return self._attempt(launch, progress)
        except _NeverBegan as problem:
            if self._still_begins(launch):
                return problem.result
            raise MachineError(
                f"{launch.id} did not start, twice: {problem}; no config is marked as failed, and "
                "measurements are kept: fix it, and continue with --resume"
            ) from problem

    def _still_begins(self, failed: Launch) -> bool:
        """Whether a launch that worked before, or else NCCL's default, still starts."""
        known = self._begun.get(failed.is_scheduled)
        if known is None and failed.is_scheduled:
            return False
        default = replace(failed.picks[0].trial, config=ABSTAIN)
        own = replace(failed, mode=LaunchMode.REFERENCE, picks=(Pick(default),))
        probe = own if known is None else replace(known, picks=known.picks[:1])
        try:
            self._attempt(probe, lambda _: None)
        except _NeverBegan:
            return False
        return True

    def _attempt(self, launch: Launch, progress: Callable[[int], None]) -> LaunchResult:
        folder = self._new_folder()
        grid = self._deal(launch)
        if launch.mode is LaunchMode.READ_BACK:
            return self._read_back(launch, grid, folder)
        return self._timed(launch, grid, folder, progress)

    def _deal(self, launch: Launch) -> Grid:
        return deal(launch, max_blocks=self._file.runner.max_blocks)

    def learn(self, launch: str, facts: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Take in facts from a read-back or an output header."""
        self._rows.choices.update(facts.get("read_back", {}))
        self._rows.learn(facts.get("environment", {}))

    def environment(self) -> Row:
        """The environment columns known so far."""
        return self._rows.environment()

    def close(self) -> None:
        """Remove the folders of launches, of killed runs too: rows are in the journal by now."""
        for folder in self._site.work.glob(f"{_FOLDER}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _new_folder(self) -> Path:
        """A folder for the schedule, report and dumps of a launch."""
        self.close()
        self._site.work.mkdir(parents=True, exist_ok=True)
        # Another one each time: on NFS a file that a rank still has open keeps its folder.
        return Path(tempfile.mkdtemp(prefix=_FOLDER, dir=self._site.work))

    def _timed(
        self, launch: Launch, grid: Grid, folder: Path, progress: Callable[[int], None]
    ) -> LaunchResult:
        program = self._program(launch)
        with self._disturber.disturb(launch.setting, program.path) as disturbance:
            ran = self._starter.start(launch, grid, program, folder, progress)
            alone = disturbance.lost
        output = self._output(launch, grid, folder, ran)
        verdicts = verdicts_of(launch, folder, output, ran.texts)
        if alone is not None:
            verdicts = [Verdict(Status.FAILED, alone)] * len(verdicts)
        measured = self._measured(launch, grid, ran, output, verdicts)
        reached = len(output.blocks)
        rest = grid.asked_from(reached, launch)
        facts = {"environment": output.environment} if output.environment else {}
        begun = has_begun(launch, folder) if launch.is_scheduled else reached > 0
        # If all rows were printed, one was torn by another rank's output: rows after it run again.
        nobody_failed = ran.told_to_stop or (measured and ran.came_to_its_end)
        if not rest or nobody_failed:
            result = LaunchResult(measured, (*rest, *grid.left_over), facts=facts)
        else:
            lost, quarantined, rest = self._blame(
                launch, grid.blocks[reached], rest, ran, output.hosts, begun=reached > 0 or begun
            )
            left = (*rest, *grid.left_over)
            result = LaunchResult((*measured, *lost), left, quarantined, facts=facts)
        if begun:
            self._begun[launch.is_scheduled] = launch
        elif not ran.told_to_stop and alone is None and not is_impossible(ran.texts):
            why = verdicts[0].reason if verdicts else what_happened(ran, self._file.runner)[1]
            raise _NeverBegan(why, result)
        return result

    def _measured(
        self,
        launch: Launch,
        grid: Grid,
        ran: ProcessOutput,
        output: Output,
        verdicts: Sequence[Verdict],
    ) -> tuple[Measured, ...]:
        """The rows of all blocks that have a verdict."""
        self._rows.learn(output.environment)
        verdicts = of_members(output.blocks[: len(verdicts)], launch.setting, [*verdicts])
        stretches = ran.stretches_of(len(verdicts))
        healths = self._watch.health(stretches)
        warn_of_unwell(launch, healths)
        is_partial = len(verdicts) < len(grid.blocks)
        known = [
            {
                "hosts": output.hosts,
                "partial_launch": is_partial,
                "timestamp": datetime.fromtimestamp(began_s, UTC),
                **health.row_columns(),
            }
            for (began_s, _), health in zip(stretches, healths, strict=True)
        ]
        blocks = zip(grid.blocks, output.blocks, verdicts, known, strict=False)
        return tuple(self._rows.measured(launch, *block) for block in blocks)

    def _blame(
        self,
        launch: Launch,
        culprit: Pick,
        rest: Sequence[Pick],
        ran: ProcessOutput,
        hosts: str | None,
        *,
        begun: bool,
    ) -> tuple[list[Measured], tuple[Quarantined, ...], list[Pick]]:
        """Mark the block at which a process ended early twice; what follows runs again."""
        is_suspect = begun and launch.is_scheduled
        if is_suspect and self._chances.gives(launch, culprit, ran, self._file.runner):
            return [], (), list(rest)
        status, reason = what_happened(ran, self._file.runner)
        lost = [self._rows.lost(launch, culprit, status, reason, hosts)]
        left = [pick for pick in rest if pick is not culprit]
        if is_suspect:
            return lost, (suspect(launch, culprit, ran, self._file.runner),), left
        # It never started, or has a single config: trying again would not help.
        lost += [self._rows.lost(launch, pick, status, reason, hosts) for pick in left]
        return lost, (), []

    def _read_back(self, launch: Launch, grid: Grid, folder: Path) -> LaunchResult:
        program = self._program(launch)
        ran = self._starter.start(launch, grid, program, folder, lambda _: None)
        logs = comm_logs(folder)
        log = logs[0]
        calls = calls_of(launch, program, self._file)
        found = agreed_choices(
            logs,
            grid,
            num_ranks=launch.setting.num_ranks,
            warmup_calls=sum(count for _, count in warmup_of(launch.setting, grid, calls)),
            calls_per_block=2 * calls.per_half,
        )
        keep_dumps(self._site.out, self._file.system, launch.setting, folder, log)
        keep_costs(self._site.out, self._file, launch, (*log, *ran.texts))
        if ran.told_to_stop:
            return LaunchResult((), launch.picks)
        reached = len(found)
        rest = grid.asked_from(reached, launch)
        quarantined: tuple[Quarantined, ...] = ()
        failed = ran.finished is not None and ran.finished.returncode != 0
        begun = failed and has_begun(launch, folder)
        if rest and begun:
            if not self._chances.gives(launch, rest[0], ran, self._file.runner):
                quarantined = (suspect(launch, rest.pop(0), ran, self._file.runner),)
        elif rest and not failed:
            # The log has an unexpected format: trying again would not help.
            _log.warning(
                "%s: NCCL's log does not name what ran from block %d of %d on (%s); those rows "
                "stay unverified",
                launch.id,
                reached,
                len(grid.blocks),
                last_words(ran.texts),
            )
        rest = rest if begun else []
        verdicts = judge_blocks(launch, folder, reached)
        again = {id(pick) for pick in (*rest, *grid.left_over)}
        tried = (pick.trial.key for pick in launch.picks if id(pick) not in again)
        choices: dict[str, PlainChoice | None] = dict.fromkeys(tried)
        choices |= {
            pick.trial.key: choice
            for pick, choice, verdict in zip(grid.blocks, found, verdicts, strict=False)
            if verdict.status is Status.OK
        }
        dump = folder / "topology.xml"
        features = topology_features(dump.read_text(errors="replace")) if dump.is_file() else {}
        facts = {"read_back": choices, "environment": features}
        result = LaunchResult((), (*rest, *grid.left_over), quarantined, facts)
        if failed and not found and not begun and not is_impossible(ran.texts):
            raise _NeverBegan(what_happened(ran, self._file.runner)[1], result)
        return result

    def _output(self, launch: Launch, grid: Grid, folder: Path, ran: ProcessOutput) -> Output:
        return read_output(
            ran.texts,
            folder / "rows.json",
            collective=launch.setting.collective,
            sizes=grid.benchmark_bytes,
            num_blocks=len(grid.blocks),
        )

    def _program(self, launch: Launch) -> Program:
        return self._programs[launch.setting.collective]

    def _must_read_back(self, trial: Trial) -> bool:
        return self._file.runner.read_back and trial.key not in self._rows.choices
