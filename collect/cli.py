"""`dynamiccl-collect`: the command line that measures, imports and describes data."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dynamiccl import cli
from dynamiccl.collect import compare, describe, fit_simulator, start
from dynamiccl.collect.checks import ANY_SWEEP, check_for_sweep
from dynamiccl.collect.health import health_command
from dynamiccl.collect.imports import import_command
from dynamiccl.collect.launchers import LauncherKind
from dynamiccl.collect.plan import make_plan, plan_lines, shapes_command
from dynamiccl.collect.sweep import Sweep, load_sweep
from dynamiccl.datasets import store
from dynamiccl.doctor import Machine, report
from dynamiccl.simulator.record_jobs import jobs_command
from dynamiccl.simulator.systems import PARAMETRIC

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


@app.command("run")
def run_command(
    sweep_file: _SweepFile,
    out: Annotated[Path, typer.Option("--out", help="Data directory to add to.")],
    runner: Annotated[start.RunnerName, typer.Option(help="What measures.")] = "nccl-tests",
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
    ] = start.WHOLE,
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
    cli.configure_logging(verbose=verbose)
    sweep = load_sweep(sweep_file)
    if launcher is not None:
        settings = sweep.file.launcher.model_copy(update={"kind": launcher})
        file = sweep.file.model_copy(update={"launcher": settings})
        sweep = Sweep(file, sweep.text, sweep.trials)
    options = start.RunOptions(
        sweep_file=sweep_file,
        out=out,
        runner=runner,
        nccl_tests_dir=nccl_tests_dir,
        resume=resume,
        retry_failed=retry_failed,
        take_over=take_over,
        shard=shard,
        batch_script=batch_script,
    )
    if sweep.file.launcher.kind == "sbatch":
        submitted = start.submit_sweep(sweep, options)
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
    summary = start.start_sweep(sweep, options, console=_stderr)
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
        fit = fit_simulator.fit_to_file(data, out, base=base, systems=system or (), name=name)
    said = fit_simulator.to_json(fit)
    if as_json:
        cli.print_json({**said, "out": str(out)})
        return
    _print(*fit_simulator.lines(said), f"{fit.file.name} -> {out}")


if __name__ == "__main__":
    main()
