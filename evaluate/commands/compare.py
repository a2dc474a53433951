"""`dynamiccl-evaluate compare`: differences between a sweep before and one after an upgrade."""

from pathlib import Path
from typing import Annotated

import typer

from dynamiccl import cli
from dynamiccl.train.commands.options import Json, folding_table, stderr, wide_stdout

#: What a script is told when something got slower.
SLOWER = 1
_ROWS = 12


def compare_command(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Data directory of before.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Data directory of after.")],
    out: Annotated[
        Path | None, typer.Option(help="Where compare.html and compare.json go.")
    ] = None,
    q: Annotated[
        float, typer.Option(help="False discovery rate among what is listed.", min=0.0, max=1.0)
    ] = 0.05,
    least: Annotated[
        float, typer.Option(help="The least change that is listed, as a fraction.", min=0.0)
    ] = 0.01,
    as_json: Json = False,
) -> None:
    """List what got slower or faster beyond noise, and whether NCCL's choice is the reason.

    Exit code 1 when anything got slower. Two sweeps of one file, before and after an NCCL upgrade,
    a firmware, a cable; three cycles or more of each.

    Example: dynamiccl-evaluate compare before after --out compared
    """
    from dynamiccl.datasets.store import part_paths

    for folder in (old, new):
        part_paths(folder)
    from dynamiccl.datasets.store import read
    from dynamiccl.evaluate.compare.shown import compare, write

    with stderr.status("comparing"):
        found = compare((str(old), str(new)), read(old), read(new), q, least)
    page = None if out is None else write(found, out)
    if as_json:
        cli.print_json({**found.to_json(), "page": None if page is None else str(page)})
    else:
        wide = wide_stdout()
        for block in found.tables(_ROWS):
            table = folding_table(*block.heads, title=block.title)
            for row in block.rows:
                table.add_row(*row)
            wide.print(table)
        for line in [*found.verdicts, *([] if page is None else [str(page)])]:
            wide.print(line, soft_wrap=True, highlight=False)
    raise typer.Exit(SLOWER if found.changes.is_slower else 0)
