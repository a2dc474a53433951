"""`dynamiccl-train constants`: fits NCCL's tuning constants to the measurements of one shape."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dynamiccl import cli
from dynamiccl.errors import UserError
from dynamiccl.nccl import NcclVersion
from dynamiccl.simulator.default import (
    CostModel,
    find_machine,
    machine_names,
    read_machine,
)
from dynamiccl.simulator.group import Group
from dynamiccl.train.commands.options import Json, stdout


def constants_command(
    data: Annotated[Path, typer.Option(help="Data directory of dynamiccl-collect.")],
    group: Annotated[str, typer.Option(metavar="NODESxRANKS", help="The group shape.")],
    machine: Annotated[
        str, typer.Option(help=f"One of {', '.join(machine_names())}, or FILE.toml.")
    ],
    nccl: Annotated[str, typer.Option(metavar="VERSION", help="NCCL release of the jobs.")],
    out: Annotated[Path, typer.Option(help="JSON file for dynamiccl-deploy constants --from.")],
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    as_json: Json = False,
) -> None:
    """Fit constants of NCCL's own cost model to the measured times of one group shape.

    NCCL 2.28 and later lets a tuner write them when a communicator is made, and then decides by
    itself: no code of ours runs in a call. Fitted on training sizes and kept only if better on
    validation sizes; says what they are worth on test sizes beside a table of the nearest size.

    Example: dynamiccl-train constants --data data --group 4x8 --machine h100-ib --nccl 2.29.7
    --out constants.json
    """
    # Checked before the heavy imports: a typo should not take five seconds to be told.
    shape = Group(*cli.parse_group(group))
    described = read_machine(Path(machine)) if machine.endswith(".toml") else find_machine(machine)
    model = CostModel(NcclVersion.parse(nccl), described)
    try:
        comm = model.communicator(shape)
    except ValueError as error:
        raise UserError(f"--group {group}: {error}") from error
    from dynamiccl.datasets.scoring import task_grid
    from dynamiccl.datasets.splits import Split
    from dynamiccl.train.data import load_data
    from dynamiccl.train.recalibrate.factors import as_constants
    from dynamiccl.train.recalibrate.fit import recalibrate

    loaded = load_data(data, seed)
    test = task_grid(loaded.frame, loaded.catalogue, [Split.TEST])
    found = recalibrate(loaded, test, model, shape, seed=seed)
    if found.helps:
        out.write_text(json.dumps(as_constants(found.factors, comm), indent=1) + "\n", "utf-8")
    if as_json:
        figures = ("helps", "own", "constants", "table", "gain_of_table", "tasks")
        cli.print_json({name: getattr(found, name) for name in figures})
        return
    stdout.print(
        f"{found.tasks} test tasks, mean ln of time over the best measured: NCCL's own constants "
        f"{found.own:.4f}, fitted {found.constants:.4f}, a table of the nearest size "
        f"{found.table:.4f}"
    )
    if not found.helps:
        stdout.print("no better than NCCL's own on the validation sizes: nothing was written")
        return
    stdout.print(f"{found.gain_of_table:.0%} of the table's gain; {out} is for")
    stdout.print(
        f"  dynamiccl-deploy constants ARTIFACT --ranks {shape.num_ranks} --nodes "
        f"{shape.num_nodes} --from {out}",
        soft_wrap=True,
    )
