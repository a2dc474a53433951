"""Import of calls files of all ranks together: the time of a call depends on all of its ranks."""

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamiccl.collect.calls.joiner import Spill, join
from dynamiccl.collect.calls.reader import CallsHeader, read_header, read_records
from dynamiccl.collect.reports import FileReport
from dynamiccl.datasets.provenance import program_record
from dynamiccl.datasets.store import slug, write_part
from dynamiccl.errors import CorruptFile, DataError, OutputError

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallsFile:
    """One file to import, and the report to fill."""

    path: Path
    sha256: str
    report: FileReport


@dataclass(slots=True)
class CallsTaken:
    """Totals over the imported calls files."""

    calls: int = 0
    #: Calls whose time is known from all their ranks.
    calls_timed: int = 0
    parts: int = 0


def take_in(
    files: Sequence[CallsFile], out_dir: Path, *, base: dict[str, Any]
) -> tuple[CallsTaken, list[DataError]]:
    """Write the calls of `files` under `out_dir`; return what they gave, and each bad file's error.

    `base` has the columns that hold for all rows, `system` and `sweep` among them.
    """
    errors: list[DataError] = []
    good: list[tuple[CallsFile, CallsHeader]] = []
    for file in files:
        try:
            good.append((file, read_header(file.path)))
        except CorruptFile as error:
            file.report.failure = str(error)
            errors.append(error)
    if not good:
        return CallsTaken(), errors
    with tempfile.TemporaryDirectory(prefix="dynamiccl-calls-") as folder:
        spill = Spill(Path(folder), sum(file.path.stat().st_size for file, _ in good))
        for source, (file, _) in enumerate(good):
            unusable = _spill_one(spill, source, file)
            if unusable is not None:
                errors.append(unusable)
        taken = _write(spill, good, out_dir, base)
    _LOG.info("%d files: %d calls, %d with a time", len(good), taken.calls, taken.calls_timed)
    return taken, errors


def _spill_one(spill: Spill, source: int, file: CallsFile) -> OutputError | None:
    for records in read_records(file.path, file.report):
        spill.add(records, source, file.report)
    if file.report.rows_read or not file.report.rejected:
        return None
    problem = OutputError(f"{file.path} holds no usable entry; {file.report.rejected[0]}")
    file.report.failure = str(problem)
    return problem


def _write(
    spill: Spill,
    files: Sequence[tuple[CallsFile, CallsHeader]],
    out_dir: Path,
    base: dict[str, Any],
) -> CallsTaken:
    taken = CallsTaken()
    # No command line and no host, as for measurements: the same files make the same parts.
    record = program_record("import", files={file.path.name: file.sha256 for file, _ in files})
    environments = [_environment(header, base) for _, header in files]
    for frame in spill.frames():
        table, duplicates = join(frame, environments, base)
        for source, count in duplicates.items():
            files[source][0].report.duplicates += count
        taken.parts += len(write_part(out_dir, table, kind="calls", provenance=record))
        taken.calls += table.num_rows
        taken.calls_timed += table.num_rows - table["time_us"].null_count
    return taken


def _environment(header: CallsHeader, base: dict[str, Any]) -> dict[str, Any]:
    told = header.environment()
    run = slug(header.job) if header.job else str(base["sweep"])
    # What the caller says of the system wins over what the plugin saw of one machine.
    return {"run": run, **{name: value for name, value in told.items() if name not in base}}
