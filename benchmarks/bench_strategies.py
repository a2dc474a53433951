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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from harness import student, write_result

from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.strategies import Outcome, Strategy, believe, make_strategy, tasks_of
from dynamiccl.collect.sweep import BudgetSettings, StrategySettings, parse_sweep
from dynamiccl.nccl import ABSTAIN, Config
from dynamiccl.simulator.h100 import default_model, true_us
from dynamiccl.simulator.noise import Noise
from dynamiccl.simulator.system import Call, Group

CYCLES: Final = 3
SEEDS: Final = range(6)
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
#: The config of each task.
Table = dict[tuple[Setting, int], Config]


@dataclass
class World:
    """Trials whose true times are known, and the rounds that a strategy picked of them."""

    trials: Sequence[Trial]
    #: Time a trial truly takes, in us; None = it fails.
    truth: Callable[[Trial], float | None]
    #: Round, pick -> factor on the true time.
    noise: Callable[[int, Trial], float] = lambda *_: 1.0
    rounds: list[tuple[Trial, ...]] = field(default_factory=list)

    def play(self, strategy: Strategy, most_rounds: int = 50) -> list[Outcome]:
        """Measure the picks of a strategy until it is done."""
        history: list[Outcome] = []
        while (picks := strategy.next_picks(len(self.rounds), history)) is not None:
            number = len(self.rounds)
            assert number < most_rounds
            self.rounds.append(picks)
            for pick in picks:
                missing = pick.infeasible is not None
                true_us = None if missing else self.truth(pick)
                time_us = None if true_us is None else true_us * self.noise(number, pick)
                history.append(Outcome(pick.key, number, time_us, true_us is not None, missing))
        return history

    def decide(self, history: Sequence[Outcome]) -> Table:
        """The config that the belief would take for each task, ABSTAIN where it is not sure."""
        table: Table = {trial.task: ABSTAIN for trial in self.trials}
        for tasks in tasks_of(self.trials).values():
            found = believe(tasks, history)
            for task in enumerate(found.decided):
                table[found.trials[task].task] = found.trials[task].config
        return table

    def ratios(self, table: Table, *, over_best: bool) -> np.ndarray:
        """True time of each task's config over that of its best one, or of NCCL's own choice."""
        times: dict[tuple[Setting, int], dict[Config, float]] = {task: {} for task in table}
        for trial in self.trials:
            if (time_us := self.truth(trial)) is not None:
                times[trial.task][trial.config] = time_us
        own = {t: min(c.values()) if over_best else c[ABSTAIN] for t, c in times.items() if c}
        return np.array([times[task][table[task]] / own_us for task, own_us in own.items()])

    def regret(self, history: Sequence[Outcome]) -> float:
        """Mean true regret of the table that follows from a history."""
        return float(self.ratios(self.decide(history), over_best=True).mean() - 1.0)


def simulated_world(seed: int) -> World:
    """The grid of SWEEP in the H100 simulator, feasible trials only, with noise of a seed."""
    truth = {}
    made = parse_sweep(SWEEP, where="benchmark")
    for trial in made.trials:
        setting, config = trial.setting, trial.config
        group = Group(setting.num_nodes, setting.ranks_per_node)
        call, asked = Call(group, setting.collective, trial.size_bytes), config.num_channels
        if config == ABSTAIN:
            config = default_model().resolve(call, ABSTAIN)
        algorithm, protocol = config.algorithm, config.protocol
        if (algorithm, protocol) in default_model().cells(group, setting.collective):
            assert algorithm is not None
            assert protocol is not None
            truth[trial.key] = true_us(call, (algorithm, protocol), asked)
    defaults = made.file.simulator
    noise = Noise(seed, defaults.noise_sigma, defaults.tail_probability, defaults.drift_sigma)
    return World(
        [trial for trial in made.trials if trial.key in truth],
        lambda trial: truth[trial.key],
        lambda number, pick: noise.factor(f"cycle-{number}", f"{pick.key}#{pick.repeat}"),
    )


def run(seed: int, kind: str, budget: int | None = None) -> tuple[int, float]:
    """Measurements that a strategy makes, and the regret of the table that follows."""
    world, file = simulated_world(seed), parse_sweep(SWEEP, where="benchmark").file
    chosen = StrategySettings.model_validate({"kind": kind, "seed": seed})
    most = BudgetSettings.model_validate({"max_measurements": budget})
    update = {"name": "bench", "cycles": CYCLES, "strategy": chosen, "budget": most}
    history = world.play(make_strategy(file.model_copy(update=update), world.trials))
    return len(history), world.regret(history)


def main() -> None:
    """Simulate and report."""
    world = simulated_world(0)
    tasks = {trial.task for trial in world.trials}
    full = CYCLES * (len(world.trials) + len(tasks))
    figures: dict[str, float | int | str | None] = {
        "tasks": len(tasks),
        "configs_per_task_mean": len(world.trials) / len(tasks) - 1,
        "exhaustive_measurements": full,
        "abstain_regret": world.regret(()),
    }
    saved = 0.0
    for share in SHARES:
        runs = [run(seed, "adaptive", full // share) for seed in SEEDS]
        found = student([regret for _, regret in runs], f"adaptive_regret_at_1_{share}")
        figures |= found
        if (found[f"adaptive_regret_at_1_{share}_hi"] or 1.0) <= BAR_REGRET:
            saved = max(saved, full / max(count for count, _ in runs))
    figures["measurements_saved_ratio_at_2pct"] = saved
    sure = [run(seed, "adaptive") for seed in SEEDS]
    figures["adaptive_saved_ratio_when_sure"] = full / float(np.mean([count for count, _ in sure]))
    figures |= student([regret for _, regret in sure], "adaptive_regret_when_sure")
    exhaustive = [run(seed, "exhaustive") for seed in SEEDS]
    figures |= student([regret for _, regret in exhaustive], "exhaustive_regret")
    write_result("strategies", figures)


if __name__ == "__main__":
    main()
