"""A policy that picks configs, and the value of a state that trains it, on one encoder.

    T rounds, R rows (a row is a task key of a job), B rows of any rounds, A actions, H decisions
    that are seen, W calls in a window, F features

What is exported is the actor, which sees what a brain shows: window and context. The critic, which
only training asks, sees the decisions that are not in force yet, too, and what the last round
earned: so a delayed reward is no surprise to it (Katsikopoulos and Engelbrecht 2003: a Markov
decision process with a constant delay is one without, whose state holds what was decided).
"""

from typing import NamedTuple, cast

import torch
from torch import nn

from dynamiccl.train.heads import Imitator

#: Width of what the critic knows of a decision, and of its hidden layer.
_DECISION_UNITS = 8
_CRITIC_UNITS = 64


class Seen(NamedTuple):
    """Observations of B rows."""

    window: torch.Tensor  # (B, W, features)
    context: torch.Tensor  # (B, F)
    mask: torch.Tensor  # (B, A)
    decided: torch.Tensor  # (B, H), -1 = nothing
    earned: torch.Tensor  # (B,)


class ActorCritic(nn.Module):
    """(Seen) -> logits (B, A) with masked actions far below, and values (B,)."""

    def __init__(
        self, actor: Imitator, hidden_size: int, num_actions: int, decisions: int, usual: float
    ) -> None:
        """Put a critic beside an actor, on its encoder; `usual` is the value to begin at."""
        super().__init__()
        self.actor = actor
        self.decision = nn.Embedding(num_actions + 1, _DECISION_UNITS)
        width = hidden_size + decisions * _DECISION_UNITS + 1
        self.critic = nn.Sequential(
            nn.Linear(width, _CRITIC_UNITS), nn.SiLU(), nn.Linear(_CRITIC_UNITS, 1)
        )
        nn.init.constant_(cast(nn.Linear, self.critic[2]).bias, usual)

    def forward(self, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        """Log probabilities (B, A) and values (B,)."""
        hidden_BH = self.actor.encoder((seen.window, seen.context, seen.mask))
        logits_BA = self.actor.logits(hidden_BH, seen.context, seen.mask)
        decided_BD = self.decision(seen.decided + 1).flatten(1)
        known = torch.cat([hidden_BH, decided_BD, seen.earned.unsqueeze(1)], dim=1)
        value_B = self.critic(known).squeeze(1)
        return torch.log_softmax(logits_BA, dim=1), cast(torch.Tensor, value_B)


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


def loss(
    log_BA: torch.Tensor,
    value_B: torch.Tensor,
    action_B: torch.Tensor,
    return_B: torch.Tensor,
    weight_B: torch.Tensor,
    entropy_weight: float,
) -> torch.Tensor:
    """The actor's and the critic's, a mean over rows by weight (a key that was not called has 0).

    -log pi(a) (R - V) - beta H(pi) + (R - V)^2 / 2 (Mnih et al. 2016, section 4.2 and S3, where the
    critic's gradient is that of (R - V)^2; half of it here, since encoder and step are shared).
    """
    off_B = return_B - value_B
    of_action_B = log_BA.gather(1, action_B.unsqueeze(1)).squeeze(1)
    entropy_B = -(log_BA.exp() * log_BA.clamp_min(-1e4)).sum(dim=1)
    sum_B = -of_action_B * off_B.detach() - entropy_weight * entropy_B + 0.5 * off_B.square()
    return (weight_B * sum_B).sum() / weight_B.sum().clamp_min(1e-6)
