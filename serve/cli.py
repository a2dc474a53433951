"""`dynamiccl-deploy`: from a trained run to what a job loads."""

import json
import logging
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dynamiccl import cli
from dynamiccl.datasets.features import TUNED
from dynamiccl.errors import UnknownName
from dynamiccl.serve.artifact import (
    Artifact,
    TableInfo,
    export_artifact,
    find_policy,
    open_artifact,
    pick_table,
    verify_artifact,
)
from dynamiccl.serve.brain.policies import POLICIES, find_policy_maker
from dynamiccl.serve.brain.server import BrainServer
from dynamiccl.serve.build import find_plugin
from dynamiccl.serve.nccl_csv import nccl_csv
from dynamiccl.serve.table import DecisionTable
from dynamiccl.sizes import bin_center_bytes

app = typer.Typer(
    help="Turn a trained policy into an artifact that NCCL's tuner plugin loads.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_stdout = Console()
_log = logging.getLogger(__name__)
_FORMATS = ("nccl-csv", "json")
_Json = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
_ArtifactDir = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="Artifact directory.")]
_System = Annotated[str | None, typer.Option(help="System, where several have this shape.")]


def main() -> None:
    """Entry point of the console script."""
    cli.run(app)


@app.command("export")
def export_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run directory or run id.")],
    out: Annotated[Path, typer.Option(help="New artifact directory.")],
    mlruns: Annotated[Path, typer.Option(help="Where run ids are looked up.")] = Path("mlruns"),
    as_json: _Json = False,
) -> None:
    """Copy a run's policy and add its decision tables.

    Example: dynamiccl-deploy export RUN_ID --out out/artifact
    """
    _show(export_artifact(find_policy(run, mlruns), out), "exported", as_json=as_json)


@app.command("verify")
def verify_command(artifact: _ArtifactDir, as_json: _Json = False) -> None:
    """Check every file's hash, every table, and that the policy still decides so.

    Example: dynamiccl-deploy verify out/artifact
    """
    _show(verify_artifact(artifact), "whole", as_json=as_json)


def _show(artifact: Artifact, word: str, *, as_json: bool) -> None:
    if as_json:
        cli.print_json(artifact.to_json())
        return
    table = Table("system", "nodes", "ranks", "entries", "acting", "table")
    for info in artifact.tables:
        counts = (info.num_nodes, info.num_ranks, info.entries, info.acting)
        table.add_row(info.system, *map(str, counts), info.path)
    _stdout.print(table)
    _stdout.print(f"{artifact.directory}: {word}", soft_wrap=True)


@app.command("table")
def table_command(
    artifact: _ArtifactDir,
    ranks: Annotated[int, typer.Option(help="Ranks of the communicator.", min=2)],
    nodes: Annotated[int, typer.Option(help="NCCL's nNodes.", min=1)],
    system: _System = None,
    format_: Annotated[
        str, typer.Option("--format", help=f"One of {', '.join(_FORMATS)}.")
    ] = "json",
) -> None:
    """Print one decision table, for people's scripts or for NVIDIA's example tuner.

    Example: dynamiccl-deploy table out/artifact --ranks 32 --nodes 4 --format nccl-csv
    """
    if format_ not in _FORMATS:
        raise UnknownName("format", format_, _FORMATS)
    opened = open_artifact(artifact)
    info = pick_table(opened, nodes, ranks, system)
    table = DecisionTable.read(artifact / info.path)
    if format_ == "json":
        cli.print_json(_table_json(info, table))
        return
    written = nccl_csv(table)
    sys.stdout.write(written.text)
    lost = written.bins_abstaining + written.bins_with_auto
    if lost:
        print(
            f"warning: {written.bins_abstaining} size bins abstain and {written.bins_with_auto} "
            "leave a knob to NCCL; that format cannot say either, and NVIDIA's example tuner "
            "forces ONE channel where no line matches. Our own plugin abstains there.",
            file=sys.stderr,
        )


def _table_json(info: TableInfo, table: DecisionTable) -> dict[str, Any]:
    bins = range(table.first_bin, table.first_bin + table.num_bins)
    decisions: dict[str, list[dict[str, Any]]] = {}
    for collective in TUNED:
        rows = []
        for index in bins:
            size = bin_center_bytes(index)
            config = table.lookup(collective, size)
            rows.append(
                {"bin": index, "size_bytes": size, "config": config.key if config else None}
            )
        decisions[collective.wire] = rows
    return {
        "system": info.system,
        "num_nodes": table.num_nodes,
        "num_ranks": table.num_ranks,
        "decisions": decisions,
    }


@app.command("env")
def env_command(
    artifact: _ArtifactDir,
    system: _System = None,
    plugin: Annotated[
        Path | None, typer.Option(help="The built plugin; default out/plugin.")
    ] = None,
    as_json: _Json = False,
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


@app.command("brain")
def brain_command(
    policy: Annotated[
        str, typer.Option(help=f"One of {', '.join(POLICIES)}, or module:function of your own.")
    ],
    artifact: Annotated[Path, typer.Option(help="Artifact directory.")],
    socket: Annotated[Path, typer.Option(help="Unix socket to listen at.")],
    seed: Annotated[int, typer.Option(help="Seed of what a policy draws.", min=0)] = 0,
    as_json: _Json = False,
) -> None:
    """Decide for jobs in mode `adaptive` from a process of its own, until Ctrl-C.

    Start it on each node that may have a leader, and the job with DYNAMICCL_BRAIN_SOCKET=SOCKET.
    Stopped or slow, it leaves every job the table that it has.

    Example: dynamiccl-deploy brain --policy epsilon-greedy --artifact out/artifact --socket b.sock
    """
    make = find_policy_maker(policy)
    opened = open_artifact(artifact)
    make(opened, seed)  # what is wrong with it shows now, and not to the first leader
    cli.configure_logging(verbose=False)
    with BrainServer(socket.absolute(), lambda: make(opened, seed)) as server:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.stop())
        started = {"socket": str(server.path), "policy": policy, "artifact": str(artifact)}
        if as_json:
            print(json.dumps(started), flush=True)
        _log.info("policy '%s' of %s listens at %s", policy, artifact, server.path)
        server.serve()
    _log.info("stopped")


if __name__ == "__main__":
    main()
