"""`dynamiccl-deploy brain`: the process that leaders ask, its messages and its socket.

The messages' layout is written down once, in `serve/plugin/brain/message.h`; this is its other end.
One that does not decode raises MessageError, and nothing longer than the longest question that
exists is ever read.

A thread serves each leader's connection. Only processes of this user are served: the socket has
mode 0600, and the peer's user is checked. Each connection has a brain of its own, so that
communicators and jobs do not mix; after a reconnect it is a new one. An exception in a policy is
answered as an error, and the job keeps its table.
"""

import errno
import json
import logging
import math
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Self

import typer

from dynamiccl import cli
from dynamiccl.datasets.history import WINDOW_LENGTH, Call
from dynamiccl.errors import CorruptFile, DataError, UserError
from dynamiccl.nccl import MAX_CHANNELS, NUM_TUNED_COLLECTIVES, Algorithm, Collective, Protocol
from dynamiccl.schedule import AUTO
from dynamiccl.serve.artifact import open_artifact
from dynamiccl.serve.brain_policies import POLICIES, Brain, find_policy_maker
from dynamiccl.serve.options import Json
from dynamiccl.serve.table import MAX_BINS, MAX_FILE_BYTES, DecisionTable
from dynamiccl.serve.torchscript import BrainConfig, History, KeyCalls
from dynamiccl.sizes import MAX_SIZE_BITS

# --- Messages ---

MAGIC: Final = b"DCBRAIN\0"
VERSION: Final = 1
ASK, TABLE, KEEP, ERROR = 1, 2, 3, 4
LENGTH: Final = struct.Struct("<I")
_HEADER: Final = struct.Struct("<8sIIQ")
_SHAPE: Final = struct.Struct("<ii")
_TASK: Final = struct.Struct("<iii")
_CALL: Final = struct.Struct("<QdddbbbB")
MAX_ARTIFACT_BYTES: Final = 4096
MAX_SYSTEM_BYTES: Final = 200
#: Maximum bytes of an error text; the leader's log line is shorter.
_MAX_ERROR_BYTES: Final = 255
MAX_TASKS: Final = NUM_TUNED_COLLECTIVES * MAX_BINS
#: Maximum bytes of a question, without its length: all task keys with full windows.
MAX_ASK_BYTES: Final = (
    _HEADER.size
    + 24
    + MAX_ARTIFACT_BYTES
    + MAX_SYSTEM_BYTES
    + MAX_FILE_BYTES
    + MAX_TASKS * (_TASK.size + WINDOW_LENGTH * _CALL.size)
)


class MessageError(DataError):
    """Raised when received bytes are not a message of this protocol."""


@dataclass(frozen=True, slots=True)
class Question:
    """A leader's request."""

    number: int
    config: BrainConfig
    history: History


@dataclass(frozen=True, slots=True)
class Answer:
    """A brain's reply: a table, nothing (keep the current one), or an error."""

    number: int
    table: DecisionTable | None = None
    error: str | None = None


def encode_answer(answer: Answer) -> bytes:
    """An answer's bytes, length first."""
    if answer.error is not None:
        kind, body = ERROR, answer.error.encode()[:_MAX_ERROR_BYTES]
    elif answer.table is not None:
        kind, body = TABLE, answer.table.to_bytes()
    else:
        kind, body = KEEP, b""
    return _sized(_HEADER.pack(MAGIC, VERSION, kind, answer.number) + body)


def decode_question(data: bytes) -> Question:
    """Decode a question (without its length); raises MessageError."""
    reader = _Reader(data)
    number = reader.header(ASK)
    num_nodes, num_ranks = reader.unpack(_SHAPE)
    artifact, system = reader.text(MAX_ARTIFACT_BYTES), reader.text(MAX_SYSTEM_BYTES)
    table = reader.sized(MAX_FILE_BYTES)
    (num_tasks,) = reader.unpack(LENGTH)
    if num_tasks > MAX_TASKS:
        raise MessageError(f"{num_tasks} tasks are more than a communicator has")
    try:
        tasks = tuple(reader.task() for _ in range(num_tasks))
        in_force = DecisionTable.from_bytes(table, where="the table in force") if table else None
    except (ValueError, CorruptFile) as error:
        raise MessageError(f"impossible history: {error}") from error
    reader.finish()
    return Question(
        number, BrainConfig(artifact, system, num_nodes, num_ranks), History(tasks, in_force)
    )


def _sized(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def _num_timed(numbers: Sequence[int]) -> int | None:
    """The number of the last call, modulo 256; None from a leader of an older release."""
    in_order = all((b - a) % 256 == 1 for a, b in pairwise(numbers))
    # A lone call is the first of its key.
    is_told = in_order and (len(numbers) > 1 or list(numbers) == [1])
    return numbers[-1] if is_told else None


class _Reader:
    """Parses a message from its front; never reads past its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0
        self.kind = 0

    def take(self, size: int) -> bytes:
        taken = self._data[self._offset : self._offset + size]
        if len(taken) != size:
            raise MessageError(f"a message of {len(self._data)} bytes ends too early")
        self._offset += size
        return taken

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def header(self, *kinds: int) -> int:
        """Check the header; returns the question's number."""
        magic, version, self.kind, number = _HEADER.unpack(self.take(_HEADER.size))
        if magic != MAGIC or version != VERSION:
            raise MessageError(f"not a message of version {VERSION}")
        if self.kind not in kinds:
            raise MessageError(f"a message of kind {self.kind} where {kinds} were expected")
        return int(number)

    def sized(self, limit: int) -> bytes:
        (size,) = self.unpack(LENGTH)
        if size > limit:
            raise MessageError(f"a field of {size} bytes where {limit} are the most")
        return self.take(size)

    def text(self, limit: int) -> str:
        try:
            return self.sized(limit).decode()
        except UnicodeDecodeError as error:
            raise MessageError(f"a text that is not UTF-8: {error}") from error

    def task(self) -> KeyCalls:
        collective, index, num_calls = self.unpack(_TASK)
        if not 0 <= num_calls <= WINDOW_LENGTH:
            raise MessageError(f"{num_calls} calls in a window")
        pairs = [self.call() for _ in range(num_calls)]
        calls = tuple(call for call, _ in pairs)
        return KeyCalls(Collective(collective), index, calls, _num_timed([n for _, n in pairs]))

    def call(self) -> tuple[Call, int]:
        """The next call, and its number."""
        size_bytes, time_us, skew_us, interference, algorithm, protocol, num_channels, number = (
            _CALL.unpack(self.take(_CALL.size))
        )
        finite = math.isfinite(time_us) and math.isfinite(skew_us) and math.isfinite(interference)
        if not finite or time_us <= 0 or not 0 < size_bytes < 1 << MAX_SIZE_BITS:
            raise MessageError(f"{size_bytes} bytes in {time_us} us")
        if not 0 <= num_channels <= MAX_CHANNELS:
            raise MessageError(f"{num_channels} channels")
        call = Call(
            size_bytes=size_bytes,
            time_us=time_us,
            algorithm=None if algorithm == AUTO else Algorithm(algorithm),
            protocol=None if protocol == AUTO else Protocol(protocol),
            num_channels=num_channels or None,
            interference=None if interference < 0 else interference,
            skew_us=None if skew_us < 0 else skew_us,
        )
        return call, number

    def finish(self) -> None:
        if self._offset != len(self._data):
            raise MessageError(f"{len(self._data) - self._offset} bytes too many")


# --- The server ---

#: Maximum number of connected leaders; further connections are closed.
MAX_LEADERS: Final = 256
#: Size of sun_path in bytes, its zero included (man 7 unix).
MAX_PATH_BYTES: Final = 108
#: Seconds that each running decision may still take when the server ends.
_LAST_ANSWER_S: Final = 1.0
#: struct ucred: pid, uid, gid.
_CREDENTIALS: Final = struct.Struct("3i")

_log = logging.getLogger(__name__)


class BrainServer:
    """Listens at `path` from the moment it is made; `serve` answers until `stop`.

    A context manager: leaving it hangs up on everybody and removes the socket.
    """

    def __init__(self, path: Path, make_brain: Callable[[], Brain]) -> None:
        """Bind and listen; raises UserError when the path cannot be used."""
        self.path = path
        self._make_brain = make_brain
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._listener = _listen(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        with self._lock:
            left = dict(self._connections)
        for connection in left:
            _shut_down(connection)
        for thread in left.values():
            thread.join(_LAST_ANSWER_S)
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def serve(self) -> None:
        """Answer leaders until `stop` is called, from a signal handler or another thread."""
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._stopped.is_set():
                    return
                if error.errno in {errno.ECONNABORTED, errno.EMFILE, errno.ENFILE}:
                    _log.warning("a leader could not be served: %s", error)
                    self._stopped.wait(0.1)
                    continue
                raise
            self._admit(connection)

    def stop(self) -> None:
        """Make `serve` return."""
        # No lock: a signal handler may interrupt the thread that holds it.
        self._stopped.set()
        _shut_down(self._listener)

    def _admit(self, connection: socket.socket) -> None:
        pid, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        with self._lock:
            full = len(self._connections) >= MAX_LEADERS
            if uid == os.geteuid() and not full and not self._stopped.is_set():
                thread = threading.Thread(target=self._serve_leader, args=(connection, pid))
                thread.daemon = True  # a policy that never returns must not keep us from ending
                self._connections[connection] = thread
                thread.start()
                return
        connection.close()
        why = f"{MAX_LEADERS} are served already" if full else f"it runs as user {uid}"
        _log.warning("hung up on process %d: %s", pid, why)

    def _serve_leader(self, connection: socket.socket, pid: int) -> None:
        _log.info("process %d: connected", pid)
        try:
            brain = self._make_brain()
            while (question := _receive(connection)) is not None:
                connection.sendall(encode_answer(_answer(brain, question)))
        except MessageError as error:
            _log.warning("process %d talks nonsense: %s", pid, error)
        except OSError as error:
            _log.info("process %d: %s", pid, error)
        except Exception:
            _log.exception("process %d: the policy could not be made", pid)
        finally:
            with self._lock:
                del self._connections[connection]
            connection.close()
            _log.info("process %d: gone", pid)


def _answer(brain: Brain, question: Question) -> Answer:
    try:
        table = brain.decide(question.config, question.history)
    except Exception as error:
        # An exception in a policy is answered as an error: the leader keeps its table.
        _log.exception("the policy failed; the table in force stays")
        return Answer(question.number, error=f"{type(error).__name__}: {error}")
    return Answer(question.number, table=table)


def _receive(connection: socket.socket) -> Question | None:
    """The next question; None when the leader has disconnected."""
    head = _read(connection, LENGTH.size)
    if not head:
        return None
    (size,) = LENGTH.unpack(head)
    if size > MAX_ASK_BYTES:
        raise MessageError(f"a message of {size} bytes")
    return decode_question(_read(connection, size))


def _read(connection: socket.socket, size: int) -> bytes:
    """`size` bytes, or b"" at the end; raises MessageError for an end in between."""
    parts: list[bytes] = []
    missing = size
    while missing:
        part = connection.recv(missing)
        if not part:
            if missing == size:
                return b""
            raise MessageError(f"it hung up {missing} bytes before the end of a message")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) >= MAX_PATH_BYTES:
        raise UserError(f"{path} is too long for a socket; take one of < {MAX_PATH_BYTES} bytes")
    if not path.parent.is_dir():
        raise UserError(f"there is no directory {path.parent} to put the socket in; make it first")
    _remove_left_over(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Closed to others from the start, and not only from the chmod on.
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise UserError(f"no socket can be made at {path}: {error.strerror}") from error
    finally:
        os.umask(before)
    listener.listen(64)
    return listener


def _remove_left_over(path: Path) -> None:
    """Remove the socket of a server that was killed; raises UserError for anything else."""
    if not path.is_socket():
        if path.exists():
            raise UserError(f"{path} is not a socket; take another path")
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise UserError(f"{path} is in use or another user's: {error.strerror}") from error
    raise UserError(f"a brain listens at {path} already; stop it or take another path")


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno not in {errno.ENOTCONN, errno.EBADF}:
            raise


# --- The command ---


def brain_command(
    policy: Annotated[
        str, typer.Option(help=f"One of {', '.join(POLICIES)}, or module:function of your own.")
    ],
    artifact: Annotated[Path, typer.Option(help="Artifact directory.")],
    path: Annotated[Path, typer.Option("--socket", help="Unix socket to listen at.")],
    as_json: Json = False,
) -> None:
    """Serve decisions to jobs in mode `adaptive`, until Ctrl-C.

    Start it on each node that may have a leader, and the job with DYNAMICCL_BRAIN_SOCKET=SOCKET.
    Stopped or slow, it leaves every job the table that it has.

    Example: dynamiccl-deploy brain --policy search --artifact out/artifact --socket b.sock
    """
    make = find_policy_maker(policy)
    opened = open_artifact(artifact)
    make(opened)  # what is wrong with it shows now, and not to the first leader
    cli.configure_logging(verbose=False)
    with BrainServer(path.absolute(), lambda: make(opened)) as server:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.stop())
        started = {"socket": str(server.path), "policy": policy, "artifact": str(artifact)}
        if as_json:
            print(json.dumps(started), flush=True)
        _log.info("policy '%s' of %s listens at %s", policy, artifact, server.path)
        server.serve()
    _log.info("stopped")
