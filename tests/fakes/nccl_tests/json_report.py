"""The JSON of `-J`, versions 1 to 3, as `src/util.cu` writes it: one piece after the other.

A crash leaves it cut off, on purpose. Booleans are strings, the first version misspells two keys,
and text beyond ASCII ends where it stops being ASCII.
"""

import errno
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TextIO

from dynamiccl.nccl import NcclVersion
from tests.fakes.nccl_tests.flags import Options
from tests.fakes.nccl_tests.report import now
from tests.fakes.nccl_tests.rows import Half, Iterations, Row

_LONGEST: Final = 2047
_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\t": "\\t", "\n": "\\n"}
_DEVICE: Final = re.compile(
    r"#  Rank +(\d+) Group +(\d+) Pid +(\d+) on +(\S+) device +(\d+) \[([^\]]*)\] (.*)"
)


def json_version(tests: NcclVersion) -> int:
    """Version of the format that a release writes."""
    if tests < NcclVersion(2, 19, 2):
        return 1
    return 2 if tests < NcclVersion(2, 19, 6) else 3


class JsonReport:
    """One JSON file that is written as the benchmark goes on."""

    def __init__(self, file: TextIO, tests: NcclVersion) -> None:
        """Start the object."""
        self._file = file
        self._version = json_version(tests)
        self._tests = tests
        #: Brackets that are open, each with whether something stands in it already.
        self._open: list[list[str | bool]] = []
        self._start("{")
        self._member("version", self._version)
        self._member("start_time", now())

    def process(
        self, arguments: Sequence[str], environment: Mapping[str, str], nccl_code: int
    ) -> None:
        """How the program was started: the whole environment is in it."""
        self._member("args", list(arguments))
        self._member("env", [f"{name}={value}" for name, value in environment.items()])
        self._member("nccl_version", nccl_code)

    def config(self, options: Options, device_lines: Sequence[str]) -> None:
        """The settings, and the first GPU of each process."""
        o = options
        self._key("config")
        self._start("{")
        settings: dict[str, object] = {
            "nthreads": o.threads,
            "ngpus": o.gpus,
            "minimum_bytes": o.min_bytes,
            "maximum_bytes": o.max_bytes,
            **(
                {"step_factor": o.step_factor}
                if o.step_factor > 1
                else {"step_bytes": o.step_bytes}
            ),
            "warmup_iters": o.warmup,
            "iterations": o.iterations,
            "aggregated_iterations": o.aggregated,
            "validation": o.check,
            "graph": o.graph,
            "blocking_collectives": bool(o.blocking),
        }
        if self._version >= 2:
            settings["per_iter_timing"] = bool(o.per_iteration)
        if self._version >= 3:
            settings["per_iter_skip"] = o.skip
        settings["parallel_init"] = bool(o.parallel_init)
        settings["devices"] = [_device(line) for line in device_lines]
        for name, value in settings.items():
            self._member(name, value)
        self._end()

    def results(self) -> None:
        """Start the list of rows."""
        self._key("results")
        self._start("[")

    def row_start(self, row: Row) -> None:
        """Start one row."""
        self._value()
        self._start("{")
        self._member("size", row.size_bytes)
        self._member("count", row.count)
        self._member("type", row.datatype)
        self._member("redop", row.operation)
        self._member("root", f"{row.root:6d}")

    def half(self, half: Half, *, cpu_time: bool) -> None:
        """One half of the row."""
        name = "in_place" if half.in_place else "out_of_place"
        wrong = None if half.wrong is None else float(half.wrong)
        time = "cpu_time" if cpu_time else "time"
        self._member(
            name,
            {time: half.time_us, "alg_bw": half.algbw, "bus_bw": half.busbw, "nwrong": wrong},
        )
        if half.iterations is not None:
            self._member(f"{name}_per_iter", self._iterations(half.iterations))

    def row_end(self, iterations: int) -> None:
        """End the row."""
        self._member("actual_iterations", iterations)
        self._member("experiment_name", "")
        self._end()

    def foot(self, errors: int, busbw: float, min_busbw: float, last_error: str) -> None:
        """End the rows and add what stands below them."""
        self._end()
        self._member("out_of_bounds", {"count": errors, "okay": errors == 0})
        okay: str | bool = "unchecked" if min_busbw == -1 else busbw >= 0.9 * min_busbw
        misspelt = self._tests < NcclVersion(2, 18)
        names = ("average_bus_bandwidith", "bandwidith")
        outer, inner = names if misspelt else ("average_bus_bandwidth", "bandwidth")
        self._member(outer, {inner: busbw, "okay": okay})
        self._member("errors", [last_error])

    def finish(self) -> None:
        """Close whatever is open.

        Version 1 only knew how to close a whole report: after a failure among the rows an assertion
        ends the process.
        """
        if len(self._open) == 1:
            self._member("end_time", now())
        elif self._version == 1:
            os.abort()
        while self._open:
            self._end()
        self._file.close()

    def _iterations(self, iterations: Iterations) -> dict[str, object]:
        names = ("min_us", "max_us", "avg_us", "p50_us", "p95_us", "p99_us", "stdev_us")
        found: dict[str, object] = (
            {"skipped_iterations": iterations.skipped} if self._version >= 3 else {}
        )
        found |= {name: getattr(iterations, name) for name in names}
        found |= {"cv_pct": iterations.cv_percent, "times_us": list(iterations.times_us)}
        if len(iterations.processes_us) > 1:
            found["per_process_max_times_us"] = [list(times) for times in iterations.processes_us]
        return found

    def _start(self, bracket: str) -> None:
        self._file.write(bracket)
        self._open.append([bracket, False])

    def _end(self) -> None:
        bracket, _ = self._open.pop()
        self._file.write("}" if bracket == "{" else "]")

    def _value(self) -> None:
        """Put a comma before a value that is not the first."""
        if self._open[-1][1]:
            self._file.write(",")
        self._open[-1][1] = True

    def _key(self, name: str) -> None:
        self._value()
        self._file.write(f"{_text(name)}:")

    def _member(self, name: str, value: object) -> None:
        self._key(name)
        self._file.write(_json(value))


def open_json(path: str) -> tuple[TextIO | None, str]:
    """Create the file, never over another one, and say what nccl-tests says about it.

    Only names that end in `.json` are known; for others nothing is written and nothing said.
    """
    extension = os.path.basename(path).rpartition(".")  # noqa: PTH119 - as nccl-tests splits it
    if not extension[1] or extension[2].lower() != "json":
        return None, ""
    tried, number = path, 0
    while True:
        try:
            file = Path(tried).open("x", encoding="ascii")  # noqa: SIM115 - open until the end
        except OSError as error:
            if error.errno != errno.EEXIST:
                return None, f"# skipping json output; {tried} not accessible\n"
            tried, number = f"{path}.{number}", number + 1
            continue
        return file, f"# Writing JSON output to {tried}\n"


def _device(line: str) -> dict[str, object]:
    match = _DEVICE.match(line)
    assert match is not None
    rank, group, pid, host, device, pci, name = match.groups()
    return {
        "rank": int(rank),
        "group": int(group),
        "pid": int(pid),
        "hostname": host,
        "device": int(device),
        "device_hex": pci,
        "device_info": name,
    }


def _json(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return _text("true" if value else "false")
    if isinstance(value, float):
        return '"nan"' if value != value else f"{value:.6f}"  # noqa: PLR0124 - NaN alone
    if isinstance(value, list):
        return f"[{','.join(map(_json, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_text(name)}:{_json(item)}" for name, item in value.items()) + "}"
    return _text(value) if isinstance(value, str) else str(value)


def _text(text: str) -> str:
    kept = []
    length = 0
    for letter in text:
        escaped = _ESCAPES.get(letter, letter)
        length += len(escaped)
        if length > _LONGEST or (letter == escaped and not " " <= letter < "\x7f"):
            break
        kept.append(escaped)
    return f'"{"".join(kept)}"'
