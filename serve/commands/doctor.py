"""`dynamiccl-deploy doctor`: whether NCCL loads the plugin here, and whether it acts."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dynamiccl import cli
from dynamiccl.doctor import Machine, report
from dynamiccl.errors import MissingPath
from dynamiccl.libraries import TUNER_NAME, built, is_ours
from dynamiccl.serve.artifact import installed_plugin
from dynamiccl.serve.commands.options import Json
from dynamiccl.serve.doctor import Question, check_for_job, compare, rank_line


def doctor_command(
    artifact: Annotated[
        Path | None,
        typer.Argument(metavar="[ARTIFACT]", help="Artifact; default DYNAMICCL_ARTIFACT."),
    ] = None,
    plugin: Annotated[
        Path | None,
        typer.Option(
            help="The plugin; default NCCL_TUNER_PLUGIN where ours, else installed or built."
        ),
    ] = None,
    nccl: Annotated[
        Path | None, typer.Option(help="The jobs' libnccl.so.2; default: what is found here.")
    ] = None,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="As one rank of a launcher: say what this has.")
    ] = False,
    compare_file: Annotated[
        Path | None, typer.Option("--compare", help="Output of all ranks; - is standard input.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Look at this machine before a job: what NCCL would load, and whether tables would act.

    Exit code 4 when something failed. With --all-ranks each rank of a launcher says what it has,
    and --compare says whether all have the same.

    Example: dynamiccl-deploy doctor out/artifact --nccl /opt/nccl/lib/libnccl.so.2
    Example: srun dynamiccl-deploy doctor --all-ranks out/artifact | dynamiccl-deploy doctor
    --compare -
    """
    if compare_file is not None:
        _compare(compare_file, as_json=as_json)
        return
    looked_at = artifact or _variable("DYNAMICCL_ARTIFACT")
    question = Question(_plugin(plugin, looked_at), looked_at, nccl)
    if all_ranks:
        print(rank_line(Machine(), question), flush=True)
        return
    raise typer.Exit(report([*check_for_job(Machine(), question)], as_json=as_json))


def _plugin(named: Path | None, artifact: Path | None) -> Path:
    """The plugin to check: as named, of the environment, installed with the artifact, or built."""
    if named is not None:
        return named
    loaded = _variable("NCCL_TUNER_PLUGIN")
    if loaded and is_ours(str(loaded)):
        return loaded
    installed = None if artifact is None else installed_plugin(artifact)
    return installed or built(TUNER_NAME)


def _variable(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None


def _compare(file: Path, *, as_json: bool) -> None:
    if str(file) == "-":
        text = sys.stdin.read()
    elif file.is_file():
        text = file.read_text(encoding="utf-8", errors="replace")
    else:
        raise MissingPath("list of ranks", file, "give a file, or - for standard input")
    agreed = compare(text.splitlines())
    if as_json:
        cli.print_json(asdict(agreed))
        return
    artifact = agreed.artifact_sha256[:16]
    acts = (
        f"acts in {agreed.acting} size bins"
        if agreed.acting
        else "acts at no size, if there is one"
    )
    print(
        f"{agreed.num_ranks} ranks are alike: {agreed.system}, artifact {artifact}; for a "
        f"communicator of all of them its table {acts}"
    )
