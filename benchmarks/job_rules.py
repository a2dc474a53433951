"""Rules that choose a config for each call of a job, from what each of them may measure.

What is measured scatters as the simulator's own calls do (`world.Noise`, robust sigma 2 %). All
rules but two read one sweep: three repeats of every config *alone*. AutoCCL's search measures the
job's calls instead, and a search like Lagom's (arXiv 2602.20656; its code was not published) the
time that a call and the compute beside it take together: here it is AutoCCL's search, told that
time. Both tune all calls of the job at once, and the iterations that they spend are counted.

K calls (each one task), A configs, of which the first is NCCL's own choice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.objective import fewest_within, sure_change_us
from dynamiccl.drawn_worlds import Floats, Ints
from dynamiccl.nccl import Algorithm, Config, Protocol
from dynamiccl.serve.search.autoccl import AutoCcl, Choice, Key, SearchSpace
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.world import Noise, World

REPEATS: Final = 3
#: Noise alone: a rule is judged by what it settles on, not by what changes cost.
QUIET: Final = find_scenario("quiet").model_copy(update={"switch_us": 0.0, "first_use_us": 0.0})
#: Draws by which ours knows how sure it is, and the spread of a median of three in them: 0.67 of a
#: repeat's (normal order statistics).
DRAWS: Final = 64
SPREAD: Final = 0.67 * QUIET.jitter.sigma
#: How far off rows and trace are for each call, standard deviations of logs (ours, chosen):
#: the compute of the rows is not the job's and loses another share, and the compute beside a call
#: does not take as long as in the trace in every iteration. Ours draws both.
OTHER_COMPUTE, OTHER_ITERATION = 0.3, 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """One iteration of a job, with the truth."""

    world: World
    #: (K,) how often an iteration makes each call, and compute before it.
    counts: Ints
    #: (K, A) configs that may be chosen: of those that come to the same the first.
    allowed: npt.NDArray[np.bool_]
    #: (K, A) from the start of a call, or of its wait for others, to the end of it and of compute.
    lasted_us: Floats
    #: (K,) what a trace of NCCL's own choice tells: the kernel, and the compute beside it.
    kernel_us: Floats
    compute_us: Floats

    def step_us(self, actions: Ints) -> float:
        """The time of an iteration."""
        lasted = np.take_along_axis(self.lasted_us, actions[:, None], axis=1)[:, 0]
        return float(((self.world.before_us + lasted) * self.counts).sum())

    @property
    def hidden(self) -> npt.NDArray[np.bool_]:
        """(K,) calls with compute beside them."""
        return self.world.beside_us > 0.0


class Measured:
    """What the rules may know of a job: a sweep, rows of compute beside calls, a trace, itself."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job = job
        self._random = np.random.default_rng(seed)
        #: (K, A) median us of a call alone; NaN where a config may not be chosen.
        self.times_us = np.where(job.allowed, job.world.quiet_us, np.nan)
        self.times_us *= self._scatter(self.times_us.shape)

    def _scatter(self, shape: tuple[int, ...]) -> Floats:
        """Medians of the repeats over the truth."""
        noise = Noise(QUIET.jitter, None, int(np.prod(shape)))
        draws = [np.exp(noise.log_factors(self._random)) for _ in range(REPEATS)]
        found: Floats = np.median(draws, axis=0).reshape(shape)
        return found

    def _drawn(self, measured: Floats) -> Floats:
        """(D, ...) what the truth of measured values may be."""
        normal = self._random.standard_normal((DRAWS, *measured.shape))
        found: Floats = measured * np.exp(SPREAD * normal)
        return found

    def beside(self) -> tuple[Floats, Floats]:
        """(D, K, A) draws of times beside compute and of the share of speed that compute loses.

        From rows that measure both sides: one a call and number of channels, of the config that is
        fastest alone with it, with the rate of compute alone and beside, and the kernel's time.
        Calls last longer beside compute than alone by one factor, that of the spreads of both
        times, whatever they wait for each other. With more channels compute never loses less.
        """
        world, times_us = self.job.world, self._drawn(self.times_us)
        loss = np.zeros(times_us.shape)
        waits_us = np.minimum(world.contention.held_us, world.beside_us / 4.0)
        for key in np.flatnonzero(self.job.hidden):
            channels = world.num_channels[key]
            counts, places = np.unique(channels, return_inverse=True)
            counted = np.where(channels == counts[:, None], self.times_us[key], np.nan)
            rows = np.nanargmin(counted[(known := ~np.isnan(counted).all(axis=1))], axis=1)
            speed = world.compute_speed[key, rows]
            rates = speed * self._scatter(rows.shape) / self._scatter(rows.shape)
            lost = 1.0 - self._drawn(rates)
            above = np.maximum.accumulate(lost, axis=1)
            below = np.minimum.accumulate(lost[:, ::-1], axis=1)[:, ::-1]
            # How far off the rows are, and in each draw how far off they may be.
            off = np.exp(OTHER_COMPUTE * self._random.standard_normal((1 + DRAWS, 1)))
            rising = np.zeros((DRAWS, len(counts)))
            rising[:, known] = 0.5 * (above + below) * off[0] * off[1:]
            loss[:, key] = rising[:, places].clip(0.0, 0.9)
            kernel_us = waits_us[key] + world.quiet_us[key, rows] * world.compute_slowdown
            kernel_us = self._drawn(kernel_us * self._scatter(rows.shape))
            longer = kernel_us.std(axis=1) / times_us[:, key, rows].std(axis=1).clip(1e-9)
            times_us[:, key] *= longer.clip(1.0, 2.0)[:, None]
        return times_us, loss

    def trace(self) -> tuple[Floats, Floats]:
        """(K,) time of the kernel, and (D, K) draws of the compute beside it."""
        kernel_us = self.job.kernel_us * self._scatter(self.job.kernel_us.shape)
        normal = self._random.standard_normal((1 + DRAWS, len(kernel_us)))
        told_us = self.job.compute_us * np.exp(OTHER_ITERATION * normal[0])
        # Half as wide again: a call that outlasts its compute after all costs much at once.
        return kernel_us, told_us * np.exp(1.5 * OTHER_ITERATION * normal[1:])

    def search(self, true_us: Floats, repeats: int) -> tuple[Ints, int]:
        """(K,) what AutoCCL's search finds by times (K, A), and the iterations that it spends."""
        keys = range(len(true_us))
        actions, spaces = zip(*(self._space(key) for key in keys), strict=True)
        by_key: Mapping[Key, SearchSpace] = dict(zip(keys, spaces, strict=True))
        search = AutoCcl(by_key.__getitem__, repeats=repeats)
        noise, iterations = Noise(QUIET.jitter, None, len(keys)), 0
        while not iterations or not all(search.is_over(key) for key in keys):
            scatter = np.exp(noise.log_factors(self._random))
            for key in keys:
                ran = actions[key][search.ask(key)]
                search.tell(key, float(true_us[key, ran] * scatter[key]))
            iterations += 1
        return np.array([actions[key][search.best(key)] for key in keys]), iterations

    def _space(self, key: int) -> tuple[Ints, SearchSpace]:
        """The actions of a call, and a search space of what they come to."""
        world, actions = self.job.world, np.flatnonzero(self.job.allowed[key])
        parts = (world.algorithm, world.protocol, world.num_channels)
        ran = [
            Choice(Config(Algorithm(a), Protocol(p), n))
            for a, p, n in zip(*(part[key, actions].tolist() for part in parts), strict=True)
        ]
        # The first is NCCL's own choice: the same config by another name is left out.
        return actions, SearchSpace([Choice(), *ran[1:]], default_runs=ran[0])


def within(slack: float) -> Callable[[Measured], Ints]:
    """The fewest channels within a slack of the fastest, on hidden calls only."""

    def rule(measured: Measured) -> Ints:
        job = measured.job
        at_most = np.where(job.hidden, slack, 0.0)[:, None]
        return fewest_within(measured.times_us, job.world.num_channels, at_most)

    return rule


def by_step(measured: Measured) -> Ints:
    """Ours: what surely shortens the step most; a time is surely one spread of its draws more."""
    times_us, loss = measured.beside()
    kernel_us, compute_us = measured.trace()
    logs = np.log(times_us)
    sure_us = np.exp(logs.mean(axis=0) + logs.std(axis=0))
    change = sure_change_us(sure_us, loss.mean(axis=0), kernel_us, compute_us.mean(axis=0))
    chosen: Ints = np.where(np.isnan(change), np.inf, change).argmin(axis=1)
    return chosen


#: Rules that spend none of the job's iterations.
FREE: Final[Mapping[str, Callable[[Measured], Ints]]] = {
    "nccl": lambda measured: np.zeros(len(measured.times_us), dtype=np.int64),
    "call": within(0.0),
    **{f"slack_{percent}": within(percent / 100.0) for percent in (1, 5, 10)},
    "job": by_step,
    "ceiling": lambda measured: np.where(
        measured.job.allowed, measured.job.lasted_us, np.inf
    ).argmin(axis=1),
}


def choices(measured: Measured) -> dict[str, tuple[Ints, int]]:
    """By rule: (K,) the actions, and the iterations of the job that it took to find them."""
    job = measured.job
    found = {name: (rule(measured), 0) for name, rule in FREE.items()}
    found["autoccl"] = measured.search(job.world.quiet_us, REPEATS)
    found["lagom"] = measured.search(job.lasted_us, REPEATS)
    found["lagom_12"] = measured.search(job.lasted_us, 4 * REPEATS)
    return found
