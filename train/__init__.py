"""Training from measurements: recipes, networks, d3rlpy algorithms, experiment tracking.

Three things must be settled before d3rlpy and MLflow are first imported, wherever in this package
that happens: MLflow's telemetry is off (nothing phones home); gym, which d3rlpy still imports, does
not print its notice of retirement at every start; and d3rlpy is without PRDC, an algorithm that no
recipe has: for it alone d3rlpy imports scikit-learn, two or three seconds of every process.
"""

import os
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Final

#: MLflow's store where none is named; here, so that a command line need not import MLflow for it.
DEFAULT_TRACKING_URI: Final = "sqlite:///mlflow.db"
#: What a run or a study came to, among its artifacts; written last of all.
SUMMARY_NAME: Final = "summary.json"

#   MLFLOW_DISABLE_TELEMETRY  set to true where it is not set: MLflow sends nothing.
#   MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR  set to false where it is not set.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

if find_spec("gym_notices") is not None:
    from gym_notices import notices

    notices.notices.clear()
for _name in ("prdc", "torch.prdc_impl"):
    sys.modules.setdefault(f"d3rlpy.algos.qlearning.{_name}", ModuleType(_name))
