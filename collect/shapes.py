"""`dynamiccl-collect shapes`: NCCL's cost tables for group shapes without measurements.

The same as NCCL would log of a job of that shape, by the simulator's model of NCCL: 3,330 recorded
costs of 2.27 to 2.30 come out of it (dynamiccl/simulator/ORIGIN.md). A log of such a job is better,
where there is one: `dynamiccl-collect import` takes NCCL's costs from any.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dynamiccl import cli
from dynamiccl.collect.nccl_log import as_logged, write_costs
from dynamiccl.datasets.schema import DEFAULT_PROFILE, MODELLED_SWEEP
from dynamiccl.datasets.store import check_slug
from dynamiccl.errors import UserError
from dynamiccl.nccl import NcclVersion
from dynamiccl.simulator.default import CostModel, find_machine, machine_names, read_machine
from dynamiccl.simulator.group import Group

_stdout = Console()


def shapes_command(
    system: Annotated[str, typer.Option(help="Name of the system in the data.")],
    machine: Annotated[
        str, typer.Option(help=f"One of {', '.join(machine_names())}, or FILE.toml.")
    ],
    nccl: Annotated[str, typer.Option(metavar="VERSION", help="NCCL release of the jobs.")],
    group: Annotated[list[str], typer.Option(metavar="NODESxRANKS", help="May be repeated.")],
    out: Annotated[Path, typer.Option("--out", help="Data directory to add to.")],
) -> None:
    """Add NCCL's modelled cost tables for group shapes to a data set; needs no machine.

    Example: dynamiccl-collect shapes --system lab --machine h100-ib --nccl 2.29.7 --group 16x8
    --out data
    """
    check_slug(system, "system")
    described = read_machine(Path(machine)) if machine.endswith(".toml") else find_machine(machine)
    model = CostModel(NcclVersion.parse(nccl), described)
    for text in group:
        shape = Group(*cli.parse_group(text))
        try:
            lines = model.lines(shape)
        except ValueError as error:
            raise UserError(f"--group {text}: {error}") from error
        known = {
            "system": system,
            "sweep": MODELLED_SWEEP,
            "source_file": f"modelled: {described.name}",
            "nccl_version": str(NcclVersion.parse(nccl)),
            "num_ranks": shape.num_ranks,
            "num_nodes": shape.num_nodes,
            "ranks_per_node": shape.ranks_per_node,
            "launch_profile": DEFAULT_PROFILE,
        }
        [path] = write_costs(out, as_logged(lines), known, program="shapes")
        _stdout.print(f"{text}: {len(lines)} costs in {path}", soft_wrap=True)
