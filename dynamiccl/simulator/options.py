"""Command line options shared by the commands that simulate jobs."""

from typing import Annotated, Final

import typer

SystemOption = Annotated[str, typer.Option(help="Simulated system: a name or a file.")]
ScenarioOption = Annotated[str, typer.Option(help="Surroundings: a name or a file.")]
WorkloadOption = Annotated[
    list[str] | None, typer.Option(help="What jobs call; may be repeated. Default: ddp.")
]
NodesOption = Annotated[int, typer.Option(help="NCCL's nNodes.", min=1)]
RanksPerNodeOption = Annotated[int, typer.Option(help="GPUs of a node.", min=1)]
CallsOption = Annotated[int, typer.Option(help="Calls of each job.", min=1)]
DEFAULT_SYSTEM: Final = "h100-ib"
DEFAULT_SCENARIO: Final = "congested"
DEFAULT_WORKLOADS: Final = ("ddp",)
