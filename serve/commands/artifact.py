"""`dynamiccl-deploy export` and `verify`: make an artifact, and verify it."""

from pathlib import Path
from typing import Annotated

import typer

from dynamiccl import cli
from dynamiccl.datasets.job_tasks import slack_of
from dynamiccl.datasets.manifest import Manifest, find_policy_in, find_trigger_in
from dynamiccl.datasets.options import Hidden, MaxChannels, Objective, SlackShare
from dynamiccl.errors import MissingPath
from dynamiccl.serve.artifact import Artifact, export_artifact, verify_artifact
from dynamiccl.serve.commands.options import (
    ArtifactDir,
    Json,
    folding_table,
    stderr,
    stdout,
    warn,
)
from dynamiccl.train import DEFAULT_TRACKING_URI


def export_command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run id, models:/dynamiccl@champion, directory.")
    ],
    out: Annotated[Path, typer.Option(help="New artifact directory.")],
    trigger: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Run of dynamiccl-train trigger that goes into it."),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODESxRANKS",
            help="Also make a table for this group shape without measurements; repeatable.",
        ),
    ] = None,
    slack: SlackShare = None,
    hidden: Hidden = None,
    max_channels: MaxChannels = None,
    objective: Objective = "call",
    tracking_uri: Annotated[
        str, typer.Option(help="MLflow store that holds the run ids.")
    ] = DEFAULT_TRACKING_URI,
    as_json: Json = False,
) -> None:
    """Copy a run's policy and add its decision tables.

    With --slack, calls that compute hides get the fewest channels within that share of time, and
    never more than NCCL's own choice takes: never slower is said of the step then, not of the call.
    With --objective job they get what surely shortens the step most, by the job's traces and a
    sweep beside matrix products (interference of kind matmul), both in --hidden DATA.

    Example: dynamiccl-deploy export RUN_ID --out out/artifact
    Example: dynamiccl-deploy export RUN_ID --out out/artifact --slack 5% --hidden data
    Example: dynamiccl-deploy export RUN_ID --out out/artifact --objective job --hidden data
    """
    groups = [cli.parse_group(text) for text in group or []]
    with cli.working("making tables and brain, and checking them"):
        policy = _find_policy(run, tracking_uri)
        watching = None if trigger is None else _find_trigger(trigger, tracking_uri)
        known = Manifest.read_unchecked(policy)
        wanted, notes = slack_of(known, slack, hidden, max_channels, objective)
        artifact = export_artifact(policy, out, watching, groups, wanted)
    if wanted is not None:
        notes.append("there is no brain.pt: mode adaptive knows no slack, so use mode table")
    for note in notes:
        stderr.print(note, soft_wrap=True, highlight=False)
    if watching is not None and known.trigger is None:
        warn(
            "this policy was trained without a Trigger: interference levels are something that it "
            "has never seen, and what it makes of them was never learned"
        )
    if not artifact.is_gated:
        warn(
            "this policy passed no gate: nothing but its own margin keeps it from being slower "
            "than NCCL; measure fresh runs and use 'dynamiccl-evaluate gate' before jobs run "
            "under it"
        )
    carried = [f"{s.num_nodes}x{s.ranks_per_node}" for s in artifact.manifest.supports if s.carried]
    if carried:
        warn(
            f"nothing was measured on {', '.join(carried)}: those tables rest on other shapes and "
            "on NCCL's own costs; measure a few sizes there before jobs rely on them"
        )
    _show(artifact, "exported", as_json=as_json)


def _find_policy(run: str, tracking_uri: str) -> Path:
    """The policy directory of a run, `models:/` name or directory (which needs no MLflow)."""
    found = find_policy_in(Path(run.removeprefix("file://")))
    if found is not None:
        return found
    from dynamiccl.train.tracking import policy_directory

    return policy_directory(run, tracking_uri)


def _find_trigger(run: str, tracking_uri: str) -> Path:
    """The `trigger.pt` of a run, `models:/` name or directory."""
    folder = Path(run.removeprefix("file://"))
    if not folder.exists():
        from dynamiccl.train.tracking import run_directory

        folder = run_directory(run, tracking_uri)
    found = find_trigger_in(folder)
    if found is None:
        raise MissingPath("trigger", folder, "give a run of 'dynamiccl-train trigger'")
    return found


def verify_command(artifact: ArtifactDir, as_json: Json = False) -> None:
    """Check all hashes and tables, and that the policy reproduces the tables.

    Example: dynamiccl-deploy verify out/artifact
    """
    _show(verify_artifact(artifact), "whole", as_json=as_json)


def _show(artifact: Artifact, word: str, *, as_json: bool) -> None:
    if as_json:
        cli.print_json(artifact.to_json())
        return
    for what, advice in artifact.warnings:
        warn(f"{what}; {advice}")
    table = folding_table("system", "nodes", "ranks", "entries", "acting", "table")
    for info in artifact.tables:
        counts = (info.num_nodes, info.num_ranks, info.entries, info.acting)
        table.add_row(info.system, *map(str, counts), info.path)
    stdout.print(table)
    stdout.print(f"{artifact.directory}: {word}; {artifact.in_short}", soft_wrap=True)
