"""Simulated measurements with known truth, for strategies."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.strategies.belief import current_beliefs
from dynamiccl.collect.strategies.strategy import (
    Outcome,
    Strategy,
    group_by_task,
    seed_of,
)
from dynamiccl.collect.sweep import Sweep, parse_sweep
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol

TEXT = """
name = "grid"
system = "sim"
collectives = ["AllReduce"]
algorithms = ["Ring", "Tree"]
protocols = ["LL", "Simple"]
num_channels = [0, 1, 2, 4, 8, 16, 32]
groups = [{ num_nodes = 4, ranks_per_node = 8 }]
sizes = { min = "64K", max = "64M" }
cycles = 3
"""

#: Times a trial truly takes, in us; None = it fails.
Truth = Callable[[Trial], float | None]
#: (seed of the draw, generator) -> factor on the true time; None = the outcome has no time.
Noise = Callable[[np.random.Generator], float | None]


def sweep(text: str = TEXT, **changes: str) -> Sweep:
    """The sweep of `text` with whole lines `key = value` replaced or put first."""
    lines = text.strip().splitlines()
    for key, value in changes.items():
        kept = [line for line in lines if not line.startswith(f"{key} =")]
        lines = [f"{key} = {value}", *kept]
    return parse_sweep("\n".join(lines), where="test")


def adaptive_sweep(settings: str = "", **changes: str) -> Sweep:
    """A sweep with `[strategy] kind = "adaptive"` and further settings."""
    lines = sweep(**changes).text
    return parse_sweep(f'{lines}\n[strategy]\nkind = "adaptive"\n{settings}', where="test")


def hockney(trial: Trial) -> float:
    """A unimodal world: latency and bandwidth by subspace, a best channel count by size.

    The default is Ring/Simple with the channel count AUTO, which is the same as 8.
    """
    config = trial.config
    algorithm = Algorithm.Ring if config.algorithm is None else config.algorithm
    protocol = Protocol.Simple if config.protocol is None else config.protocol
    latency = {Algorithm.Ring: 40.0, Algorithm.Tree: 20.0}[algorithm]
    bytes_per_us = {Algorithm.Ring: 200e3, Algorithm.Tree: 120e3}[algorithm]
    if protocol is Protocol.LL:
        latency, bytes_per_us = latency / 3.0, bytes_per_us / 8.0
    channels = config.num_channels or 8
    best = (math.log2(trial.size_bytes) - 16.0) / 2.0
    crowding = 1.0 + 0.08 * (math.log2(channels) - best) ** 2
    return latency + trial.size_bytes / bytes_per_us * crowding


def quiet(_: np.random.Generator) -> float:
    """No noise at all."""
    return 1.0


def normal(sigma: float) -> Noise:
    """Log-normal noise."""
    return lambda random: math.exp(random.normal(0.0, sigma))


def heavy(sigma: float, share: float) -> Noise:
    """Log-normal noise; a share of the times is up to many times as long."""

    def factor(random: np.random.Generator) -> float:
        slow = 1.0 + random.pareto(1.5) if random.random() < share else 1.0
        return slow * math.exp(random.normal(0.0, sigma))

    return factor


def decide(
    trials: Sequence[Trial], history: Sequence[Outcome], *, confidence: float = 0.9
) -> dict[tuple[Setting, int], Config]:
    """What the belief would take for each task now: ABSTAIN where it is not sure."""
    table: dict[tuple[Setting, int], Config] = {trial.task: ABSTAIN for trial in trials}
    for belief in current_beliefs(group_by_task(trials), history, seed=0):
        index = belief.decision(confidence)
        if index is not None:
            table[belief.trials[index].task] = belief.trials[index].config
    return table


@dataclass
class World:
    """Measures the picks of a strategy."""

    sweep: Sweep
    truth: Truth
    noise: Noise = quiet
    seed: int = 0
    #: What each round was.
    rounds: list[tuple[Trial, ...]] = field(default_factory=list)

    def measure(self, number: int, picks: Sequence[Trial]) -> list[Outcome]:
        """Outcomes of picks, each with noise of its own."""
        return [self._outcome(number, pick) for pick in picks]

    def _outcome(self, number: int, pick: Trial) -> Outcome:
        key = pick.key
        time_us = None if pick.infeasible else self.truth(pick)
        if time_us is None:
            return Outcome(key, number, None, ok=False)
        random = np.random.default_rng(seed_of(self.seed, number, key, pick.repeat))
        factor = self.noise(random)
        return Outcome(key, number, None if factor is None else time_us * factor, ok=True)

    def play(self, strategy: Strategy, most_rounds: int = 50) -> list[Outcome]:
        """Run a strategy until it is done; returns the history."""
        history: list[Outcome] = []
        for number in range(most_rounds):
            picks = strategy.next_picks(number, history)
            if picks is None:
                return history
            self.rounds.append(picks)
            history += self.measure(number, picks)
        raise AssertionError(f"not done after {most_rounds} rounds")

    def regret(self, table: dict[tuple[Setting, int], Config]) -> float:
        """Mean true regret of a table, the default being one of the choices."""
        regrets = []
        for task, config in table.items():
            times = {
                trial.config: time_us
                for trial in self.sweep.trials
                if trial.task == task and (time_us := self.truth(trial)) is not None
            }
            regrets.append(times[config] / min(times.values()) - 1.0)
        return float(np.mean(regrets))

    def slowdowns(self, table: dict[tuple[Setting, int], Config]) -> list[float]:
        """True time of each task's choice over that of its default."""
        times = {(t.task, t.config): self.truth(t) or math.inf for t in self.sweep.trials}
        return [times[task, config] / times[task, ABSTAIN] for task, config in table.items()]
