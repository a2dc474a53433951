"""Splits a byte stream into lines."""

from dataclasses import dataclass
from typing import Final

#: Bytes of a line that are kept; a runaway log must not fill our memory.
MAX_LINE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One line of output, without its end."""

    text: str
    #: When its end arrived, in seconds since the epoch.
    arrived_s: float


class LineSplitter:
    """Takes chunks as they arrive and gives back the lines that end in them.

    Bytes that are no UTF-8 become U+FFFD. What a line has beyond `max_bytes` is dropped and
    counted.
    """

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        """Keep at most `max_bytes` of a line."""
        self._max = max_bytes
        self._parts: list[bytes] = []
        self._kept = 0
        self._dropped = 0

    def feed(self, chunk: bytes, arrived_s: float) -> list[Line]:
        """The lines that this chunk completes."""
        *ends, rest = chunk.split(b"\n")
        lines = []
        for end in ends:
            self._keep(end)
            lines.append(self._take(arrived_s))
        self._keep(rest)
        return lines

    def close(self, arrived_s: float) -> list[Line]:
        """The last line, if it has no newline."""
        return [self._take(arrived_s)] if self._parts or self._dropped else []

    def _keep(self, piece: bytes) -> None:
        room = self._max - self._kept
        if piece[:room]:
            self._parts.append(piece[:room])
        self._kept += len(piece[:room])
        self._dropped += len(piece) - len(piece[:room])

    def _take(self, arrived_s: float) -> Line:
        # A pseudo-terminal (srun --unbuffered) ends lines with a carriage return too.
        text = b"".join(self._parts).removesuffix(b"\r").decode(errors="replace")
        if self._dropped:
            text += f" [{self._dropped} more bytes]"
        self._parts, self._kept, self._dropped = [], 0, 0
        return Line(text, arrived_s)
