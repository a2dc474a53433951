"""`dynamiccl-train`: offline training on measured data."""

from contextlib import nullcontext
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynamiccl import cli
from dynamiccl.errors import Interrupted, UserError
from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.commands.options import (
    DEFAULT_RECIPE,
    EXPERIMENT,
    Data,
    Json,
    TrackingUri,
    folding_table,
    open_bar,
    progress_bar,
    stderr,
    stdout,
    tell,
)
from dynamiccl.train.commands.study import study_command
from dynamiccl.train.recipe import (
    CAUTIOUS,
    RECIPES,
    Recipe,
    make_recipe,
    settable,
    setting_meanings,
    setting_text,
)

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from dynamiccl.train.fit import FitSummary
    from dynamiccl.train.trigger_fit import TriggerSummary


app = typer.Typer(
    help="Train policies offline on measured data; every run is tracked in MLflow.",
    **cli.APPLICATION,
)


@app.command("list")
def list_command(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One of them, or FILE.py with one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the recipes; of one, its settings with their meanings.

    Example: dynamiccl-train list
    Example: dynamiccl-train list gaussian-process
    """
    if recipe is not None:
        _show_settings(make_recipe(recipe), as_json=as_json)
        return
    recipes = [each.to_json() for each in RECIPES.values()]
    if as_json:
        cli.print_json(recipes)
        return
    table = folding_table("recipe", "what it is")
    for each in recipes:
        table.add_row(each["name"], each["summary"])
    stdout.print(table)
    stdout.print("settings of one, and what they mean: dynamiccl-train list NAME", soft_wrap=True)


def _show_settings(recipe: Recipe, *, as_json: bool) -> None:
    """Print a recipe's settings; those first that the recipe sets itself."""
    values = recipe.to_json()
    if as_json:
        cli.print_json(values)
        return
    plain, meanings = {f.name: f.default for f in fields(Recipe)}, setting_meanings()
    own = [key for key in settable() if values[key] != plain[key]]
    title = f"{recipe.name}: {recipe.summary}; algorithm {recipe.algorithm}"
    table = folding_table("setting (--set)", "value", "meaning", title=title)
    for key in [*own, *(key for key in settable() if key not in own)]:
        table.add_row(key, setting_text(values[key]), meanings[key])
    stdout.print(table)
    if own:
        stdout.print(f"the first {len(own)} are this recipe's own; the rest as in all recipes")


@app.command("fit")
def fit_command(
    data: Data,
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(RECIPES)}, or FILE.py with one.",
            show_default=DEFAULT_RECIPE,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting.")
    ] = None,
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    seed: Annotated[
        int | None, typer.Option(help="Seed of weights and batches.", min=0, show_default="0")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN_ID", help="Go on with a run that was killed, as it began."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Ray cluster whose actors play, for IMPALA: HOST:PORT, or auto."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a recipe; the checkpoint and the abstain margin are chosen on validation bins.

    Example: dynamiccl-train fit --data out/data --recipe ddqn-dueling --seed 1
    """
    cli.configure_logging(verbose=False)
    if resume is not None and (recipe, settings or None, seed) != (None, None, None):
        raise UserError(
            "--resume goes on with a run's own recipe, settings and seed: leave out --recipe, "
            "--set and --seed, or begin a new run without --resume"
        )
    chosen = make_recipe(recipe or DEFAULT_RECIPE, settings or [])
    # Checked before the heavy imports: a typo should not take five seconds to be told.
    from dynamiccl.datasets.cells import left_out_text
    from dynamiccl.datasets.store import part_paths

    part_paths(data)
    with cli.working("loading PyTorch and MLflow"):
        from dynamiccl.train import fit as fitting
        from dynamiccl.train import tracking

    name = resume or chosen.name
    # What is fitted in one go has no steps that lines could tell of.
    in_one_go = chosen.algorithm in CAUTIOUS and not stderr.is_terminal
    telling = cli.working(f"{name}: fitting") if in_one_go else nullcontext()
    try:
        with telling, progress_bar(name) as show:
            how: dict[str, Any] = {"tracking_uri": tracking_uri, "progress": show, "ray": ray}
            if resume is not None:
                summary = fitting.resume(data, resume, **how)
            else:
                summary = fitting.fit(data, chosen, experiment=EXPERIMENT, seed=seed or 0, **how)
    except tracking.RunInterrupted as stopped:
        again = f"dynamiccl-train fit --data {data} --resume {stopped.run_id}"
        store = "" if tracking_uri == DEFAULT_TRACKING_URI else f" --tracking-uri {tracking_uri}"
        raise Interrupted(f"run {stopped.run_id} is kept; go on with: {again}{store}") from None
    except KeyboardInterrupt:
        raise Interrupted("no run was begun; give the same command again") from None
    version = tracking.register(tracking_uri, summary.run_id, tracking.CANDIDATE)
    if as_json:
        cli.print_json(asdict(summary))
        return
    tell(
        stdout,
        f"run {summary.run_id}: {_work(summary)}\n"
        f"validation: mean regret {summary.validation_regret:.2%} on {summary.validation_tasks} "
        f"tasks (NCCL's default {summary.validation_default_regret:.2%}), abstains below a "
        f"predicted gain of {summary.abstain_margin:.1%}\n"
        f"rows in no task: {left_out_text(summary.left_out)}\n"
        f"files: {summary.run_directory}\n"
        f"registered as models:/{tracking.MODEL_NAME}@{tracking.CANDIDATE} (version {version})\n"
        f"compare runs with: {tracking.ui_hint(tracking_uri, summary.run_id)}",
    )


def _work(summary: "FitSummary") -> str:
    """Steps, duration and result of a run, as text."""
    if summary.alpha is None:
        steps = f"{summary.steps} steps in {summary.seconds:.1f} s"
        return f"{steps}, best at step {summary.best_step}"
    wider = ", ".join(
        f"{what} {by:.2f} times as wide as drawn machines have it"
        for what, by in (("prior", summary.widened), ("spreads", summary.stretched))
        if by > 1.05  # less is nothing to tell of
    )
    return (
        f"fitted in {summary.seconds:.1f} s; it acts where drawn machines say that at most "
        f"{summary.alpha:.1%} of its choices are slower, and this machine's left-out octaves do "
        f"not say otherwise{wider and f' ({wider})'}"
    )


app.command("study")(study_command)


@app.command("trigger")
def trigger_command(
    data: Data,
    false_alarms_per_1e5: Annotated[
        float, typer.Option("--false-alarms-per-1e5", help="False alarms in 100,000 quiet calls.")
    ] = 0.5,
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    seed: Annotated[int, typer.Option(help="Seed of weights and streams.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Train the Trigger on quiet calls; thresholds come from simulated run lengths.

    Example: dynamiccl-train trigger --data out/data --false-alarms-per-1e5 0.5
    """
    cli.configure_logging(verbose=False)
    # Checked before the heavy imports: a typo should not take five seconds to be told.
    from dynamiccl.datasets.store import part_paths

    part_paths(data)
    from dynamiccl.train.trigger_fit import fit_trigger

    with open_bar() as bar:
        task = bar.add_task("reading", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        summary = fit_trigger(
            data,
            false_alarms_per_1e5,
            experiment=EXPERIMENT,
            tracking_uri=tracking_uri,
            seed=seed,
            progress=show,
        )
    if summary.facts.from_averages:
        tell(
            stderr,
            "warning: there were no single calls to learn from, only averages of nccl-tests, which "
            "vary less: expect more false alarms than asked for until recorded calls are imported",
        )
    if as_json:
        cli.print_json(asdict(summary))
        return
    _show_trigger(summary, tracking_uri)


def _show_trigger(summary: "TriggerSummary", tracking_uri: str) -> None:
    facts, counts = summary.facts, summary.facts.counts
    thresholds = ", ".join(f"{key}: {value:.1f}" for key, value in facts.thresholds.items())
    found = ", ".join(
        f"{name.removeprefix('delay_').removesuffix('_calls').replace('_', '.')} after "
        f"{'more than 500' if calls is None else f'{calls:.0f}'} calls"
        for name, calls in summary.delays.items()
    )
    tell(
        stdout,
        f"run {summary.run_id}: {counts.series} quiet series (calls {counts.calls}, iterations "
        f"{counts.iterations}, averages {counts.averages}; {counts.disturbed} disturbed calls left "
        f"out), usual noise {facts.usual_scale:.3f}, in {summary.seconds:.0f} s\n"
        f"thresholds by reference value, for {facts.false_alarms_per_1e5:g} false alarms in "
        f"100,000 calls: {thresholds}\n"
        f"found, at the usual noise: {found} (median)\n"
        f"forecast error {facts.forecast_error:.3f} robust sigmas (level alone "
        f"{facts.level_error:.3f})\n"
        f"files: {summary.run_directory}\n"
        f"next: dynamiccl-deploy export RUN --trigger {summary.run_id} --out DIR\n"
        f"compare runs with: mlflow ui --backend-store-uri {tracking_uri}",
    )


@app.command("promote")
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

    found = tracking.promote(run, tracking_uri, gated=gated, force=force)
    if as_json:
        cli.print_json(asdict(found))
        return
    acts = "" if found.passed_bins is None else f", acts in {found.passed_bins} size bins"
    before = f" (before: version {found.version_before})" if found.version_before else ""
    name = f"models:/{tracking.MODEL_NAME}@{tracking.CHAMPION}"
    tell(
        stdout,
        f"{name} is version {found.version}{acts}{before}\n"
        f"deploy it with: dynamiccl-deploy export {found.policy} --out DIR",
    )


def main() -> None:
    """Entry point of `dynamiccl-train`."""
    cli.run(partial(app, standalone_mode=False))


if __name__ == "__main__":
    main()
