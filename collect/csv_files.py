"""Reads sweeps in CSV: our own tidy columns, those of other programs, and those a caller names.

One row is one measurement, one column a fact. A dialect is another program's columns by ours, and
is recognised by its header. What a row says twice must agree: a time and a bandwidth that do not
fit each other are of other units than their columns, and neither is believed.

A mode other than `isolated` is what ran beside the collective; how strong it was is not known.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, ValidationError

from dynamiccl.collect.lines import opened
from dynamiccl.collect.nccl_tests import (
    CHUNK_ROWS,
    CollectiveName,
    Count,
    ImportOptions,
    Known,
    Part,
    ranks_per_node,
)
from dynamiccl.collect.output import FileReport, Row
from dynamiccl.datasets.rows import measurements_table, scope_of, trial_id
from dynamiccl.datasets.schema import DEFAULT_PROFILE, QUIET, Source, Statistic, Status
from dynamiccl.errors import OutputError, UnknownName, UserError
from dynamiccl.nccl import Collective
from dynamiccl.simulator.toml_table import first_problem
from dynamiccl.sizes import MAX_SIZE_BITS

CSV: Final = Source.TIDY_CSV.value

_of_runs: Final = partial(re.sub, r"mean_of_\d+_runs", Statistic.MEAN_OF_RUNS.value)
_Figure = Annotated[float | None, Field(ge=0.0, allow_inf_nan=False)]


class _Record(Known):
    """The cells of one record; what is empty is of one quiet run in the untouched environment."""

    source: str | None = None
    system: str
    num_ranks: Count | None = None
    ranks_per_node: Count | None = None
    collective: CollectiveName
    size_bytes: int = Field(ge=0, lt=1 << MAX_SIZE_BITS)
    datatype: str | None = None
    reduction_op: str | None = None
    mode: str = "isolated"
    launch_profile: str = DEFAULT_PROFILE
    in_place: bool | None = None
    run: str = "csv"
    repeat: int | None = Field(default=None, ge=0, lt=1 << 31)
    statistic: Annotated[Statistic, BeforeValidator(_of_runs)] = Statistic.MEAN
    time_us: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    algbw_gbytes_per_s: _Figure = None
    busbw_gbytes_per_s: _Figure = None
    wrong_values: int | None = Field(default=None, ge=0, lt=1 << 62)
    is_default: bool | None = None
    note: str = ""


CSV_COLUMNS: Final = tuple(_Record.model_fields)
#: Columns in other units, too: ours, and what a cell is multiplied by.
_UNITS: Final = {
    "time_ms": ("time_us", 1e3),
    "time_s": ("time_us", 1e6),
    **{f"{bw}_gbits_per_s": (f"{bw}_gbytes_per_s", 1 / 8) for bw in ("algbw", "busbw")},
    **{f"{bw}_mbytes_per_s": (f"{bw}_gbytes_per_s", 1e-3) for bw in ("algbw", "busbw")},
}
_TIMES: Final = ("time_us", "algbw_gbytes_per_s", "busbw_gbytes_per_s")
_FORCED: Final = ("algorithm", "protocol", "num_channels")
#: What a caller may know of cells that are empty.
_KNOWN: Final = {*Known.model_fields, "system", "num_ranks", "launch_profile"}
#: By what a bandwidth is more than the time says, and what that says of units.
_OFF: Final = {
    8.0: "the bandwidth seems to be in Gb/s",
    1e3: "the bandwidth seems to be in MB/s, or the time in ns",
    1e-3: "the time seems to be in ms",
    1e-6: "the time seems to be in s",
}
#: The columns of each dialect, OURS or OURS=THEIRS, `-` for what is not taken; and a remark.
_DIALECTS: Final = (
    (" ".join((*CSV_COLUMNS, *_UNITS)), ""),
    # NVIDIA/nccl plugins/tuner/example/scripts; in its own sample bandwidths do not fit times.
    (
        "collective size_bytes algorithm protocol num_channels=channels num_nodes=nodes "
        "num_ranks=ranks time_us=latency_us -=pipeOps -=regBuff -=cost_metric -=bandwidth_gbps",
        "taken as the CSV of NVIDIA's optimize_config.py; its bandwidth, whose unit is not known, "
        "is not used",
    ),
    # `Reporter` in ROCm/rccl-tests src/common.cpp.
    (
        "repeat=numCycle collective -=nodes processes=ranks comm_processes=rankspernode "
        "gpus=gpusperrank gpus size_bytes=size datatype=type reduction_op=redop in_place=inplace "
        "time_us=time algbw_gbytes_per_s=algbw busbw_gbytes_per_s=busbw wrong_values=#wrong",
        "taken as the CSV of rccl-tests, which under MPI tells no nodes (say --nodes)",
    ),
    # README.md beside the first; the names of its columns need not be there.
    (
        "collective=collective_type low=min_bytes size_bytes=max_bytes algorithm protocol "
        "num_channels=channels num_nodes=nNodes num_ranks=nRanks -=numPipeOps -=regBuff",
        "taken as a table of NVIDIA's example tuner, which says what is to run and no times: its "
        "rows are kept as requests, and nothing learns from them; import the CSV of its times",
    ),
)
_TABLE_LINE: Final = (
    r"(?mi:^\s*(?:all_?reduce|broadcast|reduce|all_?gather|reduce_?scatter)\s*,"
    r"\s*\d+\s*,\s*-?\d+\s*,\s*\w+\s*,\s*(?:ll|ll128|simple)\s*,)"
)
#: What a CSV holds at its beginning, and how one begins whose names nobody here knows.
CSV_SIGN: Final = rf"\A[^\n]*(?:size_bytes|\bsize, ?type, ?redop\b)|{_TABLE_LINE}"
SOME_CSV: Final = r"\A#?[A-Za-z][\w .()/#%-]*(?:[,;\t][\w .()/#%-]+){2,}\n[^\n]*[,;\t]"
#: How the note of a tuner's table begins.
_REQUEST: Final = "a tuner's table asks for it at"


def read_csv(path: Path, _: str, options: ImportOptions, report: FileReport) -> Iterator[Part]:
    """Yield the measurements of one CSV file; refused rows go to `report` with their line.

    Raises OutputError when a column is missing or unknown, and where the file is no CSV.
    """
    rows = _rows(path, options, report)
    while chunk := list(islice(rows, CHUNK_ROWS)):
        yield "measurements", measurements_table(chunk)


def _rows(path: Path, options: ImportOptions, report: FileReport) -> Iterator[Row]:
    repeats: defaultdict[tuple[Any, ...], set[int]] = defaultdict(set)
    for line, record, measured in _records(options, report):
        row = {**options.columns(path, record.system), **measured}
        row |= {"source_file": str(path), "source_line": line, "trial": trial_id(row)}
        config = (record.algorithm, record.protocol, record.num_channels)
        known = repeats[row["trial"], record.system, record.run, *config]
        busbw = record.busbw_gbytes_per_s if row["time_us"] is None else None
        if busbw == 0.0:
            report.remark("rows with a bandwidth of 0 keep no time")
        if not record.size_bytes:
            report.drop("size 0")
        elif busbw and row["num_ranks"] != 1:
            report.drop("a bus bandwidth without its number of ranks (say --ranks, --nodes)")
        elif record.repeat in known:
            report.duplicates += 1
        else:
            free = (number for number in count(len(known)) if number not in known)
            row["repeat"] = next(free) if record.repeat is None else record.repeat
            known.add(row["repeat"])
            yield row


def _records(options: ImportOptions, report: FileReport) -> Iterator[tuple[int, _Record, Row]]:
    """All records, the line that each ends on, and its columns; wrong ones are rejected."""
    with opened(Path(report.path)) as file:
        first = next(file, "")
        # Not polars: it fills a row that is cut short with nulls, and knows no lines.
        reader = csv.reader(chain([first], file), delimiter=max(",;\t", key=first.count))
        columns: list[str] | None = None
        known = options.model_dump(include=_KNOWN, exclude_none=True)
        try:
            for cells in filter(None, reader):
                is_row = columns is not None or re.match(_TABLE_LINE, ",".join(cells))
                columns = columns or _header(cells, options, report)
                if not (columns and is_row) or cells[0].startswith("#"):
                    continue
                report.rows_read += 1
                try:
                    record = _record(columns, cells, known)
                    measured = _measurement(record)
                except (ValueError, UnknownName) as error:
                    why = first_problem(error) if isinstance(error, ValidationError) else str(error)
                    report.reject(reader.line_num, why, ",".join(cells))
                else:
                    yield reader.line_num, record, measured
        except csv.Error as error:
            where = f"{report.path}:{reader.line_num}"
            raise OutputError(f"{where}: no CSV: {error}; correct that line") from error


def _record(ours: Sequence[str], cells: Sequence[str], known: Row) -> _Record:
    """The record of a row. Raises ValueError and UnknownName with what is wrong with it."""
    if "comm_processes" in ours and len(cells) == len(ours) + 1:
        # rccl-tests' header has no name for the number of communicators.
        at = ours.index("collective") + 1
        ours = [*ours[:at], "comms", *ours[at:]]
    if "low" in ours:
        ours = ours[: max(len(cells), len(ours) - 2)]
    if len(cells) != len(ours):
        raise ValueError(f"{len(cells)} cells where the header names {len(ours)} columns")
    pairs = zip(ours, map(str.strip, cells), strict=True)
    # NVIDIA's tuner has -1 for any and for NCCL's own.
    texts = {n: text for n, text in pairs if text not in {"", "-1", "N/A"} and n != "-"}
    for name in _UNITS.keys() & texts:
        target, factor = _UNITS[name]
        texts[target] = repr(float(texts.pop(name)) * factor)
    if "gpus" in ours:
        _ranks_of_rccl(texts)
    if "low" in ours:
        low, high = (int(texts.pop(name, 0)) for name in ("low", "size_bytes"))
        # 4294967295 is no end.
        texts["size_bytes"] = str(high if 0 < high < 0xFFFFFFFF else max(low, 1))
        texts["note"] = f"{_REQUEST} {low} to {high} bytes"
    # What a caller says was forced is of the rows that are not NCCL's own choice.
    is_default = texts.get("is_default", "").lower() in {"true", "1", "yes"}
    other = {*_FORCED} if is_default else set()
    other |= {"num_ranks"} if {"num_nodes", "ranks_per_node"} <= texts.keys() else set()
    kept = {name: told for name, told in known.items() if name not in other}
    return _Record.model_validate({**kept, **texts})


def _ranks_of_rccl(texts: dict[str, str]) -> None:
    """Ranks are processes times GPUs.

    Under MPI a row's cell for nodes has the number of communicators, and that for ranks per node
    has a communicator's processes: of nodes it tells nothing. With several, bandwidths must agree.
    """
    names = ("gpus", "comm_processes", "processes")
    gpus, of_comm, of_all = (int(texts.pop(name, 1)) for name in names)
    comms = texts.pop("comms", None)
    if comms is None:
        texts |= {"num_ranks": str(of_all * gpus), "num_nodes": str(of_all // max(of_comm, 1))}
        return
    algbw, busbw = (float(texts.get(name, 0)) for name in _TIMES[1:])
    factor = Collective.parse(texts.get("collective", "")).bus_factor
    for ranks, known in ((of_comm * gpus, {}), (of_all * gpus, {"num_nodes": comms})):
        if comms == "1" or (ranks and abs(algbw * factor(ranks) - busbw) < 0.01 * algbw):
            texts |= {"num_ranks": str(ranks), **known}
            return


def _header(cells: Sequence[str], options: ImportOptions, report: FileReport) -> list[str] | None:
    """Our names of the columns that a first line names, or None for a comment."""
    names = [name.strip() for name in (cells[0].lstrip("# "), *cells[1:])]
    named = _named(filter(None, (options.foreign_columns or "").split(",")))
    pairs = [([pair.partition("=") for pair in text.split()], why) for text, why in _DIALECTS]
    tables = [({theirs or ours: ours for ours, _, theirs in each}, why) for each, why in pairs]
    if re.match(_TABLE_LINE, ",".join(cells)):
        names = [*tables[-1][0]]
    fits = (each for each in tables if {*names} <= each[0].keys() | named.keys())
    if (found := next(fits, None)) is None and cells[0].startswith("#"):
        return None
    columns, remark = found or tables[0]
    columns |= named
    if named and (others := [name for name in names if name not in columns]):
        report.remark(f"columns that are not taken: {', '.join(others)}")
        columns |= dict.fromkeys(others, "-")
    if remark:
        report.remark(remark)
    ours = [columns.get(name, "") for name in names]
    _check_names(names, ours, options, report)
    for name in _FORCED:
        if name in ours and (told := getattr(options, name)):
            report.remark(f"empty cells of the column {name} are taken as the option's {told}")
    return ours


def _named(pairs: Iterable[str]) -> dict[str, str]:
    """Their names -> ours, as the caller says, either way; raises UserError for none of ours."""
    choices = (*CSV_COLUMNS, *_UNITS)
    named: dict[str, str] = {}
    for pair in pairs:
        left, _, right = map(str.strip, pair.partition("="))
        ours, theirs = (left, right or left) if left in choices else (right, left)
        if ours not in choices:
            raise UserError(
                f"--columns '{pair}': write OURS=THEIRS, such as size_bytes=bytes, with any of "
                f"{', '.join(choices)} before the ="
            )
        unit = re.search(r"(?i)(?:^|[^a-z])(m?)(?:s|sec|seconds?)(?:$|[^a-z])", theirs)
        if ours == "time_us" and unit:
            right = f"time_{unit[1].lower()}s={theirs}"
            raise UserError(f"--columns 'time_us={theirs}' is of another unit; write {right}")
        named[theirs] = ours
    return named


def _check_names(
    names: Sequence[str], columns: Sequence[str], options: ImportOptions, report: FileReport
) -> None:
    """Refuse columns that are missing or unknown; say what is assumed in place of others."""
    ours = [_UNITS.get(name, (name, 1.0))[0] for name in columns if name != "-"]
    times = () if "low" in ours else _TIMES
    needed = (("size_bytes",), ("collective", "--collective"), ("system", "--system"), times)
    there = {*ours, *(f"--{n}" for n in ("system", "collective") if getattr(options, n))}
    missing = [" or ".join(each) for each in needed if each and there.isdisjoint(each)]
    pairs = zip(names, columns, strict=True)
    odd = [name for name, own in pairs if not own or (own != "-" and columns.count(own) > 1)]
    if missing or odd:
        raise OutputError(
            f"{report.path}:1: no column {', '.join(missing) or '-'}; unknown or repeated column "
            f"{', '.join(odd) or '-'}; it has {', '.join(names)}, and a sweep may have "
            f"{', '.join(CSV_COLUMNS)}: add, rename or remove what is wrong, or say which is which "
            "with --columns size_bytes=NAME,time_us=NAME"
        )
    known = {name for name in ("launch_profile", *_FORCED) if getattr(options, name)} | {*ours}
    lacking = [n for n in ("mode", "launch_profile", "run", "statistic") if n not in known]
    taken = [f"{name} '{_Record.model_fields[name].default}'" for name in lacking]
    if known.isdisjoint({"is_default", *_FORCED}):
        taken.append("NCCL's own choice")
    if taken:
        report.remark(f"no column says otherwise, so all rows are taken as {', '.join(taken)}")


def _measurement(record: _Record) -> Row:
    """The columns of a record; raises ValueError where they contradict each other."""
    nodes, per_node, num_ranks = record.num_nodes, record.ranks_per_node, record.num_ranks
    if nodes and per_node:
        num_ranks = num_ranks or nodes * per_node
        if num_ranks != nodes * per_node:
            raise ValueError(f"{num_ranks} ranks are not {nodes} nodes of {per_node}")
    is_quiet = record.mode == "isolated"
    return {
        **record.model_dump(exclude={"system", *_FORCED, "mode", "repeat", "note"}),
        "source": CSV,
        "system_description": record.system,
        "num_ranks": num_ranks,
        "ranks_per_node": per_node or ranks_per_node(num_ranks, nodes),
        "default_scope": scope_of(record.launch_profile),
        "interference_kind": QUIET if is_quiet else record.mode,
        "interference_level": 0.0 if is_quiet else None,
        "reason": record.note or None,
        **_config(record),
        **_figures(record, num_ranks),
    }


def _config(record: _Record) -> Row:
    """The requested and the actual config.

    A channel count in a default row was read back, unless its note says `requested`: then it was
    forced and the rest left to NCCL, which is not NCCL's default (nothing was requested). A note of
    `channels = upper limit` is of the launch profile.
    """
    note, channels = record.note.lower(), record.num_channels
    names = {"algorithm": record.algorithm, "protocol": record.protocol}
    is_auto = channels is None and not any(names.values())
    is_default = is_auto if record.is_default is None else record.is_default
    is_limit = "upper limit" in note
    is_said = "channels" in note and "requested" in note
    is_forced = is_said if is_default else not (is_limit or "channels: read back" in note)
    return {
        "is_default": is_default and not (is_forced and channels),
        **{f"requested_{name}": None if is_default else told for name, told in names.items()},
        **{f"actual_{name}": told if is_default else None for name, told in names.items()},
        "requested_num_channels": channels if is_forced else None,
        "actual_num_channels": None if is_forced or is_limit else channels,
    }


def _figures(record: _Record, num_ranks: int | None) -> Row:
    """Time and bandwidth, one from the other, and what an attempt without both came to."""
    time_us, algbw, busbw = figures = [getattr(record, name) for name in _TIMES]
    collective = Collective.parse(record.collective)
    # Without a number of ranks those of two and of very many.
    factors = [collective.bus_factor(n) for n in ([num_ranks] if num_ranks else [2, 1 << 20])]
    status = Status.WRONG_VALUES if record.wrong_values else Status.OK
    statistic = record.statistic if any(each is not None for each in figures) else Statistic.NONE
    if time_us is not None and record.size_bytes:
        by_time = record.size_bytes / (time_us * 1e3)
        _check_fit(algbw, by_time, by_time)
        _check_fit(busbw, by_time * min(factors), by_time * max(factors))
        algbw = by_time
    elif statistic is Statistic.NONE and not record.note.startswith(_REQUEST):
        has_hung = re.search(r"(?i)\bhang|\bhung|timeout|timed out", record.note)
        status = Status.TIMED_OUT if has_hung else Status.FAILED
    elif algbw is None and busbw and len({*factors}) == 1 and factors[0]:
        algbw = busbw / factors[0]
    algbw = algbw or None
    if time_us is None and algbw:
        time_us = record.size_bytes / (algbw * 1e3)
    return {
        "status": status.value,
        "statistic": statistic.value,
        "time_us": time_us,
        "time_derived": record.time_us is None and algbw is not None,
        "algbw_gbytes_per_s": algbw,
    }


def _check_fit(told: float | None, least: float, most: float) -> None:
    """Raise ValueError where a bandwidth is none that the time says, within its printed digits."""
    low, high = min(least * 0.75, least - 0.05), max(most * 1.33, most + 0.05)
    if told is None or low <= told <= high:
        return
    off = told / most if most else 0.0
    why = [f"; {text}" for factor, text in _OFF.items() if 0.7 < off / factor < 1.4]
    raise ValueError(
        f"time and bandwidth contradict each other: {told:.4g} GB/s where the time says {most:.4g}"
        f"{''.join(why)}: correct them, or name their units (--columns time_ms=NAME)"
    )
