"""MLflow's pages: kind and saved view of an experiment, source and data set of a run.

MLflow 3.17 opens an experiment on what the browser had open last, at first its GenAI overview,
where training runs show nothing; `workflowType` in the address says otherwise (`runs_page`). The
tag `mlflow.experimentKind` is for releases whose pages go by the experiment.
"""

import json
import sys
from pathlib import Path
from typing import Final

from mlflow.entities import Dataset, DatasetInput, InputTag, SourceType
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import (
    MLFLOW_DATASET_CONTEXT,
    MLFLOW_EXPERIMENT_PRIMARY_METRIC_GREATER_IS_BETTER,
    MLFLOW_EXPERIMENT_PRIMARY_METRIC_NAME,
    MLFLOW_SOURCE_NAME,
    MLFLOW_SOURCE_TYPE,
)

#: Key of the saved view in the tag's name and in addresses.
VIEW_KEY: Final = "dynamiccl"
_COLUMNS: Final = (
    "metrics.`best_validation_regret`",
    "metrics.`default_validation_regret`",
    "params.`name`",
    "params.`seed`",
    "metrics.`train_seconds`",
    "attributes.`Dataset`",
)
#: What the UI writes by *Views*, *Save as new view*: the state is JSON within JSON.
_VIEW: Final = {
    "name": "Validation regret",
    "createdAt": 0,
    "state": json.dumps(
        {
            "orderByKey": "metrics.`best_validation_regret`",
            "orderByAsc": True,
            "selectedColumns": _COLUMNS,
        }
    ),
}
#: Tags of an experiment. The kind has no constant in MLflow's Python; its UI reads it.
EXPERIMENT_TAGS: Final = {
    "mlflow.experimentKind": "custom_model_development",
    MLFLOW_EXPERIMENT_PRIMARY_METRIC_NAME: "best_validation_regret",
    MLFLOW_EXPERIMENT_PRIMARY_METRIC_GREATER_IS_BETTER: "false",
    f"mlflow.sharedViewState.{VIEW_KEY}": json.dumps(_VIEW),
}
#: MLflow takes at most 36 characters of a data set's digest.
_DIGEST_DIGITS: Final = 12


def find_or_create(client: MlflowClient, tracking_uri: str, name: str) -> str:
    """The id of the experiment `name`, which is made if need be; sets the tags that it lacks."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        set_missing_tags(client, str(found.experiment_id))
        return str(found.experiment_id)
    database = tracking_uri.removeprefix("sqlite:///")
    if database == tracking_uri:
        return str(client.create_experiment(name, tags=EXPERIMENT_TAGS))
    # Beside the database, wherever the command was started: runs and their files stay together.
    root = Path(database).resolve().parent / "mlruns"
    made = client.create_experiment(name, artifact_location=root.as_uri(), tags=EXPERIMENT_TAGS)
    return str(made)


def set_missing_tags(client: MlflowClient, experiment_id: str) -> None:
    """Set those of EXPERIMENT_TAGS that an experiment of an older release lacks."""
    held = client.get_experiment(experiment_id).tags
    for key, value in EXPERIMENT_TAGS.items():
        if key not in held:
            client.set_experiment_tag(experiment_id, key, value)


def runs_page(experiment_id: str) -> str:
    """Address of an experiment's runs, below that of `mlflow ui`.

    >>> runs_page("1")
    '/#/experiments/1/runs?workflowType=machine_learning&viewStateShareKey=dynamiccl'
    """
    query = f"workflowType=machine_learning&viewStateShareKey={VIEW_KEY}"
    return f"/#/experiments/{experiment_id}/runs?{query}"


def source_tags() -> dict[str, str]:
    """What started a run, for the column *Source*: `dynamiccl-train fit`, or a script's name."""
    path, command = Path(sys.argv[0]), sys.argv[1:2]
    # `python -m dynamiccl.train.cli` is what a study starts as a worker.
    program = f"dynamiccl-{path.parent.name}" if path.name == "cli.py" else path.name
    if program.startswith("dynamiccl-") and command and command[0].isalpha():
        program = f"{program} {command[0]}"
    return {
        MLFLOW_SOURCE_NAME: program or "python",
        MLFLOW_SOURCE_TYPE: SourceType.to_string(SourceType.LOCAL),
    }


def data_set_input(folder: str, digest: str) -> DatasetInput:
    """A data directory for MLflow's column *Dataset*: its name, and its hash's first digits."""
    entity = Dataset(
        name=Path(folder).resolve().name or folder,
        digest=digest[:_DIGEST_DIGITS],
        source_type="local",
        source=json.dumps({"uri": str(Path(folder).resolve())}),
    )
    return DatasetInput(entity, tags=[InputTag(MLFLOW_DATASET_CONTEXT, "training")])
