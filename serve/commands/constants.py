"""`dynamiccl-deploy constants`: tuning constants for NCCL's cost model, in place of a table."""

from pathlib import Path
from typing import Annotated

import typer

from dynamiccl import cli
from dynamiccl.errors import UserError
from dynamiccl.serve.artifact import open_artifact, pick_table, set_constants
from dynamiccl.serve.commands.options import ArtifactDir, System, stdout
from dynamiccl.serve.constants import TuningConstants, read_json, relative_path


def constants_command(
    artifact: ArtifactDir,
    ranks: Annotated[int, typer.Option(help="Ranks of the communicator.", min=2)],
    nodes: Annotated[int, typer.Option(help="NCCL's nNodes.", min=1)],
    system: System = None,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="JSON", help="Take these; see below.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Use the table again.")] = False,
) -> None:
    """Show, set or remove the tuning constants of one communicator shape.

    From NCCL 2.28 on a tuner may change the constants of NCCL's own cost model when a communicator
    is made. With constants in an artifact the tuner does that and nothing else: NCCL decides, and
    no code of ours runs in a call. The JSON object has some of NCCL's names (baseLatencies,
    hwLatencies, llMaxBws, perChMax...) with nested lists of its shapes; null is NCCL's own. A value
    above 100 times NCCL's own, or below a hundredth, makes every rank keep NCCL's own. The
    artifact's hash changes: install it again wherever it is used.

    Example: dynamiccl-deploy constants out/artifact --ranks 32 --nodes 4 --from constants.json
    """
    if from_ is not None and remove:
        raise UserError("--from and --remove exclude each other")
    opened = open_artifact(artifact)
    info = pick_table(opened, nodes, ranks, system)
    if from_ is None and not remove:
        path = artifact / relative_path(info.system, nodes, ranks)
        cli.print_json(TuningConstants.read(path).to_json())
        return
    given = None if from_ is None else read_json(from_, num_nodes=nodes, num_ranks=ranks)
    set_constants(opened, info, given)
    what = "the table" if given is None else f"{int((given.values > 0).sum())} tuning constants"
    stdout.print(
        f"{info.system}, {ranks} ranks on {nodes} nodes: {what}; {artifact} is now "
        f"{open_artifact(artifact).index.sha256}",
        soft_wrap=True,
        highlight=False,
    )
