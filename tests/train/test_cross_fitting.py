"""Networks that act where they are sure: who has not seen what, and what follows of it."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dynamiccl.datasets.features import CONTEXT_COLUMN, Observations
from dynamiccl.datasets.steps import Steps
from dynamiccl.errors import UserError
from dynamiccl.sizes import BINS_PER_OCTAVE, size_bin
from dynamiccl.train.action_head import ActionInputs
from dynamiccl.train.algorithms import make_algorithm, members_of
from dynamiccl.train.cross_fitting import CrossFitting, without_costs
from dynamiccl.train.data import TrainingData, load_data
from dynamiccl.train.export import FitSummary
from dynamiccl.train.fit import fit
from dynamiccl.train.heads import octaves
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipes import make_recipe
from dynamiccl.train.replay import Replay
from tests.data_sets import SWEEP, make_data
from tests.stores import new_store

#: Half octaves from 4 KiB on, so that a bound of 4 % can be kept.
WIDE = SWEEP.replace('min = "64K", max = "1G"', 'min = "4K", max = "1G", steps_per_octave = 2')
ALPHA = 0.04


@dataclass(frozen=True)
class Run:
    data: TrainingData
    summary: FitSummary
    policy: TorchPolicy


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("sure")
    data = make_data(folder / "data", WIDE)
    settings = ["steps=300", "steps_per_epoch=150", "learning_rate=0.003", "batch_size=128"]
    recipe = make_recipe("ddqn-actions", [*settings, f"alpha={ALPHA}", "cost_dropout=0.3"])
    done = fit(data, recipe, experiment="x", tracking_uri=new_store(folder), seed=0)
    policy = TorchPolicy.load(Path(done.run_directory) / "policy")
    return Run(load_data(data, 0, with_costs=True, is_cross_fitted=True), done, policy)


def slower(run: Run, actions: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    grid = run.data.validation
    return float((grid.chosen_us(actions) > 1.01 * grid.default_us).mean())


def test_octaves_of_contexts_are_those_of_bins() -> None:
    sizes = [1, 3, (1 << 20) - 16, 1 << 20, 960_000, 963_000, 1_500_000, (1 << 30) + 1]
    context = torch.zeros(len(sizes), len(CONTEXT_COLUMN))
    context[:, CONTEXT_COLUMN["log2_size"]] = torch.log2(torch.tensor(sizes, dtype=torch.float64))
    assert octaves(context).tolist() == [size_bin(size) // BINS_PER_OCTAVE for size in sizes]


def test_a_member_learns_nothing_of_the_octaves_that_it_leaves_out(data_dir: Path) -> None:
    data = load_data(data_dir, 0, with_costs=True, is_cross_fitted=True)
    steps = data.training.steps
    octave = torch.from_numpy(steps.tasks.context[steps.task])
    held = np.unique(data.validation.tasks["bin"].to_numpy() // BINS_PER_OCTAVE)
    is_first_part = np.isin(octaves(octave).numpy(), held[::3])
    assert 0.2 < is_first_part.mean() < 0.5
    otherwise = replace(steps, reward=np.where(is_first_part, 9.0 * steps.reward, steps.reward))
    recipe = make_recipe("ddqn-actions", ["num_members=3", "hidden_sizes=16", "batch_size=64"])

    def weights(of: Steps) -> list[torch.Tensor]:
        torch.manual_seed(0)
        actions = ActionInputs(data.catalogue.configs, data.cost_start, uses_cost=True)
        algorithm = make_algorithm(recipe, of, actions=actions)
        CrossFitting(data, 3).leave_out(members_of(algorithm))  # type: ignore[arg-type]
        replay = Replay(of, 64, seed=0)
        for _ in range(5):
            algorithm.update(replay.sample())
        return [torch.cat([p.flatten() for p in m.parameters()]) for m in members_of(algorithm)]

    plain, changed = weights(steps), weights(otherwise)
    assert torch.equal(plain[0], changed[0])
    assert not torch.equal(plain[1], changed[1])
    assert not torch.equal(plain[2], changed[2])


def test_it_gains_and_is_hardly_ever_slower(run: Run) -> None:
    summary = run.summary
    tasks = run.data.validation.tasks.height
    assert summary.validation_tasks == tasks
    assert summary.least_alphas == [pytest.approx(1.0 / (tasks + 1))]
    assert summary.least_alphas[0] < ALPHA
    assert summary.validation_regret < 0.7 * summary.validation_default_regret
    actions = run.policy.act(run.data.observations, run.data.validation.mask)
    assert slower(run, actions) <= ALPHA


def test_it_still_gains_without_nccls_costs(run: Run) -> None:
    untold = without_costs(run.data.observations.context, run.data.cost_start)
    assert not np.array_equal(untold, run.data.observations.context)
    actions = run.policy.act(Observations.cold(untold), run.data.validation.mask)
    assert (actions != 0).any()
    assert slower(run, actions) <= ALPHA
    assert run.data.mean_over_groups(actions) < run.data.default_regret()


@pytest.mark.parametrize("column", ["log2_nodes", "log2_nic_speed"])
def test_of_machines_and_shapes_never_measured_it_leaves_all_to_nccl(run: Run, column: str) -> None:
    elsewhere = run.data.observations.context.copy()
    elsewhere[:, CONTEXT_COLUMN[column]] += 1.0
    observations = Observations.cold(elsewhere)
    assert (run.policy.act(observations, run.data.validation.mask) == 0).all()
    certain = run.policy.certainty(observations, 1)
    assert certain is not None
    assert certain[1] == math.inf
    assert certain[0] >= 0.01


def test_it_explains_how_sure_it_had_to_be(run: Run) -> None:
    certain = run.policy.certainty(run.data.observations, 1)
    assert certain is not None
    spread, caution = certain
    assert 0.01 <= spread < 1.0
    assert math.isfinite(caution)


def test_with_too_few_tasks_it_abstains_and_says_what_can_be_kept(
    data_dir: Path, tmp_path: Path
) -> None:
    settings = ["steps=20", "steps_per_epoch=10", "num_members=2", "hidden_sizes=16"]
    recipe = make_recipe("ddqn-actions", settings)
    done = fit(data_dir, recipe, experiment="x", tracking_uri=new_store(tmp_path), seed=0)
    assert done.validation_regret == done.validation_default_regret
    assert done.least_alphas == [pytest.approx(1.0 / (done.validation_tasks + 1))]
    assert done.least_alphas[0] > recipe.alpha


@pytest.mark.parametrize(
    ("name", "settings", "fix"),
    [
        ("bc", ["caution=bound"], "--set caution=margin"),
        ("ddqn-actions", ["num_members=1"], "--set num_members=6"),
        ("ddqn-actions", ["split=shape"], "--set split=size"),
        ("ddqn-actions", ["caution=care"], "bound"),
        ("ddqn-actions", ["cost_base=true"], "held-out"),
    ],
)
def test_what_cannot_be_bounded_is_refused(name: str, settings: list[str], fix: str) -> None:
    with pytest.raises(UserError, match=fix):
        make_recipe(name, settings)
