"""The journal of a sweep: what was picked and measured, on disk, so that nothing is measured twice.

    OUT/.journal/system=NAME/sweep=NAME[.shard-0-of-4]/
        lock, owner          held while a run lives
        sweep.json           which grid this is
        rounds.jsonl         the trials of each round, written before it starts
        segment-000000.jsonl one line for each launch that ended
        segment-000000.cut   the same after its rows became a Parquet part: of each row only what
                             a resume asks for
        complete             how the sweep ended

A launch is in the journal with all its rows, or it runs again: its line is on disk (fsync) before
the next one starts, and a line that a crash tore off is cut away. At the end of a round, and when a
run stops, the segment becomes one Parquet part, whose provenance names it. So a crash between any
two steps leaves either the lines, or the part, or both, and whoever opens the journal settles
which: no row is lost and none is there twice.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.runner import Launch, LaunchMode
from dynamiccl.collect.sweep import Sweep
from dynamiccl.datasets.cells import UNWELL_COLUMNS, usable
from dynamiccl.datasets.provenance import run_record
from dynamiccl.datasets.rows import measurements_table
from dynamiccl.datasets.schema import Status
from dynamiccl.datasets.store import part_provenance, sweep_folder, sweep_parts, write_part
from dynamiccl.errors import CorruptFile, MachineError, UserError

_log = logging.getLogger(__name__)

_JOURNAL: Final = ".journal"
_CUT: Final = ".cut"
_COMPLETE: Final = "complete"
#: Changes with the layout of a round's launches, and of the journal (3: rows stand by trial).
_FORMAT: Final = "3"
#: What a launch's rows keep of themselves once they are in a part.
_ASKED_FOR: Final = ("status", "time_us", "in_place", *UNWELL_COLUMNS)
#: Errors by which a file system says that it has no locks: Lustre without `-o flock` ENOSYS, NFS
#: without a lock manager ENOLCK.
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
#: Rows with equal values here share a noise band: one setting in one round.
_BAND_KEY: Final = (
    "round",
    "collective",
    "num_nodes",
    "ranks_per_node",
    "num_comms",
    "comm_split",
    "datatype",
    "launch_profile",
    "interference_kind",
    "interference_level",
)
_BAND_QUANTILE: Final = 0.9

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shard:
    """The launches of one process: those whose setting's hash modulo `count` is `index`."""

    index: int = 0
    count: int = 1

    def holds(self, setting: Setting) -> bool:
        """Whether this shard runs the launches of a setting; the same on every resume."""
        digest = hashlib.sha256(setting.key.encode()).digest()
        return int.from_bytes(digest[:8], "little") % self.count == self.index

    @property
    def suffix(self) -> str:
        """Suffix of the journal's folder."""
        return "" if self.count == 1 else f".shard-{self.index}-of-{self.count}"


def journal_folder(sweep: Sweep, out: Path, shard: Shard) -> Path:
    """Path of the journal of a sweep or of one of its shards."""
    name = f"sweep={sweep.file.name}{shard.suffix}"
    return out / _JOURNAL / f"system={sweep.file.system}" / name


@contextmanager
def open_journal(
    sweep: Sweep,
    out: Path,
    runner: str,
    *,
    shard: Shard | None = None,
    resume: bool,
    take_over: bool = False,
) -> Iterator["Journal"]:
    """Hold the journal of a sweep, or of one of its shards, in the data directory `out`.

    Args:
        sweep: the grid.
        out: the data directory, which is there.
        runner: name of what measures.
        shard: whose journal it is.
        resume: go on with what is there, instead of refusing to add to it.
        take_over: from a run that may still live, where the file system knows no locks.

    Raises UserError: another run lives, the sweep was begun and `resume` is False, or it is another
    grid, or of a release with another journal.
    """
    folder = journal_folder(sweep, out, shard or Shard())
    _refuse_orphans(sweep, out, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with lock_sweep(folder, take_over=take_over):
        yield Journal(sweep, out, folder, runner, resume=resume)


class Journal:
    """The journal of one sweep, or of one of its shards; `open_journal` makes it."""

    def __init__(self, sweep: Sweep, out: Path, folder: Path, runner: str, *, resume: bool) -> None:
        """Check the grid, read the records, and finish what a crash cut short."""
        self._sweep, self._out, self._folder, self._runner = sweep, out, folder, runner
        keys = "\n".join(trial.key for trial in sweep.trials)
        self._grid = {"trials": _digest(keys), "runner": runner, "layout": _FORMAT}
        #: Its name in the provenance of its parts.
        self._identity = _digest(f"{folder.name}:{self._grid}")[:16]
        self._segment = 0
        self._open: list[Record] = []
        #: {"round", "trials": [[key, repeat, probability]], "retry"} of each round begun.
        self.rounds: list[Record] = []
        #: Launch id -> its record, as `commit` writes it; rows are cut when they are in a part.
        self.launches: dict[str, Record] = {}
        self._check_grid(resume=resume)
        self._read()

    def begin_round(self, trials: Sequence[Trial], *, is_retry: bool = False) -> None:
        """Write down a round's trials before it starts. Raises MachineError on a full disk."""
        record: Record = {"round": len(self.rounds), "trials": [entry_of(one) for one in trials]}
        if is_retry:
            record["retry"] = True
        _append(self._folder / "rounds.jsonl", record)
        self.rounds.append(record)

    def commit(self, launch: Launch, seconds: float) -> Record:
        """Write one launch that ended, with all its rows (fsync). Raises MachineError."""
        record: Record = {
            "launch": launch.id,
            "round": launch.round,
            "mode": launch.mode.value,
            "seconds": round(seconds, 3),
            "measured": [
                [trial.key, trial.repeat, [_known(row) for row in rows]]
                for trial, rows in launch.measured
            ],
            "left": [entry_of(trial) for trial in launch.left],
            "facts": dict(launch.facts),
        }
        if launch.culprit is not None:
            trial, row = launch.culprit
            record["culprit"] = [trial.key, row["status"], row["reason"]]
        _append(self._path(self._segment), record)
        self._open.append(record)
        self.launches[launch.id] = record
        return record

    def close_segment(self) -> None:
        """Make a Parquet part of the rows since the last one. Raises MachineError."""
        if self._open:
            self._write_part(self._open)
            self._cut(self._open)

    def complete(self, ended: str) -> None:
        """Record that the sweep with this text has ended: "done", or out of "budget"."""
        text = f"{_digest(self._sweep.text)}\n{ended}\n"
        _write_atomically(self._folder / _COMPLETE, text)

    def _check_grid(self, *, resume: bool) -> None:
        path = self._folder / "sweep.json"
        if not path.is_file():
            _write_atomically(path, json.dumps(self._grid))
            return
        if not resume:
            raise begun_here(path.parent)
        found = _loads(path.read_text(encoding="utf-8"), path)
        if found.get("layout") != _FORMAT:
            raise UserError(
                f"{path} is of a sweep that another release began, and only that one can go on "
                "with it; finish it there, or begin anew under another name or --out"
            )
        if found != self._grid:
            raise UserError(
                f"{path} was made by a sweep of this name with other trials (the file was edited, "
                "or --limit differs); give the new grid another name, or take another --out"
            )

    def _read(self) -> None:
        self.rounds = list(_lines(self._folder / "rounds.jsonl"))
        for path in sorted(self._folder.glob(f"segment-*{_CUT}")):
            # A crash may have left the whole lines beside what was cut of them.
            path.with_suffix(".jsonl").unlink(missing_ok=True)
            self.launches |= {record["launch"]: record for record in _lines(path)}
            self._segment = _number(path) + 1
        in_parts = self._segments_in_parts()
        for path in sorted(self._folder.glob("segment-*.jsonl")):
            self._segment = _number(path)
            records = list(_lines(path))
            self.launches |= {record["launch"]: record for record in records}
            if self._segment not in in_parts:
                self._write_part(records)
            self._cut(records)

    def _segments_in_parts(self) -> set[int]:
        file = self._sweep.file
        parts = map(part_provenance, sweep_parts(self._out, file.system, file.name))
        return {int(one["segment"]) for one in parts if one.get("journal") == self._identity}

    def _write_part(self, records: Sequence[Record]) -> None:
        rows = [row for record in records for _, _, rows in record["measured"] for row in rows]
        if not rows:
            return
        provenance = run_record(
            "run",
            sweep_file=self._sweep.text,
            journal=self._identity,
            segment=self._segment,
            runner=self._runner,
        )
        table = with_noise_band(measurements_table(map(_with_time, rows)))
        try:
            write_part(self._out, table, provenance=provenance)
        except OSError as error:
            raise MachineError(
                f"cannot write a part into {self._out}: {error}; everything measured is in the "
                "journal: make room and go on with --resume"
            ) from error

    def _cut(self, records: Sequence[Record]) -> None:
        """Keep of a segment, whose rows are in a part now, what a resume asks for."""
        for record in records:
            for measured in record["measured"]:
                # A night of whole rows would fill the memory.
                measured[2] = [
                    {name: row[name] for name in _ASKED_FOR if name in row} for row in measured[2]
                ]
        path = self._path(self._segment)
        _write_atomically(path.with_suffix(_CUT), "".join(_line(record) for record in records))
        path.unlink(missing_ok=True)
        self._segment += 1
        self._open = []

    def _path(self, segment: int) -> Path:
        return self._folder / f"segment-{segment:06d}.jsonl"


def entry_of(trial: Trial) -> list[Any]:
    """A trial of the sweep as plain data."""
    return [trial.key, trial.repeat, trial.probability]


def counts_as_picked(record: Record) -> bool:
    """Whether the rows of a launch are of trials that the strategy picked."""
    return record["mode"] not in {LaunchMode.REFERENCE.value, LaunchMode.READ_BACK.value}


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
    return words[1] if len(words) == 2 and words[0] == _digest(text) else None


def begin_again(folder: Path) -> None:
    """Forget that the sweep ended, so that more can be measured."""
    (folder / _COMPLETE).unlink(missing_ok=True)


class Progress(NamedTuple):
    """What has been committed."""

    #: That ended and measured something: neither stopped before a first row, nor all infeasible.
    launches: int
    #: Picked trials with rows that are not all `infeasible`.
    measured: int
    infeasible: int


def progress_on_disk(folder: Path) -> Progress:
    """How far the sweep of a journal is, as another process sees it."""
    found: dict[int, list[str]] = {}
    for path in folder.glob("segment-*"):
        with suppress(FileNotFoundError):  # cut at this moment
            whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
            # A segment that is being cut has two files for a moment: it counts once.
            lines = whole.splitlines()
            found[_number(path)] = max(found.get(_number(path), []), lines, key=len)
    launches = measured = infeasible = 0
    for record in (_loads(line, folder) for lines in found.values() for line in lines):
        picked = record["measured"] if counts_as_picked(record) else []
        lost = sum(
            all(row.get("status") == Status.INFEASIBLE.value for row in rows)
            for _, _, rows in picked
        )
        launches += not record["left"] and (not picked or lost < len(picked))
        measured += len(picked) - lost
        infeasible += lost
    return Progress(launches, measured, infeasible)


def with_noise_band(table: pa.Table) -> pa.Table:
    """Fill `aa_noise_band`: by how much nine in ten A/A pairs of NCCL's default differ.

    A pair is two measurements of the default at one size, in one setting and round: of one process,
    or of two where it is measured untouched and under our plugin, since another process has other
    queue pairs and another way through the network (ECMP). The band is the 90th percentile over
    sizes and pairs of slower / faster - 1. Null where no size has a pair.
    """
    frame = pl.DataFrame(table)
    defaults = usable(frame).filter(
        pl.col("is_default") & ~pl.col("in_place").fill_null(value=False)
    )
    per_size = (
        defaults.group_by([*_BAND_KEY, "size_bytes"])
        .agg(pl.col("time_us"))
        .filter(pl.col("time_us").list.len() >= 2)
    )
    bands = (
        per_size.with_columns(
            spread=pl.col("time_us").map_elements(_pairs, return_dtype=pl.List(pl.Float64))
        )
        .explode("spread")
        .group_by(_BAND_KEY)
        .agg(_band=pl.col("spread").quantile(_BAND_QUANTILE))
    )
    found = frame.select(_BAND_KEY).join(
        bands, on=_BAND_KEY, how="left", nulls_equal=True, maintain_order="left"
    )
    index = table.schema.get_field_index("aa_noise_band")
    return table.set_column(index, table.schema.field(index), found["_band"].to_arrow())


def _pairs(times_us: pl.Series) -> list[float]:
    times = np.sort(times_us.to_numpy())
    ratios = times[None, :] / times[:, None]
    spreads: list[float] = (ratios[np.triu_indices(len(times), k=1)] - 1.0).tolist()
    return spreads


@contextmanager
def lock_sweep(folder: Path, *, take_over: bool) -> Iterator[None]:
    """Hold a lock while a run lives, so that a sweep has one run at a time.

    `flock` where the file system knows it: the kernel releases that when a run dies. Elsewhere a
    file that one process alone can create names the owner, and stays when the owner dies: the same
    Slurm job, started anew, takes it over, and others do with `take_over`.

    Raises UserError when another run lives, or may live.
    """
    mine = f"process {os.getpid()} on {os.uname().nodename}"
    # Unbuffered: what a full disk refuses is not tried again when the file is closed.
    with (folder / "lock").open("a+b", buffering=0) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            owner = lock.read().decode(errors="replace").strip() or "another process"
            raise UserError(
                f"{owner} is running this sweep into this directory already; wait for it, stop it, "
                "or take another --out"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log.info("no locks in %s (%s): an owner file instead", folder, error.strerror)
        else:
            lock.truncate(0)
            lock.write(f"{mine}\n".encode())
            yield
            return
    path = folder / "owner"
    text = _own(path, mine, take_over=take_over)
    try:
        yield
    finally:
        if _text(path) == text:
            path.unlink(missing_ok=True)


def _own(path: Path, process: str, *, take_over: bool) -> str:
    """Make the owner's file ours; returns what is in it."""
    #   SLURM_RESTART_COUNT  Slurm: how often the job was requeued.
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    job = os.environ.get("SLURM_JOB_ID")
    text = json.dumps({"job": job, "restart": restart, "process": process})
    while not _create(path, text):
        found = _text(path)
        if found is None:
            continue  # given back just now
        owner = {"process": "another process"}
        with suppress(json.JSONDecodeError):  # cut short by a full disk, say
            owner |= json.loads(found)
        is_ours = job is not None and owner.get("job") == job
        if not take_over and not (is_ours and int(owner.get("restart", 0)) < restart):
            raise UserError(
                f"{owner['process']} (job {owner.get('job')}) may be running this sweep: {path} is "
                "its, and there are no locks here that would tell; wait for it, or where you know "
                "that it is gone, add --take-over"
            )
        _log.warning("taking this sweep over from %s", owner["process"])
        _write_atomically(path, text)
        break
    return text


def _refuse_orphans(sweep: Sweep, out: Path, journal: Path) -> None:
    """Raise UserError for parts of this name that the journal does not know."""
    folder = sweep_folder(out, sweep.file.system, sweep.file.name)
    orphans = sweep_parts(out, sweep.file.system, sweep.file.name)
    name = f"sweep={sweep.file.name}"
    shards = journal.parent.glob(f"{name}.shard-*/sweep.json")
    known = [journal.parent / name / "sweep.json", *shards]
    if orphans and not any(path.is_file() for path in known):
        raise UserError(
            f"{folder} already holds {len(orphans)} parts of sweep '{sweep.file.name}' and no "
            "journal says what they are; take another --out or name"
        )


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as plain data, without what is null."""
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in row.items()
        if value is not None
    }


def _with_time(row: Mapping[str, Any]) -> Mapping[str, Any]:
    stamp = row.get("timestamp")
    return row if stamp is None else {**row, "timestamp": datetime.fromisoformat(stamp)}


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


def _line(record: Record) -> str:
    return json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"


def _append(path: Path, record: Record) -> None:
    line = _line(record).encode()
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


def _create(path: Path, text: str) -> bool:
    """Write a file that is not there yet; False when it is."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, text.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _write_atomically(path: Path, text: str) -> None:
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
