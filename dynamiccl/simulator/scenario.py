"""A scenario: interference and noise around the calls of jobs, as checked TOML.

    [[link]]
    on = "inter"                 # intra | inter | host
    kind = "markov"              # markov | bursts | trace
    slowdowns = [1.0, 2.0, 4.0]
    dwell_us = [2e6, 5e5, 2e5]
    following = [[0.0, 0.7, 0.3], [0.6, 0.0, 0.4], [0.5, 0.5, 0.0]]

A link's slowdown is a factor of the time that bytes take to move, 1 = it is free; processes on one
link multiply. Every process is kept for N jobs at once and advanced by the time that each of them
spent, so dwell times are times and not numbers of calls: a job that calls seldom finds the network
changed. Times are those of the simulated jobs.

Forms and not measurements: which strengths a scenario has, it says itself, with their origin.
"""

from importlib import resources
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from dynamiccl.errors import MissingPath, UnknownName
from dynamiccl.simulator.toml_table import Table, parse_toml

Float64Array = npt.NDArray[np.float64]
#: A link that others fill to this share leaves a twentieth; more would be an outage.
MAX_SHARE: Final = 0.95
_SUFFIX: Final = ".toml"
Where = Literal["intra", "inter", "host"]
_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Taken = Annotated[float, Field(ge=0, le=MAX_SHARE)]
_Left = Annotated[float, Field(ge=1 - MAX_SHARE, le=1)]


class Process(Protocol):
    """A slowdown factor that changes with time, for N jobs."""

    def advance(self, elapsed_us: Float64Array, random: np.random.Generator) -> Float64Array:
        """(N,) slowdowns after `elapsed_us` (N,) more; the array may be overwritten later."""


class MarkovLink(Table):
    """Congestion as a Markov-modulated process: levels that last a while and follow one another.

    A level is left with the probability 1 - exp(-elapsed / dwell). Of `links` independent links
    the slowest counts, as for a ring that runs over all of them. S states.
    """

    on: Where
    kind: Literal["markov"]
    #: (S,) factor in each state, and the mean time in it.
    slowdowns: tuple[Annotated[float, Field(ge=1)], ...]
    dwell_us: tuple[_Positive, ...]
    #: (S, S) which state comes next; the diagonal is 0.
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

    def make(self, num_jobs: int, random: np.random.Generator) -> "Markov":
        """Start the process, each job in a state of its stationary distribution."""
        return Markov(self, num_jobs, random)


class Markov:
    """The process of a `MarkovLink`."""

    def __init__(self, link: MarkovLink, num_jobs: int, random: np.random.Generator) -> None:
        self._slowdowns = np.array(link.slowdowns, dtype=np.float64)
        self._rate = 1.0 / np.array(link.dwell_us, dtype=np.float64)
        self._following = np.array(link.following, dtype=np.float64)
        self._cumulative = self._following.cumsum(axis=1)
        self._cumulative[:, -1] = 1.0
        shape = (num_jobs, link.links)
        self._state = random.choice(len(self._rate), size=shape, p=self.usual())

    def usual(self) -> Float64Array:
        """(S,) stationary probability of each state."""
        count = len(self._rate)
        flows = self._rate[:, None] * (self._following - np.eye(count))
        system = np.vstack([flows.T / self._rate.max(), np.ones(count)])
        target = np.append(np.zeros(count), 1.0)
        found = np.maximum(np.linalg.lstsq(system, target, rcond=None)[0], 0.0)
        shares: Float64Array = found / found.sum()
        return shares

    def advance(self, elapsed_us: Float64Array, random: np.random.Generator) -> Float64Array:
        """Change states at random."""
        stays = np.exp(-elapsed_us[:, None] * self._rate[self._state])
        job, link = np.nonzero(random.random(self._state.shape) > stays)
        if len(job):
            drawn = random.random((len(job), 1))
            cumulative = self._cumulative[self._state[job, link]]
            self._state[job, link] = (cumulative <= drawn).sum(axis=1)
        found: Float64Array = self._slowdowns[self._state].max(axis=1)
        return found


class BurstsLink(Table):
    """Cross traffic: somebody else's transfers, exponential pauses and heavy-tailed lengths.

    While one runs it takes a share of the link that is drawn for it, so that ours lasts
    1 / (1 - share) times as long. Lengths are Pareto's with exponent `tail`.
    """

    on: Where
    kind: Literal["bursts"]
    #: Mean pause, and shortest length.
    pause_us: _Positive
    shortest_us: _Positive
    tail: float = Field(gt=1)
    #: Least and largest.
    share: tuple[_Taken, _Taken]

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if self.share[0] > self.share[1]:
            raise ValueError(f"shares must be in order: {self.share}")
        return self

    def make(self, num_jobs: int, random: np.random.Generator) -> "Bursts":
        """Start the process, each job within a pause."""
        return Bursts(self, num_jobs, random)


class Bursts:
    """The process of a `BurstsLink`."""

    def __init__(self, link: BurstsLink, num_jobs: int, random: np.random.Generator) -> None:
        self._link = link
        self._left_us = random.exponential(link.pause_us, num_jobs)
        self._slowdown = np.ones(num_jobs)

    def advance(self, elapsed_us: Float64Array, random: np.random.Generator) -> Float64Array:
        """Alternate pauses and bursts."""
        self._left_us -= elapsed_us
        while (over := np.flatnonzero(self._left_us <= 0.0)).size:
            begins = self._slowdown[over] <= 1.0
            lengths = self._link.shortest_us * (1.0 + random.pareto(self._link.tail, len(over)))
            pauses = random.exponential(self._link.pause_us, len(over))
            shares = random.uniform(*self._link.share, len(over))
            self._left_us[over] += np.where(begins, lengths, pauses)
            self._slowdown[over] = np.where(begins, 1.0 / (1.0 - shares), 1.0)
        return self._slowdown


class TraceLink(Table):
    """A recorded sequence of available bandwidth, repeated.

    Each job begins at a place of its own, as Pensieve does with its network traces (Mao et al.,
    SIGCOMM 2017, section 5.1).
    """

    on: Where
    kind: Literal["trace"]
    #: Of the bandwidth, what is ours, and how long each lasts.
    shares: tuple[_Left, ...] = Field(min_length=1)
    interval_us: _Positive

    def make(self, num_jobs: int, random: np.random.Generator) -> "Trace":
        """Start the process, each job at a random place."""
        return Trace(self, num_jobs, random)


class Trace:
    """The process of a `TraceLink`."""

    def __init__(self, link: TraceLink, num_jobs: int, random: np.random.Generator) -> None:
        self._slowdowns = 1.0 / np.array(link.shares, dtype=np.float64)
        self._interval_us = link.interval_us
        self._clock_us = random.random(num_jobs) * self._interval_us * len(self._slowdowns)

    def advance(self, elapsed_us: Float64Array, random: np.random.Generator) -> Float64Array:  # noqa: ARG002
        """The slowdowns recorded at the new times."""
        self._clock_us += elapsed_us
        place = (self._clock_us / self._interval_us).astype(np.int64) % len(self._slowdowns)
        found: Float64Array = self._slowdowns[place]
        return found


class Jitter(Table):
    """Noise of the log of a call's time: independent per call, and drift."""

    #: Robust standard deviation (1.4826 MAD); the shape is Student's t with 3 degrees of freedom.
    sigma: float = Field(default=0.03, ge=0, le=1)
    #: Standard deviation of an autoregressive part, and how long it remembers.
    drift_sigma: float = Field(default=0.01, ge=0, le=1)
    drift_calls: _Positive = 200.0


class Stragglers(Table):
    """Late ranks: the others wait for them, which is skew and no part of a call's time."""

    probability: _Share = 0.05
    #: Median and log-normal width of a late rank's delay.
    median_us: _Positive = 50.0
    sigma: float = Field(default=1.0, ge=0, le=5)


class VersionStep(Table):
    """An NCCL or driver update: from a moment on algorithms take other times."""

    #: When, in time of the job.
    after_us: _Positive
    #: Algorithm -> factor of its time.
    factors: dict[str, _Positive]


class Scenario(Table):
    """Everything around the calls of jobs."""

    #: One line: what it stands for, and where its strengths come from.
    meaning: str
    link: tuple[Annotated[MarkovLink | BurstsLink | TraceLink, Field(discriminator="kind")], ...]
    jitter: Jitter = Jitter()
    stragglers: Stragglers | None = None
    version_step: tuple[VersionStep, ...] = ()
    #: What a call takes longer when its key ran another config before.
    switch_us: float = Field(default=10.0, ge=0)
    #: What the first call of an algorithm takes longer: NCCL connects it then (2.22 on; "seconds on
    #: a loaded host" was seen, so this is not pessimistic).
    first_use_us: float = Field(default=20_000.0, ge=0)


def shipped_scenarios() -> list[str]:
    """Names of the built-in scenarios."""
    folder = resources.files("dynamiccl.simulator") / "scenarios"
    return sorted(
        p.name.removesuffix(_SUFFIX) for p in folder.iterdir() if p.name.endswith(_SUFFIX)
    )


def find_scenario(name_or_path: str) -> Scenario:
    """A built-in scenario by name, or one from a file.

    Raises UnknownName, MissingPath for a path, and UserError for an invalid scenario.
    """
    if not name_or_path.endswith(_SUFFIX):
        if name_or_path not in shipped_scenarios():
            raise UnknownName("scenario", name_or_path, [*shipped_scenarios(), "FILE.toml"])
        name_or_path += _SUFFIX
        held = resources.files("dynamiccl.simulator") / "scenarios" / name_or_path
        return parse_toml(Scenario, held.read_text(encoding="utf-8"), where=name_or_path)
    path = Path(name_or_path)
    if not path.is_file():
        raise MissingPath("scenario", path, f"name one of {', '.join(shipped_scenarios())}")
    return parse_toml(Scenario, path.read_text(encoding="utf-8"), where=path.name)
