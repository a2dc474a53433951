"""What nccl-tests 2.19.6 prints and what its `-J` writes (`src/common.cu`, `src/util.cu`).

The JSON is version 3, with what we read of it; tests/data/nccl_tests_v3.json has it whole. Booleans
are strings in it, and the root is padded. It is written row by row: a crash leaves it cut off.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.fakes.nccl_tests.program import Options

#: Releases: of nccl-tests, and NCCL's 2.30.7 as NCCL_VERSION_CODE.
_TESTS, _NCCL = "2.19.6", 23007
#: A step without a factor.
STEP_BYTES: Final = 1 << 20
#: What -I adds to each half of a row: name, unit, and the key in JSON.
_EACH: Final = (
    ("i_min", "(us)", "min_us"),
    ("i_max", "(us)", "max_us"),
    ("i_p99", "(us)", "p99_us"),
    ("i_cv%", "(%)", "cv_pct"),
)


class Report:
    """Text and JSON of one process; only the first one of a job prints and writes."""

    def __init__(self, options: Options, program: str, *, is_first: bool) -> None:
        """Open the JSON where it is asked for. Raises FileExistsError for a file that is there."""
        self._options = options
        self._program = program
        self._is_first = is_first
        self._comma = ""
        self._json = None
        if is_first and options.json_path:
            self._json = Path(options.json_path).open("x", encoding="ascii")  # noqa: SIM115
            self._print(f"# Writing JSON output to {options.json_path}\n")

    def head(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        devices: Sequence[Mapping[str, Any]],
    ) -> None:
        """The lines up to the devices; `devices` has one for each rank, as JSON names them."""
        o = self._options
        step = f"{o.factor}(factor)" if o.factor > 1 else f"{STEP_BYTES}(bytes)"
        self._print(
            f"# nccl-tests version {_TESTS} nccl-headers={_NCCL} nccl-library={_NCCL}\n"
            f"# Collective test starting: {self._program}\n"
            f"# nThread 1 nGpus {o.gpus} minBytes {o.min_bytes} maxBytes {o.max_bytes} "
            f"step: {step} warmup iters: {o.warmup} iters: {o.iterations} agg iters: 1 "
            f"validation: {o.check} graph: 0 unalign: 0\n"
        )
        if o.per_iteration:
            how = "CUDA event timing; i_* uses max over process rows"
            self._print(f"# Per-Iteration Report: {how} \n")
        self._print("#\n# Using devices\n")
        for one in devices:
            self._print(
                "#  Rank {rank:2d} Group {group:2d} Pid {pid:6d} on {hostname:>10} device "
                "{device:2d} [{device_hex}] {device_info}\n".format(**one)
            )
        config = {"nthreads": 1, "ngpus": o.gpus, "aggregated_iterations": 1, "graph": 0}
        content = {
            "version": 3,
            "args": [*arguments],
            "env": [f"{name}={value}" for name, value in environment.items()],
            "nccl_version": _NCCL,
            # The first GPU of each process.
            "config": {**config, "blocking_collectives": "false", "devices": devices[:: o.gpus]},
        }
        self._write(json.dumps(content)[:-1])

    def table_head(self) -> None:
        start = f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}"
        units = f"# {'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}"
        half = f"  {'time':>7}  {'algbw':>6}  {'busbw':>6}  #wrong"
        unit = f"  {'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6}{'':8}"
        titles = f"{'':11}out-of-place{'':23}in-place{'':10}"
        if self._options.per_iteration:
            named = " (+ per-iteration)"
            titles = f"{'':14}out-of-place{named}{'':32}in-place{named}"
            half += "".join(f"  {name:>7}" for name, _, _ in _EACH)
            unit += "".join(f"  {text:>7}" for _, text, _ in _EACH)
        self._print(f"#\n# {'':50}{titles}\n{start}{half}{half} \n{units}{unit}{unit} \n")
        self._write(',"results":[')

    def row(self, entry: Mapping[str, Any]) -> None:
        """One row, both of its halves, as JSON has it."""
        text = "{size:12d}  {count:12d}  {type:>8}  {redop:>6}  {root}".format(**entry)
        for name in ("out_of_place", "in_place"):
            half, each = entry[name], entry.get(f"{name}_per_iter")
            wrong = "N/A" if half["nwrong"] is None else f"{half['nwrong']:g}"
            columns = [narrow(half["time"], 7), narrow(half["alg_bw"], 6)]
            columns += [narrow(half["bus_bw"], 6), f"{wrong:>6}"]
            columns += [narrow(each[key], 7) for _, _, key in _EACH] if each else []
            text += "".join(f"  {column}" for column in columns)
        self._print(f"{text}\n")
        self._write(self._comma + json.dumps(entry))
        self._comma = ","

    def foot(self, wrong_halves: int, busbw: float) -> None:
        verdict, okay = ("FAILED", "false") if wrong_halves else ("OK", "true")
        self._print(
            f"# Out of bounds values : {wrong_halves} {verdict}\n"
            f"# Avg bus bandwidth    : {busbw:g} \n#\n"
            f"# Collective test concluded: {self._program}\n#\n\n"
        )
        foot = {"out_of_bounds": {"count": wrong_halves, "okay": okay}}
        foot["average_bus_bandwidth"] = {"bandwidth": busbw, "okay": "unchecked"}
        self._write(f"],{json.dumps(foot)[1:]}")

    def _print(self, text: str) -> None:
        if self._is_first:
            sys.stdout.write(text)

    def _write(self, text: str) -> None:
        if self._json is not None:
            self._json.write(text)


def iterations(processes_us: Sequence[Sequence[float]]) -> dict[str, Any]:
    """What `-I` tells of times of shape [process][iteration]: of each iteration the longest one."""
    slowest = [*map(max, zip(*processes_us, strict=True))]
    times, count = sorted(slowest), len(slowest)
    mean = sum(times) / count
    deviation = math.sqrt(sum((time - mean) ** 2 for time in times) / count)
    found = {"skipped_iterations": 0, "min_us": times[0], "max_us": times[-1], "avg_us": mean}
    found |= {"p99_us": times[-(-count * 99 // 100) - 1], "stdev_us": deviation}
    several = {"per_process_max_times_us": processes_us} if len(processes_us) > 1 else {}
    return {**found, "cv_pct": 100.0 * deviation / mean, "times_us": slowest, **several}


def narrow(value: float, width: int) -> str:
    """A number with as many decimals as fit (`getFloatStr`)."""
    forms = (f"{value:{width}.{digits}f}" for digits in (2, 1, 0))
    last = f"{value:{width}.{1 if width >= 7 else 0}e}"
    return next((form for form in forms if len(form) <= width), last)
