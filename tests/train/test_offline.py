"""Batches equal those of d3rlpy's pickers; losses; what a run learns of; and all without d3rlpy."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import polars as pl
import pytest
import torch

from dynamiccl.datasets.costs import NUM_CELLS
from dynamiccl.datasets.features import cold_observations
from dynamiccl.datasets.history import WINDOW_COLUMN
from dynamiccl.datasets.steps import Int64Array, Steps, with_noise
from dynamiccl.train.data import base_residuals, load_data
from dynamiccl.train.networks import (
    COST_KNOWN,
    LOG_COST,
    MASKED_Q,
    ActionFeatures,
    ActionHead,
    ActionInputs,
    Imitator,
)
from dynamiccl.train.offline import Batches, Loss, Networks, Replay, entropy, make_algorithm
from dynamiccl.train.policy import PolicyModule, forward
from dynamiccl.train.recipe import make_recipe
from tests.steps import make_steps

# After ours, which silences what d3rlpy has to say about gym.
from d3rlpy.dataset import (  # isort: skip
    BasicTransitionPicker,
    Episode,
    MultiStepTransitionPicker,
    TransitionMiniBatch,
)


def episodes_of(steps: Steps) -> list[Episode]:
    """The same steps as d3rlpy holds them, windows and masks made in advance."""
    rows = np.arange(len(steps))
    seen, mask, _ = steps.observe(rows, steps.episode_of(rows))
    return [
        Episode(
            observations=[each[start:end] for each in (seen.window, seen.context, mask)],
            actions=steps.action[start:end, None].astype(np.float32),
            rewards=steps.reward[start:end, None],
            terminated=bool(steps.terminated[number]),
        )
        for number, (start, end) in enumerate(zip(steps.starts[:-1], steps.starts[1:], strict=True))
    ]


def assert_equal(ours: TransitionMiniBatch, theirs: TransitionMiniBatch) -> None:
    for name in ("observations", "next_observations"):
        for part, their_part in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            np.testing.assert_array_equal(part, their_part)
    for name in ("actions", "next_actions", "terminals", "intervals"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    np.testing.assert_allclose(ours.rewards, theirs.rewards, rtol=1e-6)


@pytest.mark.parametrize("own_windows", [False, True])
@pytest.mark.parametrize(("num_steps", "gamma"), [(1, 0.9), (3, 0.5)])
def test_every_row_is_d3rlpys_pick(num_steps: int, gamma: float, own_windows: bool) -> None:
    steps = make_steps(own_windows=own_windows)
    pickers = [MultiStepTransitionPicker(num_steps, gamma)]
    if num_steps == 1:
        pickers.append(BasicTransitionPicker())
    episodes = episodes_of(steps)
    choosable = [
        (number, index)
        for number, episode in enumerate(episodes)
        for index in range(episode.transition_count)
    ]
    assert len(choosable) == steps.choosable.sum()
    replay = Replay(steps, 4, seed=0, num_steps=num_steps, gamma=gamma)
    number = np.array([each for each, _ in choosable])
    rows = steps.starts[number] + np.array([index for _, index in choosable])
    ours = replay.batch(rows, number)
    for picker in pickers:
        picked = [picker(episodes[each], index) for each, index in choosable]
        assert_equal(ours, TransitionMiniBatch.from_transitions(picked))


class Noted(Replay):
    """Remembers what it drew."""

    drawn: Int64Array

    def batch(self, rows: Int64Array, episode: Int64Array) -> TransitionMiniBatch:
        self.drawn = rows
        return super().batch(rows, episode)


def draws(steps: Steps, *, balance: float) -> Int64Array:
    """How often each step is drawn."""
    replay = Noted(steps, 40_000, seed=0, balance=balance)
    replay.sample()
    return np.bincount(replay.drawn, minlength=len(steps))


@pytest.mark.parametrize("ends", [False, True])
def test_steps_are_drawn_alike_and_the_last_of_a_cut_off_episode_never(ends: bool) -> None:
    steps = make_steps()
    steps.terminated[:] |= ends
    counts = draws(steps, balance=0.0)
    last = steps.starts[1:][~steps.terminated] - 1
    assert not counts[last].any()
    rest = np.delete(counts, last)
    assert 0.8 * rest.mean() < rest.min() <= rest.max() < 1.2 * rest.mean()
    group = steps.group[steps.task[steps.episode_of(np.arange(len(steps)))]]
    plain = np.bincount(group, weights=counts)
    balanced = np.bincount(group, weights=draws(steps, balance=1.0))
    assert plain.max() > 1.5 * plain.min()
    assert balanced.max() < 1.05 * balanced.min()


def test_a_batch_has_a_part_of_each_replay() -> None:
    swept, called = make_steps(own_windows=True), make_steps(seed=1)

    def replays() -> list[Replay]:
        random = np.random.default_rng(5)
        return [Replay(swept, 8, seed=random), Replay(called, 8, seed=random, num_steps=3)]

    batch = Batches(replays()).sample()
    first, second = (each.sample() for each in replays())
    for name in ("actions", "rewards", "next_actions", "terminals", "intervals"):
        joined = np.concatenate([getattr(first, name), getattr(second, name)])
        np.testing.assert_array_equal(getattr(batch, name), joined)
    for name in ("observations", "next_observations"):
        for whole, *parts in zip(*(getattr(b, name) for b in (batch, first, second)), strict=True):
            np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_costs_are_hidden_from_a_share_of_the_rows_whole(data_dir: Path) -> None:
    data = load_data(data_dir, 0, with_costs=True)
    replay = Replay(data.training.steps, 2_000, seed=0)
    costs = slice(data.cost_start, data.cost_start + NUM_CELLS)
    told = np.asarray(replay.sample().observations[1])
    assert (told[:, costs] != 0.0).any(axis=1).all()
    context = np.asarray(Batches([replay], data.cost_start, 0.25).sample().observations[1])
    hidden = (context[:, costs] == 0.0).all(axis=1)
    assert 0.2 < hidden.mean() < 0.3
    assert context.shape[1] == costs.stop
    assert (context[hidden][:, : costs.start] != 0.0).any(axis=1).all()
    # The tasks themselves still know theirs.
    assert (data.training.steps.context[:, costs] != 0.0).any(axis=1).all()


def test_times_that_are_nccls_costs_are_learned_over_them(data_dir: Path) -> None:
    """On a machine whose times are NCCL's costs, and half as much again."""
    data = load_data(data_dir, 0, with_costs=True)
    assert data.costs is not None
    frame = data.frame.with_columns(data.catalogue.actions(data.frame)).drop_nulls("action")
    noisy = with_noise(frame, data.training.noise)
    context = torch.from_numpy(cold_observations(noisy, data.profiles, data.costs).context)
    told = ActionFeatures(data.catalogue.configs, data.cost_start)(context)
    of_action = torch.from_numpy(frame["action"].to_numpy().astype(np.int64))
    found = told[torch.arange(len(told)), of_action].double()
    time = pl.Series("time_us", (1.5 * found[:, LOG_COST].exp()).numpy())
    known = pl.Series((found[:, COST_KNOWN] > 0.5).numpy())
    made = replace(data, frame=frame.with_columns(time).filter(known).drop("action"))
    residuals = base_residuals(made)
    assert residuals is not None
    over_cost, over_time = residuals
    assert over_cost < 1e-5
    assert over_time > 0.05
    assert base_residuals(replace(data, costs=None)) is None


# --- Losses ---

BATCH, ACTIONS = 6, 4
ONES, ZEROS = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)


def make_loss() -> tuple[Loss, list[torch.Tensor]]:
    """The loss of a network of random weights, and a batch's observations."""
    steps = make_steps(num_actions=ACTIONS)
    algorithm = make_algorithm(make_recipe("ddqn-dueling", ["hidden_sizes=16"]), steps)
    seen = Replay(steps, BATCH, seed=0).sample().observations
    networks = cast(Networks, algorithm.config.q_func_factory)
    return Loss(algorithm.impl.q_function[0], networks), [torch.from_numpy(part) for part in seen]


def test_masked_q_values_are_out_of_reach_and_change_no_other_and_no_loss() -> None:
    loss, (window, context, mask) = make_loss()
    some, every = mask.clone(), torch.ones_like(mask)
    some[:, 2] = 0.0
    q, of_every = (loss.compute_expected_q((window, context, each)) for each in (some, every))
    assert (of_every < 0).all()
    assert (q[:, 2] == MASKED_Q).all()
    torch.testing.assert_close(q[some > 0.5], of_every[some > 0.5])
    # The mask of a terminal row is all zero: its loss and gradient are finite.
    target = loss.compute_target([window, context, torch.zeros(BATCH, ACTIONS)], ZEROS)
    seen = [window, context, mask]
    found = loss.compute_error(seen, ZEROS, -ONES, target, terminals=ONES, gamma=0.9)
    found.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(found)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in loss.network.parameters())


def test_loss_is_zero_exactly_where_q_equals_the_reward_and_entropy_lowers_it() -> None:
    loss, seen = make_loss()
    seen[2] = torch.ones_like(seen[2])
    actions = torch.arange(BATCH).view(-1, 1) % ACTIONS
    rewards = loss.compute_target(seen, actions).detach()
    exact = loss.compute_error(seen, actions, rewards, ZEROS, ONES)
    assert exact.item() < 1e-10
    plain = loss.compute_error(seen, actions, 2 * rewards, ZEROS, ONES)
    assert plain.item() > 0.01
    loss.made_by.entropy_weight = 0.3
    mean = entropy(loss.network(*seen[:2]), seen[2]).mean()
    found = loss.compute_error(seen, actions, 2 * rewards, ZEROS, ONES)
    torch.testing.assert_close(found, plain - 0.3 * mean)
    half = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])  # of the allowed ones, or 0
    assert entropy(torch.zeros(2, 4), half).flatten().tolist() == pytest.approx(
        [math.log(2.0), 0.0]
    )


def test_imitation_does_what_the_data_did(data_dir: Path) -> None:
    data = load_data(data_dir, 0, with_costs=True)
    steps = data.training.steps
    taken = int(np.flatnonzero((steps.mask > 0.5).all(axis=0))[-1])
    steps = replace(steps, action=np.full_like(steps.action, taken))
    recipe = make_recipe("bc", ["hidden_sizes=16", "learning_rate=0.02"])
    for actions in (None, ActionInputs(data.catalogue.configs, data.cost_start, uses_cost=True)):
        algorithm = make_algorithm(recipe, steps, actions=actions)
        (imitator,) = algorithm.impl.q_function
        assert isinstance(imitator, Imitator)
        assert isinstance(imitator.head, ActionHead) == (actions is not None)
        replay = Replay(steps, 64, seed=0)
        for _ in range(80):
            algorithm.update(replay.sample())
        module = PolicyModule([imitator], 0.0, 0.0, is_unanimous=False).eval()
        chosen, _ = forward(module, data.observations, data.validation.mask)
        assert taken > 0
        assert (chosen == taken).mean() > 0.9


# --- What networks see ---


def test_networks_scale_what_they_see_by_what_they_learn_from() -> None:
    steps = make_steps()
    algorithm = make_algorithm(make_recipe("ddqn-dueling", ["num_members=2"]), steps, steps)
    rows = np.arange(len(steps))
    seen = steps.observe(rows, steps.episode_of(rows))[0]
    valid = WINDOW_COLUMN["valid"]
    calls = torch.from_numpy(seen.window[seen.window[..., valid] > 0.0])
    modules = algorithm.impl.modules
    for network in (*modules.q_funcs, *modules.targ_q_funcs):
        trunk = network.trunk
        scaled = (calls - trunk.window_mean) / trunk.window_scale
        assert (scaled[:, valid] == 1.0).all()  # `valid` tells calls from padding
        varies = calls.std(dim=0) > 1e-6
        varies[valid] = False
        assert scaled[:, varies].mean(dim=0).abs().max() < 1e-4
        assert (scaled[:, varies].std(dim=0, correction=0) - 1.0).abs().max() < 1e-4
        context = (torch.from_numpy(seen.context) - trunk.context_mean) / trunk.context_scale
        assert context.mean(dim=0).abs().max() < 1e-4


def test_what_does_not_learn_from_records_trains_without_d3rlpy(data_dir: Path) -> None:
    code = """
import sys
sys.modules["d3rlpy"] = None  # an import of it fails
from pathlib import Path
import dynamiccl.train.online, dynamiccl.train.study, dynamiccl.train.trigger_fit
from dynamiccl.train.cautious_fit import fit_tables
from dynamiccl.train.data import load_data
print(fit_tables(load_data(Path(sys.argv[1]), 0, with_costs=True), alpha=0.1)[2]['prior_widened'])
try:
    import dynamiccl.train.offline
except ImportError as error:
    print(error)
"""
    words = [sys.executable, "-P", "-c", code, str(data_dir)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tables, refused = done.stdout.splitlines()
    assert float(tables) >= 1.0
    assert "d3rlpy" in refused
