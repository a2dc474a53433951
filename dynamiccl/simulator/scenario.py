"""A scenario: interference and noise around the calls of jobs, as checked TOML.

    [[link]]
    on = "inter"                 # intra | inter | host
    kind = "markov"              # markov | bursts | trace
    slowdowns = [1.0, 2.0, 4.0]
    dwell_us = [2e6, 5e5, 2e5]
    following = [[0.0, 0.7, 0.3], [0.6, 0.0, 0.4], [0.5, 0.5, 0.0]]

A link's slowdown is a factor of the time that bytes take to move; processes on one link multiply.
Sent the us (N,) that each of N jobs spent, a link yields their slowdowns (N,), which it may
overwrite later. Dwell times are the jobs' time, not calls: the network changes between rare calls.
"""

from collections.abc import Generator
from importlib import resources
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from dynamiccl.errors import MissingPath, UnknownName
from dynamiccl.files import toml_names
from dynamiccl.simulator.toml_table import Table, parse_toml

Float64Array = npt.NDArray[np.float64]
Process = Generator[Float64Array, Float64Array]
#: Leaves a twentieth of a link; more would be an outage.
MAX_SHARE: Final = 0.95
_SUFFIX: Final = ".toml"
_SHIPPED: Final = resources.files("dynamiccl.simulator") / "scenarios"
Where = Literal["intra", "inter", "host"]
_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Taken = Annotated[float, Field(ge=0, le=MAX_SHARE)]
_Left = Annotated[float, Field(ge=1 - MAX_SHARE, le=1)]


class MarkovLink(Table):
    """Congestion as a Markov process of S states; the slowest of `links` counts, as for a ring."""

    on: Where
    kind: Literal["markov"]
    #: (S,) factor and mean time.
    slowdowns: tuple[Annotated[float, Field(ge=1)], ...]
    dwell_us: tuple[_Positive, ...]
    #: (S, S) probability of the next state; the diagonal is 0.
    following: tuple[tuple[float, ...], ...]
    links: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _is_a_process(self) -> Self:
        count = len(self.slowdowns)
        if {count} != {len(each) for each in (self.dwell_us, self.following, *self.following)}:
            raise ValueError(f"{count} slowdowns need {count} dwell times and {count} x {count}")
        matrix = np.array(self.following)
        if not np.allclose(matrix.sum(axis=1), 1.0) or np.diag(matrix).any():
            raise ValueError("each row of `following` must sum to 1 and leave its own state")
        return self

    def usual(self) -> Float64Array:
        """(S,) stationary probability of each state."""
        count, rate = len(self.dwell_us), 1.0 / np.array(self.dwell_us)
        flows = rate[:, None] * (np.array(self.following) - np.eye(count))
        system = np.vstack([flows.T / rate.max(), np.ones(count)])
        target = np.append(np.zeros(count), 1.0)
        found = np.maximum(np.linalg.lstsq(system, target, rcond=None)[0], 0.0)
        shares: Float64Array = found / found.sum()
        return shares

    def play(self, num_jobs: int, random: np.random.Generator) -> Process:
        """Each job begins in a state of the stationary distribution."""
        slowdowns, rate = np.array(self.slowdowns), 1.0 / np.array(self.dwell_us)
        cumulative = np.array(self.following, dtype=np.float64).cumsum(axis=1)
        cumulative[:, -1] = 1.0
        state = random.choice(len(rate), size=(num_jobs, self.links), p=self.usual())
        while True:
            elapsed_us = yield slowdowns[state].max(axis=1)
            stays = np.exp(-elapsed_us[:, None] * rate[state])
            job, link = np.nonzero(random.random(state.shape) > stays)
            if len(job):
                drawn = random.random((len(job), 1))
                state[job, link] = (cumulative[state[job, link]] <= drawn).sum(axis=1)


class BurstsLink(Table):
    """Cross traffic: exponential pauses, Pareto lengths; slows ours by 1 / (1 - share)."""

    on: Where
    kind: Literal["bursts"]
    pause_us: _Positive
    shortest_us: _Positive
    tail: float = Field(gt=1)
    share: tuple[_Taken, _Taken]

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if self.share[0] > self.share[1]:
            raise ValueError(f"shares must be in order: {self.share}")
        return self

    def play(self, num_jobs: int, random: np.random.Generator) -> Process:
        """Each job begins within a pause."""
        left_us, slowdown = random.exponential(self.pause_us, num_jobs), np.ones(num_jobs)
        while True:
            left_us -= yield slowdown
            while (over := np.flatnonzero(left_us <= 0.0)).size:
                begins = slowdown[over] <= 1.0
                lengths = self.shortest_us * (1.0 + random.pareto(self.tail, len(over)))
                pauses = random.exponential(self.pause_us, len(over))
                shares = random.uniform(*self.share, len(over))
                left_us[over] += np.where(begins, lengths, pauses)
                slowdown[over] = np.where(begins, 1.0 / (1.0 - shares), 1.0)


class TraceLink(Table):
    """A recorded sequence of bandwidth, repeated (as Pensieve's, SIGCOMM 2017, section 5.1)."""

    on: Where
    kind: Literal["trace"]
    #: Of the bandwidth, what is ours.
    shares: tuple[_Left, ...] = Field(min_length=1)
    interval_us: _Positive

    def play(self, num_jobs: int, random: np.random.Generator) -> Process:
        """Each job begins at a random place."""
        slowdowns = 1.0 / np.array(self.shares)
        clock_us = random.random(num_jobs) * self.interval_us * len(slowdowns)
        while True:
            place = (clock_us / self.interval_us).astype(np.int64) % len(slowdowns)
            clock_us += yield slowdowns[place]


class Jitter(Table):
    """Noise of the log of a call's time: independent per call, and drift."""

    #: Robust standard deviation (1.4826 MAD) of Student's t with 3 degrees of freedom.
    sigma: float = Field(default=0.03, ge=0, le=1)
    #: Standard deviation of an autoregressive part, and its memory.
    drift_sigma: float = Field(default=0.01, ge=0, le=1)
    drift_calls: _Positive = 200.0


class Stragglers(Table):
    """Late ranks: the others wait, which is skew and no part of a call's time."""

    probability: _Share = 0.05
    #: Of the delay, log-normal.
    median_us: _Positive = 50.0
    sigma: float = Field(default=1.0, ge=0, le=5)


class VersionStep(Table):
    """An NCCL or driver update, which changes the times of algorithms."""

    after_us: _Positive
    #: By algorithm.
    factors: dict[str, _Positive]


class Scenario(Table):
    """Everything around the calls of jobs."""

    #: What it stands for, and where its strengths come from.
    meaning: str
    link: tuple[Annotated[MarkovLink | BurstsLink | TraceLink, Field(discriminator="kind")], ...]
    jitter: Jitter = Jitter()
    stragglers: Stragglers | None = None
    version_step: tuple[VersionStep, ...] = ()
    #: Added where the key ran another config before.
    switch_us: float = Field(default=10.0, ge=0)
    #: Added to an algorithm's first call, when NCCL connects it (2.22 on; seconds were seen).
    first_use_us: float = Field(default=20_000.0, ge=0)


def shipped_scenarios() -> list[str]:
    """Names of the built-in scenarios."""
    return toml_names(_SHIPPED)


def find_scenario(name_or_path: str) -> Scenario:
    """A built-in scenario, or one from a file. Raises UnknownName, MissingPath and UserError."""
    path = Path(name_or_path)
    if path.suffix != _SUFFIX:
        if name_or_path not in shipped_scenarios():
            raise UnknownName("scenario", name_or_path, [*shipped_scenarios(), "FILE.toml"])
        text = (_SHIPPED / f"{name_or_path}{_SUFFIX}").read_bytes()
        return parse_toml(Scenario, text, where=f"{name_or_path}{_SUFFIX}")
    if not path.is_file():
        raise MissingPath("scenario", path, f"name one of {', '.join(shipped_scenarios())}")
    return parse_toml(Scenario, path.read_bytes(), where=path.name)
