"""Training from measurements."""

import os
from typing import Final

DEFAULT_TRACKING_URI: Final = "sqlite:///mlflow.db"
#: Of a run or a study, written last of all.
SUMMARY_NAME: Final = "summary.json"

# Before MLflow is first imported, wherever in this package that happens:
#   MLFLOW_DISABLE_TELEMETRY  set to true where it is not set: MLflow sends nothing.
#   MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR  set to false where it is not set.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")


def tracking_uri() -> str:
    """MLflow's store, without an import of MLflow."""
    #   MLFLOW_TRACKING_URI  the MLflow store of runs. Default: sqlite:///mlflow.db, a file in the
    #                        working directory.
    return os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_TRACKING_URI
