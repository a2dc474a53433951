"""`dynamiccl-evaluate job`: what a job would gain, from its own calls."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynamiccl import cli
from dynamiccl.errors import UserError
from dynamiccl.evaluate.commands import check_plan_file
from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.commands.options import Json, RunStore, folding_table, wide_stdout

if TYPE_CHECKING:
    from dynamiccl.evaluate.job.saved import Answer

_ROWS = 12
#: Characters; a longer reason stands below its table.
_LONG = 24


def job_command(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="CALLS...", help="Traces of a job, or a data directory with calls."),
    ],
    data: Annotated[
        Path | None, typer.Option(help="Data directory with a sweep of the job's machines.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="RUN_OR_ARTIFACT", help="What this policy saves, beside the table."),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(help="With --data: which of its systems. Without: a simulated one."),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODESxRANKS",
            help="How process groups of so many ranks lie, where the trace does not say: 4x8.",
        ),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(help="GPUs of a node, to place the ranks that the trace names.", min=1),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where job.html and job.json go.")] = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="SWEEP.toml", help="Write the sweep of what is not covered."),
    ] = None,
    least: Annotated[
        float, typer.Option(help="The least saving that counts, as a fraction.", min=0.0, max=1.0)
    ] = 0.005,
    tracking_uri: RunStore = DEFAULT_TRACKING_URI,
    as_json: Json = False,
) -> None:
    """What a job would gain under a policy or the best table, from its own calls.

    The verdict is gain, nothing or cannot-tell; exit code 0 for all three.

    Example: dynamiccl-evaluate job traces --data data --out job
    Example: dynamiccl-evaluate job trace.json.gz --system h100-ib --group 4x8
    """
    if data is None and system is None:
        raise UserError(
            "nothing to compare with: give --data DIR with a sweep of the job's machines, or "
            "--system NAME of a simulated one"
        )
    groups = [cli.parse_group(text) for text in group or []]
    from dynamiccl.datasets.store import part_paths

    if data is not None:
        part_paths(data)
    if plan is not None:
        check_plan_file(plan)
    with cli.working("reading traces"):
        found = _answer(traces, data, system, policy, tracking_uri, groups, ranks_per_node, least)
        from dynamiccl.evaluate.job.output import to_json, write

        told = to_json(found)
    page = None if out is None else str(write(told, [str(path) for path in traces], out))
    written = None
    if plan is not None and told["sweep"] is not None:
        plan.write_text(told["sweep"], encoding="utf-8")
        written = str(plan)
    if as_json:
        cli.print_json({**told, "page": page, "plan": written})
        return
    _show(told)
    if told["sweep"] is not None and written is None:
        _say("to cover it, measure this sweep (--plan FILE writes it):")
        _say(told["sweep"])
    for path in filter(None, (page, written)):
        _say(path)


def _answer(
    traces: list[Path],
    data: Path | None,
    system: str | None,
    policy: str | None,
    tracking_uri: str,
    groups: list[tuple[int, int]],
    ranks_per_node: int | None,
    least: float,
) -> "Answer":
    from dynamiccl.datasets.cells import run_names
    from dynamiccl.datasets.store import read
    from dynamiccl.evaluate.job.calls import read_job
    from dynamiccl.evaluate.job.gains import Measured, Modelled
    from dynamiccl.evaluate.job.saved import answer, policy_choice
    from dynamiccl.simulator.systems import find_system

    frame = None if data is None else read(data)
    simulated = find_system(system or "") if frame is None else None
    job, manifest, loaded = read_job(traces, ranks_per_node), None, None
    if policy is not None:
        from dynamiccl.train.policy import TorchPolicy
        from dynamiccl.train.tracking import policy_directory

        loaded = TorchPolicy.load(policy_directory(policy, tracking_uri))
        manifest = loaded.manifest
    source: Measured | Modelled
    if frame is not None:
        source = Measured(frame, system, job.nccl_version)
    else:
        assert simulated is not None
        source = Modelled(simulated, manifest.actions().configs if manifest else ())
    found = answer(
        job,
        source,
        groups=groups,
        policy=None if loaded is None else policy_choice(loaded, source.system),
        seen=bool(manifest and frame is not None and {*manifest.runs} & {*run_names(frame)}),
        least=least,
    )
    if manifest is not None and manifest.slack is not None:
        found.notes.append(manifest.slack.promise)
    return found


def _say(text: str) -> None:
    wide_stdout().print(text, soft_wrap=True, highlight=False, markup=False)


def _show(told: dict[str, Any]) -> None:
    from dynamiccl.evaluate.job.output import asking_text, tables

    _say(told["sentence"])
    if told["modelled"]:
        _say(f"modelled: gains are those of the simulated {told['system']}, not measured")
    shares = ", ".join(f"{part['name']} {part['share']:.1%}" for part in told["parts"])
    _say(f"{shares}. {asking_text(told)}")
    for block in tables(told, _ROWS):
        table = folding_table(*block.heads, title=block.title)
        why: list[str] = []
        for *cells, last in block.rows:
            if len(last) > _LONG:
                why += [last] * (last not in why)
                last = f"({why.index(last) + 1})"  # noqa: PLW2901
            table.add_row(*cells, last)
        wide_stdout().print(table)
        for number, reason in enumerate(why, 1):
            _say(f"({number}) {reason}")
    for note in told["notes"]:
        _say(f"note: {note}")
