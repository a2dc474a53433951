"""`dynamiccl-evaluate job`: what a job would gain, from its own calls."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    _check(data, plan)
    with cli.working("reading traces"):
        found = _answer(traces, data, system, (policy, tracking_uri), groups, ranks_per_node, least)
        from dynamiccl.evaluate.job.output import sweep_for, to_json, write

    page = None if out is None else write(found, [str(path) for path in traces], out)
    sweep = sweep_for(found)
    written = None
    if plan is not None and sweep is not None:
        plan.write_text(sweep.text, encoding="utf-8")
        written = str(plan)
    if as_json:
        more = {"page": None if page is None else str(page), "plan": written}
        cli.print_json({**to_json(found), **more})
        return
    _show(found)
    told = [str(line) for line in (page, written) if line is not None]
    if sweep is not None and written is None:
        told = ["to cover it, measure this sweep (--plan FILE writes it):", sweep.text, *told]
    for line in told:
        wide_stdout().print(line, soft_wrap=True, highlight=False, markup=False)


def _check(data: Path | None, plan: Path | None) -> None:
    """Check the options before the slow imports."""
    from dynamiccl.datasets.store import part_paths

    if data is not None:
        part_paths(data)
    if plan is not None:
        check_plan_file(plan)


def _answer(
    traces: list[Path],
    data: Path | None,
    system: str | None,
    policy: tuple[str | None, str],
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
    job = read_job(traces, ranks_per_node)
    loaded, name, seen = None, policy[0], False
    if name is not None:
        from dynamiccl.train.policy import TorchPolicy
        from dynamiccl.train.tracking import policy_directory

        loaded = TorchPolicy.load(policy_directory(name, policy[1]))
        seen = frame is not None and not set(loaded.manifest.runs).isdisjoint(run_names(frame))
    source: Measured | Modelled
    if simulated is not None:
        source = Modelled(simulated, () if loaded is None else loaded.manifest.actions().configs)
    else:
        assert frame is not None
        source = Measured(frame, system, job.nccl_version)
    choose = None if loaded is None else policy_choice(loaded, source.system)
    found = answer(job, source, groups=groups, policy=choose, seen=seen, least=least)
    if loaded is not None and loaded.manifest.slack is not None:
        found.notes.append(loaded.manifest.slack.promise)
    return found


def _show(found: "Answer") -> None:
    from dynamiccl.evaluate.job.output import asking_text, parts_of, tables

    wide = wide_stdout()
    wide.print(found.sentence, soft_wrap=True, highlight=False)
    if found.modelled:
        wide.print(f"modelled: gains are those of the simulated {found.system}, not measured")
    shares = ", ".join(f"{part.name} {part.share:.1%}" for part in parts_of(found))
    wide.print(f"{shares}. {asking_text(found)}", soft_wrap=True, highlight=False)
    for block in tables(found, _ROWS):
        table = folding_table(*block.heads, title=block.title)
        why: list[str] = []
        for *cells, last in block.rows:
            if len(last) > _LONG:
                why += [last] * (last not in why)
                last = f"({why.index(last) + 1})"  # noqa: PLW2901
            table.add_row(*cells, last)
        wide.print(table)
        for number, reason in enumerate(why, 1):
            wide.print(f"({number}) {reason}", soft_wrap=True, highlight=False, markup=False)
    for note in found.notes:
        wide.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)
