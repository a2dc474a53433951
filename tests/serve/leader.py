"""The leader's side of the brain protocol in Python; the real one is C++ (message.h)."""

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import ClassVar, Self

from dynamiccl.datasets.history import Call
from dynamiccl.errors import CorruptFile
from dynamiccl.schedule import AUTO
from dynamiccl.serve.brain_server import (
    _CALL,
    _HEADER,
    _SHAPE,
    _TASK,
    ASK,
    ERROR,
    KEEP,
    LENGTH,
    MAGIC,
    TABLE,
    VERSION,
    Answer,
    MessageError,
    Question,
    _Reader,
    _sized,
)
from dynamiccl.serve.build import BRAIN_NAME
from dynamiccl.serve.table import DecisionTable
from dynamiccl.serve.torchscript import BrainConfig, History, KeyCalls

NOTHING = History((), None)


class Leader:
    """The leader of one communicator, connected to the brain at an address."""

    opened: ClassVar[list[socket.socket]] = []

    def __init__(self, address: Path | bytes, config: BrainConfig) -> None:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.opened.append(self.connection)
        self.connection.settimeout(60)
        self.connection.connect(address if isinstance(address, bytes) else str(address))
        self._config = config
        self._numbers = count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def ask(self, history: History = NOTHING, config: BrainConfig | None = None) -> Answer:
        number = next(self._numbers)
        self.connection.sendall(encode_question(Question(number, config or self._config, history)))
        answer = self.told()
        assert answer.number == number
        return answer

    def told(self) -> Answer:
        """The next answer."""
        return decode_answer(self._read(LENGTH.unpack(self._read(4))[0]))

    def table(self, tasks: Sequence[KeyCalls]) -> DecisionTable:
        """The table in its answer; anything else fails the test."""
        answer = self.ask(History(tuple(tasks), None))
        assert answer.table is not None, answer
        return answer.table

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (part := self.connection.recv(size - len(data))):
            data += part
        return data

    def is_hung_up_on(self) -> bool:
        try:
            return self.connection.recv(1) == b""
        except ConnectionResetError:
            return True


@contextmanager
def torch_brain(build_dir: Path) -> Iterator[bytes]:
    """`dynamiccl-brain`, as the arbiter starts it; its address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("")  # the kernel draws a name
        listener.listen()
        process = subprocess.Popen([build_dir / BRAIN_NAME], stdin=listener.fileno())
        yield listener.getsockname()
        assert process.poll() is None
        process.kill()
        process.wait()


def encode_question(question: Question) -> bytes:
    """A question's bytes, its length in front."""
    config, history = question.config, question.history
    parts = [
        _HEADER.pack(MAGIC, VERSION, ASK, question.number),
        _SHAPE.pack(config.num_nodes, config.num_ranks),
        _sized(config.artifact.encode()),
        _sized(config.system.encode()),
        _sized(history.table.to_bytes() if history.table is not None else b""),
        LENGTH.pack(len(history.tasks)),
    ]
    for task in history.tasks:
        parts.append(_TASK.pack(task.collective, task.bin, len(task.calls)))
        numbers = _numbers(task)
        parts += [_encode_call(*each) for each in zip(task.calls, numbers, strict=True)]
    return _sized(b"".join(parts))


def decode_answer(data: bytes) -> Answer:
    """Read an answer without its length; raises MessageError."""
    reader = _Reader(data)
    number = reader.header(TABLE, KEEP, ERROR)
    kind, body = reader.kind, data[_HEADER.size :]
    if kind == ERROR:
        return Answer(number, error=body.decode(errors="replace"))
    if (kind == KEEP) != (not body):
        raise MessageError(f"{len(body)} bytes do not go with an answer of kind {kind}")
    try:
        return Answer(number, table=DecisionTable.from_bytes(body) if body else None)
    except CorruptFile as error:
        raise MessageError(str(error)) from error


def _numbers(task: KeyCalls) -> list[int]:
    """The last byte of each call: its number among the timed ones of its key, or zeros."""
    count = len(task.calls)
    if task.num_timed is None:
        return [0] * count
    return [(task.num_timed - back) % 256 for back in reversed(range(count))]


def _encode_call(call: Call, number: int) -> bytes:
    return _CALL.pack(
        call.size_bytes,
        call.time_us,
        -1.0 if call.skew_us is None else call.skew_us,
        -1.0 if call.interference is None else call.interference,
        AUTO if call.algorithm is None else call.algorithm,
        AUTO if call.protocol is None else call.protocol,
        call.num_channels or 0,
        number,
    )
