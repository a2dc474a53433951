"""A lock for one run of a sweep at a time, also on file systems without `flock`.

Where `flock` works it is used: the kernel releases it when a run dies. Lustre mounted without `-o
flock` returns ENOSYS, NFS without a lock manager ENOLCK; there a file that only one process can
create names the owner, and a dead owner's lock is taken over if its death can be proved.
"""

import errno
import fcntl
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from dynamiccl.errors import MachineError, UserError
from dynamiccl.slurm import SlurmQueue

_OWNER: Final = "owner"
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_log = logging.getLogger(__name__)


class SweepLock:
    """Held while a run lives."""

    def __init__(self, folder: Path, *, take_over: bool) -> None:
        """`take_over`: take the lock from an owner whose death cannot be proved."""
        self._folder = folder
        self._take_over = take_over
        self._file: BinaryIO | None = None
        self._owned: str | None = None

    def take(self) -> None:
        """Acquire the lock. Raises UserError when another run lives, or may live."""
        # Unbuffered: what a full disk refuses is not tried again when the file is closed.
        lock = (self._folder / "lock").open("a+b", buffering=0)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            owner = lock.read().decode(errors="replace").strip() or "another process"
            lock.close()
            raise UserError(
                f"{owner} is running this sweep into this directory already; wait for it, stop it, "
                "or take another --out"
            ) from error
        except OSError as error:
            lock.close()
            if error.errno not in _NO_LOCKS:
                raise
            _log.info("no locks in %s (%s): an owner file instead", self._folder, error.strerror)
            self._create_owner()
            return
        try:
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {os.uname().nodename}\n".encode())
        except OSError:
            lock.close()
            raise
        self._file = lock

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
        path = self._folder / _OWNER
        if self._owned is not None and _text(path) == self._owned:
            path.unlink(missing_ok=True)
        self._file = self._owned = None

    def _create_owner(self) -> None:
        path = self._folder / _OWNER
        text = json.dumps(_myself())
        while not _create(path, text):
            found = _text(path)
            if found is None:
                continue  # given back just now
            owner = _owner_in(found)
            dead = _why_dead(owner)
            if dead is None and not self._take_over:
                raise UserError(
                    f"process {owner.get('pid')} on {owner.get('host')} may be running this sweep: "
                    f"{path} is its, and there are no locks here that would tell; wait for it, or "
                    "where you know that it is gone, add --take-over"
                )
            if self._replace(found, text):
                _log.warning(
                    "taking over from process %s on %s: %s",
                    *(owner.get("pid"), owner.get("host")),
                    dead or "--take-over",
                )
                break
        self._owned = text

    def _replace(self, found: str, text: str) -> bool:
        """Replace a dead owner's file by ours atomically, one process at a time.

        False when it is no longer the file that was found.
        """
        path, taking = self._folder / _OWNER, self._folder / f"{_OWNER}.taking"
        if not _create(taking, text):
            raise UserError(f"another run takes this sweep over; if none does, remove {taking}")
        if _text(path) != found:
            taking.unlink()
            return False
        taking.replace(path)
        return True


def _myself() -> dict[str, Any]:
    #   SLURM_RESTART_COUNT  Slurm: how often the job was requeued; the attempt, for locks and jobs.
    return {
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "job": os.environ.get("SLURM_JOB_ID"),
        "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
    }


def _why_dead(owner: Mapping[str, Any]) -> str | None:
    """The evidence that an owner is dead; None when there is none."""
    pid, host = owner.get("pid"), owner.get("host")
    if host == os.uname().nodename and isinstance(pid, int):
        return None if _started(pid) == owner.get("started") else "it has ended"
    job = owner.get("job")
    if not isinstance(job, str) or not job.isdigit():
        return None
    if job == os.environ.get("SLURM_JOB_ID"):
        mine = os.environ.get("SLURM_RESTART_COUNT", "0")
        return None if mine == owner.get("restart") else f"job {job} was started anew"
    try:
        elements = SlurmQueue("").elements(job)
    except MachineError:
        return None
    return f"job {job} has ended" if all(e.ended for e in elements) else None


def _owner_in(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return {}  # cut short by a full disk, say
    return found if isinstance(found, dict) else {}


def _started(pid: int) -> str | None:
    """Boot id and start time (clock ticks) of a local process: process ids are reused."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return f"{boot} {stat.rpartition(')')[2].split()[19]}"


def _create(path: Path, text: str) -> bool:
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
