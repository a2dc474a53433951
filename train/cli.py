"""`dynamiccl-train`: training on measured data."""

import os
import shlex
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table

from dynamiccl import cli
from dynamiccl.datasets.store import part_paths
from dynamiccl.errors import DataError, Interrupted, MachineError, UserError
from dynamiccl.files import end_with_parent
from dynamiccl.train import DEFAULT_TRACKING_URI, options, tracking_uri
from dynamiccl.train.options import Data, Json, stderr, stdout, tell
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
    from optuna import Study

    from dynamiccl.train.study import StudySummary


#: Two threads on a busy core spin against each other.
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
#: Exit codes of workers that are done, or have told why not.
_TOLD: Final = (0, *(each.exit_code for each in (UserError, DataError, MachineError)))

app = typer.Typer(
    help="Train policies on measured data; MLFLOW_TRACKING_URI names the MLflow store of runs.",
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
    chosen = None if recipe is None else make_recipe(recipe)
    if as_json:
        every = [asdict(each) for each in RECIPES.values()]
        cli.print_json(every if chosen is None else asdict(chosen))
        return
    if chosen is not None:
        _show_settings(chosen)
        return
    table = options.folding_table("recipe", "what it is")
    for each in RECIPES.values():
        table.add_row(each.name, each.summary)
    stdout.print(table)
    stdout.print("settings of one, and what they mean: dynamiccl-train list NAME", soft_wrap=True)


def _show_settings(recipe: Recipe) -> None:
    values = asdict(recipe)
    plain, meanings = {f.name: f.default for f in fields(Recipe)}, setting_meanings()
    own = [key for key in settable() if values[key] != plain[key]]
    title = f"{recipe.name}: {recipe.summary}; algorithm {recipe.algorithm}"
    table = options.folding_table("setting (--set)", "value", "meaning", title=title)
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
            show_default=options.DEFAULT_RECIPE,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting.")
    ] = None,
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
    if resume is not None and (recipe, settings or None, seed) != (None, None, None):
        raise UserError(
            "--resume goes on with a run's own recipe, settings and seed: leave out --recipe, "
            "--set and --seed, or begin a new run without --resume"
        )
    chosen = make_recipe(recipe or options.DEFAULT_RECIPE, settings or [])
    part_paths(data)  # before the heavy imports, to tell of a typo at once
    with cli.working("loading PyTorch and MLflow"):
        from dynamiccl.datasets.cells import left_out_text
        from dynamiccl.train import fit as fitting
        from dynamiccl.train import tracking

    name, uri = resume or chosen.name, tracking_uri()
    in_one_go = chosen.algorithm in CAUTIOUS and not stderr.is_terminal
    telling = cli.working(f"{name}: fitting") if in_one_go else nullcontext()
    try:
        with telling, options.progress_bar(name) as show:
            how: dict[str, Any] = {"tracking_uri": uri, "progress": show, "ray": ray}
            if resume is not None:
                summary = fitting.resume(data, resume, **how)
            else:
                summary = fitting.fit(
                    data, chosen, experiment=options.EXPERIMENT, seed=seed or 0, **how
                )
    except tracking.RunInterrupted as stopped:
        again = _command(
            uri, "dynamiccl-train", "fit", "--data", str(data), "--resume", str(stopped)
        )
        raise Interrupted(f"run {stopped} is kept; go on with: {again}") from None
    except KeyboardInterrupt:
        raise Interrupted("no run was begun; give the same command again") from None
    version = tracking.register(uri, summary.run_id, tracking.CANDIDATE)
    steps = (
        f"{summary.steps} steps, best at step {summary.best_step}" if summary.steps else "fitted"
    )
    options.tell_result(
        asdict(summary),
        f"run {summary.run_id}: {steps}, in {summary.seconds:.1f} s\n"
        f"validation: mean regret {summary.validation_regret:.2%} on {summary.validation_tasks} "
        f"tasks (NCCL's default {summary.validation_default_regret:.2%}), abstains below a "
        f"predicted gain of {summary.abstain_margin:.1%}\n"
        f"rows in no task: {left_out_text(summary.left_out)}\n"
        f"files: {summary.run_directory}\n"
        f"registered as models:/{tracking.MODEL_NAME}@{tracking.CANDIDATE} (version {version})\n"
        f"compare runs with: {tracking.ui_hint(uri, summary.run_id)}",
        as_json=as_json,
    )


@app.command("trigger")
def trigger_command(
    data: Data,
    false_alarms_per_1e5: Annotated[
        float, typer.Option("--false-alarms-per-1e5", help="False alarms in 100,000 quiet calls.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of weights and streams.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Train the Trigger on quiet calls; thresholds come from simulated run lengths.

    Example: dynamiccl-train trigger --data out/data --false-alarms-per-1e5 0.5
    """
    part_paths(data)
    from dynamiccl.train.trigger_fit import fit_trigger

    with options.open_bar() as bar:
        task = bar.add_task("reading", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        summary = fit_trigger(
            data,
            false_alarms_per_1e5,
            experiment=options.EXPERIMENT,
            tracking_uri=tracking_uri(),
            seed=seed,
            progress=show,
        )
    facts, run_id = summary["facts"], summary["run_id"]
    counts = facts["counts"]
    thresholds = ", ".join(f"{key}: {value:.1f}" for key, value in facts["thresholds"].items())
    options.tell_result(
        summary,
        f"run {run_id}: {counts['series']} quiet series (calls {counts['calls']}, "
        f"iterations {counts['iterations']}; {counts['disturbed']} disturbed calls left out), "
        f"usual noise {facts['usual_scale']:.3f}, in {summary['seconds']:.0f} s\n"
        f"thresholds by reference value, for {facts['false_alarms_per_1e5']:g} false alarms in "
        f"100,000 calls: {thresholds}\n"
        f"forecast error {facts['forecast_error']:.3f} robust sigmas (level alone "
        f"{facts['level_error']:.3f})\n"
        f"files: {summary['run_directory']}\n"
        f"next: dynamiccl-deploy export RUN --trigger {run_id} --out DIR\n"
        f"compare runs with: mlflow ui --backend-store-uri {tracking_uri()}",
        as_json=as_json,
    )


@app.command("study")
def study_command(
    data: Annotated[Path | None, typer.Option(help="Data directory of dynamiccl-collect.")] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Recipes to compare, one an option.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="For all trials.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2",
            help="Vary a setting; lists with +, as 64+64; with --optuna also KEY=LOW:HIGH[:log].",
        ),
    ] = None,
    optuna: Annotated[
        int | None,
        typer.Option(metavar="N", help="Search: try N settings of --grid by TPE.", min=1),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Trials of each setting.", min=1)] = 5,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Workers here, a thread each; 0: leave the trials to --join.",
            min=0,
            show_default="processors",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="STUDY_ID", help="Go on with a study: failed trials, and the table."),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(metavar="STUDY_ID", help="Be one more worker of a study, here or in a job."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train recipes over a grid and several seeds in parallel; each trial is a child run.

    Example: dynamiccl-train study --data out/data --recipe ddqn-dueling --recipe cql --seeds 5
    """
    if [data, resume, join].count(None) != 2:
        raise UserError(
            "give --data for a new study, --resume STUDY_ID to go on with one, or --join STUDY_ID "
            "to work for one"
        )
    if data is None and (recipe or settings or grid or optuna):
        raise UserError("--resume and --join take a study's own trials: leave out what they are")
    if join is not None:
        if jobs is not None or as_json:
            raise UserError("--join is one worker, without --jobs and --json: start several")
        _join(join)
        return
    with cli.working("loading PyTorch and MLflow"):
        from dynamiccl.train import study as studies
        from dynamiccl.train.tracking import absolute_uri

    uri = absolute_uri(tracking_uri())
    if data is not None:
        part_paths(data)
        plan = studies.Plan(
            data=str(data),
            experiment=options.EXPERIMENT,
            recipes=recipe or [options.DEFAULT_RECIPE],
            settings=settings or [],
            axes=grid or [],
            seeds=seeds,
            count=optuna or 0,
        )
        study = studies.begin_study(studies.checked(plan), uri)
        if jobs == 0:
            _tell_how_to_join(studies.summarise_study(study)[0], uri, as_json=as_json)
            return
    else:
        study = studies.open_study(str(resume), uri)
        if jobs != 0:
            studies.retry_failed(study)
    ended = _run_workers(study, uri, os.cpu_count() or 1 if jobs is None else jobs)
    summary, failures = studies.end_study(study, uri)
    failures += [f"a worker ended with {code}" for code in ended if code not in _TOLD]
    _show_study(summary, failures, as_json=as_json)


def _join(run_id: str) -> None:
    """Be a worker; failures go to stdout, which `_run_workers` drops to tell them itself."""
    for name, value in _ONE_THREAD.items():  # before numpy is imported
        os.environ.setdefault(name, value)

    stopped = threading.Event()

    def stop(*_: object) -> None:
        """Stop once: after Ctrl-C of the terminal our starter sends SIGTERM."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stopped.set()
        raise KeyboardInterrupt

    # A shell's background jobs ignore it, and so would SIGTERM be.
    signal.signal(signal.SIGINT, stop)
    # As Ctrl-C, which MLflow's transactions are shielded from.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        from dynamiccl.train.study import open_study, work

        uri = tracking_uri()
        for line, is_failure in work(open_study(run_id, uri), uri, stopped.is_set):
            tell(stdout if is_failure else stderr, line)
    except KeyboardInterrupt:
        tell(stdout, "interrupted")
        sys.exit(cli.INTERRUPTED)


def _tell_how_to_join(summary: "StudySummary", uri: str, *, as_json: bool) -> None:
    from dynamiccl.train.tracking import database_of

    if database_of(uri) is not None:
        tell(
            stderr,
            f"warning: {uri} is safe on one host alone; for workers on several run 'mlflow server' "
            "and begin the study with MLFLOW_TRACKING_URI=http://NODE:5000",
        )
    join = _study(uri, "--join", summary.run_id)
    array = "sbatch --array=1-16 --cpus-per-task=1 --requeue"
    options.tell_result(
        {"run_id": summary.run_id, "trials": summary.trials, "join": join},
        f"study {summary.run_id}: {summary.trials} trials wait for workers, of any number\n"
        f"one here: {join}\n"
        f"16 on Slurm: {array} --wrap {shlex.quote(f'exec {join}')}\n"
        f"the results: {_study(uri, '--resume', summary.run_id)} --jobs 0",
        as_json=as_json,
    )


def _study(uri: str, *words: str) -> str:
    return _command(uri, "dynamiccl-train", "study", *words)


def _command(uri: str, *words: str) -> str:
    """A command line to copy, which finds the store of runs."""
    store = [] if uri == DEFAULT_TRACKING_URI else ["env", f"MLFLOW_TRACKING_URI={uri}"]
    return shlex.join([*store, *words])


def _run_workers(study: "Study", uri: str, jobs: int) -> list[int]:
    """Run workers here until the study is over; their exit codes."""
    from dynamiccl.train.study import summarise_study

    run_id, (summary, _) = study.study_name, summarise_study(study)
    left = summary.trials - summary.done
    tell(stderr, f"study {run_id}: {left} of {summary.trials} trials to run")
    command = [sys.executable, "-P", "-m", "dynamiccl.train.cli", "study", "--join", run_id]
    workers: list[subprocess.Popen[bytes]] = []
    again = _study(uri, "--resume", run_id)
    with cli.interruptible(lambda: f"study {run_id} keeps what is done; go on with: {again}"):
        try:
            for _ in range(min(left, jobs)):
                worker = subprocess.Popen(
                    command,
                    stdout=subprocess.DEVNULL,
                    env=os.environ | _ONE_THREAD | {"MLFLOW_TRACKING_URI": uri},
                    # It stops when we are killed; this takes no lock.
                    preexec_fn=partial(end_with_parent, signal.SIGTERM),  # noqa: PLW1509
                )
                workers.append(worker)
            return [worker.wait() for worker in workers]
        finally:
            for worker in workers:
                worker.terminate()
                worker.wait()


def _show_study(summary: "StudySummary", failures: list[str], *, as_json: bool) -> None:
    """Print a study's result; DataError when trials failed or are left."""
    if as_json:
        cli.print_json(asdict(summary))
    else:
        options.wide_stdout().print(_study_table(summary))
        runs = [word for each in summary.settings for word in ("--policy", each.best_run)]
        words = ("dynamiccl-evaluate", "report", "--data", str(summary.data), *runs)
        report = _command(tracking_uri(), *words, "--out", "report")
        if summary.settings:
            tell(stdout, f"their best runs, side by side on test sizes: {report}")
    for failure in failures:
        tell(stderr, failure)
    if missing := summary.trials - summary.done:
        what = "failed" if failures else "are not done"
        raise DataError(
            f"{missing} of {summary.trials} trials {what}; the others are kept: when what they say "
            f"is mended, go on with: {_study(tracking_uri(), '--resume', summary.run_id)}"
        )


def _study_table(summary: "StudySummary") -> Table:
    default = "" if summary.default_regret is None else f"{summary.default_regret:.2%}"
    title = f"{summary.done} of {summary.trials} trials; NCCL's default {default}"
    table = options.folding_table("setting", title=title)
    for head in ("seeds", "validation\nregret", "95 % interval", "seconds", "best run"):
        # A run id that is cut short names nothing.
        table.add_column(head, no_wrap=True, overflow="fold")
    for each in summary.settings:
        # No regret is negative, which Student's interval does not know.
        low = None if each.low is None else max(each.low, 0.0)
        interval = "one seed" if low is None else f"{low:.2%} .. {each.high:.2%}"
        row = (each.setting, str(each.seeds), f"{each.mean:.2%}", interval)
        table.add_row(*row, f"{each.train_seconds:.0f}", each.best_run)
    return table


@app.command("promote")
def promote_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run that the gate judged.")],
    gated: Annotated[Path, typer.Option(metavar="DIR", help="What dynamiccl-evaluate gate wrote.")],
    as_json: Json = False,
) -> None:
    """Make a gated policy the champion: the registered version that jobs are to run.

    Example: dynamiccl-train promote models:/dynamiccl@candidate --gated out/gated
    """
    from dynamiccl.train import tracking

    found = tracking.promote(run, tracking_uri(), gated)
    before = found["version_before"]
    replaced = "" if before is None else f" (before: version {before})"
    name = f"models:/{tracking.MODEL_NAME}@{tracking.CHAMPION}"
    options.tell_result(
        found,
        f"{name} is version {found['version']}, acts in {found['passed_bins']} size bins"
        f"{replaced}\n"
        f"deploy it with: dynamiccl-deploy export {found['policy']} --out DIR",
        as_json=as_json,
    )


main: Final = partial(cli.run, partial(app, standalone_mode=False))


if __name__ == "__main__":
    main()
