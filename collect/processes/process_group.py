"""Starts a program in a session of its own, and ends all of its processes.

A signal goes to the leader's process group first, since srun and mpirun end their ranks on other
nodes when asked. What is left after that is killed by session: mpirun gives each local rank a group
of its own.
"""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from dynamiccl.collect.launchers.job import Command
from dynamiccl.errors import MachineError

_log = logging.getLogger(__name__)

#: Seconds between looks at processes that are ending.
_LOOK_S: Final = 0.02
#: Seconds that the kernel may take to end what got SIGKILL, before we stop waiting.
_KILLED_S: Final = 5.0


def changed_environment(command: Command, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with the command's changes (pure)."""
    kept = {name: value for name, value in environ.items() if name not in command.unset}
    return {**kept, **command.env}


def start(
    command: Command, output: int | IO[bytes], *, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a command as leader of a new session, with stdout and stderr together in `output`.

    Raises:
        MachineError: the program is not there or cannot be executed.
    """
    try:
        return subprocess.Popen(
            command.argv,
            env=changed_environment(command, os.environ),
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise MachineError(
            f"cannot start '{command.argv[0]}': {error.strerror}; install it, or correct its path "
            f"(whole command: {command.text})"
        ) from error


def has_ended(leader: subprocess.Popen[bytes]) -> bool:
    """Whether the leader has ended, without reaping it: its number stays ours until we wait."""
    if leader.returncode is not None:
        return True
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, leader.pid, flags) is not None


def end(
    leader: subprocess.Popen[bytes], grace_s: float, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """End the whole session: SIGTERM to its group, after `grace_s` seconds SIGKILL to all of it.

    Args:
        leader: started by `start`, not yet waited for; it is reaped here.
        grace_s: seconds for srun or mpirun to end ranks on other nodes.
        meanwhile: called while waiting, e.g. to read output that would block the leader.

    An exception meanwhile (a third Ctrl-C) cuts the grace short.
    """
    if leader.returncode is not None:
        return  # reaped: its number may be somebody else's by now
    try:
        _signal_group(leader.pid, signal.SIGTERM)
        _wait_for_end(leader.pid, grace_s, meanwhile)
    finally:
        left = _members(leader.pid)
        if left:
            _log.debug("killing what SIGTERM left of session %d: %s", leader.pid, left)
        _kill_session(leader.pid)
        leader.wait()


def end_leftovers(leader: subprocess.Popen[bytes], grace_s: float) -> None:
    """Reap a leader that has ended by itself, and end what it left running in its group."""
    leader.wait()
    try:
        os.killpg(leader.pid, 0)
    except ProcessLookupError:
        return
    left = _members(leader.pid)
    if left:
        _log.warning("process %d ended but left %s running: ending them", leader.pid, left)
        try:
            _signal_group(leader.pid, signal.SIGTERM)
            _wait_for_end(leader.pid, grace_s, lambda: None)
        finally:
            _kill_session(leader.pid)


def _wait_for_end(session: int, seconds: float, meanwhile: Callable[[], object]) -> None:
    deadline = time.monotonic() + seconds
    while _members(session) and time.monotonic() < deadline:
        meanwhile()
        time.sleep(_LOOK_S)


def _kill_session(session: int) -> None:
    # Again and again, since a process may start another one between our look and its end.
    deadline = time.monotonic() + _KILLED_S
    while (members := _members(session)) and time.monotonic() < deadline:
        for pid in members:
            _send(os.kill, pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def _signal_group(group: int, number: signal.Signals) -> None:
    _send(os.killpg, group, number)


def _send(call: Callable[[int, int], None], target: int, number: signal.Signals) -> None:
    # It may have ended between our look and now, which is what we want.
    with suppress(ProcessLookupError):
        call(target, number)


def _members(session: int) -> list[int]:
    """Living processes of a session, from /proc/PID/stat (proc(5): fields 3 state, 6 session)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended since we listed it
        # The name stands in brackets and may hold spaces and brackets itself.
        fields = text[text.rindex(b")") + 2 :].split()
        if int(fields[3]) == session and fields[0] not in {b"Z", b"X"}:
            found.append(int(entry.name))
    return found
