"""`dynamiccl-evaluate explain`: a policy's prediction for each config, and why it acts or not."""

from typing import Annotated

import typer

from dynamiccl import cli
from dynamiccl.collect.grid import parse_size
from dynamiccl.errors import UserError
from dynamiccl.nccl import Collective
from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.commands.options import Json, RunStore, folding_table, wide_stdout

_ROWS = 15


def explain_command(
    policy: Annotated[
        str, typer.Argument(metavar="RUN_OR_ARTIFACT", help="Run id, directory, models:/...")
    ],
    collective: Annotated[str, typer.Option(help="As NCCL spells it.")],
    size: Annotated[str, typer.Option(help="Message size (NCCL's nBytes): 4096, 64K, 4M.")],
    ranks: Annotated[int, typer.Option(help="Ranks of the communicator.", min=2)],
    nodes: Annotated[int, typer.Option(help="NCCL's nNodes.", min=1)],
    system: Annotated[
        str | None, typer.Option(help="System, where several have this shape.")
    ] = None,
    tracking_uri: RunStore = DEFAULT_TRACKING_URI,
    as_json: Json = False,
) -> None:
    """Show what a policy predicts for each config of one message, the margin, noise and gate.

    Example: dynamiccl-evaluate explain RUN_ID --collective AllReduce --size 4M --ranks 16 --nodes 2
    """
    try:
        size_bytes = parse_size(size)
    except ValueError as error:
        raise UserError(f"--size: {error}") from error
    wanted = Collective.parse(collective, where="--collective")
    from dynamiccl.datasets.manifest import INDEX_NAME
    from dynamiccl.evaluate.explain import Query, explain, verdict_text
    from dynamiccl.serve.artifact import acts_nowhere
    from dynamiccl.train.tracking import policy_directory

    asked = Query(wanted, size_bytes, nodes, ranks, system)
    folder = policy_directory(policy, tracking_uri)
    found = explain(folder, asked)
    # A run has no index, and nothing to bind.
    has_index = (folder / INDEX_NAME).is_file()
    nowhere = acts_nowhere(folder, found.system) if has_index else []
    if as_json:
        cli.print_json({**found.to_json(), "warnings": [what for what, _ in nowhere]})
        return
    title = (
        f"{wanted.wire} of {size_bytes} bytes, {ranks} ranks on {nodes} nodes of {found.system} "
        f"(the same from {found.first_byte} to {found.last_byte} bytes)"
    )
    own = "not read back" if found.own_channels is None else str(found.own_channels)
    heads = ("config", "predicted time over NCCL's", f"channels (NCCL's: {own})", "may be chosen")
    table = folding_table(*heads, title=title)
    # What it takes is among the fastest, or is NCCL's own choice.
    for each in found.predictions[:_ROWS]:
        used = "-" if each.channels is None else str(each.channels)
        table.add_row(each.config, f"{each.time_over_default:.3f}", used, each.not_allowed or "yes")
    wide = wide_stdout()
    wide.print(table)
    if len(found.predictions) > _ROWS:
        wide.print(f"and {len(found.predictions) - _ROWS} slower ones (--json has all)")
    band = "unknown" if found.noise_band is None else f"{found.noise_band:.2%}"
    for line in (
        f"margin {found.margin:.2%}, noise band {band}",
        f"gate: {verdict_text(found.gate)}",
        f"{found.chosen}: {found.reason}",
        *map("; ".join, nowhere),
    ):
        wide.print(line, soft_wrap=True, highlight=False, markup=False)
