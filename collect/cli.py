"""`dynamiccl-collect`: the command line that measures, imports and describes data."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dynamiccl import cli
from dynamiccl.collect import compare as comparing
from dynamiccl.collect import describe as describing
from dynamiccl.collect import fit_simulator as fitting
from dynamiccl.collect.checks import ANY_SWEEP, check_for_sweep
from dynamiccl.collect.health import health_command
from dynamiccl.collect.imports import import_command
from dynamiccl.collect.launchers import LauncherKind
from dynamiccl.collect.plan import make_plan, plan_lines, shapes_command
from dynamiccl.collect.start import WHOLE, RunnerName, RunOptions, start_sweep, submit_sweep
from dynamiccl.collect.sweep import Sweep, load_sweep
from dynamiccl.datasets import store
from dynamiccl.doctor import Machine, report
from dynamiccl.simulator import options as simulating
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.record_jobs import Exploration, RecordSettings, record_jobs
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.systems import PARAMETRIC, find_system
from dynamiccl.simulator.workloads import make_workload

app = typer.Typer(
    help="Sweep nccl-tests over NCCL's configs, or import measurements.", **cli.APPLICATION
)
_stderr = Console(stderr=True)
_stdout = Console()
#: Exit code where something surely got slower.
_SLOWER = 1

_Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
_Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log more, to stderr.")]
_Out = Annotated[Path, typer.Option("--out", help="Data directory to add to.")]
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


@app.command("run")
def run_command(
    sweep_file: _SweepFile,
    out: _Out,
    runner: Annotated[RunnerName, typer.Option(help="What measures.")] = "nccl-tests",
    launcher: Annotated[
        LauncherKind | None, typer.Option(help="What starts ranks; default the sweep file's.")
    ] = None,
    nccl_tests_dir: Annotated[
        Path | None, typer.Option(help="Where the nccl-tests binaries are; default PATH.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the sweep in --out.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Continue, and measure failed trials once more.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the lock from a dead run.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="Only the first N trials.", min=1)] = None,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Run only this share of the launches.")
    ] = WHOLE,
    batch_script: Annotated[Path | None, typer.Option(hidden=True)] = None,
    as_json: _Json = False,
    verbose: _Verbose = False,
) -> None:
    """Run a sweep and write a Parquet part for each finished round.

    Ctrl-C finishes the running trial and stops; a second one stops at once. Nothing that was
    measured is lost: --resume goes on. With launcher sbatch it submits a job and returns; the same
    command then says how far the job is.

    Example: dynamiccl-collect run examples/h100_4x8.toml --runner simulator --out out/data
    """
    cli.configure_logging(verbose=verbose)
    sweep = load_sweep(sweep_file)
    file = sweep.file
    if launcher is not None:
        settings = file.launcher.model_copy(update={"kind": launcher})
        file = file.model_copy(update={"launcher": settings})
    sweep = Sweep(file, sweep.text, sweep.trials[:limit])
    options = RunOptions(
        sweep_file=sweep_file,
        out=out,
        runner=runner,
        nccl_tests_dir=nccl_tests_dir,
        resume=resume,
        retry_failed=retry_failed,
        take_over=take_over,
        limit=limit,
        shard=shard,
        batch_script=batch_script,
    )
    if sweep.file.launcher.kind == "sbatch":
        submitted = submit_sweep(sweep, options)
        job, state = submitted["job"], submitted["state"]
        if as_json:
            cli.print_json(submitted)
            return
        _print(
            f"{f'job {job}: {state}' if job else state}; {submitted['trials_done']} of "
            f"{submitted['trials']} trials done in {submitted['launches_done']} launches; the same "
            "command shows progress, its log is beside the script "
            f"{submitted['script']} (-*.out)"
        )
        return
    summary = start_sweep(sweep, options, console=_stderr)
    if as_json:
        cli.print_json({**asdict(summary), "out": str(out)})
    else:
        by_status = ", ".join(f"{count} {name}" for name, count in summary.rows_by_status.items())
        endings = {"budget": "the budget is spent", "interrupted": "stopped; go on with --resume"}
        _print(
            f"{summary.rows_written} rows ({by_status or 'nothing new'}) of {summary.trials} "
            f"trials in {summary.launches_run} launches; {summary.launches_skipped} were there "
            f"already; {endings.get(summary.ended, summary.ended)} -> {out}"
        )
    if summary.ended == "interrupted":
        # A script's next step needs a complete sweep.
        raise typer.Exit(cli.INTERRUPTED)


@app.command("doctor")
def doctor_command(
    sweep_file: Annotated[
        Path | None, typer.Argument(metavar="[SWEEP.toml]", help="The sweep that is to run.")
    ] = None,
    nccl_tests_dir: Annotated[
        Path | None, typer.Option(help="Where the nccl-tests binaries are; default PATH.")
    ] = None,
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


@app.command("jobs")
def jobs_command(
    out: _Out,
    system: simulating.SystemOption = simulating.DEFAULT_SYSTEM,
    scenario: simulating.ScenarioOption = simulating.DEFAULT_SCENARIO,
    workload: simulating.WorkloadOption = None,
    nodes: simulating.NodesOption = 4,
    ranks_per_node: simulating.RanksPerNodeOption = 8,
    jobs: Annotated[int, typer.Option(help="How many jobs.", min=1)] = 8,
    calls: simulating.CallsOption = 10_000,
    explore: Annotated[
        float, typer.Option(help="Share of calls with a config drawn at random.", min=0, max=1)
    ] = 0.3,
    hold: Annotated[
        float, typer.Option(help="Calls of a task key that a draw lasts on average.", min=1)
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of surroundings, noise and draws.")] = 0,
    name: Annotated[str, typer.Option(help="The sweep that the calls belong to.")] = "jobs",
    as_json: _Json = False,
) -> None:
    """Simulate jobs and write what the plugin would have recorded of their calls.

    Example: dynamiccl-collect jobs --scenario congested --workload decode --out out/data
    """
    kinds = workload or simulating.DEFAULT_WORKLOADS
    order = RecordSettings(
        system=find_system(system),
        workload=make_workload(kinds, Group(nodes, ranks_per_node)),
        scenario=find_scenario(scenario),
        exploration=Exploration(explore, hold),
        jobs=jobs,
        calls=calls,
        seed=seed,
        name=store.check_slug(name, "name"),
    )
    with Progress(console=_stderr, transient=True, disable=not _stderr.is_terminal) as progress:
        bar = progress.add_task("calls", total=calls)
        parts = record_jobs(order, out, lambda count: progress.advance(bar, count))
    if as_json:
        cli.print_json({"calls": jobs * calls, "parts": [str(path) for path in parts]})
        return
    _print(f"{jobs * calls} calls of {jobs} jobs -> {out}")


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
    summaries = describing.describe(directory)
    drawn: list[Path] = []
    if plots is not None and summaries:
        drawn = describing.plot_systems(store.read(directory), plots)
    if as_json:
        found = describing.to_json(summaries, describing.describe_calls(directory))
        with_plots = {"systems": found, "plots": [str(path) for path in drawn]}
        cli.print_json(found if plots is None else with_plots)
        return
    _print(*(f"drawn: {path}" for path in drawn), console=_stderr)
    for summary in summaries:
        mark = " (simulated)" if summary["simulated"] else ""
        table = Table(title=f"{summary['system']}{mark}", show_header=False, title_justify="left")
        table.add_column()
        table.add_column(overflow="fold")
        for name, value in describing.lines(summary):
            table.add_row(name, value)
        _stdout.print(table)
    _print(*describing.other_lines(directory))


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
    for directory in (old, new):
        store.part_paths(directory)
    found = comparing.compare(store.read(old), store.read(new))
    settings = [comparing.sweep_settings(directory) for directory in (old, new)]
    found["other_changes"] += comparing.differing(*settings)
    if as_json:
        cli.print_json({"old": str(old), "new": str(new), **found})
    else:
        for change in found["changes"]:
            _print("  ".join(comparing.row(change)))
        _print(*comparing.sentences(found))
    raise typer.Exit(_SLOWER if found["is_slower"] else 0)


app.command("shapes")(shapes_command)


@app.command("fit-simulator")
def fit_command(
    data: Annotated[Path, typer.Option("--data", metavar="DIR", help="A data directory.")],
    out: Annotated[Path, typer.Option(metavar="SYSTEM.toml", help="System file to write.")],
    base: Annotated[
        str, typer.Option(help=f"Where to start: {', '.join(PARAMETRIC)}, or a system file.")
    ],
    system: Annotated[
        list[str] | None,
        typer.Option(help="System of the data, where base names none; repeatable."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the fitted system; default: the base's.")
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
        fit = fitting.fit_to_file(data, out, base=base, systems=system or (), name=name)
    if as_json:
        cli.print_json({**fitting.to_json(fit), "out": str(out)})
        return
    fitting.show(fit, _stdout)
    _print(f"{fit.file.name} -> {out}")


if __name__ == "__main__":
    main()
