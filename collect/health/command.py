"""`dynamiccl-collect health`: finds slow parts of a cluster in minutes."""

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import polars as pl
import typer
from rich.console import Console
from rich.table import Table

from dynamiccl import cli
from dynamiccl.collect.health.findings import Finding, Report, examine
from dynamiccl.collect.health.short_run import Cluster, Repeated, short_sweep, usual_settings
from dynamiccl.collect.launchers import LAUNCHERS, find_launcher
from dynamiccl.collect.start import RUNNERS, RunOptions, start_sweep
from dynamiccl.collect.sweep.load import load_sweep
from dynamiccl.collect.sweep.settings import Sizes, SweepFile
from dynamiccl.collect.sweep.sizes import parse_size
from dynamiccl.datasets import store
from dynamiccl.errors import Interrupted, UserError
from dynamiccl.simulator.slow_parts import parse_slow

#: Something is slow: what a Slurm prolog takes for a node that is not fit.
SLOW: Final = 1
_WIDTH: Final = 100
_stderr = Console(stderr=True)


def health_command(
    data: Annotated[
        Path | None, typer.Argument(metavar="[DATA]", help="A data directory, to look at only.")
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="Measure the cluster first.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Data directory for --run, seen by all nodes; default: kept nowhere."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes to measure; default: those of the Slurm job.", min=1)
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of a node, a power of two.", min=1)] = 8,
    size: Annotated[str, typer.Option(help="Size of the message.")] = "64M",
    least: Annotated[
        float, typer.Option(help="By which share of the time slower counts.", min=0.001, max=10)
    ] = 0.05,
    launches: Annotated[
        int, typer.Option(help="Measure so often at most, while something is slow.", min=1)
    ] = 2,
    sweep: Annotated[
        Path | None,
        typer.Option(metavar="SWEEP.toml", help="Launcher, container and simulator of this file."),
    ] = None,
    runner: Annotated[str, typer.Option(help=f"One of {', '.join(RUNNERS)}.")] = "nccl-tests",
    launcher: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(LAUNCHERS)}; default: the file's, srun.")
    ] = None,
    nccl_tests_dir: Annotated[
        Path | None, typer.Option(help="Where the nccl-tests binaries are; default PATH.")
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND:NODE[:N]:FACTOR",
            help="With --runner simulator: what is slow, gpu:3:1:1.3, nic, node:3:1.3, link:0:3:2.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON document to stdout.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more, to stderr.")] = False,
) -> None:
    """Name the GPUs, NICs, nodes and pairs of nodes that are slow against the rest.

    With --run it pairs up the GPUs of the cluster, inside nodes and between them, log2(ranks)
    launches in all; what is slow is measured a second time before it is called so. Exit code 1 when
    something is slow.

    Example: dynamiccl-collect health --run --nodes 16 --gpus 8 --runner simulator
    """
    cli.configure_logging(verbose=verbose)
    if run == (data is not None):
        raise UserError("give a data directory to look at, or --run to measure the cluster first")
    if data is not None:
        report = examine(store.read(data), least=least)
    else:
        base = _base(sweep, launcher, runner, slow or ())
        size_bytes = Sizes(list=(_size(size),)).ladder()[0]
        order = RunOptions(
            sweep_file=Path("health.toml"),
            out=out or Path(),
            runner=runner,
            launcher=launcher,
            nccl_tests_dir=nccl_tests_dir,
        )
        with ExitStack() as stack:
            if out is None:
                # Here, since /tmp is another one on each node.
                made = tempfile.TemporaryDirectory(prefix="dynamiccl-health-", dir=Path())
                order = replace(order, out=Path(stack.enter_context(made)))
            report = _measured(
                Cluster(_nodes(nodes), gpus, size_bytes), base, order, least, launches
            )
    _show(report, as_json=as_json)
    if not report.is_well:
        raise typer.Exit(SLOW)


def _measured(
    cluster: Cluster, base: SweepFile, order: RunOptions, least: float, launches: int
) -> Report:
    """Measure the cluster, repeat while something looks slow, and judge all measurements."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    frames: list[pl.DataFrame] = []
    for number in range(launches):
        made = short_sweep(cluster, base, f"health-{stamp}-{number + 1}", again=number)
        summary = start_sweep(made, order, console=_stderr, strategy=Repeated(made.trials))
        if summary.ended == "interrupted":
            raise Interrupted(f"what was measured is in {order.out}, as {made.file.name}")
        frame = store.read(order.out)
        frames.append(frame.filter(pl.col("sweep") == made.file.name))
        report = examine(pl.concat(frames), least=least)
        if report.is_well:
            break
    return report


def _base(sweep: Path | None, launcher: str | None, runner: str, slow: Sequence[str]) -> SweepFile:
    """The settings of a short run: a sweep file's, else defaults."""
    if slow and runner != "simulator":
        raise UserError(
            "--slow makes simulated parts slow; take --runner simulator, or leave it out"
        )
    if sweep is not None:
        base = load_sweep(sweep).file
    else:
        kind = launcher or ("srun" if "SLURM_JOB_ID" in os.environ else "mpirun")
        find_launcher(kind)
        base = usual_settings(kind)
    if find_launcher(launcher or base.launcher.kind).is_batch:
        raise UserError("a check runs inside an allocation: take launcher srun, or mpirun")
    parts = tuple(parse_slow(text) for text in slow)
    simulator = base.simulator.model_copy(update={"slow": (*base.simulator.slow, *parts)})
    return base.model_copy(update={"simulator": simulator})


def _nodes(asked: int | None) -> int:
    if asked is not None:
        return asked
    told = os.environ.get("SLURM_JOB_NUM_NODES", os.environ.get("SLURM_NNODES", ""))
    if not told.isdecimal():
        raise UserError("how many nodes? give --nodes, or start it inside a Slurm job")
    return int(told)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise UserError(f"--size {error}") from error


def _show(report: Report, *, as_json: bool) -> None:
    if as_json:
        cli.print_json(report.to_json())
        return
    out = Console(width=_WIDTH, soft_wrap=False, highlight=False)
    noise = [
        f"{text} {share:.1%}"
        for text, share in (("inside", report.noise_inside), ("between", report.noise_between))
        if share is not None
    ]
    out.print(
        f"{report.nodes} nodes, {report.gpus} GPUs: {report.communicators} communicators in "
        f"{report.rows} rows"
    )
    out.print(
        f"slow: {report.least:.0%} slower, and beyond the noise of a communicator "
        f"({', '.join(noise) or 'not known'})"
    )
    if report.findings:
        table = Table(title_justify="left")
        for head in ("what", "where", "slower", "z", "of", "why"):
            table.add_column(head, overflow="fold")
        for finding in report.findings:
            table.add_row(*_cells(finding))
        out.print(table)
    else:
        out.print("nothing is slow")
    for remark in report.cannot_tell:
        out.print(f"unknown: {remark}", markup=False)


def _cells(finding: Finding) -> tuple[str, ...]:
    return (
        finding.kind,
        finding.where,
        "-" if finding.slower is None else f"{finding.slower:.0%}",
        "-" if finding.z is None else f"{finding.z:.0f}",
        f"{finding.comms} x {finding.rows // max(finding.comms, 1)}",
        finding.note,
    )
