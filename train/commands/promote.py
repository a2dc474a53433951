"""`dynamiccl-train promote`: make a policy the champion."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dynamiccl import cli
from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.commands.options import Json, TrackingUri, stdout


def promote_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run that the gate judged.")],
    gated: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What dynamiccl-evaluate gate wrote.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Take a policy that no gate let through.")
    ] = False,
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    as_json: Json = False,
) -> None:
    """Make a gated policy the champion: the registered version that jobs are to run.

    Example: dynamiccl-train promote models:/dynamiccl@candidate --gated out/gated
    """
    cli.configure_logging(verbose=False)
    from dynamiccl.train import tracking
    from dynamiccl.train.promote import promote

    found = promote(run, tracking_uri, gated=gated, force=force)
    if as_json:
        cli.print_json(asdict(found))
        return
    acts = "" if found.passed_bins is None else f", acts in {found.passed_bins} size bins"
    before = f" (before: version {found.version_before})" if found.version_before else ""
    name = f"models:/{tracking.MODEL_NAME}@{tracking.CHAMPION}"
    stdout.print(
        f"{name} is version {found.version}{acts}{before}\n"
        f"deploy it with: dynamiccl-deploy export {found.policy} --out DIR",
        soft_wrap=True,
        highlight=False,
    )
