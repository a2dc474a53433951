#!/usr/bin/env python3
"""Plays a whole job against a tuner and profiler plugin, as NCCL would, without NCCL and GPUs.

    play_job PLUGIN.so [--NAME VALUE]...

Each rank is a process of `play_rank` (serve/plugin/tests/job, whose options.h has the names), which
keeps what it would run at every collective: where all would not run the same algorithm, protocol
and channels, a real job hangs. Whatever the ranks do, the deadline comes. As a program, which the
build copies to its directory, it prints the results as JSON.

Options of its own: --deadline SECONDS, --env RANK:NAME=VALUE (NAME alone: unset).
"""

import contextlib
import json
import mmap
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

#: As the rank of an action.
ALL: Final = -1
MAX_RANKS: Final = 16
# The layout of board.h.
RANK: Final = np.dtype(
    [(name, "u8") for name in ("asked", "asked_longest_ns", "created_longest_ns")]
    + [(name, "i4") for name in ("kills_itself", "dead")]
)
LANE: Final = np.dtype([(name, "i4") for name in ("issued", "stage", "end", "members")])
ANSWER: Final = ("algorithm", "protocol", "num_channels")
COMPARED: Final = ("generation", "call", "collective", "size_bytes", *ANSWER)
RECORD: Final = np.dtype(
    [(name, "u8") for name in ("size_bytes", "question")]
    + [(name, "i4") for name in ("collective", *ANSWER, "acted", "replayed", "generation", "call")]
)
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Rank:
    """The results of one rank; `log` has what the plugin said."""

    asked: int
    errors: list[str]
    violations: list[str]
    log: list[str]
    #: Of its process, or minus the signal that ended it.
    exit: int


@dataclass(frozen=True, slots=True)
class Communicator:
    """One communicator slot over all its generations, for one group of ranks."""

    slot: int
    ranks: list[int]
    calls: int
    #: Calls that the plugin decided on all ranks, and those that it decided on some only.
    acted: int
    acted_unevenly: int
    disagreements: int
    #: Where a question gets another answer than it got since the latest switch.
    switches: int
    generations: int
    generations_acted: int
    #: Call of its generation at which the plugin first acted on all ranks.
    first_acted: int | None


@dataclass(frozen=True, slots=True)
class Played:
    """The results of a job."""

    calls: int
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
    #: The ranks' records of that call.
    first_disagreement: list[dict[str, int]]
    communicators: list[Communicator]
    ranks: list[Rank]

    @property
    def is_alike(self) -> bool:
        """Whether all ranks made equal choices, and ended alike."""
        wrong = (self.disagreements, self.acted_unevenly, self.violations, self.abnormal_exits)
        return not any(wrong) and not self.hit_deadline

    @property
    def is_sound(self) -> bool:
        """Whether a real job would have run undisturbed."""
        return self.is_alike and self.errors == 0

    @property
    def log(self) -> str:
        """The lines of all ranks."""
        return "\n".join(line for rank in self.ranks for line in rank.log)

    def __str__(self) -> str:
        return json.dumps(asdict(self), indent=1)


class Board:
    """The memory that the ranks share, by communicator slot and rank."""

    def __init__(self, num_slots: int, num_records: int) -> None:
        shapes = {RANK: (MAX_RANKS,), LANE: (num_slots, MAX_RANKS)}
        shapes |= {RECORD: (num_slots, MAX_RANKS, num_records)}
        size = sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in shapes.items())
        self.descriptor = os.memfd_create("board")
        os.ftruncate(self.descriptor, size)
        memory = mmap.mmap(self.descriptor, size)
        arrays, at = [], 0
        for dtype, shape in shapes.items():
            arrays.append(np.ndarray(shape, dtype, memory, at))
            at += arrays[-1].nbytes
        self.ranks, self.lanes, self.records = arrays

    def communicators(self) -> Iterator[tuple[int, list[int]]]:
        """The slots, and for each the groups of ranks in one communicator."""
        for slot, lanes in enumerate(self.lanes):
            for group in dict.fromkeys(lanes["members"][lanes["members"] != 0].tolist()):
                yield slot, [rank for rank in range(MAX_RANKS) if group >> rank & 1]

    def compare(self, slot: int, members: list[int], first: list[dict[str, int]]) -> Communicator:
        """What these ranks would have run; the `first` disagreement is kept."""
        rows = [self.records[slot, rank, : self.lanes[slot, rank]["issued"]] for rank in members]
        most = max(rows, key=len)
        num_came, num_acted, num_differ = np.zeros((3, len(most)), int)
        for row in rows:  # a rank that was lost has fewer
            num_came[: len(row)] += 1
            num_acted[: len(row)] += row["acted"]
            equal = [row[name] == most[name][: len(row)] for name in COMPARED]
            num_differ[: len(row)] += ~np.all(equal, axis=0)
        for call in np.flatnonzero(num_differ)[: not first]:
            for rank, row in zip(members, rows, strict=True):
                for record in row[call : call + 1].tolist():
                    named = zip(RECORD.names or (), record, strict=True)
                    first.append({"comm": slot, "rank": rank} | dict(named))
        acted = most[num_acted == num_came]
        return Communicator(
            slot=slot,
            ranks=members,
            calls=len(most),
            acted=len(acted),
            acted_unevenly=int(np.sum((num_acted > 0) & (num_acted < num_came))),
            disagreements=int(np.sum(num_differ > 0)),
            switches=switches_of(most),
            generations=int(most["generation"].max(initial=0)) + 1,
            generations_acted=len(np.unique(acted["generation"])),
            first_acted=int(acted["call"][0]) if len(acted) else None,
        )


def switches_of(records: Array) -> int:
    switches, generation = 0, 0
    answers: dict[int, list[int]] = {}
    columns = (records[name].tolist() for name in ("replayed", "generation", "question", *ANSWER))
    for is_replayed, its_generation, question, *answer in zip(*columns, strict=True):
        if its_generation != generation:
            generation, answers = its_generation, {}
        if not is_replayed and answers.setdefault(question, answer) != answer:
            switches, answers = switches + 1, {question: answer}
    return switches


def run_ranks(
    command: Mapping[int, list[str]],
    environment: Mapping[int, Mapping[str, str | None]],
    board: Board,
    deadline_s: float,
) -> tuple[list[int], bool, str, list[str]]:
    """Exit codes, whether they were ended, what they said on stderr, and what each told."""
    until, is_late = time.monotonic() + deadline_s, False
    with contextlib.ExitStack() as stack:
        # What is appended to keeps lines of several threads whole.
        files = [
            stack.enter_context(tempfile.TemporaryFile("a+", errors="replace"))
            for _ in range(MAX_RANKS + 1)
        ]
        processes = [
            subprocess.Popen(
                command[rank],
                env={name: value for name, value in environment[rank].items() if value is not None},
                stdout=files[1 + rank],
                stderr=files[0],
                pass_fds=[board.descriptor],
            )
            for rank in command
        ]
        while None in (codes := [process.poll() for process in processes]):
            board.ranks["dead"][: len(codes)] = [code is not None for code in codes]
            if not is_late and time.monotonic() > until:
                is_late = True
                for process in processes:
                    process.kill()
            time.sleep(0.005)
        os.close(board.descriptor)
        for file in files:
            file.seek(0)
        errors, *logs = (file.read() for file in files)
    return [process.returncode for process in processes], is_late, errors, logs


def play(
    play_rank: Path,
    plugin: Path | str,
    *options: str,
    environment: Mapping[str, str] | None = None,
    law: str = "sound",
    **named: object,
) -> Played:
    """Play a job, and check that it keeps the law: `sound`, or only `alike`, or "".

    `options` are whole arguments, such as `--at`; `named` others, `rate=100`. Only what
    `environment` says reaches the plugin: the tests' own settings do not. Raises ValueError for an
    option that is none.
    """
    chosen = {"ranks": 4, "comms": 1, "calls": 1000, "max_group": 4, "deadline": 60} | named
    of = {f"--{name.replace('_', '-')}": str(value) for name, value in chosen.items()}
    own: dict[int, dict[str, str | None]] = defaultdict(dict)
    actions: list[str] = []
    for name, value in zip(options[::2], options[1::2], strict=True):
        rank, _, rest = value.partition(":")
        if name == "--env":
            variable, equals, content = rest.partition("=")
            own[int(rank)][variable] = content if equals else None
        elif name in {"--at", "--every"}:
            actions += (name, value)
        else:
            of[name] = value
    deadline_s = float(of.pop("--deadline"))
    board = Board(int(of["--comms"]), int(of["--calls"]) + int(of["--max-group"]) + 64)
    of |= {"--board": str(board.descriptor), "--job": str(secrets.randbelow(1 << 31))}
    words = [str(play_rank), *chain.from_iterable(of.items()), *actions, "--rank"]
    ours = dict.fromkeys(("NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN"), str(plugin))
    ours = clean_environment() | dict(environment or {}) | ours
    numbers = range(1 if "--one-thread" in of else int(of["--ranks"]))
    codes, is_late, said, logs = run_ranks(
        {rank: [*words, str(rank)] for rank in numbers},
        {rank: ours | {"RANK": str(rank)} | own[rank] for rank in numbers},
        board,
        deadline_s,
    )
    if 2 in codes:
        raise ValueError(said)
    # Sanitizers speak here; a rank's own death shows in the result as well.
    assert "Sanitizer" not in said, said
    first: list[dict[str, int]] = []
    comms = [board.compare(slot, members, first) for slot, members in board.communicators()]
    totals = {
        name: sum(getattr(comm, name) for comm in comms)
        for name in ("calls", "acted", "acted_unevenly", "disagreements", "switches")
    }
    ranks = [
        Rank(int(state["asked"]), of_kind("E", log), of_kind("V", log), of_kind("L", log), code)
        for state, log, code in zip(board.ranks, logs, codes, strict=False)
    ]
    # Killed because the job said so.
    is_told = board.ranks["kills_itself"] == 1
    played = Played(
        **totals,
        errors=sum(len(rank.errors) for rank in ranks),
        violations=sum(len(rank.violations) for rank in ranks),
        abnormal_exits=sum(
            code != 0 and not (code == -signal.SIGKILL and is_told[rank])
            for rank, code in enumerate(codes)
        ),
        hit_deadline=is_late,
        asked_longest_ms=float(board.ranks["asked_longest_ns"].max()) / 1e6,
        created_longest_ms=float(board.ranks["created_longest_ns"].max()) / 1e6,
        first_disagreement=first,
        communicators=comms,
        ranks=ranks,
    )
    assert played.is_sound or law != "sound", played
    assert played.is_alike or law != "alike", played
    return played


def of_kind(kind: str, log: str) -> list[str]:
    return [line[1:] for line in log.split("\n") if line.startswith(kind)]


def clean_environment() -> dict[str, str]:
    """This process's, without what it says to NCCL and to us."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("DYNAMICCL_", "NCCL_"))}


def at(call: int, what: str, *, rank: int = 0, comm: int = 0) -> tuple[str, str]:
    """An action before one call: `at(100, "sleep=2", rank=3)`."""
    return "--at", f"{call}:{rank}:{comm}:{what}"


def every(calls: int, what: str, *, rank: int = 0, comm: int = 0) -> tuple[str, str]:
    """An action before every `calls` calls."""
    return "--every", f"{calls}:{rank}:{comm}:{what}"


def stop(seconds: float) -> str:
    """An action that lets a whole rank stand still."""
    return f"sh=kill -STOP $PPID; sleep {seconds}; kill -CONT $PPID"


def on_rank(rank: int, settings: Mapping[str, str | None]) -> list[str]:
    """Environment variables of one rank only; None unsets one."""
    return [
        argument
        for name, value in settings.items()
        for argument in ("--env", f"{rank}:{name}" + ("" if value is None else f"={value}"))
    ]


if __name__ == "__main__":
    program, (library, *given) = Path(__file__).with_name("play_rank"), sys.argv[1:]
    sys.stdout.write(
        json.dumps(asdict(play(program, library, *given, environment=os.environ, law="")))
    )
