"""The brain server: a Unix socket, a thread for each leader's connection.

Only processes of this user are served: the socket has mode 0600, and the peer's user is checked.
Each connection has a brain of its own, so that communicators and jobs do not mix; after a reconnect
it is a new one. An exception in a policy is answered as an error, and the job keeps its table.
"""

import errno
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from dynamiccl.errors import UserError
from dynamiccl.serve.brain.policies import Brain
from dynamiccl.serve.brain.protocol import (
    LENGTH,
    MAX_ASK_BYTES,
    Answer,
    MessageError,
    Question,
    decode_question,
    encode_answer,
)

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
