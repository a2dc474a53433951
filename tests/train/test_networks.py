"""Encoders, heads and the exported module; batches as d3rlpy's, losses, what a run learns of."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
import pytest
import torch

from dynamiccl.datasets.costs import NUM_CELLS
from dynamiccl.datasets.features import CONTEXT_COLUMN, FEATURES, cold_observations
from dynamiccl.datasets.history import WINDOW_COLUMN
from dynamiccl.datasets.steps import Int64Array, Steps, with_noise
from dynamiccl.errors import UserError
from dynamiccl.nccl import ABSTAIN, NUM_PROTOCOLS, Algorithm, Config, Protocol
from dynamiccl.train import networks
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
from dynamiccl.train.policy import PolicyModule, forward, script
from dynamiccl.train.recipe import make_recipe
from tests.datasets.test_steps import make_steps

# After ours, which silences what d3rlpy has to say about gym.
from d3rlpy.dataset import (  # isort: skip
    BasicTransitionPicker,
    Episode,
    MultiStepTransitionPicker,
    TransitionMiniBatch,
)


BATCH, SHAPE, WIDTH, ACTIONS = 6, (8, 5), CONTEXT_COLUMN["noise_band"] + 5, 4
VALID, NOISE_BAND = WINDOW_COLUMN["valid"], CONTEXT_COLUMN["noise_band"]
#: Shape of what the tests of actions show a head.
HIDDEN = 5
CONFIGS = (
    ABSTAIN,
    Config(Algorithm.Ring, Protocol.LL),
    Config(Algorithm.Tree, None),
    Config(Algorithm.NVLS, Protocol.Simple, 8),
)
RING = (Algorithm.Ring, Protocol.LL)
TREE = (Algorithm.Tree, Protocol.Simple)


def windows(valid: int, seed: int = 0, rows: int = 3) -> torch.Tensor:
    """Windows with so many calls each, right-aligned."""
    made = torch.randn(rows, *SHAPE, generator=torch.Generator().manual_seed(seed))
    made[:, :, VALID] = 1.0
    made[:, : SHAPE[0] - valid] = 0.0
    return made


def trunk_of(name: str = "mlp", seed: int = 0) -> networks.Trunk:
    torch.manual_seed(seed)
    return networks.Trunk(SHAPE, WIDTH, [16], name)


@pytest.mark.parametrize("name", networks.WINDOW_ENCODERS)
def test_every_encoder_scripts_learns_and_looks_at_calls_but_not_at_padding(name: str) -> None:
    trunk, plain, context = trunk_of(name), trunk_of(name), torch.ones(3, WIDTH)
    scripted = torch.jit.script(trunk)
    for valid in (0, 3, 8):
        calls = windows(valid)
        torch.testing.assert_close(scripted(calls, context), plain(calls, context))
    different = trunk(windows(8, seed=1), context) - trunk(windows(8, seed=2), context)
    assert different.abs().min() > 0.0
    mixed = torch.cat([windows(0), windows(4), windows(8)])
    trunk(mixed, torch.ones(9, WIDTH)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in trunk.parameters())
    mean = torch.tensor([0.0, 10.0, -3.0, 0.0, 5.0])
    scale = torch.tensor([1.0, 4.0, 2.0, 1.0, 0.1])
    trunk.window_mean.copy_(mean)
    trunk.window_scale.copy_(scale)
    for valid in (0, 3, 8):
        calls = windows(valid)
        raw = (calls * scale + mean) * calls[:, :, [VALID]]  # padding is zeros as ever
        torch.testing.assert_close(trunk(raw, context), plain(calls, context))


def test_a_state_is_of_the_order_of_calls_and_a_cold_window_has_none() -> None:
    encoder, calls = networks.WINDOW_ENCODERS["lstm"](SHAPE), windows(8)
    state = encoder(torch.cat([windows(0), calls]))
    assert not state[:3].any()
    torch.testing.assert_close(state[3:], encoder(calls))
    assert (encoder(calls) - encoder(calls.flip(1))).abs().max() > 1e-3


class Flat(torch.nn.Module):
    """Somebody's own, which says another width than it has."""

    width = 7

    def __init__(self, _shape: tuple[int, int]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 7)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        return window.flatten(1)


class TooNarrow(Flat):
    """A layer takes another number of features than a call has."""

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(window)
        return made.sum(dim=1)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (Flat, r"'own' makes a tensor \[2, 40\] of 2 windows, and its width is 7: self.width must"),
        (TooNarrow, r"RuntimeError: mat1 and .* given windows \(2, 8, 5\): \(windows, ca"),
    ],
)
def test_bad_encoders_are_told(own: type[Flat], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamiccl.train.networks.WINDOW_ENCODERS", dict(networks.WINDOW_ENCODERS))
    networks.register_window_encoder("own", own)
    with pytest.raises(UserError, match=said) as caught:
        trunk_of("own")
    assert "\n" not in str(caught.value)


# --- Actions as inputs ---


def context_of(costs_us: dict[tuple[Algorithm, Protocol], float]) -> torch.Tensor:
    made = torch.zeros(2, len(FEATURES) + NUM_CELLS)
    made[:, CONTEXT_COLUMN["log2_size"]] = 20.0
    for (algorithm, protocol), cost_us in costs_us.items():
        made[:, len(FEATURES) + algorithm * NUM_PROTOCOLS + protocol] = float(np.log(cost_us))
    return made


def features(costs_us: dict[tuple[Algorithm, Protocol], float]) -> dict[str, list[float]]:
    module, context = networks.ActionFeatures(CONFIGS, len(FEATURES)), context_of(costs_us)
    found = module(context)
    assert torch.equal(found, script(module)(context))
    assert found.shape == (2, len(CONFIGS), len(networks.ACTION_FEATURES))
    return {name: found[0, :, i].tolist() for i, name in enumerate(networks.ACTION_FEATURES)}


def test_nccls_choice_is_the_cheapest_cell_and_without_costs_a_config_is_its_name() -> None:
    found = features({TREE: 40.0, (Algorithm.Tree, Protocol.LL): 30.0, RING: 20.0})
    assert found["algorithm 1"] == [1.0, 1.0, 0.0, 0.0]  # NCCL's own choice is Ring, too
    assert found["algorithm 0"] == [0.0, 0.0, 1.0, 0.0]
    assert found["protocol 0"] == [1.0, 1.0, 1.0, 0.0]
    assert found["is NCCL's own choice"] == [1.0, 0.0, 0.0, 0.0]
    assert np.allclose(
        np.exp(found[networks.ACTION_FEATURES[networks.LOG_COST]]), [20.0, 20.0, 30.0, 1.0]
    )
    assert found["cost is known"] == [1.0, 1.0, 1.0, 0.0]  # it does not take NVLS
    assert found["how many cells NCCL takes for cheaper"] == [0.0, 0.0, 1.0, 0.0]
    found = features({})
    wanted = {
        "cost is known": [0.0, 0.0, 0.0, 0.0],
        "algorithm 1": [0.0, 1.0, 0.0, 0.0],
        "algorithm 4": [0.0, 0.0, 0.0, 1.0],
        "protocol 2": [0.0, 0.0, 0.0, 1.0],
        "channels are asked for": [0.0, 0.0, 0.0, 1.0],
        "log2 channels, 0 unless asked for": [0.0, 0.0, 0.0, 3.0],
        "log2 bytes of a channel, 0 unless channels are asked for": [0.0, 0.0, 0.0, 17.0],
    }
    assert {name: found[name] for name in wanted} == wanted


def action_head(*configs: Config) -> networks.ActionHead:
    return networks.ActionHead(
        HIDDEN, networks.ActionInputs((ABSTAIN, *configs), len(FEATURES), uses_cost=True)
    )


def test_before_it_has_learned_a_head_says_what_nccl_says() -> None:
    nvls = Config(Algorithm.NVLS, Protocol.Simple)
    head, hidden = action_head(Config(*RING), Config(*TREE), nvls), torch.randn(2, HIDDEN)
    for layer in (head.out, head.value):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    seen = context_of({RING: 20.0, TREE: 40.0})
    wanted = torch.tensor([[0.0, 0.0, np.log(2.0), 8.0]] * 2).float()  # NCCL does not take the last
    torch.testing.assert_close(head(hidden, seen), wanted)
    for action in range(4):
        column = torch.tensor([[action], [3 - action]])
        torch.testing.assert_close(head.taken(hidden, seen, column), wanted.gather(1, column))
    assert (head(hidden, context_of({})) == 0.0).all()  # nothing is known of costs


# --- The exported module ---


def network(seed: int = 0) -> networks.Network:
    trunk = trunk_of(seed=seed)
    return networks.Network(trunk, networks.OutputHead(16, ACTIONS, dueling=True))


def observation(*, warm: bool = False, noise: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    context = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    context[:, NOISE_BAND] = noise
    return windows(8 if warm else 0, rows=BATCH), context


ALL = torch.ones(BATCH, ACTIONS)


def gains_of(
    members: list[networks.Network], seen: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(B,) the best actions of the mean, (E, B) gains of them over ABSTAIN, (B, A) mean z."""
    z = torch.stack([member(*seen) for member in members]).detach()
    best = z.mean(dim=0).argmin(dim=1)
    gains = z[:, :, 0] - z.gather(2, best.view(1, -1, 1).expand(len(members), -1, 1))[..., 0]
    return best, gains, z.mean(dim=0)


def test_module_takes_the_best_allowed_action_and_survives_scripting() -> None:
    made = network()
    module = PolicyModule([made], margin=0.0, warm_margin=0.0).eval()
    scripted = torch.jit.script(module)
    action, q = scripted(*observation(), ALL)
    torch.testing.assert_close(q, -torch.exp(made(*observation())))
    assert action.tolist() == module(*observation(), ALL)[0].tolist() == q.argmax(dim=1).tolist()
    mask = (torch.rand(BATCH, ACTIONS, generator=torch.Generator().manual_seed(5)) < 0.5).float()
    mask[:, 0] = 1.0
    action, _ = module(*observation(), mask)
    assert mask.gather(1, action.view(-1, 1)).all()


def test_cold_policy_acts_where_every_member_gains_more_than_margin_and_noise() -> None:
    members = [network(seed) for seed in range(3)]
    best, gains, z = gains_of(members, observation())
    least = gains.min(dim=0).values
    middle = float(least.sort().values[BATCH // 2])
    for margin in (0.0, middle):
        module = PolicyModule(members, margin=margin, warm_margin=0.0)
        action, q = module(*observation(), ALL)
        torch.testing.assert_close(q, -torch.exp(z))
        assert action.tolist() == torch.where(least > margin, best, 0).tolist()
        assert (module(*observation(noise=100.0), ALL)[0] == 0).all()
    assert 0 < (least > 0.0).sum() < BATCH
    assert ((least <= 0.0) & (best != 0)).any()  # they do not agree there


def test_warm_the_members_mean_decides_and_noise_does_not() -> None:
    members = [network(seed) for seed in range(3)]
    _, gains, _ = gains_of(members, observation(warm=True))
    margin = float(gains.mean(dim=0).sort().values[BATCH // 2])
    module = PolicyModule(members, margin=50.0, warm_margin=margin)
    for noise in (0.0, 100.0):
        seen = observation(warm=True, noise=noise)
        best, of_noise, _ = gains_of(members, seen)
        wanted = torch.where(of_noise.mean(dim=0) > margin, best, 0)
        assert module(*seen, ALL)[0].tolist() == wanted.tolist()
    acts = gains.mean(dim=0) > margin
    assert 0 < acts.sum() < BATCH
    assert (gains.min(dim=0).values[acts] <= margin).any()  # not all agree, and yet it acts


def test_an_imitator_gives_masked_actions_nothing_and_is_exported_like_the_rest() -> None:
    imitator, mask = networks.Imitator(trunk_of(), 16, ACTIONS), ALL.clone()
    mask[:, 2] = 0.0
    hidden = imitator.trunk(*observation())
    probabilities = imitator.logits(hidden, observation()[1], mask).softmax(dim=1)
    assert (probabilities[:, 2] == 0.0).all()
    scripted = torch.jit.script(PolicyModule([imitator], margin=-100.0, warm_margin=0.0).eval())
    _, q = scripted(*observation(), mask)
    assert q.argmax(dim=1).tolist() == probabilities.argmax(dim=1).tolist()
    # A head that does not duel has no value in common.
    imitator(*observation())[:, 1].sum().backward()
    gradient = imitator.head.layer.weight.grad
    assert gradient[1].any()
    assert not gradient[[0, 2, 3]].any()


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


PLAIN = make_recipe("ddqn-dueling", ["balance=0"])


def replay_of(steps: Steps, batch_size: int, **settings: Any) -> Replay:
    return Replay(steps, batch_size, replace(PLAIN, **settings), np.random.default_rng(0))


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
    replay = replay_of(steps, 4, num_steps=num_steps, gamma=gamma)
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
    replay = Noted(steps, 40_000, replace(PLAIN, balance=balance), np.random.default_rng(0))
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
        random, by_three = np.random.default_rng(5), replace(PLAIN, num_steps=3)
        return [Replay(swept, 8, PLAIN, random), Replay(called, 8, by_three, random)]

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
    replay = replay_of(data.training.steps, 2_000)
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

ONES, ZEROS = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)


def make_loss() -> tuple[Loss, list[torch.Tensor]]:
    """The loss of a network of random weights, and a batch's observations."""
    steps = make_steps(num_actions=ACTIONS)
    algorithm = make_algorithm(make_recipe("ddqn-dueling", ["hidden_sizes=16"]), steps)
    seen = replay_of(steps, BATCH).sample().observations
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
    told = entropy(torch.zeros(2, 4), half).flatten().tolist()
    assert told == pytest.approx([math.log(2.0), 0.0])


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
        replay = replay_of(steps, 64)
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
