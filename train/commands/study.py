"""`dynamiccl-train study`: recipes over a grid or a search and seeds, by workers that are alike."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Table

from dynamiccl import cli
from dynamiccl.errors import DataError, MachineError, UserError
from dynamiccl.train import tracking_uri
from dynamiccl.train.commands.options import (
    DEFAULT_RECIPE,
    EXPERIMENT,
    Json,
    folding_table,
    stderr,
    stdout,
    tell,
    wide_stdout,
)

if TYPE_CHECKING:
    from optuna import Study

    from dynamiccl.train.study import StudySummary

_STUDY: Final = ("dynamiccl-train", "study")
#: Two threads on a busy core spin against each other: trials side by side take one each.
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_PR_SET_PDEATHSIG: Final = 1
#: Exit codes of workers that are done, or have told why not.
_TOLD: Final = (0, *(each.exit_code for each in (UserError, DataError, MachineError)))


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
    cli.configure_logging(verbose=False)
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
        _work(join)
        return
    from dynamiccl.datasets.store import part_paths
    from dynamiccl.train.tracking import absolute_uri

    uri = absolute_uri(tracking_uri())
    with cli.working("loading PyTorch and MLflow"):
        from dynamiccl.train import study as studies
    if data is not None:
        part_paths(data)
        plan = studies.Plan(
            data=str(data),
            experiment=EXPERIMENT,
            recipes=recipe or [DEFAULT_RECIPE],
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
    _show(summary, failures, as_json=as_json)


def _work(run_id: str) -> None:
    """Be a worker, to the end of the study.

    Failures and an interrupt are told on stdout: `_run_workers`, which gives it none, tells them.
    """
    for name, value in _ONE_THREAD.items():  # before numpy is imported
        os.environ.setdefault(name, value)

    stopped = threading.Event()

    def stop(*_: object) -> None:
        """Stop once: Ctrl-C comes from the terminal, and then SIGTERM from who started us."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stopped.set()
        raise KeyboardInterrupt

    # A shell's background jobs ignore it, and so would SIGTERM be.
    signal.signal(signal.SIGINT, stop)
    # As Ctrl-C, which MLflow's transactions are shielded from: the trial goes to another worker.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        from dynamiccl.train.study import open_study, work
        from dynamiccl.train.tracking import absolute_uri

        uri = absolute_uri(tracking_uri())
        for line in work(open_study(run_id, uri), uri, stopped.is_set):
            tell(stderr if ": validation regret " in line else stdout, line)
    except KeyboardInterrupt:
        tell(stdout, "interrupted")
        sys.exit(cli.INTERRUPTED)


def _tell_how_to_join(summary: "StudySummary", uri: str, *, as_json: bool) -> None:
    """Say how workers are started, and what comes then."""
    from dynamiccl.train.tracking import database_of

    if database_of(uri) is not None:
        tell(
            stderr,
            f"warning: {uri} is safe on one host alone; for workers on several run 'mlflow server' "
            "and begin the study with MLFLOW_TRACKING_URI=http://NODE:5000",
        )
    join = _command(uri, "--join", summary.run_id)
    if as_json:
        cli.print_json({"run_id": summary.run_id, "trials": summary.trials, "join": join})
        return
    array = "sbatch --array=1-16 --cpus-per-task=1 --requeue"
    tell(
        stdout,
        f"study {summary.run_id}: {summary.trials} trials wait for workers, of any number\n"
        f"one here: {join}\n"
        f"16 on Slurm: {array} --wrap {shlex.quote(f'exec {join}')}\n"
        f"the results: {_command(uri, '--resume', summary.run_id)} --jobs 0",
    )


def _command(uri: str, *words: str) -> str:
    """The command, wherever it is given."""
    return shlex.join(["env", f"MLFLOW_TRACKING_URI={uri}", *_STUDY, *words])


def _run_workers(study: "Study", uri: str, jobs: int) -> list[int]:
    """Run workers here until the study is over, which tell of trainings; their exit codes."""
    from dynamiccl.train.study import summarise_study

    run_id = study.study_name
    summary, _ = summarise_study(study)
    left = summary.trials - summary.done
    tell(stderr, f"study {run_id}: {left} of {summary.trials} trials to run")
    command = [sys.executable, "-P", "-m", "dynamiccl.train.cli", "study", "--join", run_id]
    prctl = ctypes.CDLL(None).prctl
    workers: list[subprocess.Popen[bytes]] = []
    with cli.interruptible(
        lambda: (
            f"study {run_id} keeps what is done; go on with: {_command(uri, '--resume', run_id)}"
        )
    ):
        try:
            for _ in range(min(left, jobs)):
                worker = subprocess.Popen(
                    command,
                    stdout=subprocess.DEVNULL,
                    env=os.environ | _ONE_THREAD | {"MLFLOW_TRACKING_URI": uri},
                    # When we are killed it stops, as by `terminate`; no lock is taken for that.
                    preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509
                )
                workers.append(worker)
            return [worker.wait() for worker in workers]
        finally:
            for worker in workers:
                worker.terminate()
                worker.wait()


def _show(summary: "StudySummary", failures: list[str], *, as_json: bool) -> None:
    """Print a study's result; raises DataError when trials failed or are left."""
    if as_json:
        cli.print_json(asdict(summary))
    else:
        wide_stdout().print(_study_table(summary))
        runs = " ".join(f"--policy {each.best_run}" for each in summary.settings)
        report = f"dynamiccl-evaluate report --data {summary.data} {runs} --out report"
        if summary.settings:
            tell(stdout, f"their best runs, side by side on test sizes: {report}")
    for failure in failures:
        tell(stderr, failure)
    if missing := summary.trials - summary.done:
        what = "failed" if failures else "are not done"
        raise DataError(
            f"{missing} of {summary.trials} trials {what}; the others are kept: when what they say "
            f"is mended, go on with 'dynamiccl-train study --resume {summary.run_id}'"
        )


def _study_table(summary: "StudySummary") -> Table:
    default = "" if summary.default_regret is None else f"{summary.default_regret:.2%}"
    title = f"{summary.done} of {summary.trials} trials; NCCL's default {default}"
    heads = ("setting", "seeds", "validation\nregret", "95 % interval", "seconds", "best run")
    table = folding_table(title=title)
    for head in heads:
        # A run id that is cut short names nothing.
        table.add_column(head, no_wrap=head != heads[0], overflow="fold")
    for each in summary.settings:
        # No regret is negative, which Student's interval does not know.
        low = None if each.low is None else max(each.low, 0.0)
        interval = "one seed" if low is None else f"{low:.2%} .. {each.high:.2%}"
        row = (each.setting, str(each.seeds), f"{each.mean:.2%}", interval)
        table.add_row(*row, f"{each.train_seconds:.0f}", each.best_run)
    return table
