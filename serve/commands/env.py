"""`dynamiccl-deploy env`: the environment variables of a job."""

import shlex
import sys
from typing import Annotated

import typer

from dynamiccl import cli
from dynamiccl.doctor import Machine
from dynamiccl.serve.artifact import open_artifact
from dynamiccl.serve.build import find_plugin
from dynamiccl.serve.commands.options import ArtifactDir, Json, Plugin
from dynamiccl.serve.environment import MODES, JobSettings, job_environment


def env_command(
    artifact: ArtifactDir,
    system: Annotated[
        str | None, typer.Option(help="Also insist on this system: elsewhere the plugin abstains.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(MODES)}; default table.")
    ] = None,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Print the environment that makes a job use an artifact; notes go to stderr.

    Example: eval "$(dynamiccl-deploy env out/artifact)"
    """
    job = JobSettings(open_artifact(artifact), find_plugin(plugin), system=system, mode=mode)
    found = job_environment(job, Machine())
    for note in found.notes:
        print(f"# {note}", file=sys.stderr)
    if as_json:
        cli.print_json(found.variables)
        return
    for name, value in found.variables.items():
        print(f"export {name}={shlex.quote(value)}")
