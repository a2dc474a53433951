"""`dynamiccl-collect run`: from the command's options to a sweep that runs, or is submitted."""

import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from dynamiccl.collect.companions.facts import ask_nodes, environment
from dynamiccl.collect.companions.nodes import Nodes
from dynamiccl.collect.companions.watch import NodeWatch, NoWatch, Watch
from dynamiccl.collect.journal import (
    Shard,
    begin_again,
    begun_here,
    commits_on_disk,
    how_it_ended,
    journal_folder,
)
from dynamiccl.collect.launch import NcclTestsRunner
from dynamiccl.collect.launchers import find_launcher
from dynamiccl.collect.launchers.settings import LauncherSettings
from dynamiccl.collect.processes.interrupt import Interrupt
from dynamiccl.collect.programs import Site
from dynamiccl.collect.progress import SweepProgress
from dynamiccl.collect.run import RunSummary, run_sweep
from dynamiccl.collect.runner import Runner
from dynamiccl.collect.sbatch import BatchJob, Outcome, Work, run_as_batch, run_command
from dynamiccl.collect.simulated import SimulatorRunner
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.sweep import Sweep, SweepFile
from dynamiccl.errors import MissingPath, UnknownName, UserError
from dynamiccl.libraries import JOB_NAMES, SWEEP_NAME, built
from dynamiccl.slurm import SlurmQueue

#: What may measure a sweep.
RUNNERS: Final = ("nccl-tests", "simulator")
_FIX: Final = "correct launcher.sbatch_header or the sweep's groups"
_SHARD: Final = re.compile(r"(\d+)/([1-9]\d*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The command line options of a run."""

    sweep_file: Path
    out: Path
    runner: str = "nccl-tests"
    #: None = the sweep file's.
    launcher: str | None = None
    nccl_tests_dir: Path | None = None
    resume: bool = False
    retry_failed: bool = False
    take_over: bool = False
    limit: int | None = None
    shard: str | None = None


def start_sweep(sweep: Sweep, options: RunOptions, *, console: Console) -> RunSummary:
    """Run a sweep, or have a batch job run it; raises what `run_sweep` and its parts raise."""
    shard = parse_shard(options.shard)
    if options.runner not in RUNNERS:
        raise UnknownName("runner", options.runner, RUNNERS)
    launcher = launcher_of(sweep.file, options.launcher)
    is_batch = find_launcher(launcher.kind).is_batch
    shards = max(shard.count, launcher.array if is_batch else 1)
    if shards > 1 and sweep.file.strategy.kind == "adaptive":
        raise UserError(
            "an adaptive sweep cannot be cut into shards: each would know a part of the history "
            "only; take strategy.kind = 'exhaustive' or 'random', or launcher.array = 1"
        )
    if is_batch:
        return submit(sweep, options, launcher)
    with Interrupt() as interrupt, ExitStack() as stack:
        site = Site(
            out=options.out,
            work=journal_folder(sweep, options.out, shard) / "work",
            nccl_tests_dir=options.nccl_tests_dir,
            plugin=find_plugin(sweep.file),
            launcher=launcher,
        )
        runner: Runner = (
            _nccl_tests(sweep.file, site, interrupt, stack)
            if options.runner == NcclTestsRunner.name
            else SimulatorRunner(sweep.file, options.out)
        )
        progress = SweepProgress(sweep.file.name, console, lambda: interrupt.requested)
        return run_sweep(
            sweep,
            make_strategy(sweep.file, sweep.trials),
            runner,
            options.out,
            resume=options.resume or options.retry_failed,
            retry_failed=options.retry_failed,
            take_over=options.take_over,
            progress=stack.enter_context(progress),
            shard=shard,
        )


def submit(sweep: Sweep, options: RunOptions, launcher: LauncherSettings) -> RunSummary:
    """Run the sweep inside a Slurm batch job, and watch it until it is done."""
    shards = [Shard(index, launcher.array) for index in range(launcher.array)]
    folders = [journal_folder(sweep, options.out, shard) for shard in shards]
    if any(folder.is_dir() for folder in folders) and not (options.resume or options.retry_failed):
        raise begun_here(folders[0].parent)
    words = ["--runner", options.runner]
    if options.nccl_tests_dir is not None:
        words += ["--nccl-tests-dir", str(options.nccl_tests_dir.absolute())]
    if options.limit is not None:
        words += ["--limit", str(options.limit)]
    if options.retry_failed:
        words.append("--retry-failed")
        for folder in folders:
            begin_again(folder)
    job = BatchJob(
        name=sweep.file.name,
        out=options.out.absolute(),
        command=run_command(options.sweep_file, options.out, *words),
        num_nodes=max(group.hosts for group in sweep.file.groups),
        ranks_per_node=max(group.ranks_per_host for group in sweep.file.groups),
        header=launcher.sbatch_header,
        array=launcher.array,
    )

    def ended() -> set[str | None]:
        return {how_it_ended(folder, sweep.text) for folder in folders}

    work = Work(
        is_complete=lambda: None not in ended(),
        progress=lambda: sum(commits_on_disk(folder) for folder in folders),
    )
    began = work.progress()
    with Interrupt() as interrupt:
        outcome = run_as_batch(job, work, SlurmQueue(_FIX), interrupt)
    why = "budget" if "budget" in ended() else "done"
    return RunSummary(
        trials=len(sweep.trials),
        rounds_done=0,
        launches_run=work.progress() - began,
        launches_skipped=began,
        rows_written=0,
        rows_by_status={},
        ended=why if outcome is Outcome.COMPLETE else "detached",
    )


def _nccl_tests(
    file: SweepFile, site: Site, interrupt: Interrupt, stack: ExitStack
) -> NcclTestsRunner:
    """The runner of real sweeps, with samplers on its nodes until the stack is closed."""
    nodes = Nodes(site.launcher)
    num_nodes = max(group.hosts for group in file.groups)
    facts = ask_nodes(nodes, num_nodes, environment())
    watch: Watch = NoWatch()
    if file.telemetry.enabled:
        watch = stack.enter_context(NodeWatch(nodes, num_nodes))
    runner = NcclTestsRunner(file, site, interrupt, watch=watch, facts=facts)
    # After an error the last launch may not be in the journal yet.
    stack.push(lambda error, *_: runner.close() if error is None else None)
    return runner


def launcher_of(file: SweepFile, name: str | None) -> LauncherSettings:
    """The sweep's launcher, of another kind when the command line names one.

    Raises UnknownName with the choices.
    """
    if name is None:
        return file.launcher
    find_launcher(name)
    return file.launcher.model_copy(update={"kind": name})


def find_plugin(file: SweepFile) -> Path | None:
    """Path of the sweep plugin: `runner.plugin` of the sweep file, else our build, else None.

    Raises MissingPath when the named file does not exist, and UserError when it is the plugin for
    jobs.
    """
    if file.runner.plugin is None:
        ours = built(SWEEP_NAME)
        return ours.resolve() if ours.is_file() else None
    named = Path(file.runner.plugin).expanduser()
    if not named.is_file():
        raise MissingPath(
            "tuner plugin", named, "build it with 'make plugin', or correct runner.plugin"
        )
    if named.name in JOB_NAMES:
        raise UserError(
            f"runner.plugin is {named}, which is for jobs and plays no schedule; name "
            f"{SWEEP_NAME} beside it"
        )
    return named.resolve()


def parse_shard(text: str | None) -> Shard:
    """Read `I/N`, the share I of N counted from 0. Raises UserError.

    >>> parse_shard("1/4")
    Shard(index=1, count=4)
    """
    if text is None:
        return Shard()
    match = _SHARD.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"--shard '{text}' is no share; write I/N with I from 0 to N-1, like 0/4")
    return Shard(int(match[1]), int(match[2]))
