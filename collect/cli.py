"""`dynamiccl-collect`: measure, or take in what was measured."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dynamiccl import cli
from dynamiccl.collect import describe as describing
from dynamiccl.collect.importer import import_files
from dynamiccl.collect.report import ImportOptions, ImportSummary
from dynamiccl.collect.run import RunSummary, run_sweep
from dynamiccl.collect.runners import RUNNERS, make_runner
from dynamiccl.collect.sweep import Sweep, load_sweep

app = typer.Typer(
    help="Sweep nccl-tests over NCCL's configs, or import what others measured, into Parquet.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_stderr = Console(stderr=True)
_stdout = Console()

_Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
_Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log more, to stderr.")]
_Out = Annotated[Path, typer.Option("--out", help="Data directory to add to.")]
_SweepFile = Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="The sweep file.")]


def main() -> None:
    """Entry point of the console script."""
    cli.run(app)


@app.command("plan")
def plan_command(sweep_file: _SweepFile, as_json: _Json = False) -> None:
    """Say what a sweep would run, and what NCCL cannot run and why.

    Example: dynamiccl-collect plan examples/h100_4x8.toml
    """
    sweep = load_sweep(sweep_file)
    reasons: dict[str, int] = {}
    for trial in sweep.trials:
        if trial.infeasible is not None:
            reasons[trial.infeasible] = reasons.get(trial.infeasible, 0) + 1
    feasible = len(sweep.trials) - sum(reasons.values())
    document = {
        "sweep": sweep.file.name,
        "system": sweep.file.system,
        "trials": len(sweep.trials),
        "feasible": feasible,
        "cycles": sweep.file.cycles,
        "measurements": feasible * sweep.file.cycles,
        "infeasible": reasons,
    }
    if as_json:
        cli.print_json(document)
        return
    _stdout.print(
        f"sweep {sweep.file.name} on {sweep.file.system}: {feasible} feasible trials x "
        f"{sweep.file.cycles} cycles = {feasible * sweep.file.cycles} measurements"
    )
    table = Table("left out because", "trials")
    for reason, count in sorted(reasons.items()):
        table.add_row(reason, str(count))
    if reasons:
        _stdout.print(table)


@app.command("run")
def run_command(
    sweep_file: _SweepFile,
    out: _Out,
    runner: Annotated[str, typer.Option(help=f"One of {', '.join(RUNNERS)}.")] = "nccl-tests",
    nccl_tests_dir: Annotated[
        Path | None, typer.Option(help="Where the nccl-tests binaries are; default PATH.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Skip finished cycles.")] = False,
    limit: Annotated[int | None, typer.Option(help="Only the first N trials.", min=1)] = None,
    as_json: _Json = False,
    verbose: _Verbose = False,
) -> None:
    """Run a sweep and write one Parquet part for each finished cycle.

    Example: dynamiccl-collect run examples/h100_4x8.toml --runner simulator --out out/data
    """
    cli.configure_logging(verbose=verbose)
    sweep = load_sweep(sweep_file)
    if limit is not None:
        sweep = Sweep(sweep.file, sweep.text, sweep.trials[:limit])
    measured_by = make_runner(runner, sweep.file, nccl_tests_dir=nccl_tests_dir)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=_stderr, transient=True, disable=not _stderr.is_terminal
    ) as bar:
        task = bar.add_task(sweep.file.name, total=len(sweep.trials) * sweep.file.cycles)
        summary = run_sweep(
            sweep, measured_by, out, resume=resume, progress=lambda: bar.advance(task)
        )
    _show_run(summary, out, as_json=as_json)


def _show_run(summary: RunSummary, out: Path, *, as_json: bool) -> None:
    if as_json:
        cli.print_json({**asdict(summary), "out": str(out)})
        return
    by_status = ", ".join(f"{count} {name}" for name, count in summary.rows_by_status.items())
    _stdout.print(
        f"{summary.rows_written} rows ({by_status or 'nothing new'}) of {summary.trials} trials in "
        f"{summary.cycles_done} cycles; {summary.cycles_skipped} cycles were there already "
        f"-> {out}",
        soft_wrap=True,
        highlight=False,
    )


@app.command("import")
def import_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Logs, JSON or tidy CSV.")],
    out: _Out,
    system: Annotated[str | None, typer.Option(help="Name of the system measured.")] = None,
    sweep: Annotated[str | None, typer.Option(help="Name of this import.")] = None,
    systems: Annotated[
        Path | None, typer.Option(help="TOML with topology facts of the systems.")
    ] = None,
    collective: Annotated[
        str | None, typer.Option(help="The collective, where no line of the output names it.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks, where unknown.", min=1)] = None,
    nodes: Annotated[int | None, typer.Option(help="NCCL's nNodes, where unknown.", min=1)] = None,
    nccl_version: Annotated[str | None, typer.Option(help="NCCL release, where unknown.")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU model, where unknown.")] = None,
    launch_profile: Annotated[
        str | None, typer.Option(help="Name of the launch-time settings, where unknown.")
    ] = None,
    algorithm: Annotated[str | None, typer.Option(help="Requested algorithm, if hidden.")] = None,
    protocol: Annotated[str | None, typer.Option(help="Requested protocol, if hidden.")] = None,
    channels: Annotated[
        int | None, typer.Option(help="Requested channel count, if hidden.", min=1)
    ] = None,
    as_json: _Json = False,
    verbose: _Verbose = False,
) -> None:
    """Read whole nccl-tests outputs (text, -J JSON) and tidy CSV sweeps.

    Example: dynamiccl-collect import all_reduce.log --out out/data --system mycluster
    """
    cli.configure_logging(verbose=verbose)
    options = ImportOptions(
        system=system,
        sweep=sweep,
        collective=collective,
        num_ranks=ranks,
        num_nodes=nodes,
        nccl_version=nccl_version,
        gpu=gpu,
        launch_profile=launch_profile,
        algorithm=algorithm,
        protocol=protocol,
        num_channels=channels,
        systems_file=systems,
    )
    summary = import_files(files, out, options=options)
    _show_import(summary, out, as_json=as_json)


def _show_import(summary: ImportSummary, out: Path, *, as_json: bool) -> None:
    if as_json:
        cli.print_json(summary.to_json())
        return
    for reject in summary.rejected[:20]:
        _stderr.print(f"{reject.path}:{reject.line}: {reject.reason}", markup=False, soft_wrap=True)
    if len(summary.rejected) > 20:
        _stderr.print(f"... and {len(summary.rejected) - 20} more (all of them with --json)")
    _stdout.print(
        f"{summary.rows_read} rows read, {summary.measurements_written} measurements written, "
        f"{summary.dropped} dropped, {summary.duplicates} duplicates, "
        f"{len(summary.rejected)} rejected -> {out}",
        soft_wrap=True,
        highlight=False,
    )


@app.command("describe")
def describe_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A data directory.")],
    as_json: _Json = False,
) -> None:
    """Say what a data set holds: systems, sizes, configs, repeats, coverage, noise.

    Example: dynamiccl-collect describe out/data
    """
    summaries = describing.describe(directory)
    if as_json:
        cli.print_json(describing.to_json(summaries))
        return
    for summary in summaries:
        mark = " (simulated)" if summary.simulated else ""
        table = Table(title=f"{summary.system}{mark}", show_header=False, title_justify="left")
        for name, value in describing.lines(summary):
            table.add_row(name, value)
        _stdout.print(table)


if __name__ == "__main__":
    main()
