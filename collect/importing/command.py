"""`dynamiccl-collect import`: imports files, and reports what became of every row."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from dynamiccl import cli
from dynamiccl.collect.importing.importer import import_files
from dynamiccl.collect.reports import ImportOptions, ImportSummary

#: Lines of each kind that people are shown; all are in --json.
_SHOWN: Final = 20
#: Seconds between two words about how far it is.
_EVERY_S: Final = 30.0
_LOG: Final = logging.getLogger(__name__)
_stderr = Console(stderr=True)
_stdout = Console()


def import_command(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE_OR_DIR...",
            help="Logs, JSON, CSV, calls files, traces; or directories of them.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Data directory to add to.")],
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON document to stdout.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more, to stderr.")] = False,
) -> None:
    """Read nccl-tests outputs (text, -J JSON), CSV sweeps, what the plugin recorded, and traces.

    A directory stands for all such files below it; what is none of them is named and left alone. A
    CSV needs size_bytes, collective, and time_us or busbw_gbytes_per_s (docs/collect.md).

    Traces are those of PyTorch's profiler and dumps of NCCL's Inspector (.json, .json.gz, .tar.gz).
    What is what, the content tells.

    The calls files (.dcc) or traces of all ranks of a job belong into one import: the time of a
    call is known only with all its ranks.

    Example: dynamiccl-collect import all_reduce.log --out out/data --system mycluster
    Example: dynamiccl-collect import rank*.json.gz --out out/data --system mycluster
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
    kept = f"what was read so far is in {out}; the same command goes on, and takes nothing twice"
    with cli.interruptible(lambda: kept):
        summary = import_files(files, out, options=options, progress=_said_now_and_then())
    if as_json:
        cli.print_json(summary.to_json())
    else:
        _show(summary, out)


def _said_now_and_then() -> Callable[[int, int], None]:
    """A progress callback (done, total) that logs a line every half a minute."""
    last = time.monotonic()

    def say(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _EVERY_S and done < total:
            last = time.monotonic()
            _LOG.info("%d of %d files read", done, total)

    return say


def _show(summary: ImportSummary, out: Path) -> None:
    lines = [f"{r.path}:{r.line}: {r.reason}" for r in summary.rejected]
    for remark, paths in summary.remarks().items():
        others = f" (and {len(paths) - 1} more files)" if len(paths) > 1 else ""
        lines.append(f"{paths[0]}{others}: {remark}")
    for line in lines[:_SHOWN]:
        _stderr.print(line, markup=False, soft_wrap=True, highlight=False)
    if len(lines) > _SHOWN:
        _stderr.print(f"... and {len(lines) - _SHOWN} more (all of them with --json)")
    for path, what in summary.skipped.items():
        _stderr.print(f"{path}: left alone, {what}", markup=False, soft_wrap=True)
    for reason, count in summary.recorded.untimed.items():
        _stderr.print(f"{count} calls without a time: {reason}", highlight=False, soft_wrap=True)
    there = f"; {summary.already_there} were there already" if summary.already_there else ""
    _stdout.print(
        f"{summary.rows_read} rows read, {summary.written_text} written{there}, "
        f"{summary.dropped} dropped, {summary.duplicates} duplicates, "
        f"{len(summary.rejected)} rejected -> {out}",
        soft_wrap=True,
        highlight=False,
    )
