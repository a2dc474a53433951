"""`dynamiccl-evaluate upgrade`: calls for which another NCCL release would choose differently."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from dynamiccl import cli
from dynamiccl.errors import UserError
from dynamiccl.nccl import NcclVersion
from dynamiccl.train.commands.options import Json, stderr, wide_stdout

if TYPE_CHECKING:
    import polars as pl

    from dynamiccl.evaluate.upgrade.points import Points
    from dynamiccl.simulator.system import System

#: What a script is told when something would get slower.
SLOWER = 1
_ROWS = 20
#: Columns of the table.
_WIDTH = 100


def upgrade_command(
    old: Annotated[str, typer.Option("--from", metavar="RELEASE", help="NCCL now: 2.29.7.")],
    new: Annotated[str, typer.Option("--to", metavar="RELEASE", help="NCCL then: 2.30.7.")],
    system: Annotated[str, typer.Option(help="Simulated system: a name or a TOML file.")],
    calls: Annotated[
        Path | None, typer.Option(help="Data directory with the calls of a job.")
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Traces of a job, as dynamiccl-collect import takes them."),
    ] = None,
    nodes: Annotated[
        list[int] | None, typer.Option(help="Nodes of a group; may be repeated.", min=1)
    ] = None,
    ranks_per_node: Annotated[
        list[int] | None,
        typer.Option(
            help="GPUs of each of its nodes: once, or for each --nodes; of a job, where its calls "
            "do not tell.",
            min=1,
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Data directory with sweeps of the system.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where upgrade.html and upgrade.json go.")
    ] = None,
    least: Annotated[
        float, typer.Option(help="The least measured slowdown that counts, a fraction.", min=0.0)
    ] = 0.01,
    model_error: Annotated[
        float,
        typer.Option(help="The least modelled one, where nothing was measured.", min=0.0),
    ] = 0.15,
    as_json: Json = False,
) -> None:
    """Show where another NCCL release's cost model decides differently, and the cost.

    Exit code 1 when something would get slower. Compared are the calls of a job, or else all
    collectives and groups of the system at half-octave sizes.

    Example: dynamiccl-evaluate upgrade --from 2.27.5 --to 2.29.7 --system h100-ib --nodes 4
    --ranks-per-node 8
    """
    from dynamiccl.datasets.store import part_paths, read
    from dynamiccl.evaluate.upgrade.changes import Release, decide
    from dynamiccl.evaluate.upgrade.measured import MeasuredTimes
    from dynamiccl.evaluate.upgrade.shown import Limits, Upgrade, write
    from dynamiccl.simulator.systems import find_cost_model, find_system

    versions = NcclVersion.parse(old), NcclVersion.parse(new)
    releases = [Release(find_cost_model(system, v), find_system(system, v)) for v in versions]
    world = releases[1].system
    if data is not None:
        part_paths(data)
    with stderr.status("asking both releases"):
        points = _points(world, calls, trace or [], nodes or [], ranks_per_node or [])
        decisions = decide(points, *releases)
        times = None
        if data is not None:
            times = MeasuredTimes(
                read(data), world.name, lambda version: find_cost_model(system, version)
            )
    found = Upgrade(
        versions=(str(versions[0]), str(versions[1])),
        system=world.name,
        decisions=decisions,
        measured=[None if times is None else times.of(one) for one in decisions.ranges],
        measured_under=[] if times is None else times.versions,
        limits=Limits(least, model_error),
    )
    page = None if out is None else write(found, out)
    if as_json:
        cli.print_json({**found.to_json(), "page": None if page is None else str(page)})
    else:
        wide = wide_stdout(_WIDTH)
        wide.width = min(wide.width, _WIDTH)
        wide.print(found.verdicts[0], soft_wrap=True, highlight=False)
        if decisions.ranges:
            block = found.table(_ROWS)
            table = Table(
                title=block.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
            )
            for head in block.heads:
                # The longest word of a config: NVLSTree/Simple, CollNetDirect never.
                table.add_column(
                    head, min_width=15 if head in found.versions else None, overflow="fold"
                )
            for row in block.rows:
                table.add_row(*row)
            wide.print(table)
        more = len(decisions.ranges) - _ROWS
        hidden = [f"{more} more ranges: --out DIR or --json has them."] if more > 0 else []
        for line in [*hidden, *found.verdicts[1:], *([] if page is None else [str(page)])]:
            wide.print(line, soft_wrap=True, highlight=False)
    raise typer.Exit(SLOWER if any(found.slower) else 0)


def _points(
    system: "System",
    calls: Path | None,
    trace: list[Path],
    nodes: list[int],
    ranks_per_node: list[int],
) -> "Points":
    """The points to ask about: a job's calls, the named groups, or all groups of the system."""
    from dynamiccl.evaluate.upgrade.points import called, grid
    from dynamiccl.simulator.group import Group

    if calls is not None or trace:
        if nodes or len(ranks_per_node) > 1 or (calls is not None and trace):
            raise UserError(
                "--calls or --trace says the groups: give one of them, no --nodes, and at most one "
                "--ranks-per-node"
            )
        return called(_calls(calls, trace, system.name), next(iter(ranks_per_node), None))
    if bool(nodes) != bool(ranks_per_node) or len(ranks_per_node) not in {0, 1, len(nodes)}:
        raise UserError(
            f"--nodes {nodes} and --ranks-per-node {ranks_per_node} make no groups; give one "
            "--ranks-per-node, or one for each --nodes"
        )
    if not nodes:
        return grid(system.groups(), system.collectives())
    ranks = ranks_per_node if len(ranks_per_node) > 1 else ranks_per_node * len(nodes)
    groups = [Group(*shape) for shape in zip(nodes, ranks, strict=True)]
    return grid(groups, system.collectives())


def _calls(calls: Path | None, trace: list[Path], system: str) -> "pl.DataFrame":
    """The table `calls` of a data directory, or of traces."""
    import polars as pl

    from dynamiccl.collect.traces import read_traces
    from dynamiccl.datasets.store import read_calls

    if calls is None:
        found = read_traces(trace, system=system, sweep="traces")
        for error in found.errors:
            stderr.print(f"warning: {error}", soft_wrap=True, highlight=False, markup=False)
        return pl.DataFrame(found.calls)
    return read_calls(calls)
