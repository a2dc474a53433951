"""`dynamiccl-deploy bind`: assign a machine to a system of an artifact."""

from pathlib import Path
from typing import Annotated

import typer

from dynamiccl import cli
from dynamiccl.doctor import Machine
from dynamiccl.errors import UnknownName
from dynamiccl.serve.artifact import open_artifact
from dynamiccl.serve.build import find_plugin
from dynamiccl.serve.commands.options import ArtifactDir, Json, Plugin, stdout
from dynamiccl.serve.this_machine import own_fingerprint


def bind_command(
    artifact: ArtifactDir,
    system: Annotated[str | None, typer.Option(help="The system; may be left out if one.")] = None,
    fingerprint: Annotated[
        str | None, typer.Option(help="The machine; default: the one that this runs on.")
    ] = None,
    nccl: Annotated[
        Path | None, typer.Option(help="The jobs' libnccl.so.2; default: the one found here.")
    ] = None,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Let an artifact's tables act on a kind of machine that its data do not name.

    Without a known fingerprint the plugin abstains: data that were imported or simulated say
    nothing of the machine. Bind only machines like the one that was measured. The artifact's hash
    changes: install it again wherever it is used.

    Example: dynamiccl-deploy bind out/artifact --system h100-ib-simulated
    """
    opened = open_artifact(artifact)
    names = opened.index.system_names
    chosen = system or (names[0] if len(names) == 1 else "")
    if chosen not in names:
        raise UnknownName("system", chosen or "(none given)", names, where="--system")
    machine = fingerprint or own_fingerprint(Machine(), find_plugin(plugin), nccl)
    before = opened.index.systems.get(machine)
    index = opened.index.bound(chosen, machine)
    index.write(artifact)
    if as_json:
        cli.print_json(
            {"fingerprint": machine, "system": chosen, "before": before, "sha256": index.sha256}
        )
        return
    moved = f", no longer to {before}" if before not in {None, chosen} else ""
    stdout.print(f"{machine}: belongs to {chosen}{moved}", soft_wrap=True, highlight=False)
    stdout.print(f"{artifact}: now {index.sha256}", soft_wrap=True, highlight=False)
