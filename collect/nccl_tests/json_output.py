"""Reads nccl-tests' JSON output (`-J`, since 2.17.3), versions 1 to 3, as measurements.

Written after the format in nccl-tests' sources (`src/util.cu`, 2.17.3 to 2.19.6): booleans are the
strings "true" and "false", a number that is not one is "nan", version 1 misspells
`average_bus_bandwidith`, and a crash leaves the text cut off. Its `env` is the whole environment of
whoever ran it: only the settings listed in `settings.py` are ever looked at.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from dynamiccl.collect.nccl_tests.facts import RankLine, RunFacts, nccl_version_of
from dynamiccl.collect.nccl_tests.parser import MISSING, ROW, ParsedText
from dynamiccl.collect.nccl_tests.settings import kept_settings
from dynamiccl.collect.nccl_tests.tables import columns_array, text_tables
from dynamiccl.collect.reports import FileReport, ImportOptions
from dynamiccl.datasets.schema import MEASUREMENTS, Source
from dynamiccl.errors import CorruptFile, OutputError
from dynamiccl.sizes import MAX_SIZE_BITS

#: Versions of the format that are known.
JSON_VERSIONS: Final = (1, 2, 3)
#: Keys of a bandwidth block, right and as version 1 has them.
_BANDWIDTH_KEYS: Final = ("average_bus_bandwidth", "average_bus_bandwidith")
#: Settings in `config` that make another measurement of it, and their usual values.
_CONFIG_WORDS: Final = (
    ("aggregated_iterations", "agg_iters", "1"),
    ("graph", "graph", "0"),
    ("unalign", "unalign", "0"),
)
_PER_ITERATION: Final = ("min_us", "max_us", "p99_us", "cv_pct")


#: Columns of `-I`: the times of single iterations, and of single processes.
_Times = Mapping[str, list[float | None] | None]


class _BadResult(ValueError):
    """Raised for a result that is rejected; the message is the reason."""


def json_tables(
    path: Path, *, base: Mapping[str, Any], options: ImportOptions, report: FileReport
) -> Iterator[pa.Table]:
    """Yield the measurements of one JSON file.

    Raises CorruptFile with the byte offset when the text is cut off or no JSON, and OutputError
    when it is another kind of JSON or a version that is not known.
    """
    content = read_json(path)
    run = _facts(content)
    rows, times = _rows(content["results"], run, report)
    run.rows = report.rows_read
    words = {word: i for i, word in enumerate(_words(content["results"]))}
    parsed = ParsedText(np.array(rows, dtype=ROW), [run], list(words))
    _remark_bandwidth(content, report)
    tables = text_tables(
        parsed,
        shared=RunFacts(-1, ""),
        base=dict(base),
        options=options,
        report=report,
        source=Source.NCCL_TESTS_JSON,
    )
    start = 0
    for table in tables:
        part = times[start : start + table.num_rows]
        start += table.num_rows
        yield _with_times(table, part)


def _with_times(table: pa.Table, times: Sequence[_Times]) -> pa.Table:
    for name in ("iteration_times_us", "process_times_us"):
        index = table.schema.get_field_index(name)
        values = columns_array(name, [one[name] for one in times])
        table = table.set_column(index, MEASUREMENTS.field(index), values)
    return table


def read_json(path: Path) -> dict[str, Any]:
    """Read a file and check its top level; raises as `json_tables`."""
    text = path.read_bytes().decode("utf-8", errors="replace")
    try:
        content = json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        offset = len(text[: error.pos].encode())
        raise CorruptFile(
            f"{path} is not whole JSON: {error.msg} at byte {offset} of {len(text.encode())}; a "
            "crashed benchmark leaves it cut off: import its text output instead"
        ) from error
    except RecursionError as error:
        raise CorruptFile(f"{path} is nested too deeply to be a benchmark's output") from error
    if not isinstance(content, dict) or not isinstance(content.get("results"), list):
        raise OutputError(f"{path} is JSON, but not of nccl-tests: it has no list 'results'")
    version = content.get("version")
    if version not in JSON_VERSIONS:
        raise OutputError(
            f"{path} is nccl-tests JSON version {version!r}; known are "
            f"{', '.join(map(str, JSON_VERSIONS))}: import the text output instead"
        )
    return content


def _facts(content: dict[str, Any]) -> RunFacts:
    run = RunFacts(0, "")
    args = content.get("args")
    if isinstance(args, list) and args:
        run.note(f"{args[0]} ", 0)
    run.per_process.clear()  # from `config` below, which is complete
    env = [str(item).partition("=") for item in _list(content.get("env"))]
    for name, value in kept_settings((name, value) for name, _, value in env).items():
        run.settings[name] = {value}
    run.names_host_ids = any(name == "NCCL_HOSTID" for name, _, _ in env)
    version = nccl_version_of(str(content.get("nccl_version")))
    if version is not None:
        run.nccl_versions.add(version)
    config = content.get("config")
    if isinstance(config, dict):
        _note_config(run, config)
    out_of_bounds = content.get("out_of_bounds")
    if isinstance(out_of_bounds, dict):
        run.out_of_bounds = _whole(out_of_bounds.get("count")) or 0
    return run


def _note_config(run: RunFacts, config: dict[str, Any]) -> None:
    threads, gpus = _whole(config.get("nthreads")), _whole(config.get("ngpus"))
    if threads and gpus:
        run.per_process.add(threads * gpus)
    if str(config.get("blocking_collectives")).lower() == "true":
        run.words.add("blocking")
    for key, word, usual in _CONFIG_WORDS:
        value = config.get(key)
        if value is not None and str(value) != usual:
            run.words.add(f"{word}={str(value)[:20]}")
    devices = [d for d in _list(config.get("devices")) if isinstance(d, dict)]
    run.ranks = [_rank_line(device) for device in devices]
    process = next(iter(run.per_process), 1)
    if len(run.ranks) == 1 and 1 < process <= 1024:
        # Without MPI only rank 0 is listed; the process drives consecutive devices of its host.
        only = run.ranks[0]
        run.ranks = [replace(only, rank=i, device=only.device + i) for i in range(process)]


def _rank_line(device: dict[str, Any]) -> RankLine:
    return RankLine(
        _whole(device.get("rank")) or 0,
        _whole(device.get("group")) or 0,
        str(device.get("hostname")),
        _whole(device.get("device")) or 0,
        str(device.get("device_info") or ""),
        str(device.get("device_hex") or ""),
        _whole(device.get("pid")),
    )


def _rows(
    results: list[Any], run: RunFacts, report: FileReport
) -> tuple[list[tuple[Any, ...]], list[_Times]]:
    words = {word: i for i, word in enumerate(_words(results))}
    rows: list[tuple[Any, ...]] = []
    times: list[_Times] = []
    for number, result in enumerate(results, 1):
        try:
            start, halves = _result(result, words, run)
        except _BadResult as error:
            report.reject(number, f"results[{number - 1}]: {error}", json.dumps(result)[:200])
            continue
        report.rows_read += 1
        if start[2] == 0:
            report.drop("size 0")
            continue
        if not halves:
            report.drop("no time")
        rows += [(*start, *half) for half, _ in halves]
        times += [listed for _, listed in halves]
    return rows, times


def _words(results: list[Any]) -> list[str]:
    named = [r.get(key) for r in results if isinstance(r, dict) for key in ("type", "redop")]
    return sorted({word for word in named if isinstance(word, str)})[:30_000]


_Half = tuple[tuple[Any, ...], _Times]


def _result(
    result: object, words: dict[str, int], run: RunFacts
) -> tuple[tuple[Any, ...], list[_Half]]:
    if not isinstance(result, dict):
        raise _BadResult("not an object")
    size = _whole(result.get("size"))
    if size is None or size < 0 or size >> MAX_SIZE_BITS:
        raise _BadResult(f"size {result.get('size')!r} is no number of bytes")
    root = _whole(result.get("root"))
    if root is not None and not -1 <= root < 1 << 30:
        raise _BadResult(f"root {root} is no rank")
    start = (
        run.index,
        MISSING,
        size,
        words.get(str(result.get("type")), -1),
        words.get(str(result.get("redop")), -1),
        MISSING if root is None else root,
    )
    halves = [
        half
        for place, name in ((0, "out_of_place"), (1, "in_place"))
        if (half := _half(place, result.get(name), result.get(f"{name}_per_iter"))) is not None
    ]
    return start, halves


def _half(place: int, timing: object, per_iteration: object) -> _Half | None:
    if not isinstance(timing, dict):
        return None
    if "cpu_time" in timing:
        raise _BadResult("cpu_time (-C) is the cost of the launch and not the time of the call")
    time = _number(timing.get("time"))
    if not time > 0.0 or math.isinf(time):
        return None
    wrong = _whole(timing.get("nwrong"))
    extra = per_iteration if isinstance(per_iteration, dict) else {}
    fields = (
        place,
        time,
        _number(timing.get("alg_bw")),
        _number(timing.get("bus_bw")),
        MISSING if wrong is None or not 0 <= wrong < 1 << 62 else wrong,
        *(_number(extra.get(key)) for key in _PER_ITERATION),
    )
    return fields, {
        "iteration_times_us": _numbers(extra.get("times_us")),
        "process_times_us": _process_means(extra.get("per_process_max_times_us")),
    }


def _numbers(listed: object) -> list[float | None] | None:
    if not isinstance(listed, list):
        return None
    numbers = [_number(value) for value in listed]
    return [None if math.isnan(value) else value for value in numbers]


def _process_means(listed: object) -> list[float | None] | None:
    """The mean time of each process over its iterations."""
    means: list[float | None] = []
    for process in _list(listed):
        known = [time for time in _numbers(process) or () if time is not None]
        means.append(sum(known) / len(known) if known else None)
    return means or None


def _number(value: object) -> float:
    """A number, or NaN for what nccl-tests writes as "nan", null and everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _whole(value: object) -> int | None:
    number = _number(value)
    if not math.isfinite(number) or number != int(number):
        return None
    return value if isinstance(value, int) else int(number)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _remark_bandwidth(content: dict[str, Any], report: FileReport) -> None:
    for key in _BANDWIDTH_KEYS:
        block = content.get(key)
        if isinstance(block, dict) and str(block.get("okay")).lower() == "false":
            report.remark("average bus bandwidth below NCCL_TESTS_MIN_BW (FAILED)")
