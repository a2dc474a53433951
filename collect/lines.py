"""Plain lines of whatever file a log lies in, without colours, envelopes and prefixes.

A prefix is what launchers, containers and log collectors put before a line, in any nesting. Those
of `_PREFIXES` are known; others are learned from what stands before nccl-tests' header lines. An
envelope is a JSON object of which one text is the line.
"""

import bz2
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, TextIO

from dynamiccl.errors import CorruptFile, OutputError

_PACKED: Final[dict[bytes, Callable[..., Any]]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}
_NO_TEXT: Final = {
    b"PK\x03\x04": "a zip archive or a spreadsheet, which is not read; unpack it, or save the "
    "sheet as CSV",
    b"\x28\xb5\x2f\xfd": "packed by zstd, which is not read; unpack it (zstd -d)",
    b"<!DOCTYPE html": "a web page, which is not read; save the raw text",
}
#: PowerShell's `>` writes UTF-16, with a mark or without.
_ENCODINGS: Final = (
    (rb"\xff\xfe(?:[\t\r\n\x1b -~]\0){3}|\xfe\xff(?:\0[\t\r\n\x1b -~]){3}", "utf-16"),
    (rb"(?:[\t\r\n\x1b -~]\0){8}", "utf-16-le"),
    (rb"(?:\0[\t\r\n\x1b -~]){8}", "utf-16-be"),
    (b"", "utf-8-sig"),
)
#: Colours, also where ESC was lost or is `^[`; titles and other controls.
_CONTROLS: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()][0-9A-B]|\x1b[=>78M]"
    r"|(?:\^\[)?\[\d{1,3}(?:;\d{1,3})*m|\^\[\[m|\ufeff"
)
_CLOCK: Final = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_DATE: Final = r"(?:\d{4}[-/]\d\d[-/]\d\d|\d\d[-/]\d\d[-/]\d{2,4})"
_MONTH: Final = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}\d{1,2}"
_TIME: Final = (
    rf"(?:{_DATE}[T ,] ?{_CLOCK}(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
    rf"|(?:[A-Z][a-z]{{2}} )?{_MONTH},? (?:\d{{4}} )?{_CLOCK}(?: \d{{4}})?|{_CLOCK})"
)
#: From the first character to the space behind.
_PREFIXES: Final = (
    rf"[\[(]?{_TIME}[\])]?(?::|,| -)? ?",  # `kubectl logs --timestamps`, ts, mpirun, loggers
    r"\s+(?=#)",  # quoted in a page
    r"std(?:out|err) [FP] ",  # container runtimes' own files
    r"\[?(?:INFO|DEBUG|WARNING|WARN|ERROR)\]?(?::| -)? ",  # loggers, behind a time
    r"\[pod/[^\]]{1,200}\] ",  # `kubectl logs --prefix`
    r" {0,80}(?:\[[^\[\]<>]{1,80}\]){0,3}<std(?:out|err|diag)>: ?",  # mpirun --tag-output
    r" {0,6}\d{1,6}: ",  # srun -l
    r"\[(?:default|rank)?\d{1,6}(?:@[\w.-]{1,64})?\](?:: ?| )",  # MPICH, Intel MPI, torchrun
    r"\([^()=]{0,60}\b(?:rank|pid|ip)=[^()]{1,120}\) ?",  # SkyPilot, Ray
    r"(?=[\w.@-]*\d)[\w.@-]{2,100} *\| ",  # docker compose, docker service
    r"[\w.-]{1,64} [\w./@-]{1,64}\[\d{1,9}\]: ",  # syslog, journald
    r"[IWEF]\d{4} \d\d:\d\d:\d\d[.]\d+ +\d+ [\w.]+:\d+\] ",  # glog
    r"[\w.-]{1,64}: (?=\s*\d+\s+\d+\s+[a-z]\w+\s)",  # pdsh, clush, before rows
)
_PREFIX: Final = re.compile(rf"\A(?:{'|'.join(_PREFIXES)})+")
#: Rows have none of these.
_MARK: Final = re.compile(r"[:\])|{\x1b^\ufeff]|\[\d")
#: docker's json-file, Fluent Bit, journald, cloud logs.
_TEXT_KEYS: Final = ("log", "message", "MESSAGE", "msg", "textPayload", "text", "line")
_ENVELOPE: Final = re.compile(rf'\s*\{{.*"(?:{"|".join(_TEXT_KEYS)})"\s*:\s*".*\}}\s*$', re.DOTALL)
#: A header of nccl-tests behind what is no row and no line of NCCL's.
_BEHIND: Final = re.compile(
    r"(?!\s*\d+\s|.*NCCL)([^#\n]{0,159}[^#\s\n] *)(?:#?\s*size\s+(?:count|time)\s|#\s*(?:nThread \d"
    r"|Rank\s+\d+\s|Using devices|nccl-tests version|Collective test |Out of bounds|Avg bus band))"
)


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """Unpacked and decoded text. Raises CorruptFile (while read, too), OutputError and OSError."""
    with path.open("rb") as file:
        first = file.read(8)
    unpack = next((each for magic, each in _PACKED.items() if first.startswith(magic)), open)
    try:
        with unpack(path, "rb") as file:
            head = file.read(512)
        if head[257:262] == b"ustar":
            raise OutputError(f"{path} is an archive, which is not read; unpack it (tar xf)")
        for magic, what in _NO_TEXT.items():
            if head.lstrip()[: len(magic)].lower() == magic.lower():
                raise OutputError(f"{path} is {what}")
        encoding = next(name for mark, name in _ENCODINGS if re.match(mark, head))
        with unpack(path, "rt", encoding=encoding, errors="replace") as text:
            yield text
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        # The system's errors have a number, those of unpacking none.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CorruptFile(f"{path} is damaged: {error}; copy it again") from error


def plain_lines(lines: Iterable[str]) -> Iterator[str]:
    """Lines as the program printed them; one for each, but for envelopes of several."""
    rest = iter(lines)
    # Prefixes are learned before the first is read.
    beginning = list(islice(rest, 2_000))
    shapes = {shape for line in beginning for shape in map(_shape, _texts(line)) if shape}
    learned: re.Pattern[str] | None = None
    for line in chain(beginning, rest):
        for text in _texts(line):
            if "#" in text and (shape := _shape(text)) and shape not in shapes:
                shapes.add(shape)
                learned = None
            if shapes and learned is None:
                learned = re.compile("|".join(sorted(shapes, reverse=True)))
            found = learned.match(text) if learned else None
            yield text[found.end() :] if found else text


def unwrapped(file: Iterable[str]) -> Iterator[str]:
    """Lines as they are, or their text where the first is in an envelope or behind a prefix."""
    lines = iter(file)
    first = [*islice(lines, 1)]
    rest = chain(first, lines)
    return rest if [*plain_lines(first)] == first else plain_lines(rest)


def _texts(line: str) -> list[str]:
    """A line without colours and prefixes, or those of an envelope."""
    if not _MARK.search(line):
        return [line]
    text = _PREFIX.sub("", _CONTROLS.sub("", line))
    if "{" in text and _ENVELOPE.match(text):
        try:
            told = json.loads(text)
        except (ValueError, RecursionError):
            return [text]
        inside = next((told[key] for key in _TEXT_KEYS if isinstance(told.get(key), str)), None)
        if inside is not None:
            return [each for part in inside.splitlines() or [""] for each in _texts(part)]
    return [text]


def _shape(text: str) -> str | None:
    """A pattern of what stands before a header of nccl-tests, numbers left open."""
    found = _BEHIND.match(text)
    before = re.sub(r"(?:\\ )+", " +", re.escape(found[1])) if found else None
    return before and re.sub(r"\d+", r"\\d+", before)
