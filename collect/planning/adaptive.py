"""Estimates an adaptive sweep by running it in the simulator.

The strategy itself picks, round by round; the model's times with the noise of `[simulator]` are
what it gets. That takes about a quarter of a second for each setting and round, so of settings that
can be tuned at most so many are played, those that take longest; the others are taken to need the
same share of what the exhaustive sweep takes of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from dynamiccl.collect.outcomes import Outcome
from dynamiccl.collect.planning.processes import NOTHING, Cost, Planner
from dynamiccl.collect.planning.times import CallTimes
from dynamiccl.collect.runner import Pick, Round
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.sweep.load import Sweep
from dynamiccl.collect.sweep.trial import Setting, Trial
from dynamiccl.simulator.noise import Noise

ADAPTIVE: Final = "adaptive"
#: Settings that are played.
MOST_PLAYED: Final = 3


@dataclass(frozen=True, slots=True)
class AdaptiveEstimate:
    """What an adaptive sweep took in the simulator."""

    cost: Cost
    rounds: int
    measurements: int
    #: Settings that can be tuned, and those that were played.
    settings: int
    settings_played: int


def with_strategy(sweep: Sweep, kind: str) -> Sweep:
    """The same sweep with the strategy `kind`."""
    strategy = sweep.file.strategy.model_copy(update={"kind": kind})
    return replace(sweep, file=sweep.file.model_copy(update={"strategy": strategy}))


def play(sweep: Sweep, times: CallTimes, *, most_seconds: float = math.inf) -> AdaptiveEstimate:
    """Run an adaptive sweep in the simulator until it ends, or exceeds `most_seconds`."""
    cycle = {setting: cost.total_s for setting, cost in _cycles(sweep, times).items()}
    tuned = sorted((s for s in cycle if s.collective.tunable), key=lambda s: (-cycle[s], s.key))
    taken = {*tuned[:MOST_PLAYED], *(s for s in cycle if not s.collective.tunable)}
    # What the rest needs, as a factor on what is played of the tuned ones.
    played_s = sum(cycle[setting] for setting in tuned[:MOST_PLAYED])
    factor = sum(cycle[setting] for setting in tuned) / played_s if played_s else 1.0
    game = _SimulatedSweep(sweep, times, taken, factor)
    while game.cost.total_s <= most_seconds and game.play_round():
        pass
    return AdaptiveEstimate(
        game.cost, game.rounds, round(game.measurements), len(tuned), len(tuned[:MOST_PLAYED])
    )


def _cycles(sweep: Sweep, times: CallTimes) -> dict[Setting, Cost]:
    """Cost of one full cycle, by setting."""
    planner = Planner(sweep, times)
    picks: dict[Setting, list[Pick]] = {}
    for trial in sweep.trials:
        if trial.infeasible is None:
            picks.setdefault(trial.setting, []).append(Pick(trial))
    return {
        setting: planner.cost(
            planner.processes(Round(0, tuple(found)), must_read_back=lambda _: False)
        )
        for setting, found in picks.items()
    }


class _SimulatedSweep:
    """Simulates an adaptive sweep of some settings, round by round."""

    def __init__(
        self, sweep: Sweep, times: CallTimes, settings: set[Setting], factor: float
    ) -> None:
        trials = tuple(trial for trial in sweep.trials if trial.setting in settings)
        part = replace(sweep, trials=trials)
        simulator = sweep.file.simulator
        self._times = times
        self._factor = factor
        self._planner = Planner(part, times)
        self._strategy = make_strategy(part.file, trials)
        self._noise = Noise(
            simulator.seed, simulator.noise_sigma, simulator.tail_probability, simulator.drift_sigma
        )
        self._history: list[Outcome] = []
        self._read_back: set[str] = set()
        self.rounds = 0
        self.measurements = 0.0
        self.cost = NOTHING

    def play_round(self) -> bool:
        """Simulate the next round; False when the strategy is done."""
        picks = self._strategy.next_picks(self.rounds, self._history)
        if picks is None:
            return False
        feasible = [pick for pick in picks if pick.trial.infeasible is None]
        tuned = [pick for pick in feasible if pick.trial.setting.collective.tunable]
        others = [pick for pick in feasible if not pick.trial.setting.collective.tunable]
        self._take(tuned, self._factor)
        self._take(others, 1.0)
        self._history += [self._outcome(pick) for pick in picks]
        self.rounds += 1
        return True

    def _take(self, picks: Sequence[Pick], factor: float) -> None:
        needed = [pick for pick in picks if self._planner.reason_to_skip(pick.trial) is None]
        processes = self._planner.processes(
            Round(self.rounds, tuple(needed)),
            must_read_back=lambda trial: trial.key not in self._read_back,
        )
        self.cost += self._planner.cost(processes).times(factor)
        self.measurements += factor * len(needed)
        self._read_back |= {pick.trial.key for pick in needed}

    def _outcome(self, pick: Pick) -> Outcome:
        trial = pick.trial
        skipped = trial.infeasible or self._planner.reason_to_skip(trial)
        if skipped is not None or not self._is_there(trial):
            return Outcome(trial.key, self.rounds, None, ok=False, infeasible=True)
        quiet_us = self._times.of(trial.setting).call_us(
            trial.setting.benchmark_bytes(trial.size_bytes), trial.config
        )
        factor = self._noise.factor(str(self.rounds), f"{trial.key}#{pick.repeat}")
        return Outcome(trial.key, self.rounds, quiet_us * factor, ok=True)

    def _is_there(self, trial: Trial) -> bool:
        times = self._times.of(trial.setting)
        return (
            not times.is_modelled
            or times.parts(trial.setting.benchmark_bytes(trial.size_bytes), trial.config)
            is not None
        )
