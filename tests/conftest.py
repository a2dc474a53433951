"""Shared fixtures: one simulated data set and one trained run for the whole session."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

# Fixtures for every test.
from tests.data_sets import data_dir as data_dir  # noqa: PLC0414
from tests.plugin_build import build_dir as build_dir  # noqa: PLC0414
from tests.plugin_build import plugin_path as plugin_path  # noqa: PLC0414
from tests.plugin_build import torch_build_dir as torch_build_dir  # noqa: PLC0414

# CI repeats one set of examples, so that a run says something about the change; by hand they vary.
settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


@dataclass(frozen=True)
class Trained:
    """A finished training run."""

    data: Path
    run_directory: Path
    run_id: str
    tracking_uri: str

    @property
    def policy(self) -> Path:
        return self.run_directory / "policy"


@pytest.fixture(scope="session")
def trained(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The recipe, with fewer steps than its default, on the simulated data set."""
    import torch

    from dynamiccl.train.fit import fit
    from dynamiccl.train.recipes import make_recipe

    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{store / 'mlflow.db'}"
    recipe = make_recipe("ddqn-dueling", ["steps=1200", "steps_per_epoch=150"])
    summary = fit(data_dir, recipe, experiment="tests", tracking_uri=uri, seed=0)
    return Trained(data_dir, Path(summary.run_directory), summary.run_id, uri)
