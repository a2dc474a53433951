"""Tidy CSV sweeps: one measurement a row, one column a fact, as published sweeps are tidied.

A file needs `size_bytes`, `collective`, a time or a bus bandwidth, and `system` unless the import
names it. Where another column is missing, all rows have its plain value (`_PLAIN`); rows alike then
are repeats of one measurement, in their order. Decisions that the columns leave open:

* A channel count in a default row was read back, unless its note says `requested`: then it was
  forced and algorithm and protocol were left to NCCL, which is a requested config of its own and
  not NCCL's default (the definition in the schema: nothing was requested).
* `channels = upper limit` in a note is a limit of the launch profile, not a requested count.
* A mode other than `isolated` is what ran beside the collective; how strong it was is not known.
* Time is computed from the bus bandwidth where only that is given (`time_derived`). A bandwidth
  that is printed as 0 has no time, and stays a row without one.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from dynamiccl.collect.importing.systems import KnownSystems
from dynamiccl.collect.nccl_tests.settings import default_scope
from dynamiccl.collect.reports import FileReport, ImportOptions
from dynamiccl.datasets.rows import measurements_table
from dynamiccl.datasets.schema import DEFAULT_PROFILE, QUIET, Source, Statistic, Status
from dynamiccl.datasets.store import slug
from dynamiccl.errors import OutputError, UnknownName
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.sizes import MAX_SIZE_BITS

#: Every column, in the usual order.
COLUMNS: Final = (
    *("source", "system", "gpu", "num_nodes", "ranks_per_node", "nccl_version", "collective"),
    *("size_bytes", "algorithm", "protocol", "num_channels", "mode", "launch_profile"),
    *("in_place", "run", "repeat", "statistic", "time_us", "busbw_gbytes_per_s", "is_default"),
    "note",
)
_NEEDED: Final = ("size_bytes", "collective")
#: One of these is needed, too.
_TIMES: Final = ("time_us", "busbw_gbytes_per_s")
#: What a row has in a column that its file lacks: one quiet run in the untouched environment.
_PLAIN: Final[Mapping[str, str]] = {
    "mode": "isolated",
    "launch_profile": DEFAULT_PROFILE,
    "run": "csv",
    "statistic": Statistic.MEAN.value,
}
_LEAST_COLUMNS: Final = 3
_NAME: Final = re.compile(r"[A-Za-z_][\w ()/.%-]{0,40}")
#: What makes two rows one measurement printed twice.
_KEY: Final = tuple(
    name
    for name in COLUMNS
    if name not in {"source", "statistic", "time_us", "busbw_gbytes_per_s", "note"}
)
_PART_ROWS: Final = 100_000
_BOOLEANS: Final[Mapping[str, bool | None]] = {"true": True, "false": False, "": None}
#: What a note says about an attempt without a result; the first that matches.
_OUTCOMES: Final = (
    (re.compile(r"\bhang|\bhung|timeout|timed out", re.IGNORECASE), Status.TIMED_OUT),
    (re.compile(r"\bcrash", re.IGNORECASE), Status.FAILED),
    (re.compile(r"\binvalid|infeasible", re.IGNORECASE), Status.INFEASIBLE),
    (re.compile(r"\bwrong", re.IGNORECASE), Status.WRONG_VALUES),
)
_MEAN_OF_RUNS: Final = re.compile(r"mean_of_\d+_runs")


class _BadRow(ValueError):
    """Raised for a row that is rejected; the message is the reason."""


def is_tidy_csv(first_line: str) -> bool:
    """Whether a line is the header of a CSV file, supported or not.

    >>> is_tidy_csv("size,collective,us"), is_tidy_csv("n1:7:7 [0] NCCL INFO Using a, b, c")
    (True, False)
    """
    names = [name.strip().strip('"') for name in first_line.split(",")]
    return len(names) >= _LEAST_COLUMNS and all(map(_NAME.fullmatch, names))


def csv_tables(
    path: Path,
    sweep: str,
    *,
    options: ImportOptions,
    systems: KnownSystems,
    report: FileReport,
) -> Iterator[pa.Table]:
    """Yield the measurements of one CSV file; refused rows go to `report` with their line.

    Raises OutputError when a column is missing or unknown.
    """
    seen: Counter[tuple[str, ...]] = Counter()
    rows: list[dict[str, Any]] = []
    for line, given in _records(path, options, report):
        report.rows_read += 1
        cells = _filled(given, options)
        try:
            row = _row(cells, options, systems)
        except (_BadRow, UnknownName) as error:
            report.reject(line, str(error), ",".join(cells.values()))
            continue
        key = tuple(cells[name] for name in _KEY)
        if "repeat" not in given:
            row["repeat"] = seen[key]
        seen[key] += 1
        if not _is_kept(row, report, is_again="repeat" in given and seen[key] > 1):
            continue
        rows.append({**row, "sweep": sweep, "source_file": str(path), "source_line": line})
        if len(rows) >= _PART_ROWS:
            yield measurements_table(rows)
            rows = []
    if rows:
        yield measurements_table(rows)


def _is_kept(row: Mapping[str, Any], report: FileReport, *, is_again: bool) -> bool:
    """Whether a row is kept; if not, the report gets the reason."""
    if is_again:
        report.duplicates += 1
        return False
    if row["size_bytes"] == 0:
        report.drop("size 0")
        return False
    if row["status"] == Status.OK.value and row.get("time_us") is None:
        report.remark("rows with a bandwidth of 0 or an unknown number of ranks keep no time")
    return True


def _filled(given: Mapping[str, str], options: ImportOptions) -> dict[str, str]:
    """A row's cells, with defaults for columns that the file lacks."""
    nodes, ranks = options.num_nodes, options.num_ranks
    plain = {
        **_PLAIN,
        "num_nodes": str(nodes or ""),
        "ranks_per_node": str(ranks // nodes) if nodes and ranks and ranks % nodes == 0 else "",
    }
    cells = {name: given.get(name, plain.get(name, "")) for name in COLUMNS}
    if "is_default" not in given:
        forced = any(cells[name] for name in ("algorithm", "protocol", "num_channels"))
        cells["is_default"] = "false" if forced else "true"
    return cells


def _records(
    path: Path, options: ImportOptions, report: FileReport
) -> Iterator[tuple[int, dict[str, str]]]:
    """Each record with the line it starts on; records of another length are rejected."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file)
        try:
            names = [name.strip() for name in next(reader, [])]
        except csv.Error as error:
            raise OutputError(f"{path}:1: no CSV: {error}; correct the header line") from error
        _check_names(path, names, options)
        _tell_plain(names, report)
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                report.reject(line, f"no CSV: {error}", "")
                continue
            if not cells:
                continue
            if len(cells) != len(names):
                reason = f"{len(cells)} cells where the header names {len(names)} columns"
                report.rows_read += 1
                report.reject(line, reason, ",".join(cells))
                continue
            yield line, dict(zip(names, (cell.strip() for cell in cells), strict=True))


def _check_names(path: Path, names: list[str], options: ImportOptions) -> None:
    known = ", ".join(COLUMNS)
    missing = [name for name in _NEEDED if name not in names]
    if options.system is None and "system" not in names:
        missing.append("system (or --system)")
    if not set(_TIMES) & set(names):
        missing.append(" or ".join(_TIMES))
    if missing:
        raise OutputError(
            f"{path}:1: no column {', '.join(missing)}; it has {', '.join(names)}, and a sweep may "
            f"have {known}: add or rename what is missing"
        )
    for name in names:
        if name not in COLUMNS:
            raise OutputError(
                f"{path}:1: unknown column '{name}'; a sweep may have {known}: rename or remove it"
            )


def _tell_plain(names: list[str], report: FileReport) -> None:
    """Remark on the defaults that rows take for missing columns."""
    taken = [f"{name} '{value}'" for name, value in _PLAIN.items() if name not in names]
    if not {"is_default", "algorithm", "protocol"} & set(names):
        taken.append("NCCL's own choice")
    if taken:
        report.remark(f"no column says otherwise, so all rows are taken as {', '.join(taken)}")


def _row(cells: dict[str, str], options: ImportOptions, systems: KnownSystems) -> dict[str, Any]:
    if cells["statistic"] == Statistic.TARGET.value:
        raise _BadRow("statistic 'target' is no measurement")
    nodes, per_node = _count(cells, "num_nodes"), _count(cells, "ranks_per_node")
    quiet = _required(cells, "mode") == "isolated"
    profile = options.launch_profile or _required(cells, "launch_profile")
    version = cells["nccl_version"] or options.nccl_version
    row: dict[str, Any] = {
        **systems.columns_of(options.system or slug(_required(cells, "system"))),
        "system_description": cells["system"],
        "source": Source.TIDY_CSV.value,
        "run": _required(cells, "run"),
        "repeat": _count(cells, "repeat", least=0) or 0,
        "gpu": cells["gpu"] or options.gpu,
        "nccl_version": str(NcclVersion.parse(version)) if version else None,
        "collective": Collective.parse(cells["collective"]).wire,
        "size_bytes": _size(cells),
        "num_nodes": nodes,
        "ranks_per_node": per_node,
        "num_ranks": nodes * per_node if nodes and per_node else None,
        "in_place": _boolean(cells, "in_place"),
        "launch_profile": profile,
        "default_scope": default_scope(profile),
        "interference_kind": QUIET if quiet else cells["mode"],
        "interference_level": 0.0 if quiet else None,
        "reason": cells.get("note") or None,
    }
    return {**row, **_config(cells), **_figures(cells, row)}


def _config(cells: dict[str, str]) -> dict[str, Any]:
    """Requested and actual config; see the decisions on top."""
    note = cells.get("note", "").lower()
    algorithm = Algorithm.parse(cells["algorithm"]).wire if cells["algorithm"] else None
    protocol = Protocol.parse(cells["protocol"]).wire if cells["protocol"] else None
    channels = _count(cells, "num_channels")
    default = _boolean(cells, "is_default")
    if default is None:
        raise _BadRow("is_default is empty; write true or false")
    forced = channels if _channels_forced(default, note) else None
    read_back = None if forced is not None or "upper limit" in note else channels
    if not default:
        return {
            "is_default": False,
            "requested_algorithm": algorithm,
            "requested_protocol": protocol,
            "requested_num_channels": forced,
            "actual_num_channels": read_back,
        }
    return {
        "is_default": forced is None,
        "requested_num_channels": forced,
        "actual_algorithm": algorithm,
        "actual_protocol": protocol,
        "actual_num_channels": read_back,
    }


def _channels_forced(default: bool, note: str) -> bool:
    if default:
        return "channels" in note and "requested" in note
    return "upper limit" not in note and "channels: read back" not in note


def _figures(cells: dict[str, str], row: dict[str, Any]) -> dict[str, Any]:
    time, busbw = _figure(cells, "time_us"), _figure(cells, "busbw_gbytes_per_s")
    if time is None and busbw is None:
        note = cells.get("note", "")
        status = next((s for pattern, s in _OUTCOMES if pattern.search(note)), Status.FAILED)
        return {"status": status.value, "statistic": Statistic.NONE.value}
    if time == 0.0:
        raise _BadRow("time_us is 0; leave it empty when it is not known")
    figures: dict[str, Any] = {
        "status": Status.OK.value,
        "statistic": _statistic(cells),
        "busbw_gbytes_per_s": busbw,
    }
    if time is not None:
        algbw = row["size_bytes"] / (time * 1e3)
        return {**figures, "time_us": time, "algbw_gbytes_per_s": algbw}
    factor = _bus_factor(Collective.parse(row["collective"]), row["num_ranks"])
    if not busbw or not factor:
        return figures
    algbw = busbw / factor
    derived = row["size_bytes"] / (algbw * 1e3)
    return {**figures, "time_us": derived, "algbw_gbytes_per_s": algbw, "time_derived": True}


def _bus_factor(collective: Collective, num_ranks: int | None) -> float | None:
    """Bus bandwidth / algorithm bandwidth, also where it is 1 for any number of ranks."""
    if num_ranks is not None:
        return collective.bus_factor(num_ranks)
    few, many = collective.bus_factor(2), collective.bus_factor(3)
    return few if few == many else None


def _statistic(cells: dict[str, str]) -> str:
    text = _required(cells, "statistic")
    if _MEAN_OF_RUNS.fullmatch(text):
        return Statistic.MEAN_OF_RUNS.value
    names = [statistic.value for statistic in Statistic]
    if text not in names:
        raise UnknownName("statistic", text, names)
    return text


def _required(cells: dict[str, str], name: str) -> str:
    if not cells[name]:
        raise _BadRow(f"{name} is empty")
    return cells[name]


def _boolean(cells: dict[str, str], name: str) -> bool | None:
    value = cells[name].lower()
    if value not in _BOOLEANS:
        raise _BadRow(f"{name} is '{cells[name]}'; write true, false or nothing")
    return _BOOLEANS[value]


def _size(cells: dict[str, str]) -> int:
    size = _count(cells, "size_bytes", least=0)
    if size is None:
        raise _BadRow("size_bytes is empty")
    return size


def _count(cells: dict[str, str], name: str, *, least: int = 1) -> int | None:
    text = cells[name]
    if not text:
        return None
    if not text.isdecimal() or len(text) > 19 or int(text) >> MAX_SIZE_BITS or int(text) < least:
        raise _BadRow(f"{name} is '{text}', not a whole number from {least} on")
    return int(text)


def _figure(cells: dict[str, str], name: str) -> float | None:
    text = cells[name]
    if not text:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise _BadRow(f"{name} is '{text}', not a number") from error
    if not 0.0 <= value < float("inf"):
        raise _BadRow(f"{name} is '{text}', not a number from 0 on")
    return value
