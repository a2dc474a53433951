"""`dynamiccl-collect export`: recorded calls in formats of other programs."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import polars as pl
import typer
from rich.console import Console

from dynamiccl import cli
from dynamiccl.collect.traces.param import param_trace
from dynamiccl.datasets.store import read
from dynamiccl.errors import NotEnoughData, UserError

#: Columns that tell recordings apart.
_RECORDING: Final = ("system", "sweep", "run", "source")
_stderr = Console(stderr=True)
_stdout = Console()


class _Format(StrEnum):
    """The export formats."""

    PARAM = "param"


def export_command(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Data directory with calls.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="JSON file to write.")],
    wanted: Annotated[
        _Format, typer.Option("--format", help="Whose format: PARAM's basic comms trace.")
    ] = _Format.PARAM,
    system: Annotated[str | None, typer.Option(help="The system, where there are several.")] = None,
    sweep: Annotated[str | None, typer.Option(help="The import, where there are several.")] = None,
    run: Annotated[str | None, typer.Option(help="The job, where there are several.")] = None,
    source: Annotated[
        str | None, typer.Option(help="What recorded the calls, where several did.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON document to stdout.")
    ] = False,
) -> None:
    """Write a job's recorded calls as a trace that PARAM's comm_replay plays on any cluster.

    One trace serves all ranks (comm_replay --use-one-trace). NVIDIA's own CSV for tuners is
    dynamiccl-deploy table's.

    Example: dynamiccl-collect export out/data --format param --out calls.json
    """
    calls = _of_one_recording(
        read(data, "calls"),
        {"system": system, "sweep": sweep, "run": run, "source": source},
    )
    found = param_trace(calls)
    if not found.calls:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in found.left_out.items())
        raise NotEnoughData(f"none of the {calls.height} calls in {data} can be played ({reasons})")
    out.write_text(json.dumps(found.entries, indent=1) + "\n", encoding="utf-8")
    left_out = dict(found.left_out)
    if as_json:
        cli.print_json(
            {"format": wanted.value, "calls": found.calls, "left_out": left_out, "out": str(out)}
        )
        return
    for reason, count in left_out.items():
        _stderr.print(f"{count} calls left out: {reason}", soft_wrap=True, highlight=False)
    _stdout.print(f"{found.calls} calls -> {out}", soft_wrap=True, highlight=False)


def _of_one_recording(calls: pl.DataFrame, chosen: dict[str, str | None]) -> pl.DataFrame:
    """The calls of the only matching recording; raises UserError with the choices."""
    for name, value in chosen.items():
        if value is not None:
            there = sorted(calls[name].unique())
            calls = calls.filter(pl.col(name) == value)
            if calls.is_empty():
                raise UserError(f"no calls of {name} '{value}'; there are {', '.join(there)}")
    for name in _RECORDING:
        there = sorted(calls[name].unique())
        if len(there) > 1:
            raise UserError(
                f"the calls are of {len(there)} recordings: choose one with --{name} "
                f"({', '.join(there)})"
            )
    return calls
