"""Sampling strategies: exhaustive, random, adaptive (pure functions of the history).

strategy      what a strategy is, and the tasks of a sweep
exhaustive    the whole grid, cycle by cycle
random_share  a fresh uniform share of it in each cycle
adaptive      where the winner is in doubt
samples       drift and noise of a history
kernel, surrogate, belief   what adaptive believes of the times
"""

from collections.abc import Sequence

from dynamiccl.collect.grid import Trial
from dynamiccl.collect.strategies.adaptive import Adaptive
from dynamiccl.collect.strategies.exhaustive import Exhaustive
from dynamiccl.collect.strategies.random_share import RandomShare
from dynamiccl.collect.strategies.strategy import Strategy
from dynamiccl.collect.sweep import SweepFile

__all__ = ["Strategy", "make_strategy"]


def make_strategy(file: SweepFile, trials: Sequence[Trial]) -> Strategy:
    """The strategy named in a sweep file."""
    settings = file.strategy
    match settings.kind:
        case "exhaustive":
            return Exhaustive(file.name, trials, cycles=file.cycles, seed=settings.seed)
        case "random":
            return RandomShare(
                file.name, trials, cycles=file.cycles, share=settings.share, seed=settings.seed
            )
        case "adaptive":
            return Adaptive(
                file.name, trials, settings, max_measurements=file.budget.max_measurements
            )
