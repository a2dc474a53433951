"""Measurements that the adaptive strategy saves for a table of equal regret.

    python benchmarks/bench_strategies.py

AllReduce, AllGather and ReduceScatter on 4 x 8 simulated H100, 4 KiB to 4 GiB in two steps per
octave, every (algorithm, protocol) of the model with AUTO and 10 channel counts: 33 to 77 configs a
task. The exhaustive sweep measures each three times and the default twice as often; all of it
counts, for every strategy. Regret is of the noise-free times: that of the config in the table over
that of the best config (the default included), minus one, mean over tasks. Six seeds, each with
noise and draws of its own; intervals are Student's t, 95 %. `measurements_saved_ratio_at_2pct` is
exhaustive over adaptive measurements for the smallest budget tried whose interval ends below 2 %.

Writes out/bench/strategies.json.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from harness import write_result

from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.strategies import Outcome, Strategy, believe, make_strategy, tasks_of
from dynamiccl.collect.sweep import BudgetSettings, StrategySettings, parse_sweep
from dynamiccl.nccl import ABSTAIN, Config
from dynamiccl.simulator.h100 import default_model, true_us
from dynamiccl.simulator.noise import Noise
from dynamiccl.simulator.system import Call, Group

CYCLES: Final = 3
SEEDS: Final = range(6)
#: Student's t for 95 % and len(SEEDS) - 1 = 5 degrees of freedom.
T_95: Final = 2.571
#: Budgets that are tried, as shares 1 / n of the exhaustive sweep.
SHARES: Final = (8, 10, 12, 14, 16, 20)
BAR_REGRET: Final = 0.02
SWEEP: Final = """
name = "strategies"
system = "h100-ib-simulated"
collectives = ["AllReduce", "AllGather", "ReduceScatter"]
algorithms = ["Ring", "Tree", "NVLSTree"]
num_channels = [0, 1, 2, 3, 4, 6, 8, 10, 12, 14, 16]
groups = [{ num_nodes = 4, ranks_per_node = 8 }]
sizes = { min = "4K", max = "4G", steps_per_octave = 2 }
nccl_version = "2.27.5"
"""


@dataclass(frozen=True)
class World:
    """Trials, and their true times in us by trial key."""

    trials: tuple[Trial, ...]
    truth: Mapping[str, float]

    def history(self, strategy: Strategy, seed: int) -> list[Outcome]:
        """Measure the picks of a strategy until it is done."""
        defaults = parse_sweep(SWEEP, where="benchmark").file.simulator
        noise = Noise(seed, defaults.noise_sigma, defaults.tail_probability, defaults.drift_sigma)
        history: list[Outcome] = []
        number = 0
        while (picks := strategy.next_picks(number, history)) is not None:
            for pick in picks:
                key = pick.key
                factor = noise.factor(f"cycle-{number}", f"{key}#{pick.repeat}")
                history.append(Outcome(key, number, self.truth[key] * factor, ok=True))
            number += 1
        return history

    def table(self, history: Sequence[Outcome]) -> dict[tuple[Setting, int], Config]:
        """The config that the belief would take for each task, ABSTAIN where it is not sure."""
        table = {trial.task: ABSTAIN for trial in self.trials}
        for tasks in tasks_of(self.trials).values():
            found = believe(tasks, history)
            for task in enumerate(found.decided):
                table[found.trials[task].task] = found.trials[task].config
        return table

    def regret(self, history: Sequence[Outcome]) -> np.ndarray:
        """True regret of the table that follows from a history, by task."""
        best: dict[tuple[Setting, int], float] = {}
        keys = {}
        for trial in self.trials:
            best[trial.task] = min(best.get(trial.task, math.inf), self.truth[trial.key])
            keys[trial.task, trial.config] = trial.key
        taken = self.table(history)
        return np.array([self.truth[keys[t, c]] / best[t] - 1.0 for t, c in taken.items()])


def strategy_of(world: World, kind: str, seed: int = 0, **more: float | None) -> Strategy:
    """A strategy on a world's trials; `more` is of its settings, or the budget."""
    file = parse_sweep(SWEEP, where="benchmark").file
    budget = BudgetSettings.model_validate({"max_measurements": more.pop("budget", None)})
    chosen = StrategySettings.model_validate({"kind": kind, "seed": seed, **more})
    update = {"name": "bench", "cycles": CYCLES, "strategy": chosen, "budget": budget}
    return make_strategy(file.model_copy(update=update), world.trials)


def simulated_world() -> World:
    """The grid of SWEEP in the H100 simulator, feasible trials only."""
    truth = {}
    for trial in parse_sweep(SWEEP, where="benchmark").trials:
        setting, config = trial.setting, trial.config
        group = Group(setting.num_nodes, setting.ranks_per_node)
        call, asked = Call(group, setting.collective, trial.size_bytes), config.num_channels
        if config == ABSTAIN:
            config = default_model().resolve(call, ABSTAIN)
        algorithm, protocol = config.algorithm, config.protocol
        if (algorithm, protocol) not in default_model().cells(group, setting.collective):
            continue
        assert algorithm is not None
        assert protocol is not None
        truth[trial] = true_us(call, (algorithm, protocol), asked)
    return World(tuple(truth), {trial.key: time_us for trial, time_us in truth.items()})


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean over seeds and half the width of its 95 % interval."""
    half = T_95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)), half


def simulated_figures() -> dict[str, float | int | str]:
    """Everything about the simulated grid."""
    world = simulated_world()
    tasks = {trial.task for trial in world.trials}
    full = CYCLES * (len(world.trials) + len(tasks))
    figures: dict[str, float | int | str] = {
        "tasks": len(tasks),
        "configs_per_task_mean": len(world.trials) / len(tasks) - 1,
        "exhaustive_measurements": full,
    }
    saved = 0.0
    for share in SHARES:
        runs = [adaptive_run(world, seed, full // share) for seed in SEEDS]
        mean, half = interval([regret for _, regret in runs])
        used = max(count for count, _ in runs)
        figures[f"adaptive_regret_at_1_{share}"] = mean
        figures[f"adaptive_regret_at_1_{share}_half_ci95"] = half
        if mean + half <= BAR_REGRET:
            saved = max(saved, full / used)
    figures["measurements_saved_ratio_at_2pct"] = saved
    histories = [adaptive_history(world, seed, None) for seed in SEEDS]
    figures["adaptive_saved_ratio_when_sure"] = full / float(np.mean([*map(len, histories)]))
    regrets = [float(world.regret(history).mean()) for history in histories]
    figures["adaptive_regret_when_sure"] = interval(regrets)[0]
    exhaustive = [world.history(strategy_of(world, "exhaustive", seed), seed) for seed in SEEDS]
    regrets = [float(world.regret(history).mean()) for history in exhaustive]
    figures["exhaustive_regret"], figures["exhaustive_regret_half_ci95"] = interval(regrets)
    figures["abstain_regret"] = float(world.regret(()).mean())
    return figures


def adaptive_history(world: World, seed: int, budget: int | None) -> list[Outcome]:
    """The measurements of an adaptive sweep."""
    return world.history(strategy_of(world, "adaptive", seed, budget=budget), seed)


def adaptive_run(world: World, seed: int, budget: int | None) -> tuple[int, float]:
    """Number of measurements and mean true regret."""
    history = adaptive_history(world, seed, budget)
    return len(history), float(world.regret(history).mean())


def main() -> None:
    """Simulate and report."""
    write_result("strategies", simulated_figures())


if __name__ == "__main__":
    main()
