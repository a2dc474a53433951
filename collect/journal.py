"""The journal of a sweep: what was picked and measured, so that nothing is measured twice.

    OUT/.journal/system=NAME/sweep=NAME/
        lock, owner          held while a run lives
        sweep.json           which grid this is
        rounds.jsonl         the trials of each round, written before it starts
        segment-000000.jsonl one line for each launch that ended, with all its rows; when these are
                             a Parquet part, of each row only what a resume asks for
        complete             how the sweep ended

A launch's line is on disk (fsync) before the next one starts; a torn line is cut away. A part's
provenance names its segment: after a crash no row is lost, and none is there twice.
"""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import polars as pl
import pyarrow as pa

from dynamiccl.collect.grid import Trial
from dynamiccl.collect.schedule import NOT_PICKED, Launch
from dynamiccl.collect.sweep import Sweep
from dynamiccl.datasets import store
from dynamiccl.datasets.cells import UNWELL_COLUMNS, usable
from dynamiccl.datasets.schema import Status
from dynamiccl.errors import CorruptFile, MachineError, UserError
from dynamiccl.files import replacing

COMPLETE: Final = "complete"
#: Lustre without `-o flock` says ENOSYS, NFS without a lock manager ENOLCK.
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_ASKED_FOR: Final = ("status", "time_us", "in_place", *UNWELL_COLUMNS)
#: Equal here, rows share a noise band.
_BAND_KEY: Final = (
    "round", "collective", "num_nodes", "ranks_per_node", "num_comms", "comm_split", "datatype",
    "launch_profile", "interference_kind", "interference_level",
)  # fmt: skip

Record = dict[str, Any]


def journal_folder(sweep: Sweep, out: Path) -> Path:
    """Where a sweep's journal is."""
    return out / ".journal" / f"system={sweep.file.system}" / f"sweep={sweep.file.name}"


@contextmanager
def open_journal(sweep: Sweep, out: Path, runner: str, *, resume: bool) -> Iterator["Journal"]:
    """Hold the journal of a sweep in the data directory `out`; `runner` names what measures.

    Raises UserError: another run lives, the sweep was begun and `resume` is False, or what is there
    is of another grid or release.
    """
    folder = journal_folder(sweep, out)
    parts = store.sweep_parts(out, sweep.file.system, sweep.file.name)
    if parts and not (folder / "sweep.json").is_file():
        where = store.sweep_folder(out, sweep.file.system, sweep.file.name)
        raise UserError(
            f"{where} already holds {len(parts)} parts of this sweep and no journal says what they "
            "are; take another --out or name"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder):
        yield Journal(sweep, out, folder, runner, resume=resume)


@contextmanager
def hold(
    folder: Path,
    doing: str = "running",
    advice: str = "wait for it, stop it, or take another --out",
) -> Iterator[None]:
    """Hold a lock in `folder`: one run at a time, else UserError, with what its owner is `doing`.

    The kernel releases a `flock` when a run dies. Without `flock` a file names the owner, and stays
    when that dies: the same Slurm job, started anew, takes it over.
    """
    me = f"process {os.getpid()} on {os.uname().nodename}"
    # Unbuffered: closing must not try again what a full disk refused.
    with (folder / "lock").open("a+b", buffering=0) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            owner = lock.read().decode(errors="replace").strip() or "another process"
            raise UserError(
                f"{owner} is {doing} this sweep into this directory already; {advice}"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        else:
            lock.truncate(0)
            lock.write(f"{me}\n".encode())
            yield
            return
    path = folder / "owner"
    mine = _own(path, me, doing)
    try:
        yield
    finally:
        if _owner(path) == mine:
            path.unlink(missing_ok=True)


def _own(path: Path, process: str, doing: str) -> Record:
    #   SLURM_RESTART_COUNT  Slurm: how often the job was requeued.
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    mine = {"job": os.environ.get("SLURM_JOB_ID"), "restart": restart, "process": process}
    with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(mine))
        file.flush()
        os.fsync(file.fileno())
        return mine
    owner = _owner(path)
    is_ours = mine["job"] is not None and owner.get("job") == mine["job"]
    if not (is_ours and int(owner["restart"]) < restart):
        raise UserError(
            f"{owner.get('process', 'another process')} (job {owner.get('job')}) may be {doing} "
            f"this sweep: {path} is its, and there are no locks here that would tell; wait for it, "
            "or where you know that it is gone, remove that file"
        )
    _write_atomically(path, json.dumps(mine))
    return mine


def _owner(path: Path) -> Record:
    with suppress(FileNotFoundError, json.JSONDecodeError):
        return dict(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    return {}


def _entry(trial: Trial) -> list[Any]:
    return [trial.key, trial.repeat, trial.probability]


class Journal:
    """The journal of one sweep; `open_journal` makes it."""

    def __init__(self, sweep: Sweep, out: Path, folder: Path, runner: str, *, resume: bool) -> None:
        self._sweep, self._out, self._folder, self._runner = sweep, out, folder, runner
        keys = "\n".join(trial.key for trial in sweep.trials)
        # Layout of launches and journal (6: no round tries failures again).
        grid = {"trials": _digest(keys), "runner": runner, "layout": "6"}
        path = folder / "sweep.json"
        if not path.is_file():
            _write_atomically(path, json.dumps(grid))
        elif not resume:
            raise UserError(
                f"{folder} says that this sweep was begun here; go on with --resume, or take "
                "another --out or name"
            )
        elif (found := _loads(path.read_text(encoding="utf-8"), path)) != grid:
            differs = ", ".join(name for name in grid if found.get(name) != grid[name])
            raise UserError(
                f"{path} is of a sweep of this name with another {differs} (trials: the file was "
                "edited; layout: another release began it, and finishes it); "
                "give the new grid another name, or take another --out"
            )
        self._identity = _digest(f"{folder.name}:{grid}")[:16]
        self._open: list[Record] = []
        #: {"round", "trials": [[key, repeat, probability]]}.
        self.rounds: list[Record] = list(_lines(folder / "rounds.jsonl"))
        #: By launch id, as `commit` writes them; rows are cut when in a part.
        self.launches: dict[str, Record] = {}
        self._segment = 0
        self._read_segments()

    def begin_round(self, trials: Sequence[Trial]) -> None:
        """Write down a round before it starts. Raises MachineError on a full disk."""
        record: Record = {"round": len(self.rounds), "trials": [_entry(one) for one in trials]}
        _append(self._folder / "rounds.jsonl", record)
        self.rounds.append(record)

    def commit(self, launch: Launch, seconds: float) -> Record:
        """Write a launch that ended, with all rows (fsync). Raises MachineError."""
        record: Record = {
            "launch": launch.id,
            "round": launch.round,
            "mode": launch.mode.value,
            "seconds": round(seconds, 3),
            "measured": [
                [trial.key, trial.repeat, [_known(row) for row in rows]]
                for trial, rows in launch.measured
            ],
            "left": [_entry(trial) for trial in launch.left],
            "facts": dict(launch.facts),
        }
        if launch.culprit is not None:
            trial, row = launch.culprit
            record["culprit"] = [trial.key, row["status"], row["reason"]]
        _append(self._path, record)
        self._open.append(record)
        self.launches[launch.id] = record
        return record

    def close_segment(self) -> None:
        """Make a Parquet part. Raises MachineError."""
        if self._open:
            self._write_part()
            self._cut()

    def complete(self, ended: str) -> None:
        """Record that the sweep with this text has ended: "done" or "budget"."""
        text = f"{_digest(self._sweep.text)}\n{ended}\n"
        _write_atomically(self._folder / COMPLETE, text)

    @property
    def _path(self) -> Path:
        return self._folder / f"segment-{self._segment:06d}.jsonl"

    def _read_segments(self) -> None:
        file = self._sweep.file
        parts = map(store.part_provenance, store.sweep_parts(self._out, file.system, file.name))
        in_parts = {int(one["segment"]) for one in parts if one.get("journal") == self._identity}
        for path in sorted(self._folder.glob("segment-*.jsonl")):
            self._segment = int(path.stem.removeprefix("segment-"))
            self._open = list(_lines(path))
            self.launches |= {record["launch"]: record for record in self._open}
            if all(record.get("in_part") for record in self._open):
                self._open, self._segment = [], self._segment + 1
                continue
            if self._segment not in in_parts:
                self._write_part()
            self._cut()

    def _write_part(self) -> None:
        rows = [row for record in self._open for _, _, rows in record["measured"] for row in rows]
        if not rows:
            return
        whose = {"journal": self._identity, "segment": self._segment, "runner": self._runner}
        provenance = store.run_record("run", sweep_file=self._sweep.text, **whose)
        table = with_noise_band(store.measurements_table(map(_with_time, rows)))
        with _writing(self._out):
            store.write_part(self._out, table, provenance=provenance)

    def _cut(self) -> None:
        for record in self._open:
            record["in_part"] = True
            for measured in record["measured"]:
                # Whole rows of a night would fill the memory.
                measured[2] = [
                    {name: row[name] for name in _ASKED_FOR if name in row} for row in measured[2]
                ]
        _write_atomically(self._path, "".join(map(_line, self._open)))
        self._open, self._segment = [], self._segment + 1


def how_it_ended(folder: Path, text: str) -> str | None:
    """Done or budget; None while work is left. A larger budget makes another text."""
    path = folder / COMPLETE
    words = path.read_text(encoding="utf-8").split() if path.is_file() else []
    return words[1] if len(words) == 2 and words[0] == _digest(text) else None


def progress_on_disk(folder: Path) -> tuple[int, int]:
    """How many launches measured or read back, and how many picked trials have rows."""
    launches = trials = 0
    for path in folder.glob("segment-*.jsonl"):
        for record in _lines(path, is_ours=False):
            rows = [row for _, _, rows in record["measured"] for row in rows]
            is_new = any(row.get("status") != Status.INFEASIBLE.value for row in rows)
            launches += is_new or not (rows or record["left"])
            trials += len(record["measured"]) if record["mode"] not in NOT_PICKED else 0
    return launches, trials


def with_noise_band(table: pa.Table) -> pa.Table:
    """Fill `aa_noise_band`: by how much nine in ten A/A pairs of NCCL's default differ.

    A pair is two measurements of the default at one size, setting and round: of one process, or of
    two (untouched, and under our plugin), which ECMP may route otherwise. The band is the 90th
    percentile of slower / faster - 1 over sizes and pairs; null without a pair.
    """
    frame = pl.DataFrame(table).with_row_index("_row")
    is_pair = pl.col("is_default") & ~pl.col("in_place").fill_null(value=False)
    measured = usable(frame).filter(is_pair)
    pairs = measured.join(measured, on=[*_BAND_KEY, "size_bytes"], nulls_equal=True).filter(
        pl.col("_row") < pl.col("_row_right")
    )
    times = ("time_us", "time_us_right")
    ratio = pl.max_horizontal(times) / pl.min_horizontal(times)
    bands = pairs.group_by(_BAND_KEY).agg(aa_noise_band=(ratio - 1.0).quantile(0.9))
    found = frame.drop("aa_noise_band").join(
        bands, on=_BAND_KEY, how="left", nulls_equal=True, maintain_order="left"
    )
    return found.select(table.column_names).to_arrow().cast(table.schema)


def _known(row: Mapping[str, Any]) -> Record:
    return {name: value for name, value in row.items() if value is not None}


def _with_time(row: Record) -> Record:
    stamp = row.get("timestamp")
    return row | {"timestamp": datetime.fromisoformat(stamp)} if isinstance(stamp, str) else row


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _loads(line: str | bytes, path: Path) -> Record:
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError) as error:
        raise CorruptFile(
            f"{path} is damaged: {error}; the parts that are written are whole, so move the "
            "journal away and give the rest another name"
        ) from error


def _lines(path: Path, *, is_ours: bool = True) -> Iterator[Record]:
    """The records; of a file of ours a torn last line is cut away."""
    content = path.read_bytes() if path.is_file() else b""
    whole = content.rfind(b"\n") + 1
    if is_ours and whole != len(content):
        os.truncate(path, whole)
    for line in content[:whole].splitlines():
        yield _loads(line, path)


def _line(record: Record) -> str:
    plain = json.dumps(record, separators=(",", ":"), allow_nan=False, default=datetime.isoformat)
    return plain + "\n"


def _append(path: Path, record: Record) -> None:
    """Add a line; what a full disk left of it is cut away when it is opened again."""
    line = _line(record).encode()
    with _writing(path), path.open("ab", buffering=0) as file:
        while line:
            line = line[os.write(file.fileno(), line) :]
        os.fsync(file.fileno())


def _write_atomically(path: Path, text: str) -> None:
    with _writing(path), replacing(path, is_synced=True) as hidden:
        hidden.write_text(text, encoding="utf-8")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = "the disk is full" if error.errno in {errno.ENOSPC, errno.EDQUOT} else str(error)
        raise MachineError(
            f"cannot write {path}: {what}; everything measured before is kept: make room and go on "
            "with --resume"
        ) from error
