"""Reads a large JSON object item by item: memory does not grow with the file.

Traces are one object with one long array. Items of the arrays that a caller names are yielded one
by one, all other values whole. The standard library's decoder reads each item, so any valid JSON is
read, whatever its layout.

PyTorch's profiler writes a fixed layout, which allows a short cut: a line break cannot be inside a
JSON string, and only an event's own closing brace follows a line break and two blanks. So an event
that is not wanted is skipped by searching for these, without decoding it.
"""

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

_CHUNK_BYTES: Final = 1 << 20
#: Characters of one item or value beyond which a file is taken for damaged.
_MAX_VALUE_CHARS: Final = 64 << 20
_DECODE: Final = json.JSONDecoder(strict=False).raw_decode
_BLANKS: Final = " \t\r\n"
_NOT_BLANK: Final = re.compile(r"[^ \t\r\n]")
#: Where the next item begins, after one that does not decode.
_NEXT_ITEM: Final = re.compile(r"\}\s*,\s*(?=\{\s*\")")
#: How an event of PyTorch's profiler begins and ends.
_LAID_OUT: Final = '{\n    "ph": "'
_LAID_OUT_END: Final = "\n  }"
_LAID_OUT_NEXT: Final = ",\n  "
#: Characters from its beginning that decide whether an event is wanted.
_DECIDES: Final = 256


@dataclass(frozen=True, slots=True)
class Damage:
    """A place in the file that does not decode; reading goes on behind it where possible."""

    line: int
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Item:
    """An item of one of the arrays, or a whole value of the object."""

    key: str
    value: Any
    is_item: bool


class JsonStream:
    """The values of one JSON object, as an iterator."""

    def __init__(
        self, stream: BinaryIO, arrays: frozenset[str], wanted: re.Pattern[str] | None = None
    ) -> None:
        """`arrays` are read item by item; `wanted` matches where a laid-out event is wanted."""
        self._stream = stream
        self._arrays = arrays
        self._wanted = wanted
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""
        self._at = 0
        self._line = 1
        self._ended = False

    def __iter__(self) -> Iterator[Item | Damage]:
        """Give items and values in the file's order, and Damage where it does not decode."""
        try:
            yield from self._members()
        except _UnreadableError as error:
            yield Damage(self._line_of(self._at), str(error), self._excerpt())

    def _members(self) -> Iterator[Item | Damage]:
        if self._next_char() != "{":
            raise _UnreadableError("does not begin with '{'")
        self._at += 1
        while (char := self._next_char()) != "}":
            if char == ",":
                self._at += 1
                continue
            key = self._value()
            if not isinstance(key, str) or self._next_char() != ":":
                raise _UnreadableError("a name and a colon are expected")
            self._at += 1
            if key in self._arrays and self._next_char() == "[":
                self._at += 1
                yield from self._items(key)
                if self._ended and self._at == len(self._text):
                    return  # its end is missing, and that is said
            else:
                yield Item(key, self._value(), is_item=False)

    def _items(self, key: str) -> Iterator[Item | Damage]:
        while (char := self._next_char()) != "]":
            if char == ",":
                self._at += 1
            elif not self._passed_over():
                try:
                    yield Item(key, self._value(), is_item=True)
                except _UnreadableError as error:
                    yield Damage(self._line_of(self._at), str(error), self._excerpt())
                    if not self._at_next_item():
                        self._at = len(self._text)
                        return
        self._at += 1

    def _passed_over(self) -> bool:
        """Skip laid-out events that are not wanted; False at one that is."""
        passed = False
        while self._wanted is not None:
            before = self._at
            is_undecided = self._pass_over(self._wanted)
            passed = passed or self._at != before
            if not is_undecided or not self._more():
                break
        return passed

    def _pass_over(self, wanted: re.Pattern[str]) -> bool:
        """Skip within the buffered text; True when more text is needed to decide."""
        text, at, last = self._text, self._at, len(self._text) - _DECIDES
        while at < last and text.startswith(_LAID_OUT, at) and not wanted.match(text, at):
            end = text.find(_LAID_OUT_END, at)
            if end < 0:
                self._at = at
                return True
            at = end + len(_LAID_OUT_END)
            # Most often another event follows at once.
            if text.startswith(_LAID_OUT_NEXT, at):
                at += len(_LAID_OUT_NEXT)
            else:
                break
        self._at = at
        return at >= last

    def _value(self) -> Any:
        self._next_char()
        while True:
            try:
                value, end = _DECODE(self._text, self._at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - 16
                if is_cut and self._more():
                    continue
                reason = "ends within a value" if is_cut else f"no JSON: {error.msg}"
                raise _UnreadableError(reason) from error
            # A number at the end of what was read may go on.
            if end < len(self._text) or not self._more():
                self._at = end
                return value

    def _next_char(self) -> str:
        while True:
            found = _NOT_BLANK.search(self._text, self._at)
            if found:
                self._at = found.start()
                return found.group()
            if not self._more():
                raise _UnreadableError("ends before its closing brace")

    def _at_next_item(self) -> bool:
        """Move to the next item of the array; False at its end."""
        while True:
            found = _NEXT_ITEM.search(self._text, self._at + 1)
            if found:
                self._at = found.end()
                return True
            if not self._more():
                return False

    def _more(self) -> bool:
        """Read more text and drop what was consumed; False at the end of the file."""
        if self._ended:
            return False
        if len(self._text) - self._at > _MAX_VALUE_CHARS:
            raise _UnreadableError(f"a value of more than {_MAX_VALUE_CHARS} characters")
        self._line = self._line_of(self._at)
        try:
            raw = self._stream.read(_CHUNK_BYTES)
        except (OSError, EOFError) as error:
            raise _UnreadableError(f"cannot be read on: {error}") from error
        self._ended = not raw
        self._text = self._text[self._at :] + self._decoder.decode(raw, final=self._ended)
        self._at = 0
        return not self._ended

    @property
    def line(self) -> int:
        """The line in which the last item ends."""
        return self._line_of(self._at)

    def _line_of(self, at: int) -> int:
        return self._line + self._text.count("\n", 0, at)

    def _excerpt(self) -> str:
        return self._text[self._at : self._at + 80]


class _UnreadableError(Exception):
    """Raised when what follows is no JSON."""
