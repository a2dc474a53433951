"""`dynamiccl-evaluate`: evaluates policies on sizes unseen in training."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dynamiccl import cli
from dynamiccl.collect.grid import parse_size
from dynamiccl.datasets.objective import Hidden, MaxChannels, Objective, SlackShare, SmPrice
from dynamiccl.datasets.store import part_paths, read
from dynamiccl.errors import MissingPath, UserError
from dynamiccl.nccl import Collective
from dynamiccl.serve.artifact import Group, System, check_features
from dynamiccl.simulator import workloads as simulating
from dynamiccl.train import tracking_uri
from dynamiccl.train.options import Json, open_bar, stderr

if TYPE_CHECKING:
    from dynamiccl.train.policy import TorchPolicy

app = typer.Typer(
    help="Score policies against NCCL's default and simple baselines on held-out sizes; runs are "
    "those of the MLflow store that MLFLOW_TRACKING_URI names.",
    **cli.APPLICATION,
)


main: Final = partial(cli.run, partial(app, standalone_mode=False))


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
    as_json: Json = False,
) -> None:
    """Score policies on the test size bins, cold, against NCCL's own choice.

    Policies of several turns (--set split=shape:1) get a report each; their mean is told. Page and
    figures are kept among the artifacts of each run that was given by its id or name.

    Example: dynamiccl-evaluate report --data out/data --policy RUN_ID --out out/report
    """
    # Before the heavy imports: a typo should not take five seconds to be told.
    part_paths(data)
    with cli.working("loading PyTorch, MLflow and the policies"):
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
    recipes = {each.name: each.manifest.recipe for each in named}
    means = {} if len(turns) == 1 else mean_over_turns(reports, recipes)
    document = {"turns": reports, "mean_over_turns": means} if means else reports[0]
    show_result("report", {"reports": reports, "means": means}, document, as_json=as_json)


@app.command("gate")
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
    q: Annotated[
        float, typer.Option(help="False discovery rate over all tested bins.", min=0.0, max=1.0)
    ] = 0.01,
    slack: SlackShare = None,
    hidden: Hidden = None,
    max_channels: MaxChannels = None,
    objective: Objective = "call",
    sm_price: SmPrice = 0.0,
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
    terms = slack, hidden, max_channels, objective, sm_price
    load = partial(_load, policy, terms)
    if plan is None:
        name, shown, document = "gate", *_judge(data, out, known, load, q)
    else:
        shown = document = _plan(plan, sweep, known, load, q)
        name = "plan"
    from dynamiccl.evaluate.page import show_result

    show_result(name, shown, document, as_json=as_json)


def _load(policy: str, terms: tuple[Any, ...]) -> tuple["TorchPolicy", Path]:
    from dynamiccl.datasets.objective import slack_of
    from dynamiccl.train.policy import TorchPolicy
    from dynamiccl.train.tracking import policy_directory

    folder = policy_directory(policy, tracking_uri())
    loaded = TorchPolicy.load(folder)
    check_features(loaded.manifest, folder)
    slack, notes = slack_of(loaded.manifest, *terms)
    for note in [*notes, *([slack.promise] if slack else [])]:
        stderr.print(note, soft_wrap=True, highlight=False)
    loaded.manifest = replace(loaded.manifest, slack=slack)
    return loaded, folder


_Load = Callable[[], tuple["TorchPolicy", Path]]


def _plan(
    write: Path, sweep: Path | None, known: Path | None, load: _Load, q: float
) -> dict[str, Any]:
    if sweep is None or known is None:
        missing = "--sweep SWEEP.toml" if sweep is None else "--known DATA"
        raise UserError(
            f"--plan {write} needs {missing}: the sweep file and the data that the policy was "
            "trained on"
        )
    if write.exists():
        raise UserError(f"--plan {write}: it exists already; name another file, or remove it")
    if not write.parent.is_dir():
        raise MissingPath("directory", write.parent, "make it, or write elsewhere")
    from dynamiccl.collect.sweep import load_sweep

    base = load_sweep(sweep)
    with cli.working("loading PyTorch and the policy, planning"):
        from dynamiccl.evaluate.evidence import FreshRuns
        from dynamiccl.evaluate.gate import plan_gate

        loaded, _ = load()
        trained = FreshRuns(read(known), loaded.manifest.actions())
        return plan_gate(loaded, trained, base, write, q=q)


def _judge(
    data: Path | None, out: Path | None, known: Path | None, load: _Load, q: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    if data is None or out is None:
        missing = "--data FRESH_DATA" if data is None else "--out DIR"
        raise UserError(f"{missing} is missing; or write the sweep to measure with --plan FILE")
    part_paths(data)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; take another --out or remove it")
    with cli.working("loading PyTorch and the policy, judging"):
        from dynamiccl.evaluate.evidence import costs_of
        from dynamiccl.evaluate.gate import pass_gate, write_gated

        loaded, folder = load()
        seen = None if known is None else read(known)
        costs = costs_of(*(each for each in (data, known) if each is not None))
        gated = pass_gate(loaded, read(data), known=seen, costs=costs, q=q)
        write_gated(gated, folder, out)
    return {**gated.to_show(), "out": out, "page": out / "gate.html"}, gated.to_json()


@app.command("job")
def job_command(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="CALLS...", help="Traces of a job, or a data directory with calls."),
    ],
    data: Annotated[Path, typer.Option(help="Data directory with a sweep of the job's machines.")],
    policy: Annotated[
        str | None,
        typer.Option(metavar="RUN_OR_ARTIFACT", help="What this policy saves, beside the table."),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="Which of the systems in --data, where it holds several.")
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(help="GPUs of a node of the job, where the sweep used other nodes.", min=1),
    ] = None,
    sm_price: SmPrice = 0.0,
    out: Annotated[
        Path | None,
        typer.Option(help="For job.html, job.json and cover.toml, the sweep of what is missing."),
    ] = None,
    as_json: Json = False,
) -> None:
    """What a job would gain under a policy or the best table, from its own calls.

    The verdict is gain, nothing or cannot-tell; exit code 0 for all three. A simulated sweep
    (run --runner simulator) tells it, too, and is marked as modelled.

    Example: dynamiccl-evaluate job traces --data data --out job
    Example: dynamiccl-evaluate job calls --data data --policy artifact --sm-price 0.8
    """
    with cli.working("reading traces"):
        from dynamiccl.evaluate.job import answer, policy_choice
        from dynamiccl.evaluate.job_calls import Measured, read_job
        from dynamiccl.evaluate.page import show_result, write_page
        from dynamiccl.train.policy import TorchPolicy
        from dynamiccl.train.tracking import policy_directory

        rows = read(data)
        of_system = rows if system is None else rows.filter(system=system)
        most: Any = of_system["ranks_per_node"].max()
        job = read_job(traces, ranks_per_node or most or 1)
        source = Measured(rows, system, job.nccl_version, sm_price / 100.0)
        choose = manifest = None
        if policy is not None:
            folder = policy_directory(policy, tracking_uri())
            loaded = TorchPolicy.load(folder)
            check_features(loaded.manifest, folder)
            choose, manifest = policy_choice(loaded, source.system), loaded.manifest
        told = answer(job, source, choose, manifest).told
    page = None
    if out is not None:
        page = str(write_page(out, "job", told, {"told": told, "names": traces}))
        if told["sweep"]:
            (out / "cover.toml").write_text(told["sweep"] + "\n", encoding="utf-8")
    show_result("job", {"told": told, "page": page}, {**told, "page": page}, as_json=as_json)


@app.command("explain")
def explain_command(
    policy: Annotated[
        str, typer.Argument(metavar="RUN_OR_ARTIFACT", help="Run id, directory, models:/...")
    ],
    collective: Annotated[str, typer.Option(help="As NCCL spells it.")],
    size: Annotated[str, typer.Option(help="Message size (NCCL's nBytes): 4096, 64K, 4M.")],
    group: Group,
    system: System = None,
    as_json: Json = False,
) -> None:
    """Show what a policy predicts for each config of one message, the margin, noise and gate.

    Example: dynamiccl-evaluate explain RUN_ID --collective AllReduce --size 4M --group 2x8
    """
    try:
        size_bytes = parse_size(size)
    except ValueError as error:
        raise UserError(f"--size: {error}") from error
    wanted = Collective.parse(collective, where="--collective")
    nodes, per_node = cli.parse_group(group)
    from dynamiccl.evaluate.explain import explain
    from dynamiccl.evaluate.page import show_result
    from dynamiccl.train.tracking import policy_directory

    folder = policy_directory(policy, tracking_uri())
    shape = {"num_nodes": nodes, "num_ranks": nodes * per_node}
    found = explain(folder, wanted, size_bytes, **shape, system=system)
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
    )
    folders = {each.name: each.folder for each in named_policies(policy or [], tracking_uri())}
    watching = None if trigger is None else run_directory(trigger, tracking_uri())
    found = simulate(setting, folders, watching, range(seeds), out)
    shown = {**found, "path": out / "simulate.html"}
    show_result("simulate", shown, to_json(found), as_json=as_json)


if __name__ == "__main__":
    main()
