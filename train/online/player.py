"""Plays N jobs of a place with a network, one trajectory after the other.

N jobs, K task keys, R = N x K rows (a row is a task key of a job), T rounds of a trajectory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.train.online.actor_critic import ActorCritic, RoundObservations, State
from dynamiccl.train.online.decisions import DecisionEnv
from dynamiccl.train.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Trajectory:
    """T rounds, and the observation after them."""

    seen: RoundObservations  # (T + 1, R, ...)
    #: LSTM state of the jobs before the first round.
    state: State
    action: torch.Tensor  # (T, R)
    #: Log probability of each action, under the weights that were used.
    log_probability: torch.Tensor  # (T, R)
    #: Whether the player asked NCCL's own choice for its news, whatever the network wanted.
    is_probe: torch.Tensor  # (T, R)
    reward: torch.Tensor  # (T, R)
    #: Calls of a key in a round; rows without calls are not trained on.
    calls: torch.Tensor  # (T, R)
    #: Time of all calls of the jobs, and under NCCL's own choice.
    true_us: float
    default_us: float
    #: The player's factor on the entropy weight.
    curiosity: float

    @property
    def speedup(self) -> float:
        """Time of NCCL's own choice over ours."""
        return self.default_us / self.true_us


class Player:
    """Plays N jobs, one episode after the other."""

    def __init__(
        self,
        env: DecisionEnv,
        state_units: int,
        recipe: Recipe,
        seed: int,
        *,
        is_greedy: bool = False,
    ) -> None:
        """Start an episode. `is_greedy`: take the most likely actions instead of drawing them."""
        self._is_greedy = is_greedy
        self._draw_probes = np.random.default_rng(seed)
        self.env, self.recipe, self._units = env, recipe, state_units
        self.seen: RoundObservations
        self.state: State
        #: (N,) decisions of each job from probe to probe, 0 = none, and how many since the last.
        self.probe_every: torch.Tensor
        self._since_N: torch.Tensor
        self.random = torch.Generator().manual_seed(seed)
        # Actors explore by different amounts (Mnih et al. 2016, section 4: "explicitly use
        # different exploration policies in each actor-learner"); the paper draws epsilons, we a
        # factor of the entropy.
        self.curiosity = float(np.random.default_rng(seed).uniform(0.5, 2.0))
        self._begin(seed)

    def play(self, network: ActorCritic) -> Trajectory:
        """Play `num_steps` rounds, or those left in the episode."""
        begin, rows = self.state, [self.seen]
        made: list[tuple[torch.Tensor, ...]] = []
        true_us = default_us = 0.0
        while len(made) < self.recipe.num_steps and not self.env.is_over:
            with torch.no_grad():
                log_TRA, _, self.state = network(self.seen, self.state)
            is_probe_R = self._probe()
            action_R = self._choose(log_TRA[0]).masked_fill(is_probe_R, ABSTAIN_ACTION)
            found, _, _, _, info = self.env.step(action_R.view(self.env.num_envs, -1).numpy())
            self.seen = _rows(found)
            rows.append(self.seen)
            log_R = log_TRA[0].gather(1, action_R.unsqueeze(1)).squeeze(1)
            reward_R = self._scaled(_flat(info["earned"]))
            calls_R = _flat(info["calls"])
            made.append((action_R, log_R, is_probe_R, reward_R, calls_R))
            true_us += float(info["true_us"].sum())
            default_us += float(info["default_us"].sum())
        if self.env.is_over:
            self._begin(None)
        action, log_probability, is_probe, reward, calls = map(torch.stack, zip(*made, strict=True))
        return Trajectory(
            seen=RoundObservations(*map(torch.cat, zip(*rows, strict=True))),
            state=begin,
            action=action,
            log_probability=log_probability,
            is_probe=is_probe,
            reward=reward,
            calls=calls,
            true_us=true_us,
            default_us=default_us,
            curiosity=self.curiosity,
        )

    def _probe(self) -> torch.Tensor:
        """(R,) whose turn it is to be left to NCCL; counts as the policy module's `step` does."""
        is_new_NK = (self.seen.earned[0] != 0.0).view(self.env.num_envs, -1)
        found_NK = torch.zeros_like(is_new_NK)
        for key in range(is_new_NK.size(1)):
            is_due_N = (self._since_N + 1 >= self.probe_every) & (self.probe_every > 0)
            found_NK[:, key] = is_due_N
            counted_N = torch.where(is_due_N, 0, self._since_N + 1)
            self._since_N = torch.where(is_new_NK[:, key], counted_N, self._since_N)
        return found_NK.flatten()

    def _choose(self, log_RA: torch.Tensor) -> torch.Tensor:
        if self._is_greedy:
            return log_RA.argmax(dim=1)
        return torch.multinomial(log_RA.exp(), 1, generator=self.random).squeeze(1)

    def _begin(self, seed: int | None) -> None:
        self.seen = _rows(self.env.reset(seed=seed)[0])
        self.state = State.new(self.env.num_envs, self._units)
        self._since_N = torch.zeros(self.env.num_envs, dtype=torch.int64)
        jobs = self.env.num_envs
        self.probe_every = torch.from_numpy(self._draw_probes.choice(self.recipe.probe_every, jobs))

    def _scaled(self, earned_R: torch.Tensor) -> torch.Tensor:
        """Rewards (R,) as the recipe scales them; 0 for keys without calls."""
        scale = self.recipe.reward_scale
        if scale == "log":
            return -torch.log((-earned_R).clamp_min(1e-3)).masked_fill(earned_R == 0.0, 0.0)
        if scale == "raw":
            reference_ms = torch.from_numpy(self.env.tables.reference_us / 1000.0)
            return earned_R * reference_ms.to(earned_R.dtype).repeat(self.env.num_envs)
        return earned_R.clamp_min(-2.0) if scale == "clipped" else earned_R


def _rows(found: Mapping[str, Any]) -> RoundObservations:
    flat = (
        torch.from_numpy(found[name]).flatten(0, 1).unsqueeze(0)
        for name in RoundObservations._fields
    )
    seen = RoundObservations(*flat)
    return seen._replace(mask=seen.mask.float())


def _flat(part: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(part.astype(np.float32)).flatten()
