"""`dynamiccl-train list` and `fit`: the recipes, and one training run."""

from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dynamiccl import cli
from dynamiccl.errors import Interrupted, UserError
from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.commands.options import (
    DEFAULT_EXPERIMENT,
    DEFAULT_RECIPE,
    Experiment,
    Json,
    TrackingUri,
    folding_table,
    progress_bar,
    stderr,
    stdout,
)
from dynamiccl.train.recipe import CAUTIOUS, Recipe, setting_text
from dynamiccl.train.recipes import RECIPES, make_recipe, settable, setting_meanings

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from dynamiccl.train.export import FitSummary


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


def fit_command(
    data: Annotated[Path, typer.Option(help="Data directory of dynamiccl-collect.")],
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
    experiment: Experiment = DEFAULT_EXPERIMENT,
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
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Train a recipe; the checkpoint and the abstain margin are chosen on validation bins.

    Example: dynamiccl-train fit --data out/data --recipe ddqn-dueling --seed 1
    """
    cli.configure_logging(verbose=verbose)
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
            if resume is not None:
                summary = fitting.resume(
                    data, resume, tracking_uri=tracking_uri, progress=show, ray=ray
                )
            else:
                summary = fitting.fit(
                    data,
                    chosen,
                    experiment=experiment,
                    tracking_uri=tracking_uri,
                    seed=seed or 0,
                    progress=show,
                    ray=ray,
                )
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
    stdout.print(
        f"run {summary.run_id}: {_work(summary)}\n"
        f"validation: mean regret {summary.validation_regret:.2%} on {summary.validation_tasks} "
        f"tasks (NCCL's default {summary.validation_default_regret:.2%}), abstains below a "
        f"predicted gain of {summary.abstain_margin:.1%}\n"
        f"rows in no task: {left_out_text(summary.left_out)}\n"
        f"files: {summary.run_directory}\n"
        f"registered as models:/{tracking.MODEL_NAME}@{tracking.CANDIDATE} (version {version})\n"
        f"compare runs with: {tracking.ui_hint(tracking_uri, summary.run_id)}",
        soft_wrap=True,
    )


#: What is wider by less is not told.
_TOLD_FROM: Final = 1.05


def _work(summary: "FitSummary") -> str:
    """Steps, duration and result of a run, as text."""
    if summary.alpha is None:
        steps = f"{summary.steps} steps in {summary.seconds:.1f} s"
        return f"{steps}, best at step {summary.best_step}"
    done = f"fitted in {summary.seconds:.1f} s; it "
    told = (
        f"{done}acts where drawn machines say that at most {summary.alpha:.1%} of its choices are "
        "slower, and this machine's left-out octaves do not say otherwise"
    )
    notes = [
        f"{what} {by:.2f} times as wide as drawn machines have it"
        for what, by in (("prior", summary.widened), ("spreads", summary.stretched))
        if by > _TOLD_FROM
    ]
    return f"{told} ({', '.join(notes)})" if notes else told
