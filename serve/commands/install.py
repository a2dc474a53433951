"""`dynamiccl-deploy install`: put everything that a job needs into one directory."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dynamiccl import cli
from dynamiccl.serve.commands.options import ArtifactDir, Json, stdout, warn
from dynamiccl.serve.install import Installed, check_gated
from dynamiccl.serve.install import install as install_artifact


def install_command(
    artifact: ArtifactDir,
    to: Annotated[Path, typer.Option(help="Directory that all nodes see at the same path.")],
    plugin: Annotated[
        Path | None, typer.Option(help="The built plugin; default out/plugin, else built now.")
    ] = None,
    ungated: Annotated[
        bool, typer.Option("--ungated", help="Install one that no gate judged all the same.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Put plugin, artifact, environment file, key, wrapper and job scripts into one directory.

    Again into the same directory: the artifact is checked first, then takes the old one's place in
    one step, and running jobs take it by agreement. A bad one is refused and the old one stays.

    Example: dynamiccl-deploy install out/artifact --to /shared/dynamiccl
    """
    with cli.working("checking the artifact; building the plugin where none is built"):
        if not ungated:
            check_gated(artifact)
        installed = install_artifact(artifact, to, plugin)
    if as_json:
        cli.print_json({**asdict(installed), "directory": str(installed.directory)})
        return
    for warning in installed.warnings:
        warn(warning)
    stdout.print("\n".join(_lines(installed)), soft_wrap=True, highlight=False, markup=False)


def _lines(installed: Installed) -> list[str]:
    lines = [f"{installed.directory}/{name}" for name in installed.written]
    before = installed.previous_sha256
    replaced = "" if before is None else f", in place of {before[:16]}"
    lines.append(f"artifact {installed.sha256[:16]}{replaced}: {installed.in_short}")
    if installed.key_kept:
        lines.append("the key that was there stays: jobs that run go on")
    if installed.killed:
        lines.append(f"{installed.directory}/artifact/kill is there: jobs make NCCL's own choice")
    lines.append(f"look at it here: dynamiccl-deploy doctor {installed.directory}/artifact")
    lines.append(f"start a job: {installed.directory}/bin/dynamiccl-run COMMAND...")
    return lines
