"""Asynchronous advantage actor-critic in simulation: the figures of Mnih et al. (ICML 2016) here.

    python benchmarks/bench_a3c.py [PART]...   # all parts: ten minutes; FULL=1, ten seeds: an hour

World and score are online_world's; an update is 6 rounds of 48 jobs. Intervals are over seeds.
Parts, with the sections of the paper:

* `lstm` (5.3, table 1): a state as old as the job, with and without probes, against none.
* `actors` (5.5, table 2, figure 3): scores after equal numbers of samples of 1 to 16 actors, which
  are threads on shared weights here, so that no core need be free.
* `advantage` (4): variance of the policy's gradient, with the advantage over with the return.
* `explore` (4): actors with the same weight of entropy, and with different ones.
* `rates` (5.6, figure 2): 50 learning rates, log-uniform, each with a start of its own.
* `wall` (5.1 and 5.5, figures 1 and 4): updates a second, and scores after equal seconds, of
  processes, and of a double DQN with replay (one plays, one learns): six minutes, two quiet cores.
"""

import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import online_world as play
import torch
from harness import ROOT, run_parts, student
from online_world import SEEDS, Found, Judge, Mark, Setting, make_network, recipe_of

from dynamiccl.train.online import a3c
from dynamiccl.train.online.a3c import ActorCritic, Player, Seen, State, Trajectory
from dynamiccl.train.online.impala import local_actors
from dynamiccl.train.recipe import Recipe

HERE: Final = Setting()
COUNTS: Final = (1, 2, 4, 8, 16)
MARKS: Final = 4
RATES: Final = 50
SECONDS: Final = 10.0
PLOT: Final = ROOT / "docs" / "a3c-rates.png"


def scores(recipe: Recipe, seed: int, marks: int = 1, **others: Any) -> list[float]:
    """Scores on the way of a run."""
    network = make_network(HERE, recipe, seed)
    made = play.train(HERE, recipe, seed, network, marks, **others)
    return Judge(HERE, recipe).scores(made, network)


def by_column(name: str, rows: Sequence[Sequence[float]]) -> Found:
    """NAME_1 and so on: a figure for each column of rows (seeds, columns)."""
    found: Found = {}
    for index, column in enumerate(np.array(rows).T, 1):
        found |= student(column.tolist(), f"{name}_{index}")
    return found


def actors() -> Found:
    """Scores after each quarter of the samples, by the number of actors."""
    found: Found = {}
    for count in COUNTS:
        rows = [scores(recipe_of(actors=count), seed, MARKS) for seed in SEEDS]
        found |= by_column(f"actors_{count}", rows)
    return found


def wall() -> Found:
    """Updates a second and scores of processes, and of a DQN on as many cores."""
    found: Found = {"wall_seconds": SECONDS, "wall_cores": os.cpu_count()}
    judge = Judge(HERE, recipe_of())
    rows: dict[str, list[list[Mark]]] = {}
    for seed in SEEDS:
        for count in COUNTS:
            rows.setdefault(f"wall_{count}", []).append(_a3c_for(SECONDS, count, seed))
        rows.setdefault("wall_dqn", []).append(_dqn_for(SECONDS, seed))
    for name, runs in rows.items():
        network = _q_network(0) if name == "wall_dqn" else make_network(HERE, recipe_of(), 0)
        found |= by_column(name, [judge.scores(run, network) for run in runs])
        found |= student([run[-1].updates / run[-1].seconds for run in runs], f"{name}_rate")
    return found


def _timed(next_update: Callable[[], Any], seconds: float, weights: Any, most: int) -> list[Mark]:
    """Marks at each quarter of the seconds after the first update; no more updates than `most`."""
    next_update()
    began, updates, found = time.monotonic(), 1, list[Mark]()
    while len(found) < MARKS:
        if updates < most:
            next_update()
            updates += 1
        if time.monotonic() - began > seconds * (len(found) + 1) / MARKS:
            found.append(Mark.of(updates, began, weights))
    return found


def _a3c_for(seconds: float, count: int, seed: int) -> list[Mark]:
    recipe = recipe_of(actors=count, steps=_UPDATES)
    network = make_network(HERE, recipe, seed)
    make = partial(make_network, HERE, recipe, seed)
    source = a3c.ActorLearners(network, play.actors(HERE, recipe, seed), make)
    source.start(0)
    try:
        return _timed(lambda: source.update(0), seconds, network, recipe.steps)
    finally:
        source.close()


#: Most that actors make, who end then: about what two quiet cores do in `SECONDS`.
_UPDATES: Final = 1_500
_REPLAYED: Final = 200
_TARGET_EVERY: Final = 50
_BATCH: Final = 2


class QNetwork(ActorCritic):
    """Values in place of logits; what is played is epsilon-greedy."""

    epsilon: torch.Tensor

    def forward(self, seen: Seen, state: State) -> tuple[torch.Tensor, torch.Tensor, State]:
        """Log probabilities of playing (T, R, A), values (T, R), the same state."""
        values = self.values(seen)
        count = seen.mask.sum(2, keepdim=True)
        best = torch.nn.functional.one_hot(values.argmax(2), values.size(2))
        played = self.epsilon * seen.mask / count + (1.0 - self.epsilon) * best
        return played.clamp_min(1e-9).log(), values.max(2)[0], state

    def values(self, seen: Seen) -> torch.Tensor:
        """Q (T, R, A)."""
        flat = Seen(*(part.flatten(0, 1) for part in seen))
        hidden = self.actor.trunk(flat.window, flat.context)
        return self.actor.logits(hidden, flat.context, flat.mask).view_as(seen.mask)


def _q_network(seed: int) -> QNetwork:
    recipe = recipe_of()
    plain = make_network(HERE, recipe, seed)
    width, count = recipe.hidden_sizes[-1], play.world_of(HERE)[0].mask.shape[1]
    made = QNetwork(plain.actor, width, count, recipe.seen_decisions)
    made.register_buffer("epsilon", torch.tensor(0.0))
    return made


def q_loss(
    played: Trajectory, network: QNetwork, target: QNetwork, gamma: float, delay: int
) -> torch.Tensor:
    """Double DQN; what a decision earns is that of `delay` rounds later."""
    values = network.values(played.seen)
    mine = values[:-1].gather(2, played.action.unsqueeze(2)).squeeze(2)
    best = values.detach().argmax(2, keepdim=True)
    with torch.no_grad():
        after = target.values(played.seen).gather(2, best).squeeze(2)[1:]
    rounds = len(mine) - delay
    wanted = played.reward[delay:] + gamma * after[:rounds]
    return torch.nn.functional.smooth_l1_loss(mine[:rounds], wanted)


def _dqn_for(seconds: float, seed: int) -> list[Mark]:
    network, target = _q_network(seed), _q_network(seed)
    recipe, draw = recipe_of(), np.random.default_rng(seed)
    playing = local_actors(network, play.actors(HERE, recipe, seed), partial(_q_network, seed))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    replay: deque[Trajectory] = deque(maxlen=_REPLAYED)
    network.epsilon.fill_(1.0)
    began, numbers = 0.0, itertools.count(1)

    def learn() -> None:
        nonlocal began
        replay.append(playing.next()[0])
        began = began or time.monotonic()
        # To a twentieth, over the first half.
        network.epsilon.fill_(max(0.05, 1.0 - 2.0 * (time.monotonic() - began) / seconds))
        drawn = [replay[each] for each in draw.integers(len(replay), size=_BATCH)]
        parts = [q_loss(each, network, target, recipe.gamma, HERE.delay) for each in drawn]
        optimizer.zero_grad()
        torch.stack(parts).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if next(numbers) % _TARGET_EVERY == 0:
            target.load_state_dict(network.state_dict())

    playing.start()
    try:
        return _timed(learn, seconds, network, sys.maxsize)
    finally:
        playing.close()


def rates() -> Found:
    """Scores of 50 learning rates, and a picture of them."""
    tried = 10.0 ** np.random.default_rng(100).uniform(-4.5, -1.0, RATES)
    recipes = [recipe_of(learning_rate=rate) for rate in tried.tolist()]
    found = np.array([scores(recipe, index)[0] for index, recipe in enumerate(recipes)])
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    # As figure 2 of the paper.
    figure, axes = plt.subplots(figsize=(5.2, 2.6), dpi=80)
    axes.semilogx(tried, found.clip(-4.0), ".", color="0.2")
    axes.axhline(0.0, color="0.6", linewidth=0.8)
    axes.set(xlabel="learning rate", ylabel="score", title="50 learning rates and starts")
    figure.tight_layout()
    figure.savefig(PLOT)
    best = np.quantile(found, 0.9)
    good = tried[found >= best - 0.2]
    return {
        "rates_best": float(best),
        "rates_good": len(good) / RATES,
        "rates_good_from": float(good.min()),
        "rates_good_to": float(good.max()),
        "rates_below_0": float(np.mean(found < 0.0)),
    }


def policy_loss(
    played: Trajectory, own: ActorCritic, recipe: Recipe, *, number: int, has_baseline: bool
) -> torch.Tensor:
    """A3C's loss; without a baseline actions are weighed by their returns."""
    logs, value, _ = own(played.seen, played.state)
    known = value.detach()
    reward = a3c.filled(played.reward, known, played.calls, recipe.gamma)
    earned = a3c.returns(reward, known[-1], recipe.gamma)
    weight = earned - known[:-1] if has_baseline else earned
    entropy = played.curiosity * recipe.entropy_weight(number)
    rows = logs[:-1], value[:-1], played.action, weight * ~played.is_probe
    return a3c.loss(*rows, earned, (played.calls > 0).float(), entropy)


def plain_update(
    player: Player,
    shared: ActorCritic,
    own: ActorCritic,
    optimizer: a3c.SharedRmsProp,
    count: Callable[[], int],
) -> None:
    """A3C's update without a baseline."""
    own.load_state_dict(shared.state_dict())
    played, recipe, number = player.play(own), player.recipe, count()
    total = policy_loss(played, own, recipe, number=number, has_baseline=False)
    a3c.descend(total, own, optimizer, recipe, number)


def variance(player: Player, own: ActorCritic, *, has_baseline: bool, draws: int = 24) -> float:
    """Sum over the policy head's weights of their gradient's variance over trajectories."""
    # No entropy, and no gradient of the critic, which the head does not have.
    recipe = replace(player.recipe, entropy_start=0.0, entropy_end=0.0)
    head = [each for name, each in own.actor.named_parameters() if "trunk" not in name]
    rows = []
    for _ in range(draws):
        total = policy_loss(player.play(own), own, recipe, number=1, has_baseline=has_baseline)
        given: Sequence[Any] = torch.autograd.grad(total, head, allow_unused=True)
        rows.append(torch.cat([each.flatten() for each in given if each is not None]))
    return float(torch.stack(rows).var(0).sum())


def advantage() -> Found:
    """How much less the gradient varies, on the way of a run, and what it is worth."""
    recipe, ratios = recipe_of(), list[list[float]]()
    for seed in SEEDS:
        network = make_network(HERE, recipe, seed)
        ratios.append([])
        for each in play.train(HERE, recipe, seed, network, 3):
            network.load_state_dict(each.weights)
            [one], [other] = (play.actors(HERE, recipe, seed + 500) for _ in range(2))
            with_it = variance(one.player(0), network, has_baseline=True)
            ratios[-1].append(with_it / variance(other.player(0), network, has_baseline=False))
    plain = [scores(recipe, seed, learn=plain_update)[0] for seed in SEEDS]
    return by_column("advantage_variance", ratios) | student(plain, "advantage_without")


def lstm() -> Found:
    """Feed-forward, with a state as old as the job, and with probes beside."""
    rows = {
        "none": recipe_of(),
        "state": recipe_of("a3c-lstm", probe_every=(0,)),
        "probes": recipe_of("a3c-lstm"),
    }
    found: Found = {}
    for name, recipe in rows.items():
        found |= student([scores(recipe, seed)[0] for seed in SEEDS], f"lstm_{name}")
    return found


def explore() -> Found:
    """Eight actors with the same factor of the entropy's weight, and with different ones."""
    found, recipe = Found(), recipe_of(actors=8)
    # The product's own is drawn from 0.5 to 2.
    for name, most in (("same", 1.0), ("product", 0.0), ("wide", 10.0)):
        played = []
        for seed in SEEDS:
            draw = np.random.default_rng(seed)
            factor = partial(_drawn, draw, most) if most else None
            played += scores(recipe, seed, curiosity=factor)
        found |= student(played, f"explore_{name}")
    return found


def _drawn(draw: np.random.Generator, most: float) -> float:
    return float(most ** draw.uniform(-1.0, 1.0))


PARTS: Final = {each.__name__: each for each in (lstm, actors, advantage, explore, rates, wall)}

if __name__ == "__main__":
    run_parts("a3c", PARTS, updates=play.UPDATES, seeds=len(SEEDS))
