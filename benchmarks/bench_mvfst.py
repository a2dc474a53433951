"""Delayed decisions in simulation: the figures of mvfst-rl (Sivakumar et al. 2019) here.

    python benchmarks/bench_mvfst.py [PART]...   # all parts: ten minutes; FULL=1, ten seeds: hours

Worlds and scores are those of online_world.py. Intervals are over seeds. Parts, with the sections
of the paper:

* `blocking` (figure 1): calls of a job that waits for each decision, every 100 ms, against one that
  goes on meanwhile, both under an oracle that knows the state when it is asked.
* `unseen` (figure 3b): policies of one world in others, with mean and 95th percentile of the times
  of calls over NCCL's own choice in quiet; a threshold rule beside.
* `history` (figure 3c to e): the policy sees the last 0 to 20 decisions, which are moves on the
  counts of channels, in force 1 or 4 rounds later; with and without an LSTM. Two sizes of
  `megatron` on a B300 node that others use; a channel has a price.
* `relative` (A.2): counts themselves in place of the moves (0, /2, -1, +1, *2).
* `price` (3, the reward): time against channels, by the price of a channel; fixed counts beside.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import online_world as play
import torch
from harness import FULL, run_parts, student
from online_world import SEEDS, Actions, Floats, Found, Judge, RoundEnv, Setting, make_network
from torch import nn

from dynamiccl.simulator.world import World
from dynamiccl.train.online.a3c import Seen, State
from dynamiccl.train.online.impala import Learner
from dynamiccl.train.recipe import Recipe

DELAYS_MS: Final = (1, 10, 25, 50)
INTERVAL_US: Final = 100_000.0
JOB_US: Final = 60e6 if FULL else 20e6
HISTORIES: Final = (0, 1, 2, 5, 10, 20) if FULL else (0, 20)
#: Channels have a price at which 8 to 24 are best, by the state.
CHANNELS: Final = Setting(
    place="b300-nvlink:megatron:shared-node", ladder=tuple(range(1, 33)), price=0.1
)
PRICES: Final = (0.0, 0.03, 0.1, 0.3)
UNSEEN: Final = {
    "same": Setting(),
    "shifted": Setting(is_shifted=True),
    "shared": Setting(place="b300-nvlink:lora:shared-node"),
}


def blocking() -> Found:
    """Share of calls lost by waiting; and how much longer calls take where decisions are late."""
    found: Found = {"blocking_interval_ms": INTERVAL_US / 1000.0}
    world, _ = play.world_of(Setting())
    fresh_us = [job_calls(world, 0.0, seed, waits=False)[1] for seed in SEEDS]
    for delay in DELAYS_MS:
        lost, late = [], []
        for seed in SEEDS:
            goes_on, us = job_calls(world, 1000.0 * delay, seed, waits=False)
            lost.append(1.0 - job_calls(world, 1000.0 * delay, seed, waits=True)[0] / goes_on)
            late.append(us / fresh_us[seed] - 1.0)
        found |= student(lost, f"blocking_{delay}_lost") | student(late, f"blocking_{delay}_late")
    return found


def job_calls(world: World, delay_us: float, seed: int, *, waits: bool) -> tuple[float, float]:
    """Calls of a job, and us of one, of 16 jobs that a delayed oracle decides for."""
    count, keys = 16, np.arange(len(world.keys))
    jobs, job = world.jobs(count, seed), np.arange(count)
    clock, due = np.zeros(count), np.zeros(count)
    in_force: Actions = np.zeros((count, len(keys)), dtype=np.int64)
    chosen, since = in_force.copy(), np.full(count, np.inf)
    calls = np.zeros(count)
    spent = 0.0
    while (clock < JOB_US).any():
        asks = np.flatnonzero(clock >= due)
        for each in asks:
            slow = (np.full(len(keys), on[each]) for on in (jobs.intra, jobs.inter, jobs.host))
            chosen[each] = np.nanargmin(world.times_us(keys, *slow), axis=1)
        due[asks] += INTERVAL_US
        clock[asks] += delay_us * waits
        since[asks] = clock[asks] + delay_us * (not waits)
        now = np.flatnonzero(since <= clock)
        in_force[now], since[now] = chosen[now], np.inf
        ran = jobs.step(in_force[job, jobs.key])
        calls += clock < JOB_US
        clock += ran.lasted_us
        spent += float(ran.true_us.sum())
    return float(calls.sum()), spent / float(calls.sum())


class HistoryNetwork(nn.Module):
    """The paper's model: statistics and one-hot actions, an LSTM for each key, two heads."""

    def __init__(
        self, setting: Setting, recipe: Recipe, seed: int, history: int, *, has_lstm: bool
    ) -> None:
        super().__init__()
        self.trunk = make_network(setting, recipe, seed).actor.trunk
        keys, self.actions = RoundEnv(setting, 1, recipe).tables.mask.shape
        self.history, self.units = history, 16 if has_lstm else 0
        self.state_units = keys * self.units
        width = recipe.hidden_sizes[-1] + history * (self.actions + 1)
        self.inner = nn.Sequential(nn.Linear(width, 64), nn.SiLU())
        self.core = nn.LSTMCell(64 + 1, self.units) if self.units else None
        self.policy = nn.Linear(64 + self.units, self.actions)
        self.value = nn.Linear(64 + self.units, 1)

    def forward(self, seen: Seen, state: State) -> tuple[torch.Tensor, torch.Tensor, State]:
        """As `ActorCritic`."""
        rounds, rows = seen.earned.shape
        flat = self.trunk(seen.window.flatten(0, 1), seen.context.flatten(0, 1))
        parts = [flat.view(rounds, rows, -1)]
        if self.history:
            decided = seen.decided[:, :, -self.history :] + 1
            parts.append(nn.functional.one_hot(decided, self.actions + 1).flatten(2).float())
        hidden = self.inner(torch.cat(parts, dim=2))
        if self.core is not None:
            told = torch.cat([hidden, seen.earned.unsqueeze(2)], dim=2)
            h, c = (part.reshape(rows, self.units) for part in state)
            steps = []
            for each in told:
                h, c = self.core(each, (h, c))
                steps.append(h)
            hidden = torch.cat([hidden, torch.stack(steps)], dim=2)
            state = State(*(part.reshape(state.h.shape) for part in (h, c)))
        logits = self.policy(hidden).masked_fill(seen.mask == 0, -1e6)
        return torch.log_softmax(logits, dim=2), self.value(hidden).squeeze(2), state


def learned(
    setting: Setting, history: int, seed: int, *, has_lstm: bool = False
) -> tuple[HistoryNetwork, Judge]:
    """A network that has learned, and its judge."""
    # A move is felt for long, and late: trajectories are longer, so is what counts, and episodes
    # begin again at NCCL's count before all moves have ended at the most or the least.
    longer: dict[str, Any] = {"gamma": 0.9, "num_steps": 12, "jobs": 24, "episode_rounds": 48}
    recipe = play.recipe_of(seen_decisions=max(history, 1), **longer)
    network = HistoryNetwork(setting, recipe, seed, history, has_lstm=has_lstm)
    network.load_state_dict(play.train(setting, recipe, seed, network)[-1].weights)
    return network, Judge(setting, recipe)


def rewards(setting: Setting, history: int, *, has_lstm: bool = False) -> list[float]:
    """Scores in rewards: the ln of costs, which a few bad counts do not drown."""
    runs = (learned(setting, history, seed, has_lstm=has_lstm) for seed in SEEDS)
    return [judge.score_of(judge.watch(network), in_reward=True) for network, judge in runs]


def history() -> Found:
    """Scores by the length of the history, the delay and the model."""
    found: Found = {}
    for delay, model in ((1, "plain"), (4, "plain"), (4, "lstm")):
        for length in HISTORIES:
            moving = replace(CHANNELS, delay=delay, has_moves=True)
            values = rewards(moving, length, has_lstm=model == "lstm")
            found |= student(values, f"history_{delay}_{model}_{length}")
    return found


def relative() -> Found:
    """Counts themselves, with the same model and worlds as the moves of `history`."""
    found: Found = {}
    for delay in (1, 4):
        found |= student(rewards(replace(CHANNELS, delay=delay), 5), f"relative_{delay}")
    return found


def threshold_rule(threshold: float, hold: int, memory: dict[str, Any], env: RoundEnv) -> Actions:
    """By hand: slower than in quiet, so take what is best then, for a while; look again."""
    quiet_us, now, rounds = env.world.quiet_us, env.configs[0], len(env.took)
    until = memory.setdefault("until", np.zeros(env.num_envs, dtype=np.int64))
    if rounds:
        usual = quiet_us[np.arange(env.shape[1]), now]
        until[(env.took[-1] / usual - 1.0).max(1) > threshold] = rounds + hold
    return np.where((until > rounds)[:, None], slowed(env).argmin(1), best_fixed(0.0, env))


def slowed(env: RoundEnv) -> Floats:
    """(K, A) us where everything is 1.5 times as slow that the scenario slows, inf for none."""
    keys, one = np.arange(env.shape[1]), np.ones(env.shape[1])
    on = {link.on for link in env.world.scenario.link}
    slow = ((1.5 if each in on else 1.0) * one for each in ("intra", "inter", "host"))
    found = env.world.times_us(keys, *slow)
    return np.where(np.isnan(found), np.inf, found)


def best_fixed(price: float, env: RoundEnv) -> Actions:
    """By hand: what costs least in quiet at a price of channels."""
    cost = env.world.quiet_us / env.tables.reference_us[:, None] + price * env.world.num_channels
    return np.broadcast_to(np.nanargmin(cost, axis=1), env.shape)


def unseen() -> Found:
    """Two policies and their rivals, with times of calls, in worlds that they did not see."""
    rows: dict[str, list[float]] = {}
    plain = UNSEEN["same"]
    pilot = Judge(plain, play.recipe_of(), play.JUDGED - 1)
    rules = [(slow, hold) for slow in (0.15, 0.3, 0.5) for hold in (0, 8, 32, 128)]
    best = min(
        rules, key=lambda each: pilot.play(partial(threshold_rule, each[0], each[1], {})).both
    )
    for seed in SEEDS:
        recipe = play.recipe_of("a3c-lstm")
        network: Any = make_network(plain, recipe, seed)
        network.load_state_dict(play.train(plain, recipe, seed, network)[-1].weights)
        trained = {"a3c": network, "impala": _impala(seed)}
        for world, setting in UNSEEN.items():
            judge = Judge(setting, recipe, play.JUDGED + 1 + seed)
            contenders: dict[str, Callable[[RoundEnv], Actions]] = {
                "nccl": lambda env: np.zeros(env.shape, dtype=np.int64),
                "rule": partial(threshold_rule, best[0], best[1], {}),
            }
            played = {name: judge.play(rule) for name, rule in contenders.items()}
            played |= {name: judge.watch(network) for name, network in trained.items()}
            for name, env in played.items():
                over = np.stack(env.took) / env.tables.reference_us
                told = judge.score_of(env), over.mean(), np.quantile(over, 0.95)
                for end, value in zip(("score", "mean", "p95"), told, strict=True):
                    rows.setdefault(f"unseen_{world}_{name}_{end}", []).append(float(value))
    found: Found = {"unseen_threshold": best[0], "unseen_hold": best[1]}
    for name, values in rows.items():
        found |= student(values, name)
    return found


def _impala(seed: int) -> Any:
    """One learner, and four actors that play under the weights of one to four updates ago."""
    recipe = play.recipe_of("impala-lstm", actors=4)
    network = make_network(UNSEEN["same"], recipe, seed)
    players = [
        each.player(recipe.state_units) for each in play.actors(UNSEEN["same"], recipe, seed)
    ]
    learner, average = Learner(network, None, recipe), copy.deepcopy(network)
    for number in range(recipe.steps):
        if number % len(players) == 0:
            waiting = [player.play(network) for player in players]
        learner.learn(waiting.pop(0), number + 1)
        play.mix(average, network, recipe)
    return average


def price() -> Found:
    """Mean time over NCCL's own choice in quiet, and channels, of what was learned at a price."""
    found: Found = {}
    for cost in PRICES:
        rows: dict[str, list[tuple[float, float]]] = {}
        for seed in SEEDS:
            network, judge = learned(replace(CHANNELS, price=cost), 1, seed)
            for name, env in (
                ("learned", judge.watch(network)),
                ("fixed", judge.play(partial(best_fixed, cost))),
            ):
                time = float((np.stack(env.took) / env.tables.reference_us).mean())
                rows.setdefault(name, []).append((time, float(np.mean(env.held))))
        for name, pairs in rows.items():
            for end, values in zip(("time", "channels"), np.array(pairs).T, strict=True):
                found |= student(values.tolist(), f"price_{cost:g}_{name}_{end}")
    return found


PARTS: Final = {each.__name__: each for each in (blocking, unseen, history, relative, price)}

if __name__ == "__main__":
    run_parts("mvfst", PARTS, updates=play.UPDATES, seeds=len(SEEDS))
