"""The journal of a sweep: picks and results on disk, so that nothing is measured twice.

    OUT/.journal/system=NAME/sweep=NAME[.shard-0-of-4]/
        lock, owner             held while a run lives (lock.py)
        sweep.json              which grid this is
        rounds.jsonl            the picks of each round, written before it starts
        segment-000000.jsonl    one line for each launch that was committed
        segment-000000.sealed   what a resume must know of a segment that is in a Parquet part

A launch is committed by one line, on disk (fsync) before the next one starts; a line that a crash
tore off is no commit and is cut away. At the end of a round, and when a run stops, the segment is
*sealed*: its rows become one Parquet part, whose provenance names the segment. So a crash between
any two steps leaves either the lines, or the part, or both, and an open settles which: no row is
lost and none is there twice.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from dynamiccl.collect.outcomes import decode_outcomes
from dynamiccl.collect.runs.lock import SweepLock
from dynamiccl.errors import CorruptFile, MachineError, UserError

_SEALED: Final = ".sealed"
_COMPLETE: Final = "complete"
#: What a commit keeps of itself once its rows are in a part.
_KEPT: Final = (
    "launch",
    "round",
    "seconds",
    "unfinished",
    "quarantined",
    "facts",
    "outcomes",
    "references",
)

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sealing:
    """A segment on its way to a Parquet part."""

    segment: int
    commits: tuple[Record, ...]


class Journal:
    """One sweep's journal; a context manager that holds the lock."""

    def __init__(
        self, folder: Path, grid: Mapping[str, str], *, resume: bool, take_over: bool = False
    ) -> None:
        """Open the journal in `folder` of a grid, as a new sweep or to resume one."""
        self._folder = folder
        self._grid = dict(grid)
        self._resume = resume
        self._lock = SweepLock(folder, take_over=take_over)
        self._segment = 0
        self.rounds: list[Record] = []
        self.commits: list[Record] = []
        self._open: list[Record] = []

    def __enter__(self) -> Self:
        """Take the lock, check the grid, and read the records.

        Raises UserError: another run lives, the sweep was begun and `resume` is False, or it is
        another grid.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock.take()
        try:
            self._check_grid()
            self._read()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self._lock.release()

    @property
    def identity(self) -> str:
        """The journal's name in the provenance of its parts."""
        return hashlib.sha256(f"{self._folder.name}:{self._grid}".encode()).hexdigest()[:16]

    def begin_round(self, record: Record) -> None:
        """Record a round's picks before it starts."""
        _append(self._folder / "rounds.jsonl", record)
        self.rounds.append(record)

    def commit(self, record: Record) -> None:
        """Write one launch to disk (fsync). Raises MachineError when the disk is full."""
        _append(self._path(self._segment), record)
        self._open.append(record)
        self.commits.append(record)

    def seal(self, write: Callable[[Sealing], None]) -> None:
        """Have `write` turn the open segment into a part, then close the segment."""
        if not self._open:
            return
        sealing = Sealing(self._segment, tuple(self._open))
        write(sealing)
        self._close_segment(sealing)

    def settle(self, segments_in_parts: set[int], write: Callable[[Sealing], None]) -> None:
        """Finish what a crash interrupted: seal segments that are whole but not yet closed."""
        for path in sorted(self._folder.glob("segment-*.jsonl")):
            number = _number(path)
            sealing = Sealing(number, tuple(_lines(path)))
            if sealing.commits and number not in segments_in_parts:
                write(sealing)
            self._segment = number
            self._close_segment(sealing)

    def complete(self, text: str, ended: str) -> None:
        """Record that the sweep with this text has ended: "done", or out of "budget"."""
        write_atomically(self._folder / _COMPLETE, f"{_digest(text)}\n{ended}\n")

    def _close_segment(self, sealing: Sealing) -> None:
        path = self._path(sealing.segment)
        kept = [{key: c[key] for key in _KEPT if key in c} for c in sealing.commits]
        text = "".join(json.dumps(commit) + "\n" for commit in kept)
        write_atomically(path.with_suffix(_SEALED), text)
        path.unlink(missing_ok=True)
        for commit in sealing.commits:
            commit.pop("rows", None)  # a night of rows would fill the memory
        self._segment = sealing.segment + 1
        self._open = []

    def _check_grid(self) -> None:
        path = self._folder / "sweep.json"
        if not path.is_file():
            write_atomically(path, json.dumps(self._grid))
            return
        if not self._resume:
            raise begun_here(path.parent)
        found = _loads(path.read_text(encoding="utf-8"), path)
        if found.get("layout") != self._grid.get("layout"):
            raise UserError(
                f"{path} is of a sweep that another release began, whose processes measure other "
                "sizes together; end it with that release, or take another name or --out"
            )
        if found != self._grid:
            raise UserError(
                f"{path} was made by a sweep of this name with other trials (the file was edited, "
                "or --limit differs); give the new grid another name, or take another --out"
            )

    def _read(self) -> None:
        self.rounds = list(_lines(self._folder / "rounds.jsonl"))
        sealed = sorted(self._folder.glob(f"segment-*{_SEALED}"))
        for path in sealed:
            self.commits.extend(_lines(path))
            # A crash may have left the lines beside what was made of them.
            path.with_suffix(".jsonl").unlink(missing_ok=True)
            self._segment = _number(path) + 1
        for path in sorted(self._folder.glob("segment-*.jsonl")):
            self.commits.extend(_lines(path))

    def _path(self, segment: int) -> Path:
        return self._folder / f"segment-{segment:06d}.jsonl"


def begun_here(folder: Path) -> UserError:
    """The error that the sweep was begun already."""
    return UserError(
        f"{folder} says that this sweep was begun here; go on with --resume, or take another "
        "--out or name"
    )


def how_it_ended(folder: Path, text: str) -> str | None:
    """How the sweep with this text ended: done, budget; None while work is left.

    With a larger budget it is another text.
    """
    path = folder / _COMPLETE
    words = path.read_text(encoding="utf-8").split() if path.is_file() else []
    if not words or words[0] != _digest(text):
        return None
    return words[1] if len(words) > 1 else "done"  # journals of version 0.1 have the digest alone


def begin_again(folder: Path) -> None:
    """Forget that the sweep ended, so that more can be measured."""
    (folder / _COMPLETE).unlink(missing_ok=True)


class Progress(NamedTuple):
    """What has been committed."""

    #: That ended and measured something: neither stopped before a first row, nor all infeasible.
    launches: int
    #: Trials with an outcome that is not `infeasible`.
    measured: int
    infeasible: int


def progress_on_disk(folder: Path) -> Progress:
    """How far the sweep of a journal is, as another process sees it."""
    found: dict[int, list[str]] = {}
    for path in (*folder.glob("segment-*.jsonl"), *folder.glob(f"segment-*{_SEALED}")):
        with suppress(FileNotFoundError):  # sealed at this moment
            whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
            # A segment that is being sealed has two files for a moment: it counts once.
            lines = whole.splitlines()
            found[_number(path)] = max(found.get(_number(path), []), lines, key=len)
    launches = measured = infeasible = 0
    for record in (_loads(line, folder) for lines in found.values() for line in lines):
        outcomes = list(decode_outcomes(record))
        lost = sum(outcome.infeasible for outcome in outcomes)
        launches += not record["unfinished"] and (not outcomes or lost < len(outcomes))
        measured += len(outcomes) - lost
        infeasible += lost
    return Progress(launches, measured, infeasible)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("segment-"))


def _loads(line: str, path: Path) -> Record:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise CorruptFile(
            f"{path} is damaged: {error}; the parts that are written are whole, so move the "
            "journal away and give the rest another name"
        ) from error
    if not isinstance(found, dict):
        raise CorruptFile(f"{path} is damaged: a record is {found!r}")
    return found


def _lines(path: Path) -> Iterator[Record]:
    """The records of a file; a last line without newline is torn and is cut away."""
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole != len(content):
        os.truncate(path, whole)
    for line in content[:whole].decode(encoding="utf-8").splitlines():
        yield _loads(line, path)


def _append(path: Path, record: Mapping[str, Any]) -> None:
    line = (json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        before = os.fstat(descriptor).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(descriptor, line[written:])
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, before)
            raise _full(path, error) from error
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Write a file via a temporary name; raises MachineError on a full disk."""
    hidden = path.with_name(f".writing-{path.name}")
    try:
        with hidden.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    except OSError as error:
        hidden.unlink(missing_ok=True)
        raise _full(path, error) from error


def _full(path: Path, error: OSError) -> MachineError:
    what = "the disk is full" if error.errno in {errno.ENOSPC, errno.EDQUOT} else str(error)
    return MachineError(
        f"cannot write {path}: {what}; everything measured before is kept: make room and go on "
        "with --resume"
    )
