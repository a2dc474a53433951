"""Parses the benchmark's output into rows, one for each measured block.

Text is what survives a crash, JSON has the digits: JSON is taken when it is whole and holds every
row of the text, the text otherwise. A row that cannot be read, or of a size that is not the next of
the walk, ends what is believed: the blocks from there on count as not reached, and run again.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamiccl.collect.grid import DATATYPE_BYTES
from dynamiccl.collect.nccl_tests.facts import listed_hosts
from dynamiccl.collect.nccl_tests.json_output import json_tables
from dynamiccl.collect.nccl_tests.tables import rows_of
from dynamiccl.collect.nccl_tests.text import parse_text
from dynamiccl.collect.reports import FileReport, ImportOptions
from dynamiccl.datasets.schema import MEASUREMENTS
from dynamiccl.errors import DataError
from dynamiccl.nccl import Collective

#: Matches lines of Slurm and of Open MPI.
_LAUNCHERS: Final = re.compile(r"(?:srun|slurmstepd\S*|mpirun|mpiexec|prte\w*): |\[\S+:\d+\] PRTE ")
#: A row: size, count, type, redop, root, and then times.
_ROW: Final = re.compile(r"\s*\d+\s+\d+\s+[a-z]\w+\s+\w+\s+-?\d+\s+[\d.]")
#: The rest of a row from the type on, where another rank's output overwrote its beginning.
_TAIL: Final = re.compile(rf"(?:^|\s)(?:{'|'.join(DATATYPE_BYTES)})\s+\w+\s+-?\d+\s+[\d.]")
#: Columns that a half of a row has; the runner knows all others.
_KEPT: Final = frozenset(
    (
        "source",
        "gpu",
        "nccl_version",
        "nccl_tests_version",
        "size_bytes",
        "in_place",
        "time_us",
        "algbw_gbytes_per_s",
        "busbw_gbytes_per_s",
        "wrong_values",
        "status",
        "statistic",
        "time_min_us",
        "time_max_us",
        "time_p99_us",
        "time_cv_percent",
        "iteration_times_us",
        "process_times_us",
    )
)
_DROPPED: Final = frozenset(field.name for field in MEASUREMENTS) - _KEPT
_IMPOSSIBLE: Final = re.compile(r"no algorithm/protocol available", re.IGNORECASE)
_FAILURE: Final = re.compile(
    r"(Test \w+ failure|error|NCCL WARN|DYNAMICCL:|invalid)", re.IGNORECASE
)

#: The halves of one row: out-of-place, and in-place where there is one.
Block = list[dict[str, Any]]


def is_row(line: str) -> bool:
    """Whether a line is a result row, which counts as progress."""
    return _ROW.match(line) is not None


@dataclass(frozen=True, slots=True)
class Output:
    """The rows of the measured blocks, in block order."""

    blocks: tuple[Block, ...]
    #: Environment columns that the output names.
    environment: dict[str, Any]
    #: Hosts of the ranks in order, as a host list, if printed.
    hosts: str | None = None


def read_output(
    lines: Sequence[str],
    json: Path,
    *,
    collective: Collective,
    sizes: Sequence[int],
    num_blocks: int,
) -> Output:
    """Read the blocks of a launch.

    Args:
        lines: everything printed.
        json: where JSON was asked for; it need not be there.
        collective: which one it is.
        sizes: sizes of one walk in bytes, as printed.
        num_blocks: how many blocks there should be.
    """
    blocks = _believed(_text_blocks(lines, collective), sizes)
    # The JSON output has no release of nccl-tests.
    release = blocks[0][0].get("nccl_tests_version") if blocks else None
    from_json = _believed(_json_blocks(json, collective), sizes)
    if len(from_json) >= len(blocks) and from_json:
        blocks = from_json
    blocks = blocks[:num_blocks]
    facts = ("gpu", "nccl_version", "nccl_tests_version")
    known = blocks[0][0] if blocks else {}
    known = {"nccl_tests_version": release, **known}
    environment = {name: known[name] for name in facts if known.get(name)}
    return Output(tuple(blocks), environment, listed_hosts(lines))


def last_words(lines: Sequence[str]) -> str:
    """The error lines of a failed benchmark, else its last lines.

    A launcher ends the other ranks and tells each of them: of its lines only the first counts,
    which names the node that failed.
    """
    told = [line.strip() for line in lines if line.strip() and not is_row(line)]
    launchers = [line for line in told if _LAUNCHERS.match(line)]
    own = [line for line in told if not _LAUNCHERS.match(line)]
    failures = [line for line in own if _FAILURE.search(line)]
    # Comment lines are the table's header, which does not explain a failure.
    plain = [line for line in own if not line.startswith("#")]
    words = (failures or plain)[-3:]
    words += launchers[:1] if words else launchers[:3]
    return " | ".join(words)[:600] or "no output"


def is_impossible(lines: Sequence[str]) -> bool:
    """Whether NCCL logged that no such combination exists (2.24 and later, `src/enqueue.cc`)."""
    return any(_IMPOSSIBLE.search(line) for line in lines)


def _text_blocks(lines: Sequence[str], collective: Collective) -> list[Block | None]:
    text = "\n".join(lines)
    parsed = parse_text(text, where="output", collective=collective)
    # An unreadable row (torn, or without a time) still takes its place in the walk over sizes.
    by_line: dict[int, Block | None] = {
        number: []
        for number, line in enumerate(text.splitlines(), 1)
        if is_row(line) or _TAIL.search(line)
    }
    for half in parsed.rows:
        block = by_line.setdefault(half["source_line"], [])
        if block is not None:
            block.append({name: half[name] for name in half if name in _KEPT})
    for reject in parsed.rejected:
        by_line[reject.line] = None
    return [by_line[number] for number in sorted(by_line)]


def _json_blocks(path: Path, collective: Collective) -> list[Block | None]:
    if not path.is_file():
        return []
    report = FileReport(path=str(path), format="nccl-tests-json")
    options = ImportOptions(collective=collective.wire)
    base = {"run": "output", "system": "-", "sweep": "-"}
    try:
        tables = list(json_tables(path, base=base, options=options, report=report))
    except DataError:
        return []  # cut off by a crash: the text has what was measured
    blocks: list[Block | None] = []
    for half in (row for table in tables for row in rows_of(table, _DROPPED)):
        if not half["in_place"]:
            blocks.append([])
        if blocks and blocks[-1] is not None:
            blocks[-1].append(half)
    return [] if report.rejected else blocks


def _believed(blocks: Sequence[Block | None], sizes: Sequence[int]) -> list[Block]:
    """The blocks before the first one that is torn or not of the expected size."""
    good: list[Block] = []
    for number, block in enumerate(blocks):
        if not block or block[0]["size_bytes"] != sizes[number % len(sizes)]:
            break
        good.append(block)
    return good
