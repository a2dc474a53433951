"""MLflow: the only place that imports it.

The default store is an SQLite file beside the working directory's `mlruns`. Metrics are logged once
an epoch: a call costs tens of milliseconds.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import mlflow
from mlflow.entities import Param, RunStatus
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from dynamiccl.datasets.manifest import POLICY_FOLDER, find_policy_in
from dynamiccl.errors import MissingPath, UserError
from dynamiccl.train import DEFAULT_TRACKING_URI


class Run:
    """One tracked run."""

    def __init__(self, client: MlflowClient, run_id: str, artifact_uri: str) -> None:
        """Wrap an MLflow run that has been started."""
        self._client = client
        self.run_id = run_id
        self.artifact_uri = artifact_uri

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters, as text."""
        entries = [Param(name, str(value)[:500]) for name, value in params.items()]
        self._client.log_batch(self.run_id, params=entries)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics of one step."""
        mlflow.log_metrics(dict(metrics), step=step, run_id=self.run_id)

    def param(self, name: str) -> str:
        """A parameter that was logged; empty without."""
        return str(self._client.get_run(self.run_id).data.params.get(name, ""))

    def has_metric(self, name: str, step: int) -> bool:
        """Whether a metric was logged for a step."""
        history = self._client.get_metric_history(self.run_id, name)
        return any(metric.step == step for metric in history)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        for name, value in tags.items():
            self._client.set_tag(self.run_id, name, value)

    def log_folder(self, folder: Path) -> None:
        """Copy what a folder holds into the run's artifacts."""
        self._client.log_artifacts(self.run_id, str(folder))

    @property
    def directory(self) -> Path | None:
        """The artifacts as a local folder; None when the store is elsewhere."""
        return _local(self.artifact_uri)


@contextmanager
def start_run(tracking_uri: str, experiment: str, run_name: str) -> Iterator[Run]:
    """Start a run and end it as FINISHED, or as FAILED when the body raises.

    Raises UserError when the tracking URI cannot be used.
    """
    with _store(tracking_uri) as client:
        run = client.create_run(_experiment(client, tracking_uri, experiment), run_name=run_name)
    with _ended(client, Run(client, run.info.run_id, run.info.artifact_uri)) as tracked:
        yield tracked


@contextmanager
def continue_run(tracking_uri: str, run_id: str) -> Iterator[Run]:
    """Go on with a run that did not finish, and end it as `start_run` does.

    Raises UserError when the tracking URI cannot be used, does not hold the run, or the run has
    finished.
    """
    with _store(tracking_uri) as client:
        run = client.get_run(run_id)
    if run.info.status == RunStatus.to_string(RunStatus.FINISHED):
        raise UserError(f"run '{run_id}' has finished; train anew with 'dynamiccl-train fit'")
    with _ended(client, Run(client, run_id, run.info.artifact_uri)) as tracked:
        client.update_run(run_id, RunStatus.to_string(RunStatus.RUNNING))
        yield tracked


@contextmanager
def _store(tracking_uri: str) -> Iterator[MlflowClient]:
    _quiet()
    try:
        mlflow.set_tracking_uri(tracking_uri)
        yield MlflowClient(tracking_uri)
    except MlflowException as error:
        raise UserError(
            f"cannot track in '{tracking_uri}': {error.message}; use {DEFAULT_TRACKING_URI} or the "
            "http address of an MLflow server"
        ) from error


@contextmanager
def _ended(client: MlflowClient, tracked: Run) -> Iterator[Run]:
    status = RunStatus.to_string(RunStatus.FAILED)
    try:
        yield tracked
        status = RunStatus.to_string(RunStatus.FINISHED)
    finally:
        client.set_terminated(tracked.run_id, status)


def policy_directory(run_or_folder: str, tracking_uri: str) -> Path:
    """The local policy folder of a run id, a run's artifact folder, or a policy folder itself.

    Raises MissingPath when it is none of them.
    """
    folder = Path(run_or_folder)
    found = find_policy_in(folder)
    if found is not None:
        return found
    if folder.exists():
        raise MissingPath("policy", folder, "give an MLflow run id, a run directory or an artifact")
    _quiet()
    try:
        local = mlflow.artifacts.download_artifacts(
            run_id=run_or_folder, artifact_path=POLICY_FOLDER, tracking_uri=tracking_uri
        )
    except MlflowException as error:
        raise MissingPath(
            f"policy of run '{run_or_folder}'",
            folder,
            f"'{tracking_uri}' does not hold it either; list the runs with 'mlflow ui'",
        ) from error
    return Path(local)


def _experiment(client: MlflowClient, tracking_uri: str, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    database = tracking_uri.removeprefix("sqlite:///")
    if database == tracking_uri:
        return str(client.create_experiment(name))
    # Beside the database, wherever the command was started: runs and their files stay together.
    root = Path(database).resolve().parent / "mlruns"
    return str(client.create_experiment(name, artifact_location=root.as_uri()))


def _local(uri: str) -> Path | None:
    parsed = urlparse(uri)
    if parsed.scheme not in {"", "file"}:
        return None
    return Path(unquote(parsed.path))


def _quiet() -> None:
    # Database migrations of the first use are logged line by line otherwise.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
