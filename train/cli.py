"""`dynamiccl-train`: offline training on measured data."""

from functools import partial

import typer

from dynamiccl import cli
from dynamiccl.train.commands.fit import fit_command, list_command
from dynamiccl.train.commands.promote import promote_command
from dynamiccl.train.commands.study import study_command
from dynamiccl.train.commands.trigger import trigger_command

app = typer.Typer(
    help="Train policies offline on measured data; every run is tracked in MLflow.",
    **cli.APPLICATION,
)
app.command("list")(list_command)
app.command("fit")(fit_command)
app.command("study")(study_command)
app.command("trigger")(trigger_command)
app.command("promote")(promote_command)


def main() -> None:
    """Entry point of `dynamiccl-train`."""
    cli.run(partial(app, standalone_mode=False))


if __name__ == "__main__":
    main()
