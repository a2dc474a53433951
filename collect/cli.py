"""`dynamiccl-collect`: the command line that measures, imports and describes data.

`run` starts a sweep here, or submits it as a Slurm batch job, which queues itself again while work
is left:

    OUT/.slurm/NAME.sbatch    the script; it resumes the sweep, so it may run any number of times
    OUT/.slurm/NAME-JOB.out   what the job printed
    OUT/.slurm/NAME.jobs/1    numbers of the jobs of the first submission; 2 of the next, and so on

`submit_sweep` returns as soon as Slurm has the job; nobody watches it. Slurm sends SIGUSR1 to the
batch shell before the time limit (`--signal=B:USR1@120`). The shell replaces itself by the sweep
(`exec`), which so gets the signal itself, finishes its trial, stops, and queues the job again. A
shell that forwards signals by `trap` may lose one that comes just before its `wait`.
"""

import logging
import os
import re
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console
from rich.table import Table

from dynamiccl import cli
from dynamiccl.collect import compare, describe, fit_simulator, journal
from dynamiccl.collect.checks import ANY_SWEEP, check_for_sweep
from dynamiccl.collect.health import health_command
from dynamiccl.collect.imports import import_command
from dynamiccl.collect.journal import Shard, journal_folder, progress_on_disk
from dynamiccl.collect.launch import NcclTestsRunner, Site
from dynamiccl.collect.launchers import Interrupt, LauncherKind
from dynamiccl.collect.nodes import Nodes, ask_nodes, watch_health
from dynamiccl.collect.plan import make_plan, plan_lines, shapes_command
from dynamiccl.collect.run import Runner, Summary, SweepProgress, run_sweep
from dynamiccl.collect.schedule import without_slow
from dynamiccl.collect.simulated import SimulatorRunner
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.sweep import Sweep, SweepFile, load_sweep
from dynamiccl.datasets import store
from dynamiccl.doctor import Machine, report
from dynamiccl.errors import InvalidSweep, MachineError, MissingPath, UserError
from dynamiccl.libraries import SWEEP_NAME, built
from dynamiccl.simulator.record_jobs import jobs_command
from dynamiccl.simulator.systems import PARAMETRIC
from dynamiccl.slurm import BatchScript, bare_option, option_name, quoted

_log = logging.getLogger(__name__)

app = typer.Typer(
    help="Sweep nccl-tests over NCCL's configs, or import measurements.", **cli.APPLICATION
)
_stderr = Console(stderr=True)
_stdout = Console()
_Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
_NcclTestsDir = Annotated[
    Path | None, typer.Option(help="Where the nccl-tests binaries are; default PATH.")
]
_SweepFile = Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="The sweep file.")]


def main() -> None:
    """Entry point of `dynamiccl-collect`."""
    cli.run(partial(app, standalone_mode=False))


def _print(*lines: str, console: Console = _stdout) -> None:
    """Lines as they are, however long."""
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


@app.command("plan")
def plan_command(sweep_file: _SweepFile, as_json: _Json = False) -> None:
    """Show what a sweep would run, what it leaves out and why, and how long it takes.

    Times are the embedded simulator's.

    Example: dynamiccl-collect plan examples/slurm_h100.toml
    """
    with _stderr.status("planning"):
        plan = make_plan(load_sweep(sweep_file))
    if as_json:
        cli.print_json(plan)
    else:
        _print(*plan_lines(plan))


RunnerName = Literal["nccl-tests", "simulator"]
WHOLE: Final = "0/1"
_FIX: Final = "correct launcher.sbatch_header or the sweep's groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The command line options of a run."""

    sweep_file: Path
    out: Path
    runner: RunnerName = "nccl-tests"
    nccl_tests_dir: Path | None = None
    resume: bool = False
    retry_failed: bool = False
    take_over: bool = False
    shard: str = WHOLE
    #: Inside a batch job: its script, for queueing it again.
    batch_script: Path | None = None


@app.command("run")
def run_command(
    sweep_file: _SweepFile,
    out: Annotated[Path, typer.Option("--out", help="Data directory to add to.")],
    runner: Annotated[RunnerName, typer.Option(help="What measures.")] = "nccl-tests",
    launcher: Annotated[
        LauncherKind | None, typer.Option(help="What starts ranks; default the sweep file's.")
    ] = None,
    nccl_tests_dir: _NcclTestsDir = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the sweep in --out.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Continue, and measure failed trials once more.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the lock from a dead run.")
    ] = False,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Run only this share of the launches.")
    ] = WHOLE,
    batch_script: Annotated[Path | None, typer.Option(hidden=True)] = None,
    as_json: _Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more, to stderr.")] = False,
) -> None:
    """Run a sweep and write a Parquet part for each finished round.

    Ctrl-C finishes the running trial and stops; a second one stops at once. Nothing that was
    measured is lost: --resume goes on. With launcher sbatch it submits a job and returns; the same
    command then says how far the job is.

    Example: dynamiccl-collect run examples/h100_4x8.toml --runner simulator --out out/data
    """
    given = locals()
    cli.configure_logging(verbose=verbose)
    sweep = load_sweep(sweep_file)
    if launcher is not None:
        settings = sweep.file.launcher.model_copy(update={"kind": launcher})
        file = sweep.file.model_copy(update={"launcher": settings})
        sweep = Sweep(file, sweep.text, sweep.trials)
    options = RunOptions(**{name: given[name] for name in RunOptions.__slots__})
    if sweep.file.launcher.kind == "sbatch":
        submitted = submit_sweep(sweep, options)
        job, state = submitted["job"], submitted["state"]
        if as_json:
            cli.print_json(submitted)
            return
        log = f"what it says: {submitted['script'].removesuffix('.sbatch')}-*.out"
        more = f"the same command shows how far it is; {log}" if job else f"data in {out}; {log}"
        _print(
            f"{f'job {job}: {state}' if job else state}; {submitted['trials_done']} of "
            f"{submitted['trials']} trials done in {submitted['launches_done']} launches\n{more}"
        )
        return
    summary = start_sweep(sweep, options)
    if as_json:
        cli.print_json({**summary, "out": str(out)})
    else:
        by_status = summary["rows_by_status"].items()
        told = ", ".join(f"{count} {name}" for name, count in by_status) or "nothing new"
        told_of = {"budget": "the budget is spent", "interrupted": "stopped; go on with --resume"}
        ended = told_of.get(summary["ended"], summary["ended"])
        _print(
            f"{summary['rows_written']} rows ({told}) of {summary['trials']} trials in "
            f"{summary['launches_run']} launches; {summary['launches_skipped']} were there "
            f"already; {ended} -> {out}"
        )
    if summary["ended"] == "interrupted":
        # A script's next step needs a complete sweep.
        raise typer.Exit(cli.INTERRUPTED)


def start_sweep(sweep: Sweep, options: RunOptions) -> Summary:
    """Run a sweep here; raises what `run_sweep` and its parts raise.

    With `options.batch_script` it is inside a batch job, which is queued again where work is left
    after something was measured: before the time limit, or when the machine failed.
    """
    shard = parse_shard(options.shard)
    _check_shards(sweep, shard.count)
    folder = journal_folder(sweep, options.out, shard)
    launches, _ = progress_on_disk(folder)
    interrupt = Interrupt()
    try:
        with interrupt, ExitStack() as stack:
            plugin = find_plugin(sweep.file)
            runner: Runner = SimulatorRunner(sweep.file, options.out)
            if options.runner == NcclTestsRunner.name:
                sweep = without_slow(sweep)
                site = Site(options.out, folder / "work", options.nccl_tests_dir, plugin)
                runner = _nccl_tests(sweep.file, site, interrupt, stack)
            progress = SweepProgress(sweep.file.name, _stderr, lambda: interrupt.requested)
            summary = run_sweep(
                *(sweep, make_strategy(sweep.file, sweep.trials), runner, options.out),
                resume=options.resume or options.retry_failed,
                retry_failed=options.retry_failed,
                take_over=options.take_over,
                progress=stack.enter_context(progress),
                shard=shard,
            )
    except MachineError as error:
        if options.batch_script is not None and progress_on_disk(folder)[0] > launches:
            _log.warning("%s", error)
            BatchScript(options.batch_script, _FIX).submit_again(os.environ)
        raise
    # SIGTERM alone is somebody's scancel, or a preemption after which Slurm queues it itself.
    warned = summary["ended"] == "interrupted" and interrupt.cause == "SIGUSR1"
    if options.batch_script is not None and warned:
        if progress_on_disk(folder)[0] == launches:
            raise MachineError(
                "the time limit came before anything was measured, so the job is not queued again: "
                "give it more in launcher.sbatch_header (--time), then --resume"
            )
        BatchScript(options.batch_script, _FIX).submit_again(os.environ)
    return summary


def _nccl_tests(
    file: SweepFile, site: Site, interrupt: Interrupt, stack: ExitStack
) -> NcclTestsRunner:
    """The runner of real sweeps, with samplers on its nodes until the stack is closed."""
    nodes, num_nodes = Nodes(file.launcher), max(group.hosts for group in file.groups)
    facts, health = ask_nodes(nodes, num_nodes, os.environ), None
    if file.telemetry.enabled:
        health = stack.enter_context(watch_health(nodes, num_nodes))
    runner = NcclTestsRunner(file, site, interrupt, health=health, facts=facts)
    # After an error the last launch may not be in the journal yet.
    stack.push(lambda error, *_: runner.close() if error is None else None)
    return runner


def _check_shards(sweep: Sweep, count: int) -> None:
    if count > 1 and sweep.file.strategy.kind == "adaptive":
        raise UserError(
            "an adaptive sweep cannot be cut into shards: each would know a part of the history "
            "only; take strategy.kind = 'exhaustive' or 'random', or launcher.array = 1"
        )


def find_plugin(file: SweepFile) -> Path | None:
    """The tuner plugin that plays schedules: the named one (or MissingPath), our build, or None."""
    named = file.runner.plugin
    path = built(SWEEP_NAME) if named is None else Path(named).expanduser()
    if path.is_file():
        return path.resolve()
    if named is None:
        return None
    raise MissingPath("tuner plugin", path, "build it with 'make plugin', or correct runner.plugin")


def parse_shard(text: str) -> Shard:
    """Read `I/N`, the share I of N counted from 0. Raises UserError.

    >>> parse_shard("1/4")
    Shard(index=1, count=4)
    """
    match = re.fullmatch(r"(\d+)/([1-9]\d*)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"--shard '{text}' is no share; write I/N with I from 0 to N-1, like 0/4")
    return Shard(int(match[1]), int(match[2]))


def submit_sweep(sweep: Sweep, options: RunOptions) -> dict[str, Any]:
    """Submit the sweep as a Slurm batch job, unless its job waits or runs, or it is complete.

    Returns job (null = none is needed; several of an array whose elements were submitted again:
    "77,81"), state (of the job, as Slurm says; without one how the sweep ended: done or budget),
    script, trials (that the strategy expects), trials_done (measured or infeasible), launches_done.
    Raises UserError, InvalidSweep for a header line that sbatch cannot take, and MachineError where
    the job is refused or Slurm does not answer.
    """
    array = sweep.file.launcher.array
    _check_shards(sweep, array)
    if options.shard != WHOLE:
        raise UserError("--shard is a process's; the elements of a batch job are launcher.array")
    folders = [journal_folder(sweep, options.out, Shard(index, array)) for index in range(array)]
    script = script_path(options.out, sweep.file.name)
    text = batch_script(sweep, options, script)
    batch = BatchScript(script, _FIX)
    job = batch.find()
    if job is not None and options.retry_failed:
        raise UserError(
            f"job {job[0]} of this sweep is {job[1]}: give --retry-failed when it has ended"
        )
    ended = {journal.how_it_ended(folder, sweep.text) for folder in folders}
    if job is None and (None in ended or options.retry_failed):
        if any(f.is_dir() for f in folders) and not (options.resume or options.retry_failed):
            raise UserError(
                f"{folders[0].parent} says that this sweep was begun here, work is left, and no "
                f"job of it waits or runs (what it said: {script.with_suffix('')}-*.out); go on "
                "with --resume, or take another --out or name"
            )
        if options.retry_failed:
            for folder in folders:
                (folder / journal.COMPLETE).unlink(missing_ok=True)
        job = batch.submit(text)
    number, state = job or (None, "budget" if "budget" in ended else "done")
    progress = [progress_on_disk(folder) for folder in folders]
    trials = make_strategy(sweep.file, sweep.trials).expected_picks()
    return {
        "job": number,
        "state": state,
        "script": str(script),
        "trials": trials,
        # What follows a launch that was cut off measures NCCL's default once more.
        "trials_done": min(sum(done for _, done in progress), trials),
        "launches_done": sum(launches for launches, _ in progress),
    }


def script_path(out: Path, name: str) -> Path:
    """Path of the batch script of the sweep called `name`; its stem is a valid job name."""
    return out.absolute() / ".slurm" / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}.sbatch"


def batch_script(sweep: Sweep, options: RunOptions, script: Path) -> str:
    """The text of the batch script (pure): our options, the user's, which win, and the command.

    Raises InvalidSweep for a header line that is no option, or that sets the array.
    """
    launcher = sweep.file.launcher
    for line in launcher.sbatch_header:
        if option_name(line) in {None, "array"}:
            raise InvalidSweep(
                f"sbatch_header line '{line}' is no option of sbatch that a sweep can have; write "
                'one option a line, e.g. "--time=02:00:00", and --array as launcher.array'
            )
    argv = [sys.executable, "-P", "-m", "dynamiccl.collect.cli", "run"]
    argv += [str(options.sweep_file.absolute()), "--out", str(options.out.absolute())]
    argv += ["--launcher", "srun", "--resume", "--runner", options.runner]
    programs = options.nccl_tests_dir
    argv += [] if programs is None else ["--nccl-tests-dir", str(programs.absolute())]
    argv += ["--retry-failed"] if options.retry_failed else []
    command = shlex.join([*argv, "--batch-script", str(script)])
    # sbatch reads a percent sign in a file name as a pattern.
    log = str(script.with_suffix("")).replace("%", "%%")
    lines = [
        f"--job-name={script.stem}",
        f"--nodes={max(group.hosts for group in sweep.file.groups)}",
        f"--ntasks-per-node={max(group.ranks_per_host for group in sweep.file.groups)}",
        f"--output={quoted(log + ('-%A_%a.out' if launcher.array > 1 else '-%j.out'))}",
        # A job that is queued again keeps its number, and its log goes on.
        "--open-mode=append",
        "--signal=B:USR1@120",
        "--requeue",
    ]
    if launcher.array > 1:
        lines.append(f"--array=0-{launcher.array - 1}")
        command += f' --shard "$SLURM_ARRAY_TASK_ID/{launcher.array}"'
    # Of an option that is given twice sbatch takes the last.
    lines += map(bare_option, launcher.sbatch_header)
    head = "".join(f"#SBATCH {line}\n" for line in lines)
    return (
        f"#!/bin/bash\n{head}\n"
        "# Written by dynamiccl-collect. It resumes the sweep, so it may run any number of times.\n"
        f"exec {command}\n"
    )


@app.command("doctor")
def doctor_command(
    sweep_file: Annotated[
        Path | None, typer.Argument(metavar="[SWEEP.toml]", help="The sweep that is to run.")
    ] = None,
    nccl_tests_dir: _NcclTestsDir = None,
    inside: Annotated[
        bool, typer.Option("--inside", help="This is the sweep's container already.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Check this machine before a sweep: what would fail, mislead or cost time, with fixes.

    Of a container it knows nothing: start it in there too, with --inside. Exit code 4 when a check
    failed.

    Example: dynamiccl-collect doctor examples/slurm_h100.toml --nccl-tests-dir nccl-tests/build
    """
    sweep = ANY_SWEEP if sweep_file is None else load_sweep(sweep_file).file
    checks = check_for_sweep(Machine(), sweep, nccl_tests_dir, inside=inside)
    raise typer.Exit(report([*checks], as_json=as_json))


app.command("import")(import_command)
app.command("health")(health_command)
app.command("jobs")(jobs_command)


@app.command("describe")
def describe_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A data directory.")],
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw a PNG for each system into DIR.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Describe a data set: systems, sizes, configs, repeats, coverage, noise.

    With --plots also a map of the best config by size, and of its gain over NCCL's default.

    Example: dynamiccl-collect describe out/data --plots out/plots
    """
    found = describe.describe(directory)
    measured = [one for one in found if "rows" in one]
    drawn = describe.plot_systems(store.read(directory), plots) if plots and measured else []
    if as_json:
        with_plots = {"systems": found, "plots": [str(path) for path in drawn]}
        cli.print_json(found if plots is None else with_plots)
        return
    _print(*(f"drawn: {path}" for path in drawn), console=_stderr)
    for one in measured:
        mark = " (simulated)" if one["simulated"] else ""
        table = Table(title=f"{one['system']}{mark}", show_header=False, title_justify="left")
        table.add_column()
        table.add_column(overflow="fold")
        for line in describe.lines(one).items():
            table.add_row(*line)
        _stdout.print(table)
    _print(*describe.other_lines(directory, found))


@app.command("compare")
def compare_command(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Data directory of before.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Data directory of after.")],
    as_json: _Json = False,
) -> None:
    """List what got slower or faster between two data sets, and what else is not as it was.

    Two sweeps of one file, before and after another NCCL, a firmware, a cable. Three cycles of each
    confirm a change; one of each tells which differences mean nothing. Exit code 1 when something
    surely got slower.

    Example: dynamiccl-collect compare before after
    """
    found = compare.compare(store.read(old), store.read(new))
    settings = [compare.sweep_settings(directory) for directory in (old, new)]
    found["other_changes"] += compare.differing(*settings)
    if as_json:
        cli.print_json({"old": str(old), "new": str(new), **found})
    else:
        _print(*compare.lines(found))
    raise typer.Exit(1 if found["is_slower"] else 0)


app.command("shapes")(shapes_command)


@app.command("fit-simulator")
def fit_command(
    data: Annotated[Path, typer.Option("--data", metavar="DIR", help="A data directory.")],
    out: Annotated[Path, typer.Option(metavar="SYSTEM.toml", help="File, named as the system.")],
    base: Annotated[
        str, typer.Option(help=f"Where to start: {', '.join(PARAMETRIC)}, or a system file.")
    ],
    system: Annotated[
        list[str] | None,
        typer.Option(help="System of the data, where base names none; repeatable."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Fit the simulator's parameters of a system to its measurements.

    What is marked origin = "fitted" in the description is fitted, by robust least squares on log
    time; every third size of every config is held out in turn for the errors that are shown. Data
    that cannot tell a parameter is refused, with what would have to be measured.

    Example: dynamiccl-collect fit-simulator --data out/data --base b300-nvlink --out mine.toml
    """
    with _stderr.status("fitting"):
        fit = fit_simulator.fit_to_file(data, out, base=base, systems=system or ())
    said = fit_simulator.to_json(fit)
    if as_json:
        cli.print_json({**said, "out": str(out)})
        return
    _print(*fit_simulator.lines(said), f"{fit.file.name} -> {out}")


if __name__ == "__main__":
    main()
