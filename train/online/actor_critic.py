"""An actor-critic network: a policy over configs and a value function, on one encoder.

    T rounds, N jobs, K task keys, R = N x K rows (a row is a task key of a job), B rows of any
    rounds, A actions, H decisions that are seen, W calls in a window, F features, U units of a
    job's state

What is exported is the actor, which sees what a brain shows: window and context. The critic, which
only training asks, sees the decisions that are not in force yet, too, and what the last round
earned: so a delayed reward is no surprise to it (Katsikopoulos and Engelbrecht 2003: a Markov
decision process with a constant delay is one without, whose state holds what was decided).
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Self, cast

import torch
from torch import nn

from dynamiccl.train.networks import Imitator, StatefulTrunk
from dynamiccl.train.recipe import Recipe

#: Width of what the critic knows of a decision, and of its hidden layer.
_DECISION_UNITS = 8
_CRITIC_UNITS = 64


class RoundObservations(NamedTuple):
    """Observations of T rounds."""

    window: torch.Tensor  # (T, R, W, features)
    context: torch.Tensor  # (T, R, F)
    mask: torch.Tensor  # (T, R, A)
    decided: torch.Tensor  # (T, R, H), -1 = nothing
    #: 0 where the key had no call in the round before, below 0 elsewhere.
    earned: torch.Tensor  # (T, R)


class State(NamedTuple):
    """LSTM state of N jobs; U is 0 without an LSTM."""

    h: torch.Tensor  # (N, U)
    c: torch.Tensor  # (N, U)

    @classmethod
    def new(cls, jobs: int, units: int) -> Self:
        """The zero state of `jobs` new jobs."""
        return cls(torch.zeros(jobs, units), torch.zeros(jobs, units))


class ActorCritic(nn.Module):
    """(RoundObservations, State) -> log probabilities, values, State; see `forward`."""

    def __init__(
        self, actor: Imitator, hidden_size: int, num_actions: int, decisions: int, usual: float
    ) -> None:
        """`usual` is the initial value of the critic."""
        super().__init__()
        self.actor = actor
        self.decision = nn.Embedding(num_actions + 1, _DECISION_UNITS)
        width = hidden_size + decisions * _DECISION_UNITS + 1
        self.critic = nn.Sequential(
            nn.Linear(width, _CRITIC_UNITS), nn.SiLU(), nn.Linear(_CRITIC_UNITS, 1)
        )
        nn.init.constant_(cast(nn.Linear, self.critic[2]).bias, usual)

    @property
    def state_units(self) -> int:
        """Number of LSTM units, U."""
        return int(getattr(self.actor.trunk, "units", 0))

    def forward(
        self, seen: RoundObservations, state: State
    ) -> tuple[torch.Tensor, torch.Tensor, State]:
        """Log probabilities (T, R, A), masked ones far below; values (T, R); new state."""
        rounds = seen.window.size(0)
        flat = RoundObservations(*(part.flatten(0, 1) for part in seen))
        hidden_BH, state = self._features(flat, rounds, state)
        logits_BA = self.actor.logits(hidden_BH, flat.context, flat.mask)
        decided_BD = self.decision(flat.decided + 1).flatten(1)
        known = torch.cat([hidden_BH, decided_BD, flat.earned.unsqueeze(1)], dim=1)
        value_TR = self.critic(known).view(rounds, -1)
        log_TRA = torch.log_softmax(logits_BA, dim=1).view(rounds, value_TR.size(1), -1)
        return log_TRA, value_TR, state

    def _features(
        self, flat: RoundObservations, rounds: int, state: State
    ) -> tuple[torch.Tensor, State]:
        trunk = self.actor.trunk
        if not isinstance(trunk, StatefulTrunk):
            return trunk(flat.window, flat.context), state
        shape = (rounds, state.h.size(0), -1)
        seen_BH = trunk.trunk(flat.window, flat.context)
        features, *after = trunk.unroll(
            seen_BH.view(rounds, shape[1], -1, seen_BH.size(1)),
            flat.decided[:, -1].view(shape),
            (flat.earned != 0.0).view(shape),
            *state,
        )
        return features.flatten(0, 2), State(*after)


def filled(
    reward_TR: torch.Tensor, value_SR: torch.Tensor, calls_TR: torch.Tensor, gamma: float
) -> torch.Tensor:
    """Rewards (T, R), where those of keys without calls follow from the values (T + 1, R)."""
    expected_TR = value_SR[:-1] - gamma * value_SR[1:]
    return torch.where(calls_TR > 0, reward_TR, expected_TR)


def returns(reward_TR: torch.Tensor, bootstrap_R: torch.Tensor, gamma: float) -> torch.Tensor:
    """(T, R) R_t = r_t + gamma R_(t+1), from the value after the last on (Mnih et al. 2016, S3).

    >>> returns(torch.tensor([[1.0], [2.0]]), torch.tensor([4.0]), 0.5).flatten().tolist()
    [3.0, 4.0]
    """
    found, last = [], bootstrap_R
    for reward_R in reward_TR.flip(0):
        last = reward_R + gamma * last
        found.append(last)
    return torch.stack(found[::-1])


def loss(  # noqa: PLR0913, PLR0917 - what the papers name
    log_TRA: torch.Tensor,
    value_TR: torch.Tensor,
    action_TR: torch.Tensor,
    advantage_TR: torch.Tensor,
    target_TR: torch.Tensor,
    weight_TR: torch.Tensor,
    entropy_weight: float,
) -> torch.Tensor:
    """The sum of actor and critic losses, a weighted mean over rows (weight 0: key not called).

    -log pi(a) A - beta H(pi) + (target - V)^2 / 2 (Mnih et al. 2016, section 4.2 and S3, where the
    critic's gradient is that of (R - V)^2; half of it here, since encoder and step are shared).
    """
    of_action_TR = log_TRA.gather(2, action_TR.unsqueeze(2)).squeeze(2)
    entropy_TR = -(log_TRA.exp() * log_TRA.clamp_min(-1e4)).sum(dim=2)
    error_TR = 0.5 * (target_TR - value_TR).square()
    sum_TR = -of_action_TR * advantage_TR - entropy_weight * entropy_TR + error_TR
    return (weight_TR * sum_TR).sum() / weight_TR.sum().clamp_min(1e-6)


_ALPHA: Final = 0.99
#: The paper gives no value; the common 0.1 would make it plain gradient descent here.
_EPSILON: Final = 1e-5


class SharedRmsProp:
    """RMSProp with a statistic shared by all actors, updated without a lock (Mnih et al. 2016).

        g <- alpha g + (1 - alpha) d^2,    theta <- theta - eta d / sqrt(g + epsilon)

    `torch.optim.RMSprop` adds epsilon outside of the root, and keeps one statistic a process. With
    `shared=False` each actor has a statistic of its own, the paper's other variant (S4).
    """

    def __init__(self, parameters: Sequence[torch.Tensor], *, shared: bool = True) -> None:
        """Start with zero statistics, in shared memory."""
        self.parameters = list(parameters)
        self.epsilon = _EPSILON
        self.squares = [torch.zeros_like(each) for each in self.parameters]
        if shared:
            for each in self.squares:
                each.share_memory_()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor | None], rate: float) -> None:
        """One update; parameters without a gradient are unchanged."""
        for parameter, square, gradient in zip(
            self.parameters, self.squares, gradients, strict=True
        ):
            if gradient is not None:
                square.mul_(_ALPHA).addcmul_(gradient, gradient, value=1.0 - _ALPHA)
                parameter.addcdiv_(gradient, (square + self.epsilon).sqrt(), value=-rate)


def descend(
    total: torch.Tensor, network: ActorCritic, optimizer: SharedRmsProp, recipe: Recipe, number: int
) -> None:
    """One gradient step on a loss; the learning rate falls linearly to 0 over the run."""
    gradients = torch.autograd.grad(total, list(network.parameters()), allow_unused=True)
    left = max(1.0 - number / recipe.steps, 0.0)
    optimizer.step(_clipped(gradients), recipe.learning_rate * left)


def _clipped(
    gradients: Iterable[torch.Tensor | None], most: float = 40.0
) -> list[torch.Tensor | None]:
    """Gradients clipped to a norm of `most`, as in IMPALA (Espeholt et al. 2018, appendix D)."""
    found = list(gradients)
    squares = [each.square().sum() for each in found if each is not None]
    norm = float(torch.stack(squares).sum().sqrt())
    factor = min(1.0, most / max(norm, 1e-12))
    return [None if each is None else each * factor for each in found]
