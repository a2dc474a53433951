"""`dynamiccl-evaluate job`: what a job would gain, from its own calls."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynamiccl import cli
from dynamiccl.errors import UserError
from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.commands.options import Json, RunStore, folding_table, wide_stdout

if TYPE_CHECKING:
    import polars as pl

    from dynamiccl.evaluate.job.gains import Source
    from dynamiccl.simulator.systems import System
    from dynamiccl.train.policy import TorchPolicy

_ROWS = 12


def job_command(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="CALLS...", help="Traces of a job, or a data directory with calls."),
    ],
    data: Annotated[
        Path | None, typer.Option(help="Data directory with a sweep of the job's machines.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="RUN_OR_ARTIFACT", help="What this policy saves, beside the table."),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(help="With --data: which of its systems. Without: a simulated one."),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODESxRANKS",
            help="How process groups of so many ranks lie, where the trace does not say: 4x8.",
        ),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(help="GPUs of a node, to place the ranks that the trace names.", min=1),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="For job.html, job.json and cover.toml, the sweep of what is missing."),
    ] = None,
    tracking_uri: RunStore = DEFAULT_TRACKING_URI,
    as_json: Json = False,
) -> None:
    """What a job would gain under a policy or the best table, from its own calls.

    The verdict is gain, nothing or cannot-tell; exit code 0 for all three.

    Example: dynamiccl-evaluate job traces --data data --out job
    Example: dynamiccl-evaluate job trace.json.gz --system h100-ib --group 4x8
    """
    if data is None and system is None:
        raise UserError(
            "nothing to compare with: give --data DIR with a sweep of the job's machines, or "
            "--system NAME of a simulated one"
        )
    groups = [cli.parse_group(text) for text in group or []]
    with cli.working("reading traces"):
        from dynamiccl.datasets.store import read
        from dynamiccl.evaluate.job.calls import read_job
        from dynamiccl.evaluate.job.output import to_json, write
        from dynamiccl.evaluate.job.saved import answer, policy_choice
        from dynamiccl.simulator.systems import find_system

        known = find_system(system or "") if data is None else read(data)
        job = read_job(traces, ranks_per_node)
        loaded = None if policy is None else _load(policy, tracking_uri)
        source, is_seen = _source(known, system, job.nccl_version, loaded)
        choose = None if loaded is None else policy_choice(loaded, source.system)
        found = answer(job, source, groups=groups, policy=choose, seen=is_seen)
        if loaded is not None and loaded.manifest.slack is not None:
            found.notes.append(loaded.manifest.slack.promise)
        told = to_json(found)
    page = None if out is None else str(write(told, [str(path) for path in traces], out))
    if as_json:
        cli.print_json({**told, "page": page})
    else:
        _show(told, page)


def _load(policy: str, tracking_uri: str) -> "TorchPolicy":
    from dynamiccl.train.policy import TorchPolicy
    from dynamiccl.train.tracking import policy_directory

    return TorchPolicy.load(policy_directory(policy, tracking_uri))


def _source(
    known: "pl.DataFrame | System",
    system: str | None,
    version: str | None,
    loaded: "TorchPolicy | None",
) -> tuple["Source", bool]:
    """What tells gains, and whether the policy was trained on the runs that they are of."""
    import polars as pl

    from dynamiccl.datasets.cells import run_names
    from dynamiccl.evaluate.job.gains import Measured, Modelled

    if not isinstance(known, pl.DataFrame):
        return Modelled(known, loaded.manifest.actions().configs if loaded else ()), False
    runs = set(loaded.manifest.runs) if loaded else set()
    return Measured(known, system, version), not runs.isdisjoint(run_names(known))


def _say(text: str) -> None:
    wide_stdout().print(text, soft_wrap=True, highlight=False, markup=False)


def _show(told: dict[str, Any], page: str | None) -> None:
    from dynamiccl.evaluate.job.output import tables

    _say(told["sentence"])
    if told["modelled"]:
        _say(f"modelled: gains are those of the simulated {told['system']}, not measured")
    _say(", ".join(f"{part['name']} {part['share']:.1%}" for part in told["parts"]))
    for block in tables(told, _ROWS):
        table = folding_table(*block.heads, title=block.title)
        for row in block.rows:
            table.add_row(*row)
        wide_stdout().print(table)
    sweep = f"to cover it, measure this sweep (--out DIR writes it):\n{told['sweep']}"
    notes = [f"note: {note}" for note in told["notes"]]
    for line in filter(None, (*notes, sweep if told["sweep"] else None, page)):
        _say(line)
