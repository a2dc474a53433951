"""One actor-learner: plays in its own place, and steps the shared weights (Mnih et al. 2016, S3).

N jobs, K task keys, T rounds of a rollout; a row is a key of a job, R = N x K of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from dynamiccl.train.online.actor_critic import ActorCritic, Seen, loss, returns
from dynamiccl.train.online.decisions import DecisionEnv
from dynamiccl.train.online.rmsprop import SharedRmsProp
from dynamiccl.train.recipe_checks import RewardScale
from dynamiccl.train.recipes import Recipe


class Counter(Protocol):
    """Updates that all actors have made."""

    def add(self) -> int:
        """One more; the number with it."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one update was made of."""

    #: Of all actors, this one counted.
    number: int
    loss: float
    #: Time of NCCL's own choice over ours, in the rollout.
    speedup: float
    calls: int


class Actor:
    """Plays N jobs, and learns from each rollout of T rounds."""

    def __init__(
        self,
        env: DecisionEnv,
        shared: ActorCritic,
        own: ActorCritic,
        optimizer: SharedRmsProp,
        recipe: Recipe,
        seed: int,
    ) -> None:
        """Begin an episode; `own` is a network of this actor alone, of the shared one's form."""
        self.env, self.shared, self.own, self.optimizer = env, shared, own, optimizer
        self.recipe = recipe
        self.random = torch.Generator().manual_seed(seed)
        # Actors explore by different amounts (section 4: "explicitly use different exploration
        # policies in each actor-learner"); the paper draws epsilons, we a factor of the entropy.
        self.curiosity = float(np.random.default_rng(seed).uniform(0.5, 2.0))
        self._seen = self._rows(env.reset(seed=seed)[0])

    def update(self, counter: Counter) -> Update:
        """One rollout, one step of the shared weights without a lock."""
        self.own.load_state_dict(self.shared.state_dict())
        rows: list[Seen] = []
        actions, rewards, weights = [], [], []
        true_us = default_us = 0.0
        while len(rows) < self.recipe.num_steps:
            with torch.no_grad():
                log_RA, _ = self.own(self._seen)
            action_R = torch.multinomial(log_RA.exp(), 1, generator=self.random).squeeze(1)
            found, _, _, over, info = self.env.step(action_R.view(self.env.num_envs, -1).numpy())
            rows.append(self._seen)
            actions.append(action_R)
            rewards.append(self._scaled(_flat(info["earned"])))
            weights.append(_flat(info["calls"]))
            true_us += float(info["true_us"].sum())
            default_us += float(info["default_us"].sum())
            self._seen = self._rows(found)
            if over.any():
                break
        with torch.no_grad():
            _, bootstrap_R = self.own(self._seen)
        reward_TR, weight_TR = torch.stack(rewards), torch.stack(weights)
        # A key that was not called earns what its value says, so that it teaches nothing.
        return_TR = returns(reward_TR, bootstrap_R, self.recipe.gamma)
        log_BA, value_B = self.own(_joined(rows))
        number = counter.add()
        total = loss(
            log_BA,
            value_B,
            torch.cat(actions),
            return_TR.flatten(),
            (weight_TR > 0).float().flatten(),
            self.curiosity * self.recipe.entropy_weight(number),
        )
        gradients = torch.autograd.grad(total, list(self.own.parameters()), allow_unused=True)
        left = max(1.0 - number / self.recipe.steps, 0.0)
        self.optimizer.step(_clipped(gradients), self.recipe.learning_rate * left)
        if self.env.is_over:
            self._seen = self._rows(self.env.reset()[0])
        calls = float(weight_TR.sum())
        return Update(
            number,
            float(total.detach()),
            default_us / true_us,
            int(calls),
        )

    def _scaled(self, earned_R: torch.Tensor) -> torch.Tensor:
        """What the recipe makes of rewards; 0 of keys that were not called."""
        if self.recipe.reward_scale == RewardScale.LOG:
            return -torch.log((-earned_R).clamp_min(1e-3)).masked_fill(earned_R == 0.0, 0.0)
        return earned_R

    def _rows(self, found: Mapping[str, Any]) -> Seen:
        flat = (torch.from_numpy(found[name]).flatten(0, 1) for name in Seen._fields)
        seen = Seen(*flat)
        return seen._replace(mask=seen.mask.float())


def _flat(part: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(part.astype(np.float32)).flatten()


def _joined(rows: list[Seen]) -> Seen:
    return Seen(*map(torch.cat, zip(*rows, strict=True)))


def _clipped(
    gradients: tuple[torch.Tensor | None, ...], most: float = 40.0
) -> list[torch.Tensor | None]:
    """With a norm of 40 at most, as IMPALA's (Espeholt et al. 2018, appendix D); A3C names none."""
    squares = [each.square().sum() for each in gradients if each is not None]
    norm = float(torch.stack(squares).sum().sqrt())
    factor = min(1.0, most / max(norm, 1e-12))
    return [None if each is None else each * factor for each in gradients]
