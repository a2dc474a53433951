"""Options, per-file report and summary of an import.

Nothing is lost silently: a row that was read is written, dropped with a reason, counted as a
duplicate, or listed as rejected with its file, line and text.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

#: Rejected lines kept per file; a file of noise would otherwise fill memory with its own report.
MAX_REJECTED_PER_FILE: Final = 10_000
_EXCERPT_CHARS: Final = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What the caller knows about the files. What a file itself says wins, except where noted."""

    #: Hive directory. Benchmark output does not name its system, so it is required for it;
    #: for tidy CSV it replaces the file's own `system` column.
    system: str | None = None
    #: Hive directory; None = the folder of a benchmark output, the stem of a CSV file.
    sweep: str | None = None
    #: For output that does not name its collective. Used before the name of the file is.
    collective: str | None = None
    num_ranks: int | None = None
    #: NCCL's nNodes. Wins over the number of host names (NVL72, NCCL_HOSTID), not over NCCL's log.
    num_nodes: int | None = None
    nccl_version: str | None = None
    gpu: str | None = None
    #: Replaces the profile that is derived from NCCL_* settings shown in the output.
    launch_profile: str | None = None
    #: What was requested of NCCL, for output that does not show it.
    algorithm: str | None = None
    protocol: str | None = None
    num_channels: int | None = None
    #: TOML file with facts of known systems (`collect/importing/systems.py`).
    systems_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """One line that looked like a measurement and could not be taken."""

    path: str
    line: int
    reason: str
    excerpt: str

    @classmethod
    def of(cls, path: str, line: int, reason: str, text: str) -> "Rejected":
        """Cut `text` to an excerpt that prints on one line."""
        printable = "".join(c if c.isprintable() else " " for c in text.strip())
        return cls(path, line, reason, printable[:_EXCERPT_CHARS])

    def __str__(self) -> str:
        """`file:line: reason: 'text'`, as compilers print it."""
        return f"{self.path}:{self.line}: {self.reason}: '{self.excerpt}'"


@dataclass(slots=True, kw_only=True)
class FileReport:
    """What became of one file's rows; filled while it is read."""

    path: str
    format: str
    #: Complete rows found, dropped ones and duplicates included. A torn line is not a row.
    rows_read: int = 0
    measurements_written: int = 0
    #: Rows read and left out on purpose, by reason (`size 0`).
    dropped: dict[str, int] = field(default_factory=dict)
    #: Measurements that had been read before (printed twice).
    duplicates: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    #: Rejected lines beyond the limit on those that are kept.
    rejected_more: int = 0
    #: What the reader of the summary should know: conflicts, inferences, failed checks.
    remarks: list[str] = field(default_factory=list)
    #: What of the options the output contradicts: such rows are left out.
    contradictions: list[str] = field(default_factory=list)
    #: Rows of parts that an earlier import had written.
    already_there: int = 0
    #: Why the file gave nothing, when it gave nothing.
    failure: str | None = None
    parts: list[str] = field(default_factory=list)
    #: Cells of NCCL's own cost model that a log told, as rows of `costs`.
    costs: list[dict[str, Any]] = field(default_factory=list)
    #: What NCCL ran for each size, by a log without benchmark rows, as rows of `decisions`.
    decisions: list[dict[str, Any]] = field(default_factory=list)

    def reject(self, line: int, reason: str, text: str) -> None:
        """List a line as rejected."""
        if len(self.rejected) < MAX_REJECTED_PER_FILE:
            self.rejected.append(Rejected.of(self.path, line, reason, text))
        else:
            self.rejected_more += 1

    def drop(self, reason: str, count: int = 1) -> None:
        """Count rows that are left out on purpose."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def remark(self, text: str) -> None:
        """Note something, once."""
        if text not in self.remarks:
            self.remarks.append(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Totals of recorded jobs: calls files and traces, over all ranks."""

    #: One a collective, whatever the number of ranks that recorded it.
    calls: int = 0
    #: Those of them whose time is known from all ranks.
    calls_timed: int = 0
    #: Of traces: records of single ranks that calls were joined of, and steps.
    rank_records: int = 0
    steps: int = 0
    #: Why calls of traces have no time -> calls.
    untimed: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSummary:
    """Totals over all files, and each file's report."""

    rows_read: int
    measurements_written: int
    recorded: Recorded
    dropped: int
    duplicates: int
    rejected: tuple[Rejected, ...]
    files: tuple[FileReport, ...]
    #: Measurements of those written that an earlier import had written, too.
    already_there: int
    #: Files of directories that are not read -> what they are.
    skipped: dict[str, str]

    @classmethod
    def of(
        cls,
        files: list[FileReport],
        *,
        recorded: Recorded,
        skipped: dict[str, str] | None = None,
    ) -> "ImportSummary":
        """Add up the reports of all files; joined calls belong to no single file."""
        return cls(
            rows_read=sum(f.rows_read for f in files),
            measurements_written=sum(f.measurements_written for f in files),
            recorded=recorded,
            dropped=sum(sum(f.dropped.values()) for f in files),
            duplicates=sum(f.duplicates for f in files),
            rejected=tuple(r for f in files for r in f.rejected),
            files=tuple(files),
            already_there=sum(f.already_there for f in files),
            skipped=skipped or {},
        )

    def remarks(self) -> dict[str, list[str]]:
        """Remark -> the files that it is about."""
        found: dict[str, list[str]] = {}
        for file in self.files:
            for text in file.remarks:
                found.setdefault(text, []).append(file.path)
        return found

    @property
    def written_text(self) -> str:
        """What was written, as text."""
        costs = sum(len(f.costs) for f in self.files)
        decisions = sum(len(f.decisions) for f in self.files)
        parts = [f"{self.measurements_written} measurements"]
        told = self.recorded
        if told.calls:
            joined = f" from {told.rank_records} records of ranks" if told.rank_records else ""
            parts.append(f"{told.calls} calls{joined} ({told.calls_timed} with a time)")
        if told.steps:
            parts.append(f"{told.steps} steps")
        if costs:
            parts.append(f"{costs} of NCCL's costs")
        if decisions:
            parts.append(f"{decisions} of NCCL's decisions")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The summary as plain values for `json.dumps`; rejected lines appear once."""
        files = [dataclasses.asdict(report) for report in self.files]
        for report in files:
            report["rejected"] = len(report["rejected"]) + report.pop("rejected_more")
            report["costs"] = len(report["costs"])
            report["decisions"] = len(report["decisions"])
        return {
            "rows_read": self.rows_read,
            "measurements_written": self.measurements_written,
            "calls_written": self.recorded.calls,
            "calls_timed": self.recorded.calls_timed,
            "rank_records": self.recorded.rank_records,
            "steps_written": self.recorded.steps,
            "untimed": self.recorded.untimed,
            "dropped": self.dropped,
            "duplicates": self.duplicates,
            "already_there": self.already_there,
            "skipped": list(self.skipped),
            "rejected": [dataclasses.asdict(line) for line in self.rejected],
            "files": files,
        }
