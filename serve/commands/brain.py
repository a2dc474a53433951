"""`dynamiccl-deploy brain`: the brain server for running jobs."""

import json
import logging
import signal
from pathlib import Path
from typing import Annotated

import typer

from dynamiccl import cli
from dynamiccl.serve.artifact import open_artifact
from dynamiccl.serve.brain.policies import POLICIES, find_policy_maker
from dynamiccl.serve.brain.server import BrainServer
from dynamiccl.serve.commands.options import Json

_log = logging.getLogger(__name__)


def brain_command(
    policy: Annotated[
        str, typer.Option(help=f"One of {', '.join(POLICIES)}, or module:function of your own.")
    ],
    artifact: Annotated[Path, typer.Option(help="Artifact directory.")],
    socket: Annotated[Path, typer.Option(help="Unix socket to listen at.")],
    seed: Annotated[int, typer.Option(help="Seed of what a policy draws.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Serve decisions to jobs in mode `adaptive`, until Ctrl-C.

    Start it on each node that may have a leader, and the job with DYNAMICCL_BRAIN_SOCKET=SOCKET.
    Stopped or slow, it leaves every job the table that it has.

    Example: dynamiccl-deploy brain --policy search --artifact out/artifact --socket b.sock
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
