"""Boosted trees fitted to simulated sweeps: what they choose, what they leave to NCCL."""

from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dynamiccl.collect.cli import app
from dynamiccl.datasets.features import TUNED, Observations
from dynamiccl.datasets.questions import cold_questions, decide
from dynamiccl.datasets.scoring import task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.policies import LearnedPolicy
from dynamiccl.nccl import Collective, Config
from dynamiccl.serve.artifact import export_artifact, pick_table
from dynamiccl.serve.table import DecisionTable
from dynamiccl.simulator import h100
from dynamiccl.simulator.group import Group
from dynamiccl.train.boosting.fit import fit_boosting
from dynamiccl.train.data import load_data
from dynamiccl.train.fit import fit
from dynamiccl.train.policy import TorchPolicy, forward
from dynamiccl.train.recipes import make_recipe
from tests.data_sets import SYSTEM, make_data
from tests.stores import new_store
from tests.train.cautious.wide import WIDE, Run


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Of shapes 2x8, 4x8 and 8x8, and of NCCL's costs of 16x8, which nobody measured."""
    folder = tmp_path_factory.mktemp("boosting")
    data = make_data(folder / "data", WIDE)
    asked = ["--system", SYSTEM, "--machine", "h100-ib", "--nccl", "2.27.5", "--out", str(data)]
    done = CliRunner().invoke(app, ["shapes", *asked, "--group", "16x8"])
    assert done.exit_code == 0, done.output
    uri = new_store(folder)
    recipe = make_recipe("residual-boosting", ["alpha=0.05"])
    return Run(data, uri, fit(data, recipe, experiment="trees", tracking_uri=uri, seed=0))


def test_it_gains_where_there_is_something_to_gain_and_is_hardly_ever_slower(
    fitted: Run, tmp_path: Path
) -> None:
    quiet = "noise_sigma = 0.0\ntail_probability = 0.0\ndrift_sigma = 0.0\n"
    truth = make_data(tmp_path, WIDE + quiet)
    policy = TorchPolicy.load(fitted.policy)
    grid = task_grid(read(truth), policy.manifest.actions(), [Split.TEST])
    chosen = LearnedPolicy(policy, policy.manifest.actions(), "trees").choose(grid)
    default = float(grid.regret(np.zeros(len(chosen), dtype=np.int64)).mean())
    assert float(grid.regret(chosen).mean()) < default / 2
    ratio = grid.chosen_us(chosen) / grid.default_us
    assert float((ratio > 1.01).mean()) <= 2 / 36  # alpha is 0.05, and there are 36 tasks


def test_run_says_how_far_it_can_be_trusted(fitted: Run) -> None:
    mlflow.set_tracking_uri(fitted.uri)
    metrics = mlflow.get_run(fitted.summary.run_id).data.metrics
    assert metrics["calibration_tasks_sizes"] == 138
    assert metrics["calibration_tasks_shapes"] > 0
    assert 0.0 < metrics["coverage_90_sizes"] <= 1.0
    assert fitted.summary.validation_regret < fitted.summary.validation_default_regret
    assert (fitted.policy.parent / "plots" / "calibration.png").is_file()


def test_tables_are_what_the_policy_answers_and_other_shapes_get_theirs(
    fitted: Run, tmp_path: Path
) -> None:
    # `export_artifact` also compares the brain with tables and policy.
    artifact = export_artifact(fitted.policy, tmp_path / "artifact", groups=[(16, 8)])
    policy = TorchPolicy.load(fitted.policy)
    configs = policy.manifest.actions().configs
    for support in policy.manifest.supports:
        asked = cold_questions(policy.manifest, support)
        actions = decide(policy, Observations.cold(asked.context), asked.mask)
        info = pick_table(artifact, support.num_nodes, support.num_ranks, support.system)
        table = DecisionTable.read(artifact.directory / info.path)
        wanted = [None if action == 0 else configs[action] for action in actions]
        bins = range(asked.first_bin, asked.first_bin + asked.num_bins)
        assert [table.at(collective, index) for collective in TUNED for index in bins] == wanted
        assert (actions != 0).any()
        assert (actions.reshape(len(TUNED), -1)[0] == 0).all()  # Broadcast was not measured

    info = pick_table(artifact, 16, 128, SYSTEM)
    table, group, acted = DecisionTable.read(artifact.directory / info.path), Group(16, 8), 0
    for octave in range(16, 31):
        config = table.lookup(Collective.AllReduce, 1 << octave)
        if config is not None:
            default = h100.default_config(group, Collective.AllReduce, 1 << octave)
            assert config.num_channels is None
            assert _true_us(config, 1 << octave) < 1.01 * _true_us(default, 1 << octave)
            acted += 1
    assert acted >= 1


def _true_us(config: Config, size: int) -> float:
    assert config.algorithm is not None
    assert config.protocol is not None
    cell = Collective.AllReduce, config.algorithm, config.protocol
    return h100.true_us(Group(16, 8), *cell, size)


def test_a_bound_that_cannot_be_kept_abstains(data_dir: Path) -> None:
    data = load_data(data_dir, 0, with_costs=True)
    found = fit_boosting(data, alpha=0.01, seed=0)
    assert found.of_sizes[0].least_alpha() > 0.01
    observed = (
        torch.from_numpy(data.observations.window),
        torch.from_numpy(data.observations.context),
    )
    mask = torch.from_numpy(data.validation.mask.astype(np.float32))
    assert (found.policy(*observed, mask)[0] == 0).all()


def test_without_costs_it_learns_from_ratios(data_dir: Path) -> None:
    data = load_data(data_dir, 0)
    assert data.costs is None
    found = fit_boosting(data, alpha=0.1, seed=0)
    assert not any(found.policy.block_costs)
    chosen = forward(found.of_training, data.observations, data.validation.mask)[0]
    assert data.mean_over_groups(chosen) < data.default_regret()
