"""The heads in log time, their loss, what an algorithm begins with, and the exported module."""

import math
from typing import cast

import numpy as np
import torch

from dynamiccl.datasets.features import CONTEXT_COLUMN
from dynamiccl.datasets.history import WINDOW_COLUMN
from dynamiccl.train.algorithms import make_algorithm, members_of
from dynamiccl.train.encoders import ObservationEncoder, Trunk
from dynamiccl.train.heads import (
    MASKED_Q,
    Imitator,
    LogTimeForwarder,
    LogTimeHead,
    LogTimeQFunction,
    Member,
    PlainHead,
    entropy,
)
from dynamiccl.train.policy_module import PolicyModule
from dynamiccl.train.recipes import make_recipe
from tests.steps import make_steps

NOISE_BAND = CONTEXT_COLUMN["noise_band"]
BATCH, CALLS, WIDTH, FEATURES, ACTIONS = 6, 8, 3, NOISE_BAND + 5, 4


def make_q_function(seed: int = 0) -> LogTimeQFunction:
    torch.manual_seed(seed)
    encoder = ObservationEncoder(Trunk((CALLS, WIDTH), FEATURES, [16]))
    return LogTimeQFunction(encoder, LogTimeHead(16, ACTIONS))


def observation(
    mask: torch.Tensor | None = None, *, warm: bool = False
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    window = torch.randn(BATCH, CALLS, WIDTH, generator=generator)
    window[:, -1, WINDOW_COLUMN["valid"]] = float(warm)
    context = torch.randn(BATCH, FEATURES, generator=generator)
    context[:, NOISE_BAND] = 0.0
    return window, context, torch.ones(BATCH, ACTIONS) if mask is None else mask


def test_q_values_are_negative_and_masked_ones_are_out_of_reach() -> None:
    mask = torch.ones(BATCH, ACTIONS)
    mask[:, 2] = 0.0
    q = make_q_function()(observation(mask)).q_value
    assert (q < 0).all()
    assert (q[:, 2] == MASKED_Q).all()
    assert (q[:, [0, 1, 3]] > MASKED_Q).all()


def test_q_of_an_action_does_not_depend_on_which_others_are_allowed() -> None:
    q_func = make_q_function()
    mask = torch.ones(BATCH, ACTIONS)
    mask[:, 3] = 0.0
    torch.testing.assert_close(
        q_func(observation()).q_value[:, :3], q_func(observation(mask)).q_value[:, :3]
    )


def test_value_head_is_the_value_of_abstaining() -> None:
    q_func = make_q_function()
    z = q_func.log_time(observation())
    hidden = q_func.encoder(observation())
    assert isinstance(q_func.head, LogTimeHead)
    torch.testing.assert_close(z[:, :1], q_func.head.value(hidden))


def test_all_zero_mask_of_a_terminal_row_gives_finite_loss_and_gradient() -> None:
    q_func = make_q_function()
    forwarder = LogTimeForwarder(q_func)
    ones = torch.ones(BATCH, 1)
    next_observation = (*observation()[:2], torch.zeros(BATCH, ACTIONS))
    target = forwarder.compute_target(next_observation, torch.zeros(BATCH, 1))
    loss = forwarder.compute_error(
        observation(), torch.zeros(BATCH, 1), -ones, target, terminals=ones, gamma=0.9
    )
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in q_func.parameters() if p.grad is not None)


def test_loss_is_zero_exactly_where_q_equals_the_reward() -> None:
    q_func = make_q_function()
    forwarder = LogTimeForwarder(q_func)
    actions = torch.arange(BATCH).view(-1, 1) % ACTIONS
    rewards = q_func(observation()).q_value.gather(1, actions).detach()
    ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
    exact = forwarder.compute_error(observation(), actions, rewards, zeros, ones)
    off = forwarder.compute_error(observation(), actions, 2 * rewards, zeros, ones)
    assert exact.item() < 1e-10
    assert off.item() > 0.01


def test_module_agrees_with_the_q_function_and_survives_scripting() -> None:
    q_func = make_q_function()
    module = PolicyModule([q_func], margin=0.0, warm_margin=0.0).eval()
    scripted = torch.jit.script(module)
    action, q = scripted(*observation())
    torch.testing.assert_close(q, q_func(observation()).q_value)
    assert action.tolist() == module(*observation())[0].tolist()
    assert action.tolist() == q.argmax(dim=1).tolist()


def test_policy_abstains_unless_the_gain_exceeds_the_margin() -> None:
    q_func = make_q_function()
    z = q_func.log_time(observation())
    gain = (z[:, 0] - z.min(dim=1).values).detach().numpy()
    middle = float(np.sort(gain)[BATCH // 2])
    action, _ = PolicyModule([q_func], margin=middle, warm_margin=0.0)(*observation())
    np.testing.assert_array_equal(action.numpy() != 0, gain > middle)
    assert (action != 0).any() < BATCH


def test_policy_abstains_unless_the_gain_exceeds_the_noise_band() -> None:
    q_func = make_q_function()
    window, context, mask = observation()
    context[:, NOISE_BAND] = 100.0
    action, _ = PolicyModule([q_func], margin=0.0, warm_margin=0.0)(window, context, mask)
    assert (action == 0).all()


def test_policy_acts_only_where_every_member_predicts_the_gain() -> None:
    members = [make_q_function(seed) for seed in range(3)]
    all_z = torch.stack([member.log_time(observation()) for member in members])
    best = all_z.mean(dim=0).argmin(dim=1)
    gains = torch.stack([z[:, 0] - z.gather(1, best.view(-1, 1)).squeeze(1) for z in all_z])
    agreed = (gains > 0.0).all(dim=0)
    action, q = PolicyModule(members, margin=0.0, warm_margin=0.0)(*observation())
    torch.testing.assert_close(q, -torch.exp(all_z.mean(dim=0)))
    np.testing.assert_array_equal((action != 0).numpy(), (agreed & (best != 0)).numpy())
    assert action[agreed].tolist() == best[agreed].tolist()
    assert (agreed & (best != 0)).any()
    assert (~agreed & (best != 0)).any()


def test_warm_the_members_mean_decides_and_noise_does_not() -> None:
    members = [make_q_function(seed) for seed in range(3)]
    window, context, mask = observation(warm=True)
    all_z = torch.stack([m.log_time((window, context, mask)) for m in members]).detach()
    best = all_z.mean(dim=0).argmin(dim=1)
    gains = torch.stack([z[:, 0] - z.gather(1, best.view(-1, 1)).squeeze(1) for z in all_z])
    gain, least = gains.mean(dim=0), gains.min(dim=0).values
    margin = float(gain.sort().values[BATCH // 2])
    module = PolicyModule(members, margin=50.0, warm_margin=margin)
    context[:, NOISE_BAND] = 100.0
    noisy = torch.stack([m.log_time((window, context, mask)) for m in members]).detach()
    for found, feature in ((all_z, 0.0), (noisy, 100.0)):
        context[:, NOISE_BAND] = feature
        choice = found.mean(dim=0).argmin(dim=1)
        gained = found[:, :, 0] - found.gather(2, choice.view(1, -1, 1).expand(3, -1, 1))[..., 0]
        acts = gained.mean(dim=0) > margin
        action, _ = module(window, context, mask)
        assert action.tolist() == torch.where(acts, choice, 0).tolist()
    acts = gain > margin
    assert 0 < acts.sum() < BATCH
    assert (least[acts] <= margin).any()  # not all agree there, and yet it acts


def test_policy_never_chooses_a_masked_action() -> None:
    module = PolicyModule([make_q_function()], margin=0.0, warm_margin=0.0)
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        mask = (torch.rand(BATCH, ACTIONS, generator=generator) < 0.5).float()
        mask[:, 0] = 1.0
        action, _ = module(*observation(mask))
        assert mask.gather(1, action.view(-1, 1)).all()


def test_entropy_is_of_the_allowed_actions() -> None:
    z = torch.tensor([[0.0, 0.0, 0.0, 5.0], [0.0, math.log(3.0), 9.0, 9.0], [1.0, 2.0, 3.0, 4.0]])
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    quarter = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    wanted = torch.tensor([[math.log(3.0)], [quarter], [0.0]])
    torch.testing.assert_close(entropy(z, mask), wanted, rtol=1e-5, atol=1e-6)


def test_entropy_lowers_the_loss_by_its_weight() -> None:
    q_func = make_q_function()
    forwarder = LogTimeForwarder(q_func)
    ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
    arguments = (observation(), zeros, -ones, zeros, ones)
    plain = forwarder.compute_error(*arguments)
    q_func.entropy_weight = 0.3
    mean = entropy(q_func.log_time(observation()), observation()[2]).mean()
    torch.testing.assert_close(forwarder.compute_error(*arguments), plain - 0.3 * mean)


def test_a_plain_head_has_no_value_in_common() -> None:
    torch.manual_seed(0)
    encoder = ObservationEncoder(Trunk((CALLS, WIDTH), FEATURES, [16]))
    head = PlainHead(16, ACTIONS)
    q_func = LogTimeQFunction(encoder, head)
    q_func.log_time(observation())[:, 1].sum().backward()  # type: ignore[no-untyped-call]
    gradient = head.layer.weight.grad
    assert gradient is not None
    assert gradient[1].any()
    assert not gradient[[0, 2, 3]].any()


def test_an_imitator_gives_masked_actions_nothing_and_is_exported_like_the_rest() -> None:
    torch.manual_seed(0)
    imitator = Imitator(ObservationEncoder(Trunk((CALLS, WIDTH), FEATURES, [16])), 16, ACTIONS)
    mask = torch.ones(BATCH, ACTIONS)
    mask[:, 2] = 0.0
    probabilities = imitator(observation(mask)).probs
    assert (probabilities[:, 2] == 0.0).all()
    scripted = torch.jit.script(PolicyModule([imitator], margin=-100.0, warm_margin=0.0).eval())
    _, q = scripted(*observation(mask))
    assert q.argmax(dim=1).tolist() == probabilities.argmax(dim=1).tolist()


def test_networks_scale_what_they_see_by_what_they_learn_from() -> None:
    steps = make_steps()
    algorithm = make_algorithm(make_recipe("ddqn-dueling", ["num_members=2"]), steps, steps)
    rows = np.arange(len(steps))
    seen = steps.observe(rows, steps.episode_of(rows))[0]
    valid = WINDOW_COLUMN["valid"]
    calls = torch.from_numpy(seen.window[seen.window[..., valid] > 0.0])
    members = list(members_of(algorithm))
    assert len(members) == 2
    for member in members:
        trunk = cast(ObservationEncoder, cast(Member, member).encoder).trunk
        scaled = (calls - trunk.window_mean) / trunk.window_scale
        assert (scaled[:, valid] == 1.0).all()  # `valid` tells calls from padding
        varies = calls.std(dim=0) > 1e-6
        varies[valid] = False
        assert varies.sum() > len(WINDOW_COLUMN) // 2
        torch.testing.assert_close(
            scaled[:, varies].mean(dim=0), torch.zeros(int(varies.sum())), atol=1e-4, rtol=0
        )
        torch.testing.assert_close(
            scaled[:, varies].std(dim=0, correction=0),
            torch.ones(int(varies.sum())),
            atol=1e-4,
            rtol=0,
        )
        context = (torch.from_numpy(seen.context) - trunk.context_mean) / trunk.context_scale
        assert context.mean(dim=0).abs().max() < 1e-4


def test_without_any_call_windows_are_left_as_they_are() -> None:
    steps = make_steps(lengths=(1, 1, 1))
    algorithm = make_algorithm(make_recipe("ddqn-dueling"), steps)
    (first, *_) = members_of(algorithm)
    trunk = cast(ObservationEncoder, cast(Member, first).encoder).trunk
    assert not trunk.window_mean.any()
    assert (trunk.window_scale == 1.0).all()
