"""The messages between a leader and a brain process.

The layout is written down once, in `serve/plugin/brain/message.h`; this is its other end.
A message that does not decode raises MessageError, and nothing longer than the longest question
that exists is ever read.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from dynamiccl.datasets.history import WINDOW_LENGTH, Call
from dynamiccl.errors import CorruptFile, DataError
from dynamiccl.nccl import MAX_CHANNELS, NUM_TUNED_COLLECTIVES, Algorithm, Collective, Protocol
from dynamiccl.schedule import AUTO
from dynamiccl.serve.brain_history import BrainConfig, History, KeyCalls
from dynamiccl.serve.table import MAX_BINS, MAX_FILE_BYTES, DecisionTable
from dynamiccl.sizes import MAX_SIZE_BITS

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
