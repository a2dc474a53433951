"""Reads sweeps in CSV: our tidy columns, those of other programs, and those a caller names.

A dialect is another program's columns, recognised by its header; other columns tell their unit by
name (`Time (us)`, `size(MiB)`). Neither of a contradicting time and bandwidth is believed: the
units are others. A mode other than `isolated` is what ran beside, at an unknown strength.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

from dynamiccl.collect.lines import opened, unwrapped
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
from dynamiccl.datasets.schema import DEFAULT_PROFILE, QUIET, Source, Statistic, Status
from dynamiccl.datasets.store import measurements_table, scope_of, trial_id
from dynamiccl.errors import OutputError, UnknownName, UserError
from dynamiccl.nccl import Collective
from dynamiccl.simulator.toml_table import first_problem
from dynamiccl.sizes import MAX_SIZE_BITS

CSV: Final = Source.TIDY_CSV.value

_of_runs: Final = partial(re.sub, r"mean_of_\d+_runs", Statistic.MEAN_OF_RUNS.value)
_Figure = Annotated[float | None, Field(ge=0.0, allow_inf_nan=False)]


class _Record(Known):
    """One record; empty cells mean one quiet run in the untouched environment."""

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
    time_us: float | None = Field(default=None, gt=0.0, lt=1e10, allow_inf_nan=False)
    algbw_gbytes_per_s: _Figure = None
    busbw_gbytes_per_s: _Figure = None
    wrong_values: int | None = Field(default=None, ge=0, lt=1 << 62)
    is_default: bool | None = None
    note: str = ""


CSV_COLUMNS: Final = tuple(_Record.model_fields)
#: Column and unit -> ours, factor, others' spelling. No name tells MB from MiB, or bits in gb/s.
_UNITS: Final = {
    "time_ns": ("time_us", 1e-3, r"(?i:n(?:ano)?s(?:ecs?|econds?)?)"),
    "time_us": ("time_us", 1.0, r"(?i:(?:[u\u00b5\u03bc\ufffd]|micro)s(?:ecs?|econds?)?)"),
    "time_ms": ("time_us", 1e3, r"(?i:m(?:illi)?s(?:ecs?|econds?)?)"),
    "time_s": ("time_us", 1e6, r"(?i:s(?:ecs?|econds?)?)"),
    "size_bytes": ("size_bytes", 1.0, r"(?i:b(?:ytes?)?)"),
    **{f"size_{p}ib": ("size_bytes", 1024.0**n, f"(?i:{p}ib)") for n, p in enumerate("kmg", 1)},
    **{
        f"{bw}_{p.lower()}{noun}s_per_s": (
            f"{bw}_gbytes_per_s",
            by * share,
            rf"(?:{p}{letter}|(?i:{p}{noun}s?))(?:/|p|_per_)s",
        )
        for bw in ("algbw", "busbw")
        for p, by in (("M", 1e-3), ("G", 1.0), ("Gi", 1.024**3))
        for noun, letter, share in (("byte", "B", 1.0), ("bit", "b", 1 / 8))
    },
}
_MEASURES: Final = {
    "time": r"(?:(?:avg|mean|average)[ _]?)?(?:time|latency|lat)",
    "size": r"(?:(?:message|msg|data)[ _]?)?(?:size|bytes)",
    "algbw": r"alg(?:orithm)?[ _]?(?:bw|bandwidth)",
    "busbw": r"bus[ _]?(?:bw|bandwidth)",
}
_CAMEL: Final = "(?<=[a-z])(?=[A-Z][a-z])"
_SHORT: Final = {"algo": "algorithm", "proto": "protocol", "bytes": "size_bytes"}
_Column = tuple[str, float]
_Names = Mapping[str, _Column]
_TIMES: Final = ("time_us", "algbw_gbytes_per_s", "busbw_gbytes_per_s")
_FORCED: Final = ("algorithm", "protocol", "num_channels")
#: Cells that leave the choice to NCCL, and column names of a config or its settings.
_OWN: Final = {"default", "auto", "none", "-"}
_OF_CONFIG: Final = re.compile(r"(?i)algo|proto|chan|conf|nccl|tun|plugin|variant|setting|env|prof")
#: Bandwidth over what the time says -> what that says of units.
_OFF: Final = {
    8.0: "the bandwidth seems to be in Gb/s",
    1e3: "the bandwidth seems to be in MB/s, or the time in ns",
    1e-3: "the time seems to be in ms",
    1e-6: "the time seems to be in s",
}
#: OURS or OURS=THEIRS, and a remark. `-` is not taken; `+` joins the launch profile, and without a
#: forced config nobody knows whose choice it was.
_DIALECTS: Final = (
    # nccl-tests; times are us.
    (
        "size_bytes=size -=count datatype=type reduction_op=redop -=root time_us=time "
        "algbw_gbytes_per_s=algbw busbw_gbytes_per_s=busbw wrong_values=#wrong",
        "taken as columns of nccl-tests: bytes, us and GB/s",
    ),
    # NVIDIA/nccl plugins/tuner/example/scripts; in its sample bandwidths do not fit times.
    (
        "collective size_bytes algorithm protocol num_channels=channels num_nodes=nodes "
        "num_ranks=ranks time_us=latency_us +pipeops=pipeOps +regbuff=regBuff -=cost_metric "
        "-=bandwidth_gbps",
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
    # README.md beside the second; it may have no header.
    (
        "collective=collective_type low=min_bytes size_bytes=max_bytes algorithm protocol "
        "num_channels=channels num_nodes=nNodes num_ranks=nRanks +pipeops=numPipeOps "
        "+regbuff=regBuff",
        "taken as a table of NVIDIA's example tuner, which says what is to run and no times: its "
        "rows are kept as requests, and nothing learns from them; import the CSV of its times",
    ),
)
_TABLES: Final = [
    ({their or our: (our, 1.0) for our, their in re.findall(r"([^\s=]+)=?(\S*)", text)}, remark)
    for text, remark in _DIALECTS
]
_TABLE_LINE: Final = (
    r"(?mi:^\s*(?:all_?reduce|broadcast|reduce|all_?gather|reduce_?scatter)\s*,"
    r"\s*\d+\s*,\s*-?\d+\s*,\s*\w+\s*,\s*(?:ll|ll128|simple)\s*,)"
)
CSV_SIGN: Final = (
    r'(?m:(?:^#? ?|[,;\t|]) ?"?size_bytes"? ?(?:[,;\t|]|$))|\bsize, ?type, ?redop\b'
    rf"|{_TABLE_LINE}"
)
SOME_CSV: Final = r"\A#?\"?[A-Za-z][\w .()/#%\"-]*(?:[,;\t|][\w .()/#%\"-]+){2,}\n[^\n]*[,;\t|]"
_THEIRS: Final = {name for table, _ in _TABLES for name in table}
#: Lines that tell separators and decimal commas.
_HEAD: Final = 1_000
_REQUEST: Final = "a tuner's table asks for it at"


def read_csv(path: Path, _: str, options: ImportOptions, report: FileReport) -> Iterator[Part]:
    """Yield one file's measurements. Raises OutputError for wrong columns, and for no CSV."""
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
        if not record.size_bytes:
            report.drop("size 0")
        elif record.busbw_gbytes_per_s and row["time_us"] is None:
            report.drop("a bus bandwidth without its number of ranks (say --ranks, --nodes)")
        elif record.repeat in known:
            report.duplicates += 1
        else:
            free = (number for number in count(len(known)) if number not in known)
            row["repeat"] = next(free) if record.repeat is None else record.repeat
            known.add(row["repeat"])
            yield row


def _records(options: ImportOptions, report: FileReport) -> Iterator[tuple[int, _Record, Row]]:
    """Each record with the line that it ends on; wrong ones are rejected."""
    fillable = {*Known.model_fields, "system", "num_ranks"}
    known = options.model_dump(include=fillable, exclude_none=True)
    named = _named(filter(None, (options.foreign_columns or "").split(",")))
    with opened(Path(report.path)) as file:
        lines = unwrapped(file)
        head = [*islice(lines, _HEAD)]
        first = head[:100] or [""]
        mark = max(",;\t|", key=lambda m: max(_num_names(each.split(m), named) for each in first))
        edge = '"' if mark == "," else rf'(?:["{mark}]|^|$)'
        comma = re.compile(rf"{edge} *-?[\d.]*\d,(?:\d\d?|\d{{4,}}) *{edge}", re.MULTILINE)
        has_commas = any(map(comma.search, map(str.rstrip, head)))
        # polars would fill a row that is cut short with nulls, and knows no lines.
        reader = csv.reader(chain(head, lines), delimiter=mark, skipinitialspace=True)
        try:
            for columns, cells in _cells(reader, named, options, report):
                report.rows_read += 1
                try:
                    record = _record(_texts(columns, cells, has_commas=has_commas), known)
                    measured = _measurement(record, report)
                except (ValueError, UnknownName) as error:
                    report.reject(reader.line_num, first_problem(error), mark.join(cells))
                else:
                    yield reader.line_num, record, measured
        except csv.Error as error:
            where = f"{report.path}:{reader.line_num}"
            raise OutputError(f"{where}: no CSV: {error}; correct that line") from error


def _cells(
    reader: Iterable[list[str]], named: _Names, options: ImportOptions, report: FileReport
) -> Iterator[tuple[list[_Column], list[str]]]:
    """Each row and its columns; a line of names begins a table, also below another one."""
    columns: list[_Column] = []
    unknown: list[str] = []
    for cells in filter(lambda each: any(cell.strip(" \t:-") for cell in each), reader):
        if _num_names(cells, named) > 1:
            columns = _header(cells, named, options, report) or columns
            continue
        if not columns and re.match(_TABLE_LINE, ",".join(cells)):
            columns = _header([*_TABLES[-1][0]], {}, options, report) or []
        if columns and len([*filter(None, cells)]) > 2 and not re.search(r"\d", "".join(cells)):
            columns = [("?", 0.0)]
        if columns and not cells[0].lstrip().startswith("#"):
            yield columns, cells
        else:
            unknown = max(unknown, cells, key=len)
    if not columns:
        _header([cell.lstrip("# ") for cell in unknown], named, options, report)


def _num_names(cells: Sequence[str], named: _Names) -> int:
    """How many are somebody's columns; 0 for a row with numbers."""
    names = [cell.lstrip("# ").strip(' "\n\r') for cell in cells]
    if any(name[:1].isdigit() for name in names):
        return 0
    return sum(n in named or n in _THEIRS or _meaning(n) is not None for n in names)


def _meaning(name: str) -> _Column | None:
    """Our column that a name tells by words and unit, and the factor of its cells.

    >>> [_meaning(name) for name in ("Time (ms)", "BusBw_Gbps", "size_mb")]
    [('time_us', 1000.0), ('busbw_gbytes_per_s', 0.125), None]
    """
    plain = re.sub(r"[ .-]+|^nccl_(?=algo|proto)", "_", name.strip().lower()).lstrip("_")
    plain = re.sub(r"^n?_?(?=(?:ranks|nodes|channels)$)", "num_", _SHORT.get(plain, plain))
    if plain in CSV_COLUMNS or plain in _UNITS:
        return _UNITS.get(plain, (plain, 1.0))[:2]
    for ours, (column, factor, unit) in _UNITS.items():
        words = rf"(?i:{_MEASURES[ours.partition('_')[0]]})(?:[ _(\[]+|{_CAMEL})"
        if re.fullmatch(rf"{words}{unit}[ )\]]*", name.strip()):
            return column, factor
    return None


def _number(text: str, *, is_size: bool, has_commas: bool) -> str:
    """As Python writes it. Raises ValueError where a separator can be two things."""
    point, group = ",." if has_commas else ".,"
    grouped = re.fullmatch(rf"-?\d{{1,3}}(?:[{group}]\d{{3}})+(?:[{point}]\d+)?", text)
    is_open = group == "," and not is_size and len(re.findall("[.,]", text)) == 1
    if group in text and (is_open or not grouped):
        raise ValueError(f"'{text}' can be two numbers: write it without separators of thousands")
    return text.replace(group, "").replace(point, ".")


def _texts(columns: Sequence[_Column], cells: Sequence[str], *, has_commas: bool) -> dict[str, str]:
    names = [name for name, _ in columns]
    if "comm_processes" in names and len(cells) == len(names) + 1:
        # rccl-tests' header has no name for the number of communicators.
        at = names.index("collective") + 1
        columns = [*columns[:at], ("comms", 1.0), *columns[at:]]
    if "low" in names:
        columns = columns[: max(len(cells), len(columns) - 2)]
    if names == ["?"]:
        raise ValueError("a line of names that are not known stands above it, or is it")
    if len(cells) != len(columns):
        raise ValueError(f"{len(cells)} cells where the header names {len(columns)} columns")
    texts: dict[str, str] = {}
    for (name, factor), cell in zip(columns, map(str.strip, cells), strict=True):
        # NVIDIA's tuner has -1 for any and for NCCL's own; a time of -1 is none.
        if name == "-" or cell in {"", "N/A"} or (cell == "-1" and name not in _TIMES):
            continue
        texts[name] = cell
        if name in {*_TIMES, "size_bytes"}:
            number = _number(cell, is_size=name == "size_bytes", has_commas=has_commas)
            texts[name] = number if factor == 1.0 else repr(float(number) * factor)
    return texts


def _record(texts: dict[str, str], known: Row) -> _Record:
    collective = texts.get("collective") or known.get("collective")
    if re.search(r"(?i)to_?all_?v", str(collective)):
        raise ValueError(f"'{collective}' is another call than AlltoAll, and NCCL tunes neither")
    # Without in_place it is another program's number of GPUs.
    if {"gpus", "in_place"} <= texts.keys():
        _ranks_of_rccl(texts)
    if "low" in texts:
        low, high = (int(texts.pop(name, 0)) for name in ("low", "size_bytes"))
        if 0 < high < low:
            raise ValueError(f"{low} to {high} bytes is no range")
        # 4294967295 means no end.
        texts["size_bytes"] = str(high if 0 < high < 0xFFFFFFFF else max(low, 1))
        texts["note"] = f"{_REQUEST} {low} to {high} bytes"
    unset = {n for n in texts if (n in _FORCED or n[0] == "+") and texts[n].lower() in _OWN}
    # What the caller says was forced does not hold for NCCL's own choices.
    is_default = texts.get("is_default", "").lower() in {"true", "1", "yes"}
    other = {*_FORCED} if is_default else unset
    other |= {"num_ranks"} if {"num_nodes", "ranks_per_node"} <= texts.keys() else set()
    row = {name: told for name, told in known.items() if name not in other}
    row |= {name: text for name, text in texts.items() if name not in unset}
    # Settings beside the config, or of a collective without one, join the launch profile.
    is_tuned = not collective or Collective.parse(collective).tunable
    beside = [n for n in row if n[0] == "+" or (not is_tuned and n in _FORCED[:2])]
    short = {ours: name for name, ours in _SHORT.items()}
    words = [f"{short.get(name, name[1:])}={row.pop(name)}" for name in beside]
    if any(name[0] == "+" for name in beside) and row.keys().isdisjoint(_FORCED):
        row.setdefault("is_default", "false")
    if words:
        told = row.get("launch_profile", DEFAULT_PROFILE)
        row["launch_profile"] = ",".join([told] * (told != DEFAULT_PROFILE) + words)
    return _Record.model_validate(row)


def _ranks_of_rccl(texts: dict[str, str]) -> None:
    """Ranks are processes times GPUs; of several communicators the bandwidths must agree.

    Under MPI a row has communicators for nodes, and their processes for ranks per node.
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


def _header(
    cells: Sequence[str], named: _Names, options: ImportOptions, report: FileReport
) -> list[_Column] | None:
    """Our columns that a line names; None for a comment. Raises OutputError."""
    names = [cell.strip() for cell in ("".join(cells[:1]).lstrip("# "), *cells[1:])]
    said, own = {*names} - {""}, {*CSV_COLUMNS, *named}
    fits = (each for each in _TABLES if not said <= own and said <= each[0].keys() | named.keys())
    table, remark = next(fits, ({}, ""))
    # A column of row numbers has no name.
    given = {**table, **named, "": ("-", 1.0)}
    found = [given.get(name) or _meaning(name) for name in names]
    if None in found and cells and cells[0].lstrip().startswith("#"):
        return None
    for at, name in enumerate(names if named else ()):
        if not found[at]:
            is_config = _OF_CONFIG.search(name)
            what = "joins the launch profile, not NCCL's own choice (say with --columns what it is)"
            report.remark(f"the column {name} {what if is_config else 'is not taken'}")
            found[at] = (f"+{name.lower()}" if is_config else "-", 1.0)
    columns = [own or ("", 1.0) for own in found]
    if remark:
        report.remark(remark)
    _check_names(names, [ours for ours, _ in columns], options, report)
    for name in _FORCED:
        if (name, 1.0) in columns and (told := getattr(options, name)):
            report.remark(f"empty cells of the column {name} are taken as the option's {told}")
    return columns


def _named(pairs: Iterable[str]) -> dict[str, _Column]:
    """Their names -> ours, in either order. Raises UserError for none of ours."""
    named: dict[str, _Column] = {}
    choices = (*CSV_COLUMNS, *_UNITS)
    for pair in pairs:
        left, _, right = map(str.strip, pair.partition("="))
        ours, theirs = (left, right or left) if left in choices else (right, left)
        if ours not in choices:
            raise UserError(
                f"--columns '{pair}': write OURS=THEIRS, such as size_bytes=bytes, with any of "
                f"{', '.join(choices)} before the ="
            )
        named[theirs] = _UNITS.get(ours, (ours, 1.0))[:2]
        units = [
            unit
            for unit, (column, _, text) in _UNITS.items()
            if column == named[theirs][0]
            and re.search(rf"(?:^|[^A-Za-z]|{_CAMEL}){text.replace('ib)', 'i?b)')}\W*$", theirs)
        ]
        if units and ours not in units:
            others = " or ".join(f"{unit}={theirs}" for unit in units)
            raise UserError(f"--columns '{ours}={theirs}' is of another unit; write {others}")
    return named


def _check_names(
    names: Sequence[str], ours: Sequence[str], options: ImportOptions, report: FileReport
) -> None:
    times = () if "low" in ours else _TIMES
    needed = (("size_bytes",), ("collective", "--collective"), ("system", "--system"), times)
    there = {*ours, *(f"--{n}" for n in ("system", "collective") if getattr(options, n))}
    pairs = list(zip(names, ours, strict=True))
    odd = [name for name, own in pairs if not own or (own[0] not in "-+" and ours.count(own) > 1)]
    missing = [" or ".join(each) for each in needed if each and there.isdisjoint(each)]
    wrong = {"no column": missing, "unknown or repeated column": odd}
    if why := "; ".join(f"{what} {', '.join(each)}" for what, each in wrong.items() if each):
        raise OutputError(
            f"{report.path}: {why}; it has {', '.join(names)}, and a sweep may have "
            f"{', '.join(CSV_COLUMNS)}: add, rename or remove what is wrong, or say which is which "
            "with --columns size_bytes=NAME,time_us=NAME"
        )
    known = {name for name in _FORCED if getattr(options, name)} | {*ours}
    fields = {n: _Record.model_fields[n] for n in ("mode", "launch_profile", "run", "statistic")}
    taken = [f"{name} '{field.default}'" for name, field in fields.items() if name not in known]
    if known.isdisjoint({"is_default", *_FORCED}):
        taken.append("NCCL's own choice")
    if taken:
        report.remark(f"no column says otherwise, so all rows are taken as {', '.join(taken)}")


def _measurement(record: _Record, report: FileReport) -> Row:
    nodes, per_node, num_ranks = record.num_nodes, record.ranks_per_node, record.num_ranks
    if nodes and per_node:
        num_ranks = num_ranks or nodes * per_node
        if num_ranks != nodes * per_node:
            raise ValueError(f"{num_ranks} ranks are not {nodes} nodes of {per_node}")
    if num_ranks and nodes and num_ranks < nodes:
        raise ValueError(f"{num_ranks} ranks cannot be on {nodes} nodes")
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
        **_figures(record, num_ranks, report),
    }


def _config(record: _Record) -> Row:
    """The requested and the actual config; a note tells what a default row's channels were."""
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


def _figures(record: _Record, num_ranks: int | None, report: FileReport) -> Row:
    time_us, algbw, busbw = figures = [getattr(record, name) for name in _TIMES]
    collective = Collective.parse(record.collective)
    factors = [collective.bus_factor(n) for n in ([num_ranks] if num_ranks else [2, 1 << 20])]
    status = Status.WRONG_VALUES if record.wrong_values else Status.OK
    statistic = record.statistic if any(each is not None for each in figures) else Statistic.NONE
    by_time = record.size_bytes / (time_us * 1e3) if time_us else None
    _check_fit(algbw, by_time, [1.0], report)
    algbw = by_time or algbw or None
    _check_fit(busbw, algbw, factors, report)
    if busbw and not algbw and factors[0] == factors[-1] != 0.0:
        algbw = busbw / factors[0]
    if statistic is Statistic.NONE and not record.note.startswith(_REQUEST):
        has_hung = re.search(r"(?i)\bhang|\bhung|timeout|timed out", record.note)
        status = Status.TIMED_OUT if has_hung else Status.FAILED
    if busbw == 0.0 and not (time_us or algbw):
        report.remark("rows with a bandwidth of 0 keep no time")
    if time_us is None and algbw:
        time_us = record.size_bytes / (algbw * 1e3)
    # No call between GPUs is so short, and no link so fast.
    if time_us and num_ranks != 1 and (time_us < 0.5 or (algbw or 0) > 10_000):
        raise ValueError(
            f"{time_us:.4g} us, which is {algbw or 0:.4g} GB/s, is too fast for any call between "
            "GPUs: name the unit (--columns time_ms=NAME)"
        )
    return {
        "status": status.value,
        "statistic": statistic.value,
        "time_us": time_us,
        "time_derived": record.time_us is None and algbw is not None,
        "algbw_gbytes_per_s": algbw,
    }


def _check_fit(
    told: float | None, algbw: float | None, factors: Sequence[float], report: FileReport
) -> None:
    if told is None or not algbw:
        return
    least, most = algbw * min(factors), algbw * max(factors)
    off = max(least - told, told - most, 0.0)
    if off > max(0.05 * most, 0.05):
        by = told / most if most else 0.0
        why = [f"; {text}" for factor, text in _OFF.items() if 0.7 < by / factor < 1.4]
        raise ValueError(
            f"time and bandwidth contradict each other: {told:.4g} GB/s where time and ranks say "
            f"{most:.4g}{''.join(why)}: correct them, or name units (--columns time_ms=NAME)"
        )
    if off > max(0.015 * most, 0.05):
        report.remark(
            "bandwidths differ by up to 5 % from what times and sizes say (MB or MiB? averages?): "
            "the times are taken"
        )
