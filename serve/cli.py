"""`dynamiccl-deploy`: from a trained run to files that a job loads."""

from functools import partial
from typing import Final

import typer

from dynamiccl import cli
from dynamiccl.serve.ab import ab_command
from dynamiccl.serve.brain import brain_command
from dynamiccl.serve.doctor import doctor_command
from dynamiccl.serve.explain import explain_command, table_command
from dynamiccl.serve.export import bind_command, export_command
from dynamiccl.serve.install import install_command

app = typer.Typer(
    help="Turn a trained policy into an artifact that NCCL's tuner plugin loads.",
    **cli.APPLICATION,
)
app.command("export")(export_command)
app.command("bind")(bind_command)
app.command("table")(table_command)
app.command("install")(install_command)
app.command("doctor")(doctor_command)
# The first word that is no option of ours begins the job's command, with its own options.
app.command("ab", context_settings={"allow_interspersed_args": False})(ab_command)
app.command("explain")(explain_command)
app.command("brain")(brain_command)


main: Final = partial(cli.run, partial(app, standalone_mode=False))


if __name__ == "__main__":
    main()
