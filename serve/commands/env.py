"""`dynamiccl-deploy env`: what a job's environment needs."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from dynamiccl import cli
from dynamiccl.errors import UnknownName
from dynamiccl.serve.artifact import open_artifact
from dynamiccl.serve.build import find_plugin
from dynamiccl.serve.commands.options import ArtifactDir, Json, System


def env_command(
    artifact: ArtifactDir,
    system: System = None,
    plugin: Annotated[
        Path | None, typer.Option(help="The built plugin; default out/plugin.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the environment that makes a job use an artifact.

    Example: eval "$(dynamiccl-deploy env out/artifact --system h100-ib-simulated)"
    """
    systems = sorted({info.system for info in open_artifact(artifact).tables})
    chosen = system or (systems[0] if len(systems) == 1 else "")
    if chosen not in systems:
        raise UnknownName("system", chosen or "(none given)", systems, where="--system")
    variables = {
        "NCCL_TUNER_PLUGIN": str(find_plugin(plugin).resolve()),
        "DYNAMICCL_ARTIFACT": str(artifact.resolve()),
        "DYNAMICCL_SYSTEM": chosen,
    }
    if as_json:
        cli.print_json(variables)
        return
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
    print(
        "warning: the ranks do not yet compare their tables: every node must read this artifact "
        "from the same file system, or a job can hang. Not for production jobs.",
        file=sys.stderr,
    )
