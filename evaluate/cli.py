"""`dynamiccl-evaluate`: evaluates policies on sizes unseen in training."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dynamiccl import cli
from dynamiccl.collect.grid import parse_size
from dynamiccl.errors import UserError
from dynamiccl.evaluate.commands.gate import gate_command
from dynamiccl.evaluate.commands.job import job_command
from dynamiccl.nccl import Collective
from dynamiccl.simulator import workloads as simulating
from dynamiccl.train import tracking_uri
from dynamiccl.train.options import Json, open_bar, stderr

app = typer.Typer(
    help="Score policies against NCCL's default and simple baselines on held-out sizes; runs are "
    "those of the MLflow store that MLFLOW_TRACKING_URI names.",
    **cli.APPLICATION,
)


def main() -> None:
    """Entry point of `dynamiccl-evaluate`."""
    cli.run(partial(app, standalone_mode=False))


@app.command("report")
def report_command(
    data: Annotated[Path, typer.Option(help="Data directory of dynamiccl-collect.")],
    policy: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]RUN_OR_ARTIFACT",
            help="Run's id or name, directory, artifact; repeatable: what changes from the first.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where results.parquet and report.html go.")],
    log: Annotated[
        bool, typer.Option(help="Keep page and figures among the artifacts of each RUN_ID given.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Score policies on the test size bins, cold, against NCCL's own choice.

    Policies of several turns (--set split=shape:1) get a report each; their mean is told.

    Example: dynamiccl-evaluate report --data out/data --policy RUN_ID --out out/report
    """
    # Checked before the heavy imports: a typo should not take five seconds to be told.
    from dynamiccl.datasets.store import part_paths

    part_paths(data)
    with cli.working("loading PyTorch, MLflow and the policies"):
        from dynamiccl.datasets.manifest import Manifest
        from dynamiccl.evaluate.baselines import named_policies
        from dynamiccl.evaluate.page import show_result
        from dynamiccl.evaluate.report import by_turn, make_report, mean_over_turns

        named = named_policies(policy, tracking_uri())
    kept = "a report is written at the end, so nothing is there yet; give the same command again"
    # On a terminal the bar tells the time itself.
    telling = nullcontext() if stderr.is_terminal else cli.working("scoring and drawing")
    with cli.interruptible(lambda: kept), telling, open_bar() as bar:
        task = bar.add_task("policies and baselines", total=None)
        turns = by_turn(named)
        reports = [
            make_report(
                data,
                [(each.name, each.folder) for each in turn],
                out / f"turn-{number}" if len(turns) > 1 else out,
                {each.name: each.run_id for each in turn if each.run_id is not None},
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
            for number, turn in enumerate(turns)
        ]
    for turn, report in zip(turns, reports, strict=True):
        for each in turn if log else ():
            if each.run_id is not None:
                report.keep(each.run_id, tracking_uri())
    recipes = {each.name: Manifest.read(each.folder).recipe for each in named}
    means = {} if len(turns) == 1 else mean_over_turns(reports, recipes)
    told = [report.told for report in reports]
    document = {"turns": told, "mean_over_turns": means} if means else told[0]
    show_result("report", {"reports": told, "means": means}, document, as_json=as_json)


app.command("gate")(gate_command)
app.command("job")(job_command)


@app.command("explain")
def explain_command(
    policy: Annotated[
        str, typer.Argument(metavar="RUN_OR_ARTIFACT", help="Run id, directory, models:/...")
    ],
    collective: Annotated[str, typer.Option(help="As NCCL spells it.")],
    size: Annotated[str, typer.Option(help="Message size (NCCL's nBytes): 4096, 64K, 4M.")],
    ranks: Annotated[int, typer.Option(help="Ranks of the communicator.", min=2)],
    nodes: Annotated[int, typer.Option(help="NCCL's nNodes.", min=1)],
    system: Annotated[
        str | None, typer.Option(help="System, where several have this shape.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a policy predicts for each config of one message, the margin, noise and gate.

    Example: dynamiccl-evaluate explain RUN_ID --collective AllReduce --size 4M --ranks 16 --nodes 2
    """
    try:
        size_bytes = parse_size(size)
    except ValueError as error:
        raise UserError(f"--size: {error}") from error
    wanted = Collective.parse(collective, where="--collective")
    from dynamiccl.evaluate.explain import explain
    from dynamiccl.evaluate.page import show_result
    from dynamiccl.train.tracking import policy_directory

    folder = policy_directory(policy, tracking_uri())
    found = explain(folder, wanted, size_bytes, num_nodes=nodes, num_ranks=ranks, system=system)
    document = {**found, "warnings": [what for what, _ in found["warnings"]]}
    show_result("explain", found, document, as_json=as_json)


@app.command("simulate")
def simulate_command(
    out: Annotated[Path, typer.Option(help="Where simulate.html and simulate.json go.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]RUN_OR_ARTIFACT", help="Policies to play; may be repeated."),
    ] = None,
    trigger: Annotated[
        str | None,
        typer.Option(metavar="RUN_OR_ARTIFACT", help="A Trigger to watch policies and searches."),
    ] = None,
    system: simulating.SystemOption = simulating.DEFAULT_SYSTEM,
    scenario: simulating.ScenarioOption = simulating.DEFAULT_SCENARIO,
    workload: simulating.WorkloadOption = None,
    nodes: simulating.NodesOption = 4,
    ranks_per_node: simulating.RanksPerNodeOption = 8,
    calls: simulating.CallsOption = 100_000,
    jobs: Annotated[int, typer.Option(help="Jobs at once, for each seed.", min=1)] = 4,
    seeds: Annotated[int, typer.Option(help="Seeds: 5 for intervals worth the name.", min=1)] = 5,
    as_json: Json = False,
) -> None:
    """Simulate whole jobs in a changing network: policies, searches, fixed choices, oracle.

    Example: dynamiccl-evaluate simulate --policy RUN_ID --scenario congested --out out/simulate
    """
    from dynamiccl.evaluate.baselines import named_policies
    from dynamiccl.evaluate.page import show_result
    from dynamiccl.evaluate.simulate import Setting, simulate, to_json
    from dynamiccl.simulator.scenario import find_scenario
    from dynamiccl.simulator.system import Group
    from dynamiccl.simulator.systems import find_system
    from dynamiccl.simulator.workloads import make_workload
    from dynamiccl.train.tracking import run_directory

    shape = Group(nodes, ranks_per_node)
    setting = Setting(
        system=find_system(system),
        workload=make_workload(workload or simulating.DEFAULT_WORKLOADS, shape),
        scenario=find_scenario(scenario),
        calls=calls,
        jobs=jobs,
    )
    folders = {each.name: each.folder for each in named_policies(policy or [], tracking_uri())}
    watching = None if trigger is None else run_directory(trigger, tracking_uri())
    found = simulate(setting, folders, watching, range(seeds), out)
    shown = {**found, "path": out / "simulate.html"}
    show_result("simulate", shown, to_json(found), as_json=as_json)


if __name__ == "__main__":
    main()
