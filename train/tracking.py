"""MLflow runs and the model registry: with `experiments.py` the only place that imports it.

The default store is an SQLite file beside the working directory's `mlruns`. Metrics are logged once
an epoch: a call costs tens of milliseconds.
"""

import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import MappingProxyType
from typing import Any, Final

import mlflow
from mlflow.entities import Param, RunStatus
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE

from dynamiccl.datasets.manifest import POLICY_FOLDER, find_policy_in
from dynamiccl.errors import MissingPath, UserError
from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.experiments import (
    data_set_input,
    find_or_create,
    runs_page,
    set_missing_tags,
    source_tags,
)
from dynamiccl.train.stores import (
    absolute_uri,
    check_there,
    check_writable,
    local_folder,
    quiet_mlflow,
)

#: The registered model whose versions are policies.
MODEL_NAME: Final = "dynamiccl"
#: Alias of the version that was trained last.
CANDIDATE: Final = "candidate"
#: Alias of the version that jobs are to run under (`train/promote.py`).
CHAMPION: Final = "champion"
_SERVERS: Final = ("http://", "https://")
NO_TAGS: Final[Mapping[str, str]] = MappingProxyType({})


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay SIGINT until the block ends; KeyboardInterrupt is raised then.

    An interrupted transaction leaves MLflow's store locked.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # it gets no signals
        return
    came = False

    def remember(_number: int, _frame: object) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


class Run:
    """One tracked run."""

    def __init__(self, client: MlflowClient, run_id: str, artifact_uri: str) -> None:
        """Wrap an MLflow run that has been started."""
        self._client = client
        self.run_id = run_id
        self.artifact_uri = artifact_uri

    @uninterrupted()
    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters, as text."""
        entries = [Param(name, str(value)[:500]) for name, value in params.items()]
        self._client.log_batch(self.run_id, params=entries)

    @uninterrupted()
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics of one step."""
        mlflow.log_metrics(dict(metrics), step=step, run_id=self.run_id)

    def param(self, name: str) -> str:
        """A parameter that was logged; empty without."""
        return str(self._client.get_run(self.run_id).data.params.get(name, ""))

    def tag(self, name: str) -> str:
        """A tag; empty without."""
        return str(self._client.get_run(self.run_id).data.tags.get(name, ""))

    def has_metric(self, name: str, step: int) -> bool:
        """Whether a metric was logged for a step."""
        return step in self.history(name)

    @uninterrupted()
    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        for name, value in tags.items():
            self._client.set_tag(self.run_id, name, value)

    @uninterrupted()
    def log_data(self, folder: str, digest: str) -> None:
        """Log the data directory that the run learns from, by its hash, as MLflow's data set."""
        inputs = [data_set_input(folder, digest)]
        try:
            self._client.log_inputs(self.run_id, inputs)
        except MlflowException:
            # MLflow 3 looks for the data set and then inserts it: another trial of the study may
            # have come between (UNIQUE constraint). Now it is there; another error comes again.
            self._client.log_inputs(self.run_id, inputs)

    def describe(self, text: str) -> None:
        """Set the description that MLflow shows beside the run."""
        self.set_tags({MLFLOW_RUN_NOTE: text})

    @uninterrupted()
    def log_text(self, text: str, name: str) -> None:
        """Write a text among the run's artifacts."""
        self._client.log_text(self.run_id, text, name)

    @uninterrupted()
    def end(self, *, finished: bool) -> None:
        """End it as FINISHED or FAILED."""
        status = RunStatus.FINISHED if finished else RunStatus.FAILED
        self._client.set_terminated(self.run_id, RunStatus.to_string(status))

    def history(self, name: str) -> dict[int, float]:
        """Step -> value of a metric, in order of the steps; empty when it was never logged."""
        found = self._client.get_metric_history(self.run_id, name)
        return {each.step: each.value for each in sorted(found, key=lambda each: each.step)}

    @uninterrupted()
    def log_folder(self, folder: Path, name: str | None = None) -> None:
        """Copy what a folder holds into the run's artifacts, or into folder `name` of them."""
        self._client.log_artifacts(self.run_id, str(folder), name)

    @property
    def directory(self) -> Path | None:
        """The artifacts as a local folder; None when the store is elsewhere."""
        return local_folder(self.artifact_uri)


def open_run(
    tracking_uri: str, experiment: str, run_name: str, tags: Mapping[str, str] = NO_TAGS
) -> Run:
    """Start a run that somebody ends later; raises UserError when the URI cannot be used."""
    check_writable(tracking_uri)
    with _store(tracking_uri) as client:
        experiment_id = find_or_create(client, tracking_uri, experiment)
        all_tags = source_tags() | dict(tags)
        run = client.create_run(experiment_id, run_name=run_name, tags=all_tags)
    return Run(client, run.info.run_id, run.info.artifact_uri)


def reopen_run(tracking_uri: str, run_id: str) -> Run:
    """A run that was started; raises UserError when the store does not hold it."""
    check_there(tracking_uri, run_id)
    with _store(tracking_uri) as client:
        run = client.get_run(run_id)
    return Run(client, run_id, run.info.artifact_uri)


@contextmanager
def start_run(
    tracking_uri: str, experiment: str, run_name: str, tags: Mapping[str, str] = NO_TAGS
) -> Iterator[Run]:
    """Start a run and end it as FINISHED, or as FAILED when the body raises.

    Raises UserError when the tracking URI cannot be used.
    """
    with _ended(open_run(tracking_uri, experiment, run_name, tags)) as tracked:
        yield tracked


@contextmanager
def continue_run(tracking_uri: str, run_id: str) -> Iterator[Run]:
    """Go on with a run that did not finish, and end it as `start_run` does.

    Raises UserError when the tracking URI cannot be used, does not hold the run, or the run has
    finished.
    """
    check_there(tracking_uri, run_id)
    with _store(tracking_uri) as client:
        run = client.get_run(run_id)
    if run.info.status == RunStatus.to_string(RunStatus.FINISHED):
        raise UserError(f"run '{run_id}' has finished; train anew with 'dynamiccl-train fit'")
    with _ended(Run(client, run_id, run.info.artifact_uri)) as tracked:
        set_missing_tags(client, run.info.experiment_id)
        client.update_run(run_id, RunStatus.to_string(RunStatus.RUNNING))
        yield tracked


@contextmanager
def _store(tracking_uri: str) -> Iterator[MlflowClient]:
    quiet_mlflow()
    try:
        # MLflow keeps stores by their address: a relative one would stay in the first directory.
        address = absolute_uri(tracking_uri)
        mlflow.set_tracking_uri(address)
        with uninterrupted():
            yield MlflowClient(address)
    except MlflowException as error:
        said = str(error.message).partition("\n")[0]
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise UserError(
                f"'{tracking_uri}' does not hold it: {said}; {_list_runs(tracking_uri)}"
            ) from error
        raise UserError(
            f"cannot track in '{tracking_uri}': {said}; use {DEFAULT_TRACKING_URI} or the "
            "http address of an MLflow server"
        ) from error


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C while a run was tracked, which `run_id` names."""

    def __init__(self, run_id: str) -> None:
        """Of which run."""
        super().__init__(run_id)
        self.run_id = run_id


@contextmanager
def _ended(run: Run) -> Iterator[Run]:
    finished = False
    try:
        yield run
        finished = True
    except KeyboardInterrupt:
        raise RunInterrupted(run.run_id) from None
    finally:
        run.end(finished=finished)


@dataclass(frozen=True, slots=True)
class Child:
    """A run below another."""

    run_id: str
    tags: Mapping[str, str]


def child_tags(parent_run_id: str) -> dict[str, str]:
    """Tags of a run that make it a child."""
    return {MLFLOW_PARENT_RUN_ID: parent_run_id}


def children(tracking_uri: str, parent_run_id: str, tags: Mapping[str, str]) -> list[Child]:
    """The runs below a run that have these tags, oldest first."""
    wanted = child_tags(parent_run_id) | dict(tags)
    query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in wanted.items())
    with _store(tracking_uri) as client:
        experiment_id = client.get_run(parent_run_id).info.experiment_id
        found: list[Child] = []
        token: str | None = None
        while token is None or token:
            page = client.search_runs(
                [experiment_id], query, order_by=["attributes.start_time"], page_token=token
            )
            found += [Child(run.info.run_id, run.data.tags) for run in page]
            token = page.token or ""
        return found


def ui_hint(tracking_uri: str, run_id: str) -> str:
    """Where the runs beside a run are compared: a command, and the page that it serves."""
    with _store(tracking_uri) as client:
        page = runs_page(client.get_run(run_id).info.experiment_id)
    if tracking_uri.startswith(_SERVERS):
        return f"{tracking_uri.rstrip('/')}{page}"
    return f"mlflow ui --backend-store-uri {tracking_uri}\n  and open http://127.0.0.1:5000{page}"


def _list_runs(tracking_uri: str) -> str:
    if tracking_uri.startswith(_SERVERS):
        return f"list the runs at {tracking_uri}"
    return f"list the runs with 'mlflow ui --backend-store-uri {tracking_uri}'"


def read_text(tracking_uri: str, run_id: str, name: str) -> str | None:
    """A text among a run's artifacts; None without it. Raises UserError for a run that is not."""
    run = reopen_run(tracking_uri, run_id)
    if run.directory is not None:
        path = run.directory / name
        return path.read_text(encoding="utf-8") if path.is_file() else None
    with _store(tracking_uri) as client:
        if name not in {entry.path for entry in client.list_artifacts(run_id)}:
            return None
        return str(mlflow.artifacts.load_text(f"{run.artifact_uri}/{name}"))


def add_artifacts(tracking_uri: str, run_id: str, folder: Path, place: str) -> None:
    """Copy what a folder holds to `place` among the artifacts of a run, which may have ended.

    Raises UserError for a run that is not, and for a store that takes nothing.
    """
    with _store(tracking_uri) as client:
        client.log_artifacts(run_id, str(folder), place)


def register(tracking_uri: str, run_id: str, alias: str, *, folder: str = POLICY_FOLDER) -> str:
    """Make a run's policy a version of the registered model, and let `alias` mean it; the version.

    `folder` is where it lies among the run's artifacts; each has one version. Raises
    UserError when the store has no registry.
    """
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


def version_of(tracking_uri: str, alias: str) -> str | None:
    """The version of the registered model that an alias means; None when it means none."""
    with _store(tracking_uri) as client:
        for model in client.search_registered_models(f"name = '{MODEL_NAME}'"):
            version = model.aliases.get(alias)
            return None if version is None else str(version)
        return None


def tag_version(tracking_uri: str, version: str, tags: Mapping[str, str]) -> None:
    """Set tags of a version of the registered model."""
    with _store(tracking_uri) as client:
        for name, value in tags.items():
            client.set_model_version_tag(MODEL_NAME, version, name, value)


def policy_directory(run_or_folder: str, tracking_uri: str) -> Path:
    """The local policy folder of a run's id or name or artifact folder, or a policy folder itself.

    Also of a registered version, by alias or number: `models:/dynamiccl@candidate`. Raises
    MissingPath when it is none of them.
    """
    folder = Path(run_or_folder)
    found = find_policy_in(folder)
    if found is not None:
        return found
    if folder.exists():
        raise MissingPath("policy", folder, "give an MLflow run id, a run directory or an artifact")
    check_there(tracking_uri, run_or_folder)
    quiet_mlflow()
    uri = run_or_folder
    if ":/" not in uri:
        with _store(tracking_uri) as client:
            uri = f"runs:/{_id_of(client, run_or_folder)}/{POLICY_FOLDER}"
    try:
        address = absolute_uri(tracking_uri)
        mlflow.set_tracking_uri(address)
        into = mkdtemp(dir=_downloads().name)
        local = mlflow.artifacts.download_artifacts(uri, dst_path=into, tracking_uri=address)
    except MlflowException as error:
        raise MissingPath(
            f"policy of run '{run_or_folder}'",
            folder,
            f"'{tracking_uri}' does not hold it either; {_list_runs(tracking_uri)}",
        ) from error
    return Path(local)


@cache
def _downloads() -> "TemporaryDirectory[str]":
    """Where policies are fetched to; it goes when the process ends (MLflow's own would stay)."""
    return TemporaryDirectory(prefix="dynamiccl-policies-")


def run_directory(run_or_folder: str, tracking_uri: str) -> Path:
    """The local artifact folder of a run id, or a folder or file as it is.

    Raises MissingPath for a run whose files are elsewhere, and UserError for no run at all.
    """
    folder = Path(run_or_folder)
    if folder.exists():
        return folder
    found = reopen_run(tracking_uri, run_or_folder).directory
    if found is None:
        fix = "fetch them first: mlflow artifacts download -r RUN -d DIR, and give DIR"
        raise MissingPath(f"files of run '{run_or_folder}'", folder, fix)
    return found


def find_run(named: str, tracking_uri: str) -> str | None:
    """The id of the run that `policy_directory` would take the policy from; None for a folder.

    None also for files that lie elsewhere (`s3://...`), of which no run is known. Raises UserError
    when the store holds no such run or registered version.
    """
    kind, found, path = named.partition(":/")
    if Path(named).exists() or (found and kind not in {"runs", "models"}):
        return None
    check_there(tracking_uri, named)
    with _store(tracking_uri) as client:
        if not found or kind == "runs":
            run_id = path.partition("/")[0] if found else _id_of(client, named)
        else:
            run_id = _version_named(client, path).run_id
        return str(client.get_run(run_id).info.run_id)


def _id_of(client: MlflowClient, named: str) -> str:
    """The id of a run by its name (`cql-seed0`): of the latest that ended well; others as given."""
    if re.fullmatch("[0-9a-f]{32}", named) or "'" in named:
        return named
    wanted = f"attributes.run_name = '{named}' AND attributes.status = 'FINISHED'"
    places = [each.experiment_id for each in client.search_experiments()]
    found = client.search_runs(places, wanted, max_results=1, order_by=["start_time DESC"])
    return str(found[0].info.run_id) if found else named


def _version_named(client: MlflowClient, path: str) -> Any:
    """The registered version that NAME@ALIAS, NAME/NUMBER or NAME/latest means."""
    name, _, alias = path.partition("@")
    if alias:
        return client.get_model_version_by_alias(name, alias)
    name, _, number = path.partition("/")
    if number == "latest":
        versions = client.search_model_versions(f"name = '{name}'")
        return max(versions, key=lambda each: int(each.version))
    return client.get_model_version(name, number)
