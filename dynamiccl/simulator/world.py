"""Simulated jobs: a system, a workload's calls, and a scenario around them.

The clock of the surroundings runs as under NCCL's own choices in quiet: congestion comes at the
same calls whatever is chosen, so that choices can be compared call by call.

N jobs, L calls of an iteration, K task keys, A configs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import ABSTAIN, NUM_ALGORITHMS, Algorithm, Config
from dynamiccl.simulator.scenario import Float64Array, Jitter, Process, Scenario, Stragglers
from dynamiccl.simulator.system import Call
from dynamiccl.simulator.systems import System
from dynamiccl.simulator.workloads import Workload

Int64Array = npt.NDArray[np.int64]
_ABSTAIN_ACTION: Final = 0
#: Median of |t| with 3 degrees of freedom (quantile 0.75) over the normal's: MAD to sigma.
T3_ROBUST_SIGMA: Final = 0.7648923284 / 0.6744897502
#: Bound of the logarithm, as t's tail has no third moment.
MAX_SIGMAS: Final = 30.0


class Noise:
    """Noise of N jobs: heavy tails, slow drift, and late ranks.

    Of published cells half spread by under 1.5 %, one in ten by a multiple: Student's t with 3
    degrees of freedom, cut where a call would look like another size.
    """

    def __init__(self, jitter: Jitter, stragglers: Stragglers | None, num_jobs: int) -> None:
        self._jitter, self._stragglers = jitter, stragglers
        self._drift = np.zeros(num_jobs)
        self._keep = math.exp(-1.0 / jitter.drift_calls)

    def log_factors(self, random: np.random.Generator) -> Float64Array:
        """(N,) log of measured over true time of the next calls."""
        jitter, count = self._jitter, len(self._drift)
        own = random.standard_t(3, count) / T3_ROBUST_SIGMA
        np.clip(own, -MAX_SIGMAS, MAX_SIGMAS, out=own)
        own *= jitter.sigma
        if jitter.drift_sigma:
            self._drift *= self._keep
            innovation = jitter.drift_sigma * math.sqrt(1.0 - self._keep**2)
            self._drift += innovation * random.standard_normal(count)
            own += self._drift
        return own

    def skew_us(self, random: np.random.Generator) -> Float64Array:
        """(N,) us that the earliest rank waits for the latest."""
        late, skew = self._stragglers, np.zeros(len(self._drift))
        if late is not None:
            comes_late = np.flatnonzero(random.random(len(skew)) < late.probability)
            skew[comes_late] = late.median_us * random.lognormal(0.0, late.sigma, len(comes_late))
        return skew


@dataclass(frozen=True, slots=True)
class CallResults:
    """The results of N calls."""

    key: Int64Array  # (N,)
    action: Int64Array  # (N,)
    #: With switches and surroundings, without noise.
    true_us: Float64Array
    measured_us: Float64Array
    skew_us: Float64Array
    #: Whether another config ran than in the call before of its key.
    changed: npt.NDArray[np.bool_]
    #: From the compute before the call until call and compute beside it are done.
    lasted_us: Float64Array


class World:
    """Times of every config for every task key, in parts, and the sequence of calls."""

    def __init__(
        self,
        system: System,
        workload: Workload,
        configs: Sequence[Config],
        scenario: Scenario,
    ) -> None:
        """Raises ValueError unless `configs[0]` is ABSTAIN, KeyError as the system's `parts`."""
        if not configs or configs[0] != ABSTAIN:
            raise ValueError("the first config must be ABSTAIN")
        self.system, self.workload, self.scenario = system, workload, scenario
        self.configs = tuple(configs)
        calls = [Call(c.group, c.collective, c.size_bytes) for c in workload.calls]
        self.keys = tuple(dict.fromkeys(calls))
        number = {call: index for index, call in enumerate(self.keys)}
        self.order: Int64Array = np.array([number[call] for call in calls])  # (L,)
        self.before_us = np.array([call.before_us for call in workload.calls])
        self.beside_us = np.array([call.beside_us for call in workload.calls])
        shape = (len(self.keys), len(self.configs))
        self.fixed_us, self.intra_us, self.inter_us = np.full((3, *shape), np.nan)
        self.host_share = np.zeros(shape)
        #: (K, A) what runs; -1 and 0 where NCCL lacks the config.
        self.algorithm, self.protocol = np.full((2, *shape), -1, dtype=np.int8)
        self.num_channels = np.zeros(shape, dtype=np.int16)
        #: Speed of the compute beside a call over its speed alone, and the call's slowdown.
        self.compute_speed = np.ones(shape)
        self.contention = system.contention
        self.compute_slowdown = self.contention.surroundings(1.0).compute
        for key, call in enumerate(self.keys):
            self._fill(key, call)
        #: (K, A) one number for what runs: equal numbers are no change of config.
        wide = self.algorithm.astype(np.int64) * 64 + self.protocol
        self.identity = wide * 1024 + self.num_channels
        #: (K, A) the first action that runs the same: their calls are one stream of times.
        self.stream: Int64Array = (self.identity[:, :, None] == self.identity[:, None, :]).argmax(2)

    def _fill(self, key: int, call: Call) -> None:
        for action, config in enumerate(self.configs):
            try:
                parts = self.system.parts(call, config)
            except KeyError:
                if config == ABSTAIN:
                    raise
                continue
            self.fixed_us[key, action] = parts.fixed_us
            self.intra_us[key, action] = parts.intra_us
            self.inter_us[key, action] = parts.inter_us
            self.host_share[key, action] = parts.host_share
            self.compute_speed[key, action] = self.contention.compute_speed(parts, call.size_bytes)
            self.algorithm[key, action] = parts.algorithm
            self.protocol[key, action] = parts.protocol
            self.num_channels[key, action] = parts.num_channels

    @cached_property
    def mask(self) -> npt.NDArray[np.bool_]:
        """(K, A) configs that NCCL has."""
        return self.algorithm >= 0

    @cached_property
    def quiet_us(self) -> Float64Array:
        """(K, A) us without interference; NaN where NCCL lacks the config."""
        found: Float64Array = self.fixed_us + np.maximum(self.intra_us, self.inter_us)
        return found

    @cached_property
    def nominal_us(self) -> Float64Array:
        """(L,) us from each call to the next, with NCCL's own choices and no interference."""
        calls_us = self.quiet_us[self.order, _ABSTAIN_ACTION]
        found: Float64Array = self.before_us + np.maximum(calls_us, self.beside_us)
        return found

    @cached_property
    def updates(self) -> list[tuple[float, Float64Array]]:
        """Each update's us and factors by algorithm; the last is for configs that NCCL lacks."""
        found = []
        for step in self.scenario.version_step:
            factors = np.ones(NUM_ALGORITHMS + 1)
            for name, factor in step.factors.items():
                factors[Algorithm.parse(name)] = factor
            found.append((step.after_us, factors))
        return found

    def times_us(
        self, key: Int64Array, intra: Float64Array, inter: Float64Array, host: Float64Array
    ) -> Float64Array:
        """(N, A) true us of every config under slowdowns (N,), for an oracle."""
        moving = np.maximum(
            self.intra_us[key] * intra[:, None], self.inter_us[key] * inter[:, None]
        )
        host_factor = 1.0 + self.host_share[key] * (host[:, None] - 1.0)
        found: Float64Array = (self.fixed_us[key] + moving) * host_factor
        return found

    def jobs(self, num_jobs: int, seed: int) -> "Jobs":
        """N jobs, each starting at a random place of the workload."""
        return Jobs(self, num_jobs, seed)


class Jobs:
    """N jobs that run one call each per step; equal seeds give equal interference and noise."""

    def __init__(self, world: World, num_jobs: int, seed: int) -> None:
        self.world = world
        scenario = world.scenario
        draw_start, self._draw_noise, self._draw_skew, *draw_links = (
            np.random.default_rng(each)
            for each in np.random.SeedSequence(seed).spawn(3 + len(scenario.link))
        )
        self._links: list[tuple[str, Process]] = []
        for link, draw in zip(scenario.link, draw_links, strict=True):
            self._links.append((link.on, link.play(num_jobs, draw)))
            next(self._links[-1][1])
        self._noise = Noise(scenario.jitter, scenario.stragglers, num_jobs)
        self._place: Int64Array = draw_start.integers(len(world.order), size=num_jobs)
        self._job = np.arange(num_jobs)
        self._clock_us, self._elapsed_us = np.zeros((2, num_jobs))
        self._used = np.zeros((num_jobs, NUM_ALGORITHMS), dtype=np.bool_)
        self._last: Int64Array = np.full((num_jobs, len(world.keys)), -1, dtype=np.int64)
        self._flat = [
            np.ascontiguousarray(part).reshape(-1)
            for part in (world.fixed_us, world.intra_us, world.inter_us, world.host_share)
        ]
        self._ones = np.ones(num_jobs)
        self._move()

    def __len__(self) -> int:
        return len(self._job)

    def _move(self) -> None:
        world = self.world
        self.place = self._place
        #: (N,) task keys of the next calls.
        self.key: Int64Array = world.order[self._place]
        found = {"intra": self._ones, "inter": self._ones, "host": self._ones}
        for on, process in self._links:
            found[on] = found[on] * process.send(self._elapsed_us)
        self.intra, self.inter, self.host = found["intra"], found["inter"], found["host"]
        self._beside_us = world.beside_us[self._place]
        #: (N,) what the compute beside the next calls does to them.
        self._felt = np.where(self._beside_us > 0.0, world.compute_slowdown, 1.0)
        self._elapsed_us = world.nominal_us[self._place]
        self._clock_us = self._clock_us + self._elapsed_us

    def step(self, action: Int64Array) -> CallResults:
        """Run the next call of every job under `action` (N,), and advance."""
        world, key = self.world, self.key
        cell = key * len(world.configs) + action
        fixed_us, intra_us, inter_us, host_share = (part.take(cell) for part in self._flat)
        true_us = np.maximum(intra_us * self.intra, inter_us * self.inter)
        true_us += fixed_us
        true_us *= (1.0 + host_share * (self.host - 1.0)) * self._felt
        algorithm = world.algorithm.take(cell)
        for after_us, factors in world.updates:
            true_us *= np.where(self._clock_us > after_us, factors[algorithm], 1.0)
        identity = world.identity.take(cell)
        last = self._last[self._job, key]
        changed = (identity != last) & (last >= 0)
        self._last[self._job, key] = identity
        true_us += world.scenario.switch_us * changed
        first = ~self._used[self._job, algorithm]
        if first.any():
            true_us += world.scenario.first_use_us * first
            self._used[self._job, algorithm] = True
        lasted_us = self._lasted_us(cell, true_us)
        noise = np.exp(self._noise.log_factors(self._draw_noise))
        skew_us = self._noise.skew_us(self._draw_skew)
        self._place = (self._place + 1) % len(world.order)
        self._move()
        return CallResults(key, action, true_us, true_us * noise, skew_us, changed, lasted_us)

    def _lasted_us(self, cell: Int64Array, call_us: Float64Array) -> Float64Array:
        """(N,) from the compute before the calls to the end of all (system.py)."""
        world, beside_us = self.world, self._beside_us
        before_us = world.before_us[self._place]
        if not beside_us.any():
            return before_us + call_us
        waiting_us = np.minimum(world.contention.held_us, beside_us / 4)
        both_us = waiting_us + call_us
        speed = world.compute_speed.take(cell)
        together_us = beside_us / speed
        left = np.minimum(1.0, (both_us - together_us) / call_us)
        found = np.where(
            together_us >= both_us,
            both_us + (beside_us - both_us * speed),
            together_us + left * call_us / self._felt,
        )
        lasted: Float64Array = before_us + np.where(beside_us > 0.0, found, call_us)
        return lasted

    def oracle_us(self) -> Float64Array:
        """(N, A) true us of the next calls under every config, without switching costs."""
        world = self.world
        times = world.times_us(self.key, self.intra, self.inter, self.host)
        times *= self._felt[:, None]
        for after_us, factors in world.updates:
            later = self._clock_us[:, None] > after_us
            times *= np.where(later, factors[world.algorithm[self.key]], 1.0)
        return times
