"""`dynamiccl-deploy explain`: what an artifact would change in a job."""

from pathlib import Path
from typing import Annotated

import typer

from dynamiccl import cli
from dynamiccl.datasets.manifest import GATE_NAME, KILL_NAME
from dynamiccl.errors import UserError
from dynamiccl.serve.artifact import Artifact, open_artifact
from dynamiccl.serve.calls_seen import Called, calls_in_trace, calls_of
from dynamiccl.serve.commands.options import (
    ArtifactDir,
    Json,
    System,
    folding_table,
    stderr,
    stdout,
    wide_stdout,
)
from dynamiccl.serve.explain import Gain, Outlook, gate_gains, look_ahead
from dynamiccl.sizes import bin_center_bytes

#: Rows that people are shown; --json has all.
_SHOWN = 15
_LEFT_OUT = "NCCL asks no tuner about them, or the trace does not tell size, ranks or nodes"


def explain_command(
    artifact: ArtifactDir,
    calls: Annotated[
        Path | None, typer.Option(metavar="DATA", help="Data directory with a job's calls.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv", help="Or a list: collective,size_bytes,count[,num_ranks,num_nodes]."
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks, where the calls do not say.", min=2)
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="NCCL's nNodes, where the calls do not say.", min=1)
    ] = None,
    system: System = None,
    as_json: Json = False,
) -> None:
    """Show what an artifact would change in your calls, and on what evidence.

    Example: dynamiccl-deploy explain artifact --calls data
    Example: dynamiccl-deploy explain artifact --trace calls.csv --ranks 16 --nodes 2
    """
    if calls is not None and trace is not None:
        raise UserError("--calls and --trace are two places for the same calls: give one")
    opened = open_artifact(artifact)
    called, left_out = _called(calls, trace, nodes, ranks)
    outlook = None if called is None else look_ahead(opened, called, system)
    if as_json:
        found = None if outlook is None else outlook.to_json()
        cli.print_json({**opened.to_json(), "outlook": found, "calls_left_out": left_out})
        return
    if left_out:
        stderr.print(f"{left_out} calls are left out: {_LEFT_OUT}", soft_wrap=True)
    for line in _about(opened):
        stdout.print(line, soft_wrap=True, highlight=False, markup=False)
    if outlook is not None:
        _show_outlook(outlook)
    for line in _in_the_process(opened):
        stdout.print(line, soft_wrap=True, highlight=False, markup=False)


def _called(
    calls: Path | None, trace: Path | None, nodes: int | None, ranks: int | None
) -> tuple[list[Called] | None, int]:
    """A job's calls (None: none were named), and the number of calls left out."""
    if calls is not None:
        return calls_of(calls, nodes, ranks)
    return (None if trace is None else calls_in_trace(trace, nodes, ranks)), 0


def _about(artifact: Artifact) -> list[str]:
    lines = [f"{artifact.directory}: {artifact.in_short}"]
    gains = gate_gains(artifact)
    if gains:
        least = min(gains.values(), key=lambda gain: gain.low)
        lines.append(
            f"evidence: {GATE_NAME}, fresh runs paired with NCCL's own choice; of {len(gains)} "
            f"size bins the least gain is {_text(least)}"
        )
    else:
        lines.append("evidence: none; no fresh run stands behind it")
    machines = [m for name in artifact.index.system_names for m in artifact.index.machines_of(name)]
    lines.append(f"acts on: {'; '.join(machines) or 'no machine yet (dynamiccl-deploy bind)'}")
    return lines


def _show_outlook(outlook: Outlook) -> None:
    table = folding_table(
        "collective", "bytes", "nodes x ranks", "calls", "ran", "would run", "channels", "gain"
    )
    for change in outlook.changes[:_SHOWN]:
        called = change.called
        table.add_row(
            called.collective.wire,
            str(bin_center_bytes(called.bin)),
            f"{called.num_nodes} x {called.num_ranks // called.num_nodes}",
            str(called.calls),
            called.ran or "not known",
            change.config,
            f"{change.channels or '?'}, NCCL's {change.own_channels or '?'}",
            "not measured" if change.gain is None else _text(change.gain),
        )
    if outlook.changes:
        wide_stdout().print(table)
    lines = [f"... and {len(outlook.changes) - _SHOWN} more (--json has all)"]
    lines = lines if len(outlook.changes) > _SHOWN else []
    lines.append(
        f"of {outlook.calls} calls it would decide {outlook.calls_changed}; NCCL's own choice "
        f"stands for the others, {outlook.calls_without_table} of them on shapes without a table"
    )
    if outlook.saved is not None:
        saved = outlook.saved
        lines.append(
            f"expected: {saved.mean:.1%} of the recorded time saved ({saved.low:.1%} to "
            f"{saved.high:.1%})"
        )
    if outlook.worst is not None and outlook.worst.gain is not None:
        called, gain = outlook.worst.called, outlook.worst.gain
        size = bin_center_bytes(called.bin)
        lines.append(f"worst case: {called.collective.wire} of {size} bytes, {_text(gain)}")
    for line in lines:
        stdout.print(line, soft_wrap=True, highlight=False, markup=False)


def _text(gain: Gain) -> str:
    return f"{gain.mean:+.1%} ({gain.low:+.1%} to {gain.high:+.1%})"


def _in_the_process(artifact: Artifact) -> list[str]:
    return [
        "in your process: one library (libnccl-tuner-dynamiccl.so) without threads, files or "
        "messages of its own once a communicator is made; each collective is a look-up in a table "
        "(docs/plugin.md)",
        f"off: touch {artifact.directory / KILL_NAME}, for communicators made from then on "
        "(in mode adaptive at once); for one job: DYNAMICCL_DISABLE=1",
    ]
