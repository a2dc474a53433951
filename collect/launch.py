"""The nccl-tests runner: starts one benchmark process after the other and makes rows of its output.

A launch's folder, with the schedule and the plugin's report, is on a file system that all nodes
share. What NCCL really ran is read back once for each trial, from the log of an untimed launch.

Text survives a crash, JSON has the digits: it is taken when it is whole and holds every row of the
text. A row that cannot be read, or of a size that is not the next of the walk, ends what is
believed: the blocks from there on run again.
"""

import logging
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import cycle, pairwise, takewhile
from pathlib import Path
from typing import Any, Final

from dynamiccl.collect import launchers, output, schedule
from dynamiccl.collect.grid import BINARIES, PERSISTENT, Setting, Trial
from dynamiccl.collect.launchers import Interrupt, Ranks, run_process
from dynamiccl.collect.lines import plain_lines
from dynamiccl.collect.nccl_log import logged_calls, write_costs
from dynamiccl.collect.nodes import UNKNOWN, Health, Nodes, disturb
from dynamiccl.collect.run import Runner
from dynamiccl.collect.schedule import Choice, Grid, Launch, LaunchMode, lost_row
from dynamiccl.collect.sweep import RunnerSettings, SweepFile
from dynamiccl.datasets.schema import Source, Status
from dynamiccl.errors import DataError, InvalidSweep, MachineError
from dynamiccl.nccl import ABSTAIN, Collective

_log = logging.getLogger(__name__)

_FOLDER: Final = "launch-"
#: For the plugin's report to come over NFS.
_REPORT_S: Final = 45.0
_TIMES: Final = ("time_us", "algbw_gbytes_per_s", "busbw_gbytes_per_s")
_ACTUAL: Final = ("actual_algorithm", "actual_protocol", "actual_num_channels")
#: Exit codes after SIGTERM or SIGKILL, ours and a launcher's.
_ENDED_FROM_OUTSIDE: Final = frozenset({-signal.SIGTERM, -signal.SIGKILL, 128 + 15, 128 + 9})

#: Lines of Slurm and Open MPI when they end the other ranks.
_LAUNCHERS: Final = re.compile(r"(?:srun|slurmstepd\S*|mpirun|mpiexec|prte\w*): |\[\S+:\d+\] PRTE ")
_OF_A_LAUNCH: Final = {output.RUN, "source_line", "datatype", "reduction_op", "root"}
_FAILURE: Final = re.compile(r"(?i)Test \w+ failure|error|NCCL WARN|DYNAMICCL:|invalid")


@dataclass(frozen=True, slots=True)
class Site:
    """Where nccl-tests runs."""

    out: Path
    work: Path
    nccl_tests_dir: Path | None
    plugin: Path | None


def find_program(
    collective: Collective, folder: Path | None, container: launchers.ContainerSettings | None
) -> str:
    """The binary as ranks see it (folder None = PATH). Raises InvalidSweep and MachineError."""
    if collective not in BINARIES:
        choices = ", ".join(c.wire for c in BINARIES)
        raise InvalidSweep(f"no nccl-tests binary for {collective.wire}; choose from {choices}")
    name, where = BINARIES[collective], None if folder is None else str(folder.resolve())
    if container is not None:
        if where is None:
            return name
        with suppress(InvalidSweep):
            return f"{launchers.map_into_container(where, container)}/{name}"
        return f"{folder}/{name}"  # not mounted, so it is the image's own
    found = shutil.which(name, path=where)
    if found is None:
        raise MachineError(
            f"no executable {name} in {where or 'PATH'}; build nccl-tests (MPI=1 where ranks are "
            "processes) and give its build directory with --nccl-tests-dir, or use --runner "
            "simulator"
        )
    return found


def check_packages(setting: Setting, container: launchers.ContainerSettings | None) -> None:
    """Raise MachineError where compute beside it lacks a package; an image has its own."""
    kind = setting.interference.kind
    needs = ("torch", "triton")[: 1 + (kind == PERSISTENT)] if setting.is_beside else ()
    lacking = [name for name in needs if find_spec(name) is None]
    if lacking and container is None:
        raise MachineError(
            f"interference kind '{kind}' runs {lacking[0]}, which is not installed: pip "
            "install '.[train]', with a torch built for CUDA"
        )


class NcclTestsRunner(Runner):
    """Runs nccl-tests through a launcher."""

    name = "nccl-tests"

    def __init__(
        self,
        file: SweepFile,
        site: Site,
        interrupt: Interrupt | None = None,
        *,
        health: Health | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._file, self._site = file, site
        self._interrupt, self._health = interrupt or Interrupt(), health
        known = {"source": Source.NCCL_TESTS_TEXT.value, "nccl_version": file.nccl_version}
        self._environment: dict[str, Any] = {**known, **(facts or {})}
        self._num_gpus: int | None = self._environment.pop("num_gpus", None)
        self._choices: dict[str, Choice | None] = {}
        self._programs: dict[Collective, str] = {}
        self._command = ""
        self._plays = False

    def check(self, trials: Sequence[Trial]) -> None:
        """Find binaries and plugin. Raises for what cannot be measured here."""
        self._plays = any(trial.config != ABSTAIN for trial in trials)
        folder, container = self._site.nccl_tests_dir, self._file.launcher.container
        for setting in dict.fromkeys(trial.setting for trial in trials):
            self._check_setting(setting)
            if not setting.is_beside:
                found = find_program(setting.collective, folder, container)
                self._programs[setting.collective] = found
        if self._plays and self._site.plugin is None:
            raise MachineError(
                "a sweep of configs needs the sweep plugin, and there is none: build it with 'make "
                "plugin', or set runner.plugin (NCCL's own choice alone, algorithms = [], does not)"
            )
        if self._plays and self._file.too_old:
            raise MachineError(self._file.too_old)

    def launches(self, number: int, trials: Sequence[Trial]) -> tuple[Launch, ...]:
        """The launches of a round."""
        return schedule.lay_out(
            number, trials, self._file, plays_schedules=self._plays, known=self._choices
        )

    def run(self, launch: Launch, progress: Callable[[int], None]) -> Launch:
        """Run one launch, and once more where it reached no config at all."""
        done = self._attempt(launch, progress)
        if not done.never_began:
            return done
        wait_s = self._file.runner.retry_after_s
        why = (launch.id, done.never_began, wait_s, self._command)
        _log.warning("%s never began (%s); again in %g s: %s", *why)
        if not self._pause(wait_s):
            return replace(launch, left=launch.trials)
        return self._attempt(launch, progress)

    def learn(self, facts: Mapping[str, Any]) -> None:
        """Take in an earlier launch's facts."""
        self._choices.update(facts.get("read_back", {}))
        self._environment.update(facts.get("environment", {}))

    def environment(self) -> output.Row:
        """The environment columns known so far."""
        return {**self._environment, "timestamp": datetime.now(UTC)}

    def close(self) -> None:
        """Remove the folders of launches, of killed runs too: rows are in the journal by now."""
        for folder in self._site.work.glob(f"{_FOLDER}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _check_setting(self, setting: Setting) -> None:
        launcher, container = self._file.launcher, self._file.launcher.container
        kind = setting.interference.kind
        if kind == "congestion" or (kind == "traffic" and container is not None):
            raise InvalidSweep(
                f"interference kind '{kind}' cannot run here; choose from none, cpu, matmul, "
                "persistent-matmul, or, outside of a container, traffic"
            )
        lacks = setting.split or setting.datatype in {"uint32", "uint64", "f8e4m3", "f8e5m2"}
        if setting.is_beside and (lacks or not setting.collective.tunable):
            raise InvalidSweep(
                f"interference kind '{kind}' runs PyTorch, with one communicator, a collective "
                "that a tuner is asked about, and neither uint32, uint64 nor f8; give "
                f"{setting.key} a sweep of its own"
            )
        check_packages(setting, container)
        if setting.split and not launcher.is_distributed:
            raise InvalidSweep(
                f"split '{setting.split}' shares out processes, and launcher '{launcher.kind}' "
                "starts one for all GPUs; take mpirun, srun or sbatch"
            )
        launchers.command(Ranks(("true",), {}, setting.hosts, setting.ranks_per_host), launcher)
        launchers.map_into_container(str(self._site.work.resolve()), container)
        if self._plays and self._site.plugin is not None:
            launchers.map_into_container(str(self._site.plugin), container)

    def _program(self, setting: Setting, inside: Path) -> tuple[str, ...]:
        if not setting.is_beside:
            return (self._programs[setting.collective],)
        python = "python3" if self._file.launcher.container else sys.executable
        return (
            *(python, "-m", "dynamiccl.collect.beside", BINARIES[setting.collective]),
            *("--edge", f"{setting.interference.level:.0f}", "--meet", str(inside / "meet")),
            *(("--persistent",) if setting.interference.kind == PERSISTENT else ()),
        )

    def _attempt(self, launch: Launch, progress: Callable[[int], None]) -> Launch:
        self.close()
        self._site.work.mkdir(parents=True, exist_ok=True)
        # Another one each time: on NFS a file that a rank has open keeps its folder.
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=self._site.work))
        calls = schedule.calls_of(launch, self._file)
        ran = _Ran(launch, schedule.deal(launch), calls, folder, self._file.runner)
        if launch.mode is LaunchMode.READ_BACK:
            self._start(ran, lambda _: None)
            return self._read_back(ran)
        (program, *_) = self._program(launch.setting, folder)
        nodes = Nodes(self._file.launcher)
        with disturb(nodes, self._num_gpus, launch.setting, program) as lost:
            self._start(ran, progress)
            alone = lost()
        return self._timed(ran, alone)

    def _start(self, ran: "_Ran", progress: Callable[[int], None]) -> None:
        launch, grid, folder = ran.launch, ran.grid, ran.folder
        setting, container = launch.setting, self._file.launcher.container
        inside = Path(launchers.map_into_container(str(folder.resolve()), container))
        digest = plugin = ""
        if launch.is_scheduled:
            played = schedule.schedule_of(setting, grid, ran.calls)
            (folder / schedule.SCHEDULE_NAME).write_bytes(played.to_bytes())
            digest = played.content_hash
            plugin = launchers.map_into_container(str(self._site.plugin), container)
        gpus = 1 if self._file.launcher.is_distributed else setting.ranks_per_host
        program = self._program(setting, inside)
        argv = schedule.arguments(program, launch, grid, self._file, gpus=gpus, folder=inside)
        env, unset = schedule.environment(launch, inside, plugin, digest)
        ranks = Ranks(argv, env, setting.hosts, setting.ranks_per_host, unset=unset)
        started = launchers.command(ranks, self._file.launcher)
        self._command = shlex.join(started)
        ran.began_s = time.time()

        def take(text: str, arrived_s: float) -> bool:
            ran.texts.append(text)
            if not output.MEANT_AS_ROW.search(text):
                return False
            ran.row_times.append(arrived_s)
            progress(1)
            if self._interrupt.requested:
                raise _Enough
            return True

        grace_s = self._file.launcher.grace_s
        try:
            ran.returncode = run_process(started, ran.patience_s, grace_s, take, self._interrupt)
        except _Enough:
            return
        # Slurm signals a job's steps and its batch script at once: the step may be gone up to 2 s
        # before we hear of it, and then no config is to blame.
        ran.is_over = ran.returncode not in _ENDED_FROM_OUTSIDE or self._pause(2.0)

    def _pause(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._interrupt.requested:
            if time.monotonic() >= deadline:
                return True
            time.sleep(0.05)
        return False

    def _timed(self, ran: "_Ran", alone: str | None) -> Launch:
        """`alone` says why what was to run beside it did not."""
        launch, grid = ran.launch, ran.grid
        json = ran.folder / schedule.JSON_NAME
        blocks, told = read_rows(ran.texts, json, sizes=grid.benchmark_bytes)
        blocks = blocks[: len(grid.blocks)]
        # Our own program's NCCL and GPU are no facts of other launches.
        own = told if launch.setting.is_beside else {}
        facts = {} if own else {"environment": told}
        self.learn(facts)
        hosts = output.hosts_of(output.rank_lines(ran.texts))
        wrong = alone or wrong_comms(launch.setting, ran.texts)
        patience_s = 0.0 if wrong else _REPORT_S
        verdicts, began = schedule.judge(launch, ran.folder, len(blocks), patience_s)
        if wrong is not None:
            verdicts = [{"status": Status.FAILED.value, "reason": wrong}] * len(blocks)
        measured = self._rows(ran, blocks, verdicts, {"hosts": hosts, **own})
        rest = grid.asked_from(len(blocks), launch)
        left = (*rest, *grid.left_over)
        done = replace(launch, measured=measured, left=left, facts=facts, began=began)
        # Where it ended well, another rank's output tore a row: what follows runs again.
        is_torn = bool(blocks) and ran.is_over and ran.returncode == 0
        if rest and ran.is_over and not is_torn:
            status, reason = ran.what_happened()

            def lost(trial: Trial) -> dict[str, Any]:
                return lost_row(self._base(launch, trial, hosts=hosts), status, reason)

            if launch.is_scheduled and (began or blocks):
                culprit = grid.blocks[len(blocks)]
                done = replace(done, culprit=(culprit, lost(culprit)))
            else:
                # Trying again would not help.
                rows = tuple((trial, (lost(trial),)) for trial in rest)
                done = replace(done, measured=(*measured, *rows), left=grid.left_over)
        if began or not ran.is_over or alone is not None or is_impossible(ran.texts):
            return done
        why = verdicts[0]["reason"] if verdicts else ran.what_happened()[1]
        return replace(done, never_began=why)

    def _rows(
        self,
        ran: "_Ran",
        blocks: Sequence[Sequence[dict[str, Any]]],
        verdicts: Sequence[output.Row],
        told: output.Row,
    ) -> tuple[tuple[Trial, tuple[output.Row, ...]], ...]:
        launch, grid = ran.launch, ran.grid
        stretches = ran.stretches_of(len(blocks))
        healths = self._health(stretches) if self._health else [UNKNOWN] * len(stretches)
        if launch.setting.is_beside:
            # Products always meet the power cap, so heat cannot be told from it.
            healths = [{**health, "throttled": None} for health in healths]
        if unwell := sum(bool(health["throttled"] or health["ecc_errors"]) for health in healths):
            _log.warning(
                "%s: heat, power or memory errors of GPUs in %d of %d blocks: not used",
                *(launch.id, unwell, len(healths)),
            )
        is_partial = len(blocks) < len(grid.blocks)
        # With processes left over the mean of all is the time of no communicator.
        no_time = dict.fromkeys(_TIMES) if launch.setting.spare else {}
        measured = []
        for trial, halves, (began_s, _), health, verdict in zip(
            grid.blocks, blocks, stretches, healths, verdicts, strict=False
        ):
            base = self._base(launch, trial, partial_launch=is_partial, **told)
            base |= {"timestamp": datetime.fromtimestamp(began_s, UTC), **health, **verdict}
            choice = self._choices.get(trial.key)
            if "status" in verdict:
                rows = [lost_row(base, Status(verdict["status"]), verdict["reason"])]
            else:
                base["verified"] = choice is not None
                base |= dict(zip(_ACTUAL, choice or (), strict=False))
                rows = [base | half | no_time for half in halves]
            for row in rows:
                if row.get("wrong_values"):
                    row["reason"] = f"{row['wrong_values']} wrong values"
            measured.append((trial, tuple(rows)))
        return tuple(measured)

    def _base(self, launch: Launch, trial: Trial, **more: Any) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if launch.setting.is_beside:
            own = {"source": Source.BESIDE.value, "nccl_version": None, "nccl_tests_version": None}
        told = {**schedule.trial_row(self._file, launch, trial), **self.environment()}
        return {**told, **own, **more}

    def _read_back(self, ran: "_Ran") -> Launch:
        launch, grid = ran.launch, ran.grid
        logs = comm_logs(ran.folder)
        found = choices_of(logs, self._file, launch, grid)
        keep_costs(self._site.out, self._file, launch, (*logs[0], *ran.texts))
        if not ran.is_over:
            return replace(launch, left=launch.trials)
        verdicts, reached = schedule.judge(launch, ran.folder, len(found))
        rest = grid.asked_from(len(found), launch)
        went_wrong = ran.returncode != 0
        done = replace(launch, left=grid.left_over, began=bool(found) or (went_wrong and reached))
        if rest and went_wrong and reached and launch.is_scheduled:
            row = lost_row(self._base(launch, rest[0]), *ran.what_happened())
            done = replace(done, left=(*rest, *grid.left_over), culprit=(rest[0], row))
        elif rest:
            # An unexpected log, or it never started: trying again would not help.
            _log.warning("%s: of %d trials NCCL's log does not name what ran", launch.id, len(rest))
        again = {id(trial) for trial in done.left}
        choices: dict[str, Choice | None] = {
            trial.key: None for trial in launch.trials if id(trial) not in again
        }
        for trial, choice, verdict in zip(grid.blocks, found, verdicts, strict=False):
            if "status" not in verdict:
                choices[trial.key] = choice
        done = replace(done, facts={"read_back": choices})
        if went_wrong and not done.began and not is_impossible(ran.texts):
            return replace(done, never_began=ran.what_happened()[1])
        return done


class _Enough(Exception):
    """A stop was requested, and a block is done."""


@dataclass(slots=True)
class _Ran:
    launch: Launch
    grid: Grid
    calls: schedule.Calls
    folder: Path
    settings: RunnerSettings
    began_s: float = 0.0
    #: All output, and when each row arrived (Unix seconds).
    texts: list[str] = field(default_factory=list)
    row_times: list[float] = field(default_factory=list)
    #: False when it was told to stop.
    is_over: bool = False
    #: None = it hung.
    returncode: int | None = None

    def patience_s(self) -> float:
        """Seconds after which the awaited row's config counts as hung."""
        settings, row, sizes = self.settings, len(self.row_times), self.grid.benchmark_bytes
        limit_s = settings.stall_timeout_s if row else settings.startup_timeout_s
        return limit_s + self.calls.slow_s(sizes[row % len(sizes)])

    def stretches_of(self, num_rows: int) -> list[tuple[float, float]]:
        """(begin, end) of the first rows, Unix seconds; one not seen takes the last one's."""
        seen = list(pairwise([self.began_s, *self.row_times])) or [(self.began_s, self.began_s)]
        return [seen[min(row, len(seen) - 1)] for row in range(num_rows)]

    def what_happened(self) -> tuple[Status, str]:
        assert self.is_over, "a launch that was told to stop has no culprit"
        words = last_words(self.texts)
        if self.returncode is None:
            what = "new row for" if self.row_times else "row within"
            return Status.TIMED_OUT, f"no {what} {self.patience_s():.3g} s: {words}"
        status = Status.INFEASIBLE if is_impossible(self.texts) else Status.FAILED
        return status, f"exit code {self.returncode}: {words}"


def read_rows(
    lines: Sequence[str], json: Path, *, sizes: Sequence[int]
) -> tuple[list[list[output.Row]], output.Row]:
    """Rows of each block (out-of-place, maybe in-place), and the environment columns named."""
    report = output.FileReport("output", Source.NCCL_TESTS_TEXT.value)
    found = output.TextRuns(report)
    # A row that cannot be read (torn, or without a time) still takes its place in the walk.
    rows = list(found.rows(plain_lines(lines)))
    first = next((half for row in rows for half in row), None)
    told = _told(found.runs[first[output.RUN]]) if first else {}
    blocks = _believed(rows, sizes, report.format)
    from_json, run = _json_blocks(json)
    exact = _believed(from_json, sizes, Source.NCCL_TESTS_JSON.value)
    if exact and len(exact) >= len(blocks):
        # The JSON output has no release of nccl-tests.
        return exact, told | _told(run)
    return blocks, told


def last_words(lines: Sequence[str]) -> str:
    """The error lines of a failed benchmark, else its last; a launcher's line names nodes."""
    told = [line.strip() for line in lines if line.strip() and not output.MEANT_AS_ROW.search(line)]
    of_launcher = [line for line in told if _LAUNCHERS.match(line)]
    own = [line for line in told if not _LAUNCHERS.match(line) and not line.startswith("#")]
    words = ([line for line in own if _FAILURE.search(line)] or own)[-3:]
    words += of_launcher[:1] if words else of_launcher[:3]
    return " | ".join(words)[:600] or "no output"


def is_impossible(lines: Sequence[str]) -> bool:
    """Whether NCCL logged that no such combination exists (2.24 and later, `src/enqueue.cc`)."""
    return any("no algorithm/protocol available" in line.lower() for line in lines)


def _json_blocks(path: Path) -> tuple[list[list[output.Row]], output.Run]:
    report = output.FileReport(str(path), Source.NCCL_TESTS_JSON.value)
    blocks: list[list[output.Row]] = []
    try:
        halves, run = output.read_json(path, report)
    except (FileNotFoundError, DataError):
        return blocks, output.Run(0)  # cut off by a crash: the text has what was measured
    # One that is left out would give its place to the next.
    for half in halves if not (report.num_rejected or report.dropped) else ():
        if not (half["in_place"] and blocks and len(blocks[-1]) == 1):
            blocks.append([])
        blocks[-1].append(half)
    return blocks, run


def _measured(half: output.Row, source: str) -> output.Row:
    status = Status.WRONG_VALUES if half["wrong_values"] else Status.OK
    told = {k: v for k, v in half.items() if k not in _OF_A_LAUNCH and v is not None}
    source = Source.BESIDE.value if "compute_alone_tflops" in told else source
    return {"source": source, "status": status.value, **told}


def _told(run: output.Run) -> output.Row:
    """The environment columns that a run names; what two lines say differently is not known."""
    told = {
        "gpu": {line.gpu for line in run.ranks if line.gpu},
        "nccl_version": run.nccl.versions,
        "nccl_tests_version": run.tests_versions,
    }
    return {name: next(iter(values)) for name, values in told.items() if len(values) == 1}


def _believed(
    rows: Sequence[list[output.Row]], sizes: Sequence[int], source: str
) -> list[list[output.Row]]:
    pairs = zip(rows, cycle(sizes), strict=False)
    good = takewhile(lambda pair: pair[0] and pair[0][0]["size_bytes"] == pair[1], pairs)
    return [[_measured(half, source) for half in row] for row, _ in good]


def wrong_comms(setting: Setting, lines: Sequence[str]) -> str | None:
    """Why communicators are not the setting's, or None; groups are colours (`src/util.cu`)."""
    groups: dict[int, list[output.RankLine]] = defaultdict(list)
    for line in output.rank_lines(lines):
        groups[line.group].append(line)
    if setting.comms is None:
        if len(groups) < 2:
            return None
        return (
            f"nccl-tests made {len(groups)} communicators of the ranks in place of one; remove "
            "NCCL_TESTS_SPLIT from the environment, and use split in the sweep file"
        )
    found = {
        tuple(sorted(line.rank for line in group)): len({line.host for line in group})
        for group in groups.values()
    }
    if {found.get(members) for members in setting.comms} == {setting.num_nodes}:
        return None
    return (
        f"nccl-tests made other communicators than split '{setting.split}' asks for "
        f"({', '.join(f'{len(group)} ranks on {on} hosts' for group, on in found.items())}); build "
        "it with MPI, and start ranks node by node (srun --distribution=block, mpirun --map-by ppr)"
    )


def comm_logs(folder: Path) -> list[list[str]]:
    """NCCL's log lines by communicator: each rank has a file, and a first rank logs the calls."""
    paths = sorted(folder.glob("nccl.*.log"))
    files = [path.read_text(errors="replace").splitlines() for path in paths]
    told = [lines for lines in files if any(logged_calls(lines))]
    return told if len(told) > 1 else [[line for lines in files for line in lines]]


def choices_of(
    logs: Sequence[Sequence[str]], file: SweepFile, launch: Launch, grid: Grid
) -> list[Choice | None]:
    """What ran in each block of a read-back launch; None where calls or communicators differ.

    NCCL logs rank 0's calls in order (2.20 and later; channels from 2.24). A crash ends the list
    early; a log of other calls gives an empty one.
    """
    counts = schedule.calls_of(launch, file)
    warmup = sum(count for _, count in schedule.warmup_of(launch.setting, grid, counts))
    each = []
    for log in logs:
        calls = list(logged_calls(log))[warmup:]
        found: list[Choice | None] = []
        # With one size nothing else reveals a miscount.
        whole = len(calls) <= len(grid.blocks) * counts.per_block
        places = range(0, len(calls) if whole else 0, counts.per_block)
        for place, wanted in zip(places, cycle(grid.benchmark_bytes), strict=False):
            part = calls[place : place + counts.per_block]
            sizes = {call.whole_bytes(launch.setting.num_ranks) for call in part}
            if len(part) < counts.per_block or sizes != {wanted}:
                break
            choices = {call.choice for call in part}
            one = choices.pop()
            found.append([*one] if one is not None and not choices else None)
        each.append(found)
    blocks = zip(*each, strict=False)
    return [block[0] if all(one == block[0] for one in block) else None for block in blocks]


def keep_costs(out: Path, file: SweepFile, launch: Launch, log: Sequence[str]) -> None:
    """Write the cost table of a log's TUNING section, if it holds just one."""
    run = output.Run(0)
    for line in log:
        if " Bytes -> " not in line:
            run.note(line, 0)
    table = run.nccl.cost_table()
    if table is not None:
        known = schedule.trial_row(file, launch, launch.trials[0])
        known |= {"gpu": None, "nccl_version": None, **_told(run)}
        write_costs(out, table, known, program="run")
