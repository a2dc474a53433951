"""`dynamiccl-collect`: measures, imports and describes data."""

import logging
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from dynamiccl import cli
from dynamiccl.collect import compare, describe, fit_simulator
from dynamiccl.collect.batch import RunnerName, RunOptions, queue_again, submit_sweep
from dynamiccl.collect.checks import ANY_SWEEP, check_for_sweep
from dynamiccl.collect.health import health_command
from dynamiccl.collect.imports import import_command
from dynamiccl.collect.journal import journal_folder, progress_on_disk
from dynamiccl.collect.launch import NcclTestsRunner, Site
from dynamiccl.collect.launchers import Interrupt
from dynamiccl.collect.nodes import Nodes, ask_nodes, watch_health
from dynamiccl.collect.plan import make_plan, plan_lines, shapes_command
from dynamiccl.collect.run import Runner, Summary, SweepProgress, run_sweep
from dynamiccl.collect.schedule import without_slow
from dynamiccl.collect.simulated import SimulatorRunner
from dynamiccl.collect.strategies import logged_costs, make_strategy
from dynamiccl.collect.sweep import Sweep, SweepFile, load_sweep
from dynamiccl.datasets import store
from dynamiccl.doctor import Machine, report
from dynamiccl.errors import MachineError, MissingPath
from dynamiccl.libraries import SWEEP_NAME, built
from dynamiccl.simulator.record_jobs import jobs_command
from dynamiccl.simulator.systems import PARAMETRIC

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


main: Final = partial(cli.run, partial(app, standalone_mode=False))


def _print(*lines: str, console: Console = _stdout) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _tell(document: object, *lines: str, as_json: bool) -> None:
    """Print a command's result: in words, or as JSON."""
    if as_json:
        cli.print_json(document)
    else:
        _print(*lines)


@app.command("plan")
def plan_command(sweep_file: _SweepFile, as_json: _Json = False) -> None:
    """Show what a sweep would run, what it leaves out and why, and how long it takes.

    Times are the embedded simulator's.

    Example: dynamiccl-collect plan examples/slurm_h100.toml
    """
    with _stderr.status("planning"):
        plan = make_plan(load_sweep(sweep_file))
    _tell(plan, *plan_lines(plan), as_json=as_json)


@app.command("run")
def run_command(
    sweep_file: _SweepFile,
    out: Annotated[Path, typer.Option("--out", help="Data directory to add to.")],
    runner: Annotated[RunnerName, typer.Option(help="What measures.")] = "nccl-tests",
    nccl_tests_dir: _NcclTestsDir = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the sweep in --out.")] = False,
    batch_script: Annotated[Path | None, typer.Option(hidden=True)] = None,
    as_json: _Json = False,
) -> None:
    """Run a sweep and write a Parquet part for each finished round.

    Ctrl-C finishes the running trial and stops; a second one stops at once. Nothing that was
    measured is lost: --resume goes on. With launcher sbatch it submits a job and returns; the same
    command then says how far the job is. The simulator always runs here.

    Example: dynamiccl-collect run examples/h100_4x8.toml --runner simulator --out out/data
    """
    given = locals()
    sweep = load_sweep(sweep_file)
    options = RunOptions(**{name: given[name] for name in RunOptions.__slots__})
    is_real = options.runner == NcclTestsRunner.name
    if is_real and sweep.file.launcher.kind == "sbatch" and options.batch_script is None:
        submitted = submit_sweep(sweep, options)
        job, state = submitted["job"], submitted["state"]
        log = f"what it says: {submitted['script'].removesuffix('.sbatch')}-*.out"
        more = f"the same command shows how far it is; {log}" if job else f"data in {out}; {log}"
        far = (
            f"{f'job {job}: {state}' if job else state}; {submitted['trials_done']} of "
            f"{submitted['trials']} trials done in {submitted['launches_done']} launches\n{more}"
        )
        _tell(submitted, far, as_json=as_json)
        return
    summary = start_sweep(sweep, options)
    by_status = summary["rows_by_status"].items()
    told = ", ".join(f"{count} {name}" for name, count in by_status) or "nothing new"
    told_of = {"budget": "the budget is spent", "interrupted": "stopped; go on with --resume"}
    ended = told_of.get(summary["ended"], summary["ended"])
    text = (
        f"{summary['rows_written']} rows ({told}) of {summary['trials']} trials in "
        f"{summary['launches_run']} launches; {summary['launches_skipped']} were there "
        f"already; {ended} -> {out}"
    )
    _tell({**summary, "out": str(out)}, text, as_json=as_json)
    if summary["ended"] == "interrupted":
        # A script's next step needs a complete sweep.
        raise typer.Exit(cli.INTERRUPTED)


def start_sweep(sweep: Sweep, options: RunOptions) -> Summary:
    """Run a sweep here; raises what `run_sweep` and its parts raise.

    A batch job that measured something is queued again before the time limit, or when the machine
    failed.
    """
    folder = journal_folder(sweep, options.out)
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
            costs = logged_costs(sweep.file, options.out)
            strategy = make_strategy(sweep.file, sweep.trials, costs)
            summary = run_sweep(
                *(sweep, strategy, runner, options.out),
                resume=options.resume,
                progress=stack.enter_context(progress),
            )
    except MachineError as error:
        if options.batch_script is not None and progress_on_disk(folder)[0] > launches:
            _log.warning("%s", error)
            queue_again(options.batch_script, os.environ)
        raise
    # SIGTERM alone is scancel, or a preemption after which Slurm queues it itself.
    warned = summary["ended"] == "interrupted" and interrupt.cause == "SIGUSR1"
    if options.batch_script is not None and warned:
        if progress_on_disk(folder)[0] == launches:
            raise MachineError(
                "the time limit came before anything was measured, so the job is not queued again: "
                "give it more in launcher.sbatch_header (--time), then --resume"
            )
        queue_again(options.batch_script, os.environ)
    return summary


def _nccl_tests(
    file: SweepFile, site: Site, interrupt: Interrupt, stack: ExitStack
) -> NcclTestsRunner:
    """The runner, with samplers on its nodes until the stack is closed."""
    nodes, num_nodes = Nodes(file.launcher), max(group.hosts for group in file.groups)
    facts, health = ask_nodes(nodes, num_nodes, os.environ), None
    if file.telemetry.enabled:
        health = stack.enter_context(watch_health(nodes, num_nodes))
    runner = NcclTestsRunner(file, site, interrupt, health=health, facts=facts)
    # After an error the journal may lack the last launch.
    stack.push(lambda error, *_: runner.close() if error is None else None)
    return runner


def find_plugin(file: SweepFile) -> Path | None:
    """The tuner plugin: the named one (or raises MissingPath), our build, or None."""
    named = file.runner.plugin
    path = built(SWEEP_NAME) if named is None else Path(named).expanduser()
    if path.is_file():
        return path.resolve()
    if named is None:
        return None
    raise MissingPath("tuner plugin", path, "build it with 'make plugin', or correct runner.plugin")


@app.command("doctor")
def doctor_command(
    sweep_file: Annotated[
        Path | None, typer.Argument(metavar="[SWEEP.toml]", help="The sweep that is to run.")
    ] = None,
    nccl_tests_dir: _NcclTestsDir = None,
    as_json: _Json = False,
) -> None:
    """Check this machine before a sweep: what would fail, mislead or cost time, with fixes.

    Of a container it knows nothing: start it in there too, without a sweep file. Exit code 4 when a
    check failed.

    Example: dynamiccl-collect doctor examples/slurm_h100.toml --nccl-tests-dir nccl-tests/build
    """
    sweep = ANY_SWEEP if sweep_file is None else load_sweep(sweep_file).file
    checks = check_for_sweep(Machine(), sweep, nccl_tests_dir)
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
    surely got slower, or fails that did not.

    Example: dynamiccl-collect compare before after
    """
    found = compare.compare(store.read(old), store.read(new))
    settings = [compare.sweep_settings(directory) for directory in (old, new)]
    found["other_changes"] += compare.differing(*settings)
    named = {"old": str(old), "new": str(new), **found}
    _tell(named, *compare.lines(found), as_json=as_json)
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
    lines = (*fit_simulator.lines(said), f"{fit.file.name} -> {out}")
    _tell({**said, "out": str(out)}, *lines, as_json=as_json)


if __name__ == "__main__":
    main()
