"""NCCL's costs as inputs: dropped from some rows, and as what times are learned over."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from mlflow import MlflowClient

from dynamiccl.datasets.costs import NUM_CELLS, log_costs
from dynamiccl.datasets.scoring import task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.nccl import NUM_PROTOCOLS
from dynamiccl.train.cost_base import base_residuals
from dynamiccl.train.data import TrainingData, load_data
from dynamiccl.train.fit import fit
from dynamiccl.train.recipes import make_recipe
from dynamiccl.train.replay import CostDropout, Replay
from tests.stores import new_store

FEW = ["steps=20", "steps_per_epoch=10", "num_members=2", "hidden_sizes=16"]


def test_costs_are_hidden_from_a_share_of_the_rows_whole(data_dir: Path) -> None:
    data = load_data(data_dir, 0, with_costs=True)
    replay = Replay(data.training.steps, 2_000, seed=0)
    costs = slice(data.cost_start, data.cost_start + NUM_CELLS)
    told = np.asarray(replay.sample().observations[1])
    assert (told[:, costs] != 0.0).any(axis=1).all()
    context = np.asarray(CostDropout(replay, data.cost_start, 0.25).sample().observations[1])
    hidden = (context[:, costs] == 0.0).all(axis=1)
    assert 0.2 < hidden.mean() < 0.3
    assert context.shape[1] == costs.stop
    assert (context[hidden][:, : costs.start] != 0.0).any(axis=1).all()
    # The tasks themselves still know theirs.
    assert (data.training.steps.tasks.context[:, costs] != 0.0).any(axis=1).all()


def as_nccl_predicts(data: TrainingData) -> TrainingData:
    """The same sweep on a machine whose times are NCCL's costs, and half as much again."""
    frame = data.frame.with_columns(data.catalogue.actions(data.frame)).drop_nulls("action")
    assert data.costs is not None
    costs = log_costs(frame, data.costs)
    costs = np.where(costs == 0.0, np.inf, costs)
    actions = frame["action"].to_list()
    cells = [
        None
        if c.algorithm is None or c.protocol is None
        else c.algorithm * NUM_PROTOCOLS + c.protocol
        for c in data.catalogue.configs
    ]
    row = [
        costs[i].min() if cells[a] is None else costs[i, cells[a]] for i, a in enumerate(actions)
    ]
    time = pl.Series("time_us", 1.5 * np.exp(row))
    return replace(
        data, frame=frame.with_columns(time).drop("action").filter(pl.col("time_us").is_finite())
    )


def test_times_that_are_nccls_costs_are_learned_over_them(data_dir: Path) -> None:
    data = as_nccl_predicts(load_data(data_dir, 0, with_costs=True))
    assert task_grid(data.frame, data.catalogue, [Split.VALIDATION]).tasks.height > 3
    found = base_residuals(data)
    assert found is not None
    assert found.over_cost < 1e-5
    assert found.over_time > 0.05
    assert found.is_cost_better
    assert base_residuals(replace(data, costs=None)) is None


@pytest.mark.parametrize("asked", ["held-out", "cost", "time"])
def test_a_run_says_what_times_were_learned_over(
    data_dir: Path, tmp_path: Path, asked: str
) -> None:
    uri = new_store(tmp_path)
    recipe = make_recipe("ddqn-actions", [*FEW, f"cost_base={asked}"])
    done = fit(data_dir, recipe, experiment="x", tracking_uri=uri, seed=0)
    run = MlflowClient(uri).get_run(done.run_id)
    residuals = {name: run.data.metrics[f"residual_over_{name}"] for name in ("cost", "time")}
    better = min(residuals, key=lambda name: residuals[name])
    assert run.data.tags["cost_base"] == (better if asked == "held-out" else asked)
