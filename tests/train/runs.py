"""Training runs for tests: killed in the middle, or without a package."""

import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from dynamiccl.train.fit import fit
from dynamiccl.train.recipe import Recipe


class Killed(Exception):
    """Raised to end a run between two epochs."""


def broken_run(data: Path, uri: str, recipe: Recipe, *, at: int, seed: int = 0) -> str:
    """The id of a run that ended after step `at`, the only one in the experiment `broken`."""

    def stop(step: int, _steps: int, _metrics: dict[str, float]) -> None:
        if step == at:
            raise Killed

    with pytest.raises(Killed):
        fit(data, recipe, experiment="broken", tracking_uri=uri, seed=seed, progress=stop)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("broken")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return str(run.info.run_id)


def without_package(package: str, directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `dynamiccl-train WORDS` in a directory as if `package` were not there."""
    code = (
        f"import sys; sys.modules['{package}'] = None; sys.argv = sys.argv[1:]; "
        "from dynamiccl.train.cli import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-P", "-c", code, "dynamiccl-train", *words],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
