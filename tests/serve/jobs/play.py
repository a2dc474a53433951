"""Runs a job of rank processes under the built plugin (`play_job`), and parses its report.

The work is done by `play_job` (serve/plugin/tests/job/), which behaves as NCCL does and checks at
every collective that all ranks would run the same.
"""

import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.serve.jobs.setting import clean_environment

#: Over this the launcher ends the job by force; the harness itself ends a little later.
DEADLINE_S: Final = 30


@dataclass(frozen=True, slots=True)
class Rank:
    """The results of one rank."""

    asked: int
    errors: list[str]
    violations: list[str]
    log: list[str]
    exit: int | None
    signal: int | None


@dataclass(frozen=True, slots=True)
class Communicator:
    """One communicator slot over all its generations, for one group of ranks."""

    slot: int
    ranks: list[int]
    calls: int
    acted: int
    switches: int
    generations: int
    generations_acted: int
    #: Call of its generation at which the plugin first acted on all ranks.
    first_acted: int | None
    last_acted: int | None


@dataclass(frozen=True, slots=True)
class Played:
    """The results of a job; `raw` has all of it."""

    calls: int
    #: Calls that the plugin decided on all ranks, and those that it decided on some only.
    acted: int
    acted_unevenly: int
    disagreements: int
    switches: int
    errors: int
    violations: int
    abnormal_exits: int
    hit_deadline: bool
    asked_longest_ms: float
    created_longest_ms: float
    communicators: list[Communicator]
    ranks: list[Rank]
    raw: dict[str, Any]

    @property
    def is_sound(self) -> bool:
        """Whether a real job would have run undisturbed."""
        return not (
            self.disagreements
            or self.acted_unevenly
            or self.errors
            or self.violations
            or self.abnormal_exits
            or self.hit_deadline
        )

    @property
    def log(self) -> str:
        """The lines of all ranks."""
        return "\n".join(line for rank in self.ranks for line in rank.log)

    def __str__(self) -> str:
        return json.dumps(self.raw, indent=1)


def play(
    play_job: Path,
    plugin: Path,
    *options: str,
    environment: Mapping[str, str] | None = None,
    **named: object,
) -> Played:
    """Run `play_job PLUGIN --name value ...`; `options` are whole arguments, such as `--at`.

    Only what `environment` says reaches the plugin: the tests' own settings do not.
    """
    arguments = [str(play_job), str(plugin), *options]
    settings = {"deadline": DEADLINE_S, **named}
    for name, value in settings.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(
        arguments,
        env=clean_environment() | dict(environment or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=float(str(settings["deadline"])) + 60,
    )
    ended = f"ended with {done.returncode}"
    assert done.returncode == 0, f"{done.stderr}\n{ended}: {' '.join(arguments)}"
    played = _read(done.stdout)
    # Sanitizers speak here; a rank's own death shows in the result as well.
    assert "Sanitizer" not in done.stderr, done.stderr
    return played


def assert_never_split(played: Played) -> None:
    """Check that all ranks made equal choices, and ended alike."""
    assert (played.disagreements, played.acted_unevenly, played.violations) == (0, 0, 0), played
    assert (played.abnormal_exits, played.hit_deadline) == (0, False), played


def at(call: int, what: str, *, rank: int | str = 0, comm: int = 0) -> tuple[str, str]:
    """An action before one call: `at(100, "sleep=2", rank=3)`."""
    return "--at", f"{call}:rank={rank}:comm={comm}:{what}"


def every(calls: int, what: str, *, rank: int | str = 0, comm: int = 0) -> tuple[str, str]:
    """An action before every `calls` calls."""
    return "--every", f"{calls}:rank={rank}:comm={comm}:{what}"


def on_rank(rank: int, settings: Mapping[str, str | None]) -> list[str]:
    """Environment variables of one rank only; None unsets one."""
    return [
        argument
        for name, value in settings.items()
        for argument in ("--env", f"{rank}:{name}" + ("" if value is None else f"={value}"))
    ]


def _read(text: str) -> Played:
    raw = json.loads(text)
    return Played(
        **{
            name: raw[name]
            for name in (
                "calls",
                "acted",
                "acted_unevenly",
                "disagreements",
                "switches",
                "errors",
                "violations",
                "abnormal_exits",
                "hit_deadline",
                "asked_longest_ms",
                "created_longest_ms",
            )
        },
        communicators=[_communicator(comm) for comm in raw["comms"]],
        ranks=list(_ranks(raw["ranks"])),
        raw=raw,
    )


def _communicator(raw: dict[str, Any]) -> Communicator:
    names = (
        "ranks",
        "calls",
        "acted",
        "switches",
        "generations",
        "generations_acted",
        "first_acted",
        "last_acted",
    )
    return Communicator(slot=raw["comm"], **{name: raw[name] for name in names})


def _ranks(raw: Iterable[dict[str, Any]]) -> Iterable[Rank]:
    for rank in raw:
        yield Rank(
            asked=rank["asked"],
            errors=rank["error_texts"],
            violations=rank["violation_texts"],
            log=rank["log"],
            exit=rank["exit"],
            signal=rank["signal"],
        )
