"""`dynamiccl-evaluate gate`: which bins of a policy may be deployed, and the sweep to find out."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynamiccl import cli
from dynamiccl.datasets.objective import Hidden, MaxChannels, Objective, SlackShare, SmPrice
from dynamiccl.errors import MissingPath, UserError
from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.commands.options import Json, RunStore, stderr

if TYPE_CHECKING:
    from dynamiccl.evaluate.gate.gate import Gated
    from dynamiccl.train.policy import TorchPolicy

#: Policy and MLflow store; --slack, --hidden, --max-channels, --objective and --sm-price.
_Asked = tuple[str, str, str | None, str | None, int | None, str, float]


def gate_command(
    policy: Annotated[
        str, typer.Option(metavar="RUN_OR_ARTIFACT", help="Run id, run directory, artifact.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="Fresh runs of default and configs: none the policy was trained on."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the policy that may be deployed goes.")
    ] = None,
    known: Annotated[
        Path | None,
        typer.Option(help="The data trained on: NCCL's own choice where --data do not tell."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FRESH.toml", help="Write the sweep of --data, in place of judging."),
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(metavar="SWEEP.toml", help="With --plan: the sweep of the data trained on."),
    ] = None,
    power: Annotated[
        float | None,
        typer.Option(
            help="With --plan: share of bins to pass, of those that can; default 0.8, or what "
            "takes no longer than the sweep.",
            min=0,
            max=1,
        ),
    ] = None,
    q: Annotated[
        float, typer.Option(help="False discovery rate over all tested bins.", min=0.0, max=1.0)
    ] = 0.01,
    slack: SlackShare = None,
    hidden: Hidden = None,
    max_channels: MaxChannels = None,
    objective: Objective = "call",
    sm_price: SmPrice = 0.0,
    tracking_uri: RunStore = DEFAULT_TRACKING_URI,
    as_json: Json = False,
) -> None:
    """Allow bins where fresh runs show a gain over NCCL's default; all others abstain.

    With --plan FRESH.toml it writes the sweep of these fresh runs: only where the policy acts, only
    its config and the default, so often as the gate's test needs. With --slack what takes fewer
    channels than NCCL's own choice may lose less than that: never slower is said of the step then;
    with --objective job it may lose what the compute beside it gets back.

    Example: dynamiccl-evaluate gate --policy RUN_ID --known data --sweep s.toml --plan fresh.toml
    Example: dynamiccl-evaluate gate --policy RUN_ID --data fresh --known data --out gated
    """
    from dynamiccl.evaluate.page import tell

    asked = policy, tracking_uri, slack, hidden, max_channels, objective, sm_price
    if plan is not None:
        if sweep is None or known is None:
            missing = "--sweep SWEEP.toml" if sweep is None else "--known DATA"
            raise UserError(
                f"--plan {plan} needs {missing}: the sweep file and the data that the policy was "
                "trained on"
            )
        with cli.working("loading PyTorch and the policy, planning"):
            planned = _plan(plan, sweep, known, asked, q, power)
        tell("plan", planned, planned, as_json=as_json)
        return
    if data is None or out is None:
        missing = "--data FRESH_DATA" if data is None else "--out DIR"
        raise UserError(f"{missing} is missing; or write the sweep to measure with --plan FILE")
    with cli.working("loading PyTorch and the policy, judging"):
        gated = _judge(data, out, known, asked, q)
    tell(
        "gate",
        {**gated.to_show(), "out": out, "page": out / "gate.html"},
        gated.to_json(),
        as_json=as_json,
    )


def _load(asked: _Asked) -> tuple["TorchPolicy", Path]:
    """A policy, as its tables would be made with the slack that was asked for, and its folder."""
    from dynamiccl.datasets.objective import slack_of
    from dynamiccl.train.policy import TorchPolicy
    from dynamiccl.train.tracking import policy_directory

    folder = policy_directory(*asked[:2])
    loaded = TorchPolicy.load(folder)
    slack, notes = slack_of(loaded.manifest, *asked[2:])
    for note in [*notes, *([slack.promise] if slack else [])]:
        stderr.print(note, soft_wrap=True, highlight=False)
    loaded.manifest = replace(loaded.manifest, slack=slack)
    return loaded, folder


def _plan(
    write: Path, sweep: Path, known: Path, asked: _Asked, q: float, power: float | None
) -> dict[str, Any]:
    from dynamiccl.collect.sweep import load_sweep

    if write.exists():
        raise UserError(f"--plan {write}: it exists already; name another file, or remove it")
    if not write.parent.is_dir():
        raise MissingPath("directory", write.parent, "make it, or write elsewhere")
    base = load_sweep(sweep)
    from dynamiccl.datasets.store import read
    from dynamiccl.evaluate.gate.evidence import FreshRuns
    from dynamiccl.evaluate.gate.plan import plan_gate

    loaded, _ = _load(asked)
    trained = FreshRuns(read(known), loaded.manifest.actions())
    return plan_gate(loaded, trained, base, write, q=q, power=power)


def _judge(data: Path, out: Path, known: Path | None, asked: _Asked, q: float) -> "Gated":
    from dynamiccl.datasets.store import part_paths, read

    part_paths(data)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; take another --out or remove it")
    from dynamiccl.evaluate.gate.evidence import costs_of
    from dynamiccl.evaluate.gate.gate import pass_gate, write_gated

    loaded, folder = _load(asked)
    seen = None if known is None else read(known)
    costs = costs_of(*(each for each in (data, known) if each is not None))
    gated = pass_gate(loaded, read(data), known=seen, costs=costs, q=q)
    write_gated(gated, folder, out)
    return gated
