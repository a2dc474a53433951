"""A scenario: interference and noise around the calls of jobs, as checked TOML.

    [[link]]
    on = "inter"                 # intra | inter | host
    kind = "markov"              # markov | bursts | trace
    slowdowns = [1.0, 2.0, 4.0]
    dwell_us = [2e6, 5e5, 2e5]
    following = [[0.0, 0.7, 0.3], [0.6, 0.0, 0.4], [0.5, 0.5, 0.0]]

Processes on one link multiply. Times are those of the simulated jobs.
"""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from dynamiccl.errors import MissingPath, UnknownName, UserError
from dynamiccl.simulator.links import Bursts, Markov, Process, Trace
from dynamiccl.simulator.toml_table import Table, first_problem

_SUFFIX: Final = ".toml"
Where = Literal["intra", "inter", "host"]
_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(ge=0, le=1)]


class MarkovLink(Table):
    """Parameters of `links.Markov`."""

    on: Where
    kind: Literal["markov"]
    slowdowns: tuple[float, ...]
    dwell_us: tuple[float, ...]
    following: tuple[tuple[float, ...], ...]
    links: int = 1

    def make(self) -> Process:
        """Make the process."""
        return Markov(self.slowdowns, self.dwell_us, self.following, self.links)


class BurstsLink(Table):
    """Parameters of `links.Bursts`."""

    on: Where
    kind: Literal["bursts"]
    pause_us: float
    shortest_us: float
    tail: float
    share: tuple[float, float]

    def make(self) -> Process:
        """Make the process."""
        return Bursts(self.pause_us, self.shortest_us, self.tail, self.share)


class TraceLink(Table):
    """Parameters of `links.Trace`."""

    on: Where
    kind: Literal["trace"]
    shares: tuple[float, ...]
    interval_us: float

    def make(self) -> Process:
        """Make the process."""
        return Trace(self.shares, self.interval_us)


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
        return _read(held.read_text(encoding="utf-8"), name_or_path)
    path = Path(name_or_path)
    if not path.is_file():
        raise MissingPath("scenario", path, f"name one of {', '.join(shipped_scenarios())}")
    return _read(path.read_text(encoding="utf-8"), path.name)


def _read(text: str, where: str) -> Scenario:
    try:
        scenario = Scenario.model_validate(tomllib.loads(text))
        for link in scenario.link:
            link.make()
    except ValidationError as error:
        raise UserError(f"{where}: {first_problem(error)}") from error
    except ValueError as error:  # a TOML error is one, too
        raise UserError(f"{where}: {error}") from error
    return scenario
