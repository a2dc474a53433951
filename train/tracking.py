"""MLflow: runs, what its pages show of them, and the model registry; imported here alone.

Metrics are logged once an epoch: a call costs tens of milliseconds. MLflow 3.17 opens an experiment
on its GenAI overview, where training runs show nothing, but for `workflowType` in the address.

A champion is the gate's copy of a policy, whose manifest holds it back where nothing was shown.
"""

import json
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import MappingProxyType
from typing import Any, Final, Self
from urllib.parse import unquote, urlparse

import mlflow
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunData, RunTag
from mlflow.entities import Run as MlflowRun
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.utils.models import get_model_name_and_version
from mlflow.tracking import MlflowClient
from mlflow.tracking.context.registry import resolve_tags
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from dynamiccl.datasets.manifest import (
    MANIFEST_NAME,
    POLICY_FOLDER,
    POLICY_NAME,
    Manifest,
    find_policy_in,
)
from dynamiccl.datasets.store import file_sha256, git_commit
from dynamiccl.errors import MachineError, MissingPath, UserError
from dynamiccl.train import DEFAULT_TRACKING_URI, SUMMARY_NAME

VIEW_KEY: Final = "dynamiccl"
_STATE: Final = {
    "orderByKey": "metrics.`best_validation_regret`",
    "orderByAsc": True,
    "selectedColumns": [
        "metrics.`best_validation_regret`",
        "metrics.`default_validation_regret`",
        "params.`name`",
        "params.`seed`",
        "metrics.`train_seconds`",
        "attributes.`Dataset`",
    ],
}
#: As the UI saves a view: the state is JSON within JSON.
_VIEW: Final = {"name": "Validation regret", "createdAt": 0, "state": json.dumps(_STATE)}
EXPERIMENT_TAGS: Final = {
    "mlflow.experimentKind": "custom_model_development",
    "mlflow.experiment.primaryMetric.name": "best_validation_regret",
    "mlflow.experiment.primaryMetric.greaterIsBetter": "false",
    f"mlflow.sharedViewState.{VIEW_KEY}": json.dumps(_VIEW),
}
_RUNS_PAGE: Final = f"workflowType=machine_learning&viewStateShareKey={VIEW_KEY}"
PARENT_TAG: Final = MLFLOW_PARENT_RUN_ID
#: Of a data set; MLflow takes at most 36 characters.
_DIGEST_DIGITS: Final = 12
_MOST_RUNS: Final = 50_000
MODEL_NAME: Final = "dynamiccl"
CANDIDATE: Final = "candidate"
CHAMPION: Final = "champion"
_SERVERS: Final = ("http://", "https://")
NO_TAGS: Final[Mapping[str, str]] = MappingProxyType({})


def database_of(tracking_uri: str) -> Path | None:
    """The file of an SQLite store; None for other stores.

    >>> database_of("sqlite:///out/mlflow.db")
    PosixPath('out/mlflow.db')
    """
    scheme, separator, rest = tracking_uri.partition(":///")
    return Path(rest) if separator and scheme.startswith("sqlite") and rest else None


def absolute_uri(tracking_uri: str) -> str:
    """The URI with an absolute path, for other working directories."""
    database = database_of(tracking_uri)
    if database is None:
        return tracking_uri
    return f"{tracking_uri.partition(':///')[0]}:///{database.absolute()}"


def check_there(tracking_uri: str, named: str) -> None:
    """Raise MissingPath for a missing database, which MLflow would create empty."""
    path = database_of(tracking_uri)
    if path is not None and not path.exists() and not _is_elsewhere(named):
        fix = (
            f"'{named}' is no directory, so it is looked for there: give a directory, name the "
            "store in MLFLOW_TRACKING_URI, or work where the runs were tracked"
        )
        raise MissingPath("MLflow store", path, fix)


def _is_elsewhere(named: str) -> bool:
    kind, found, _ = named.partition(":/")
    return bool(found) and kind not in {"runs", "models"}


def _check_writable(tracking_uri: str) -> None:
    """Raise MachineError for a read-only database, which MLflow retries for two minutes."""
    path = database_of(tracking_uri)
    if path is None:
        return
    if not path.parent.is_dir():
        raise MissingPath("directory", path.parent, f"make it, for the MLflow store {path}")
    for each in (path.parent, *([path] if path.exists() else [])):
        if not os.access(each, os.W_OK):
            raise MachineError(
                f"the MLflow store {path} cannot be written: {each.absolute()} is read-only here; "
                "work in another directory, or name another store in MLFLOW_TRACKING_URI"
            )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay SIGINT to the block's end: an interrupted transaction leaves the store locked."""
    if threading.current_thread() is not threading.main_thread():
        yield  # it gets no signals
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


class _Shielded:
    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return uninterrupted()(getattr(self._client, name))


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C while the run that is its argument was tracked."""


@dataclass(frozen=True, slots=True)
class Run:
    """One tracked run; a `with` block ends it as FINISHED, or as FAILED where it raises."""

    _client: Any
    run_id: str
    artifact_uri: str

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(finished=kind is None)
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            raise RunInterrupted(self.run_id) from None

    @property
    def directory(self) -> Path | None:
        """The artifacts as a local folder; None for a store elsewhere."""
        parsed = urlparse(self.artifact_uri)
        return Path(unquote(parsed.path)) if parsed.scheme in {"", "file"} else None

    @property
    def place(self) -> str:
        """The folder or address of its artifacts."""
        return str(self.directory or self.artifact_uri)

    @property
    def kept_folder(self) -> Path:
        """For what is not over: local artifacts, else the user's state folder."""
        #   XDG_STATE_HOME  keeps what `--resume` and `--join` need of runs on an MLflow server.
        #                   Default: ~/.local/state.
        home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        return self.directory or home / "dynamiccl" / self.run_id

    def begin(self, data_dir: Path, digest: str, params: Mapping[str, Any], text: str) -> None:
        """Log a run's settings, data, code, host and description."""
        self.log(params={**params, "data": data_dir}, text=text)
        place = data_dir.resolve()
        entity = Dataset(
            name=place.name,
            digest=digest[:_DIGEST_DIGITS],
            source_type="local",
            source=json.dumps({"uri": str(place)}),
        )
        inputs = [DatasetInput(entity, tags=[InputTag("mlflow.data.context", "training")])]
        # MLflow 3 looks and then inserts; another trial may come between (UNIQUE constraint).
        try:
            self._client.log_inputs(self.run_id, inputs)
        except MlflowException:
            self._client.log_inputs(self.run_id, inputs)
        # Last: a run without `data_hash` was cut off before.
        host = socket.gethostname()
        self.log(tags={"data_hash": digest, "git_commit": git_commit(), "host": host})

    def finish(self, summary: Mapping[str, Any], scratch: Path | None = None) -> None:
        """Log what `scratch` holds, and last of all the summary."""
        if scratch is not None:
            self.log_folder(scratch)
        self._client.log_text(self.run_id, json.dumps(summary, indent=1), SUMMARY_NAME)

    def log(
        self,
        metrics: Mapping[str, float] = MappingProxyType({}),
        *,
        step: int = 0,
        params: Mapping[str, Any] = MappingProxyType({}),
        tags: Mapping[str, str] = NO_TAGS,
        text: str = "",
    ) -> None:
        """Log metrics of a step, parameters, tags, and MLflow's description."""
        now = int(time.time() * 1000)
        told = {**tags, "mlflow.note.content": text} if text else tags
        self._client.log_batch(
            self.run_id,
            metrics=[Metric(name, value, now, step) for name, value in metrics.items()],
            params=[Param(name, str(value)[:500]) for name, value in params.items()],
            tags=[RunTag(name, value) for name, value in told.items()],
        )

    def log_folder(self, folder: Path, name: str | None = None) -> None:
        """Copy a folder into the run's artifacts, or into folder `name` of them."""
        self._client.log_artifacts(self.run_id, str(folder), name)

    def end(self, *, finished: bool) -> None:
        """End it as FINISHED or FAILED."""
        self._client.set_terminated(self.run_id, "FINISHED" if finished else "FAILED")

    @property
    def data(self) -> RunData:
        """Parameters and tags, and the latest metrics."""
        return self._client.get_run(self.run_id).data

    def steps(self, metric: str) -> set[int]:
        """The steps at which a metric was logged."""
        return {each.step for each in self._client.get_metric_history(self.run_id, metric)}


def _find_or_create(client: Any, tracking_uri: str, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        for key in EXPERIMENT_TAGS.keys() - found.tags.keys():  # made by hand
            client.set_experiment_tag(found.experiment_id, key, EXPERIMENT_TAGS[key])
        return str(found.experiment_id)
    # Beside the database, wherever the command was started.
    database = database_of(tracking_uri)
    root = None if database is None else (database.resolve().parent / "mlruns").as_uri()
    made = client.create_experiment(name, artifact_location=root, tags=EXPERIMENT_TAGS)
    return str(made)


def open_run(
    tracking_uri: str, experiment: str, run_name: str, tags: Mapping[str, str] = NO_TAGS
) -> Run:
    """Start a run, which a `with` or somebody else ends; UserError when the URI cannot be used."""
    _check_writable(tracking_uri)
    with _store(tracking_uri) as client:
        experiment_id = _find_or_create(client, tracking_uri, experiment)
        all_tags = resolve_tags(dict(tags))
        run = client.create_run(experiment_id, run_name=run_name, tags=all_tags)
    return Run(client, run.info.run_id, run.info.artifact_uri)


def reopen_run(tracking_uri: str, run_id: str) -> Run:
    """A run that was started; UserError when the store does not hold it."""
    check_there(tracking_uri, run_id)
    with _store(tracking_uri) as client:
        return Run(client, run_id, client.get_run(run_id).info.artifact_uri)


def continue_run(tracking_uri: str, run_id: str) -> Run:
    """Go on with a run; UserError where it is none, or finished."""
    run = reopen_run(tracking_uri, run_id)
    with _store(tracking_uri) as client:
        if client.get_run(run_id).info.status == "FINISHED":
            raise UserError(f"run '{run_id}' has finished; train anew with 'dynamiccl-train fit'")
        client.update_run(run_id, "RUNNING")
    return run


@contextmanager
def _store(tracking_uri: str) -> Iterator[Any]:
    # MLflow logs a new database's migrations.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    #   GIT_PYTHON_REFRESH  set to quiet where it is not set: no warning without git.
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    try:
        with uninterrupted():  # it makes the database
            # A relative address would stay in the first directory.
            client = _Shielded(MlflowClient(absolute_uri(tracking_uri)))
        yield client
    except MlflowException as error:
        said = str(error.message).partition("\n")[0]
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise UserError(
                f"'{tracking_uri}' does not hold it: {said}; {_list_runs(tracking_uri)}"
            ) from error
        raise UserError(
            f"cannot track in '{tracking_uri}': {said}; let MLFLOW_TRACKING_URI be "
            f"{DEFAULT_TRACKING_URI} or the http address of an MLflow server"
        ) from error


def children(tracking_uri: str, parent_run_id: str) -> list[MlflowRun]:
    """The runs below a run, oldest first."""
    with _store(tracking_uri) as client:
        place = client.get_run(parent_run_id).info.experiment_id
        query = f"tags.`{PARENT_TAG}` = '{parent_run_id}'"
        order = ["attributes.start_time"]
        return [*client.search_runs([place], query, max_results=_MOST_RUNS, order_by=order)]


def ui_hint(tracking_uri: str, run_id: str) -> str:
    """A command and its page, where the runs beside a run are compared."""
    with _store(tracking_uri) as client:
        experiment = client.get_run(run_id).info.experiment_id
    page = f"/#/experiments/{experiment}/runs?{_RUNS_PAGE}"
    if tracking_uri.startswith(_SERVERS):
        return f"{tracking_uri.rstrip('/')}{page}"
    return f"mlflow ui --backend-store-uri {tracking_uri}\n  and open http://127.0.0.1:5000{page}"


def _list_runs(tracking_uri: str) -> str:
    if tracking_uri.startswith(_SERVERS):
        return f"list the runs at {tracking_uri}"
    return f"list the runs with 'mlflow ui --backend-store-uri {tracking_uri}'"


def read_summary(tracking_uri: str, run_id: str) -> dict[str, Any] | None:
    """What `Run.finish` wrote, or None; UserError for no run."""
    with _store(tracking_uri) as client:
        if SUMMARY_NAME not in {entry.path for entry in client.list_artifacts(run_id)}:
            return None
        with TemporaryDirectory() as folder:
            text = Path(client.download_artifacts(run_id, SUMMARY_NAME, folder)).read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def register(tracking_uri: str, run_id: str, alias: str, *, folder: str = POLICY_FOLDER) -> str:
    """A version of a run's `folder`, which `alias` then means; UserError without a registry."""
    with _store(tracking_uri) as client:
        if not client.search_registered_models(f"name = '{MODEL_NAME}'"):
            client.create_registered_model(MODEL_NAME, description="DynamICCL's policies")
        source = f"runs:/{run_id}/{folder}"
        of_run = client.search_model_versions(f"name = '{MODEL_NAME}' and run_id = '{run_id}'")
        known = [version for version in of_run if version.source == source]
        found = known[0] if known else client.create_model_version(MODEL_NAME, source, run_id)
        version = str(found.version)
        client.set_registered_model_alias(MODEL_NAME, alias, version)
    return version


def policy_directory(run_or_folder: str, tracking_uri: str) -> Path:
    """The policy folder of a run, path or `models:/dynamiccl@candidate`; raises MissingPath."""
    folder = Path(run_or_folder)
    found = find_policy_in(folder)
    if found is not None:
        return found
    if folder.exists():
        raise MissingPath("policy", folder, "give an MLflow run id, a run directory or an artifact")
    check_there(tracking_uri, run_or_folder)
    uri, client = run_or_folder, None
    if not _is_elsewhere(uri):
        with _store(tracking_uri) as client:  # one that does not answer says so
            client.search_experiments(max_results=1)
    try:
        if client is not None:
            _, uri = _run_and_address(client, uri)
        into, address = mkdtemp(dir=_downloads().name), absolute_uri(tracking_uri)
        local = mlflow.artifacts.download_artifacts(uri, dst_path=into, tracking_uri=address)
    except MlflowException as error:
        fix = f"'{tracking_uri}' does not hold it either; {_list_runs(tracking_uri)}"
        raise MissingPath(f"policy of run '{run_or_folder}'", folder, fix) from error
    return Path(local)


@cache
def _downloads() -> "TemporaryDirectory[str]":
    """Fetched policies, to the end of the process (MLflow's own would stay)."""
    return TemporaryDirectory(prefix="dynamiccl-policies-")


def run_directory(run_or_folder: str, tracking_uri: str) -> Path:
    """The artifacts of a run id, or a path as it is; MissingPath where they are elsewhere."""
    folder = Path(run_or_folder)
    if folder.exists():
        return folder
    found = reopen_run(tracking_uri, run_or_folder).directory
    if found is None:
        fix = "fetch them first: mlflow artifacts download -r RUN -d DIR, and give DIR"
        raise MissingPath(f"files of run '{run_or_folder}'", folder, fix)
    return found


def find_run(named: str, tracking_uri: str) -> str | None:
    """The run whose policy `policy_directory` takes; None for files, UserError for none."""
    if Path(named).exists() or _is_elsewhere(named):
        return None
    check_there(tracking_uri, named)
    with _store(tracking_uri) as client:
        run_id, _ = _run_and_address(client, named)
        return str(client.get_run(run_id).info.run_id)


def _run_and_address(client: Any, named: str) -> tuple[str, str]:
    """The run of a run id, a run name, `runs:/...` or `models:/...`, and its policy's address."""
    if named.startswith("models:/"):
        name_and_version = get_model_name_and_version(client, named)
        if len(name_and_version) < 2:
            forms = f"models:/{MODEL_NAME}@{CANDIDATE} or models:/{MODEL_NAME}/VERSION"
            raise UserError(f"'{named}' is no registered model's version; give {forms}")
        version = client.get_model_version(*name_and_version)
        return version.run_id, version.source
    if named.startswith("runs:/"):
        return named.removeprefix("runs:/").partition("/")[0], named
    run_id = _id_of(client, named)
    return run_id, f"runs:/{run_id}/{POLICY_FOLDER}"


def _id_of(client: Any, named: str) -> str:
    """The latest FINISHED run of a name (`cql-seed0`); others as given."""
    if re.fullmatch("[0-9a-f]{32}", named) or "'" in named:
        return named
    wanted = f"attributes.run_name = '{named}' AND attributes.status = 'FINISHED'"
    places = [each.experiment_id for each in client.search_experiments()]
    found = client.search_runs(places, wanted, max_results=1, order_by=["start_time DESC"])
    return str(found[0].info.run_id) if found else named


def promote(named: str, tracking_uri: str, gated: Path) -> dict[str, Any]:
    """Let `champion` mean a run's policy, as a gate left it in `gated`.

    Returns `run_id`, `version`, `version_before` (or None), `passed_bins` (size bins in which it
    may act), and `policy`, its folder or address. Raises UserError where a gate has not judged it
    or lets it do nothing, and where it is not the run's.
    """
    run_id = find_run(named, tracking_uri)
    if run_id is None:
        raise UserError(
            f"{named} is no run, and a champion is a version of one: give the run's id or name, or "
            f"models:/{MODEL_NAME}@{CANDIDATE}"
        )
    run = reopen_run(tracking_uri, run_id)
    own, manifest = Manifest.read(policy_directory(run_id, tracking_uri)), Manifest.read(gated)
    if manifest.files.get(POLICY_NAME) != own.files.get(POLICY_NAME):
        raise UserError(
            f"{gated} is not about the policy of run '{run_id}': their {POLICY_NAME} differ; give "
            "the run that the gate judged"
        )
    verdicts = [support.gated for support in manifest.supports]
    passing = [bins for v in verdicts if v for each in v.values() for bins in each.values()]
    passed = sum(map(len, passing))
    if None in verdicts or not passed:
        raise UserError(
            f"no gate let the policy of {gated} act in any size bin: as a champion it would leave "
            f"all to NCCL; judge run '{run_id}' by 'dynamiccl-evaluate gate --data FRESH --policy "
            f"{run_id} --out DIR', on more fresh runs, and give --gated DIR"
        )
    # One folder for each verdict: what an earlier version means must not change.
    name = f"gated-{file_sha256(gated / MANIFEST_NAME)[:12]}"
    run.log_folder(gated, name)
    with _store(tracking_uri) as client:
        held = client.search_registered_models(f"name = '{MODEL_NAME}'")
        before = held[0].aliases.get(CHAMPION) if held else None
        version = register(tracking_uri, run_id, CHAMPION, folder=name)
        client.set_model_version_tag(MODEL_NAME, version, "gate", f"passed {passed} size bins")
    return {
        "run_id": run_id,
        "version": version,
        "version_before": None if before is None else str(before),
        "passed_bins": passed,
        "policy": f"{run.place}/{name}",
    }
