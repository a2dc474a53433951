"""One run of a benchmark program: its call order, rows and exit (`src/common.cu`, `src/util.cu`).

The JSON is version 3, with what we read of it; tests/data/nccl_tests_v3.json has it whole. Booleans
are strings in it, and the root is padded. It is written row by row: a crash leaves it cut off. Text
has its columns without their widths.
"""

import argparse
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Final

from dynamiccl.collect.grid import DATATYPE_BYTES
from dynamiccl.nccl import Collective
from tests.fakes.nccl_tests.install import PROGRAMS
from tests.fakes.nccl_tests.nccl import Choice, Nccl, die, hang
from tests.fakes.nccl_tests.world import colours, communicator, world_of

#: The exit status of wrong values.
_WRONG = 7
_PER_RANK: Final = frozenset({Collective.AllGather, Collective.ReduceScatter, Collective.AlltoAll})
_ROOTED: Final = frozenset({Collective.Broadcast, Collective.Reduce})
#: Collectives without an operation, and those whose in-place halves are timed and not checked.
_NO_OPERATION: Final = frozenset({Collective.AllGather, Collective.Broadcast, Collective.AlltoAll})
_NOT_IN_PLACE: Final = frozenset({Collective.AlltoAll, Collective.SendRecv})
_WRONG_VALUES: Final = 17


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one program; `arguments[0]` is its path. Returns the exit status."""
    # As the real `main` does, so that each row appears when it is done, and not before.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    for number in (signal.SIGPIPE, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    return Benchmark(arguments, _OPTIONS.parse_args(arguments[1:]), environment).run()


def _bytes(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper())
    return int(text) if unit is None else int(text[:-1]) * unit


#: The options that our launches use: the real one has more, and one with these is no run of it.
_OPTIONS: Final = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
for _letter, _name, _default, _type in (
    ("-g", "gpus", 1, int),
    ("-b", "min_bytes", 32 << 20, _bytes),
    ("-e", "max_bytes", 32 << 20, _bytes),
    ("-f", "factor", 2, int),
    ("-n", "iterations", 20, int),
    ("-w", "warmup", 1, int),
    ("-N", "cycles", 1, int),  # 0 = for ever
    ("-c", "check", 1, int),
    ("-d", "datatype", "float", str),
    ("-J", "json_path", "", str),
    ("-I", "per_iteration", 0, int),
):
    _OPTIONS.add_argument(_letter, dest=_name, default=_default, type=_type)
Options = argparse.Namespace


class Benchmark:
    """Runs one test, and counts errors for its footer."""

    def __init__(
        self, arguments: Sequence[str], options: Options, environment: Mapping[str, str]
    ) -> None:
        """Print the head; `arguments[0]` is the program's path."""
        program = arguments[0].rpartition("/")[2]
        self._world = world_of(environment)
        self._colours = colours(self._world.size, environment)
        self._options = options
        self._environment = environment
        own = communicator(self._world, self._colours)
        self._nccl = Nccl(environment, own, options.gpus, self._colours[self._world.rank])
        self._report = Report(options, program, is_first=self._world.rank == 0)
        self._collective = PROGRAMS[program]
        self._type_bytes = DATATYPE_BYTES[options.datatype]
        self._busbw: list[float] = []
        self._wrong_halves = 0
        self._noise = float(environment.get("FAKE_NOISE", "0.015"))
        self._launch = environment.get("FAKE_LAUNCH", f"{os.getpid()}-{time.time_ns()}")
        self._report.head(arguments, environment, [*self._devices()])

    def run(self) -> int:
        """Everything from the communicators to the footer. Returns the exit status."""
        options, report = self._options, self._report
        self._nccl.connect()
        sys.stdout.flush()
        report.table_head()
        # The warm-up doubles the size, whatever the factor of the walk is.
        for size in self._sizes(2):
            for _ in range(options.warmup):
                self._call(self._entry(size)["count"])
        # No row appears before all ranks have made its calls: the others are ahead of the first.
        pace_s = float(self._environment.get("FAKE_SECONDS_PER_ROW", "0"))
        pace_s /= 1 if self._world.rank == 0 else 2
        cycle = 0
        while options.cycles == 0 or cycle < options.cycles:
            for size in self._sizes(options.factor):
                entry = self._entry(size)
                time.sleep(pace_s)
                for name in ("out_of_place", "in_place"):
                    self._measure(entry, name, cycle)
                report.row(entry)
            cycle += 1
        self._nccl.finish()
        report.foot(self._wrong_halves, sum(self._busbw) / len(self._busbw))
        if self._wrong_halves:
            host, pid = self._world.host, os.getpid()
            sys.stdout.write(f" .. {host} pid {pid}: Test failure common.cu:1454\n")
        return _WRONG if self._wrong_halves else 0

    def _devices(self) -> Iterator[dict[str, Any]]:
        """A record for each rank, as JSON has them."""
        gpus, world = self._options.gpus, self._world
        for process, host in enumerate(world.hosts):
            local = world.hosts[:process].count(host)
            local = world.local_rank if process == world.rank else local
            for device in range(local * gpus, (local + 1) * gpus):
                yield {
                    "rank": (process - local) * gpus + device,
                    "group": self._colours[process],
                    # Other processes' ids are made up: only they know them.
                    "pid": os.getpid() + process - world.rank,
                    "hostname": host,
                    "device": device,
                    "device_hex": f"0000:{0x10 * (device + 1):02x}:00",
                    "device_info": "FAKE H100",
                }

    def _sizes(self, factor: int) -> Iterator[int]:
        size = self._options.min_bytes
        while size <= self._options.max_bytes:
            yield size
            size *= factor

    def _entry(self, size: int) -> dict[str, Any]:
        """What a row is about, as JSON names it: NCCL's count, and the larger buffer's size."""
        collective, type_bytes, ranks = self._collective, self._type_bytes, 1
        count = size // type_bytes
        if collective in _PER_RANK:
            ranks = self._nccl.num_ranks
            count = count // ranks & ~(16 // type_bytes - 1)
        return {
            "size": count * type_bytes * ranks,
            "count": count,
            "type": self._options.datatype,
            "redop": "none" if collective in _NO_OPERATION else "sum",
            "root": f"{0 if collective in _ROOTED else -1:6d}",
        }

    def _call(self, count: int) -> Choice | None:
        """One call by every GPU of this process."""
        return self._nccl.call(self._collective, count * self._type_bytes)

    def _measure(self, entry: dict[str, Any], name: str, cycle: int) -> None:
        """Add one half to a row: the figures of one buffer or two."""
        options, collective, size = self._options, self._collective, entry["size"]
        choice = self._call(entry["count"])
        for iteration in range(options.iterations):
            choice = self._call(entry["count"])
            if iteration == 0 and self._is_told("FAKE_CRASH", choice):
                die(signal.SIGSEGV)
            if iteration == 0 and self._is_told("FAKE_HANG", choice):
                hang()
        wrong = None
        if options.check and not (name == "in_place" and collective in _NOT_IN_PLACE):
            is_wrong = self._is_told("FAKE_WRONG", choice)
            wrong = float(_WRONG_VALUES * self._nccl.num_ranks * is_wrong)
            self._wrong_halves += is_wrong
        for _ in range(1 if wrong else options.check):
            self._call(entry["count"])
        draws = random.Random(f"{self._launch}|{cycle}|{size}|{name}|{choice}")

        def noisy(time_us: float) -> float:
            return time_us * math.exp(draws.gauss(0.0, self._noise))

        own_us = self._nccl.time_us(collective, size, choice)
        time_us = noisy(own_us)
        algbw = size / (1000.0 * time_us)
        self._busbw.append(algbw * collective.bus_factor(self._nccl.num_ranks))
        figures = {"time": time_us, "alg_bw": algbw, "bus_bw": self._busbw[-1]}
        entry[name] = {**{key: round(figures[key], 6) for key in figures}, "nwrong": wrong}
        if options.per_iteration:
            every = range(options.iterations)
            each = [[noisy(own_us) for _ in every] for _ in self._colours]
            entry[f"{name}_per_iter"] = iterations(each)

    def _is_told(self, name: str, choice: Choice | None) -> bool:
        """Whether FAKE_HANG, FAKE_CRASH or FAKE_WRONG names this call."""
        return self._environment.get(name) in ({"ABSTAIN"} if choice is None else choice.keys)


#: Releases: of nccl-tests, and NCCL's 2.30.7 as NCCL_VERSION_CODE.
_TESTS, _NCCL = "2.19.6", 23007


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
        self._print(
            f"# nccl-tests version {_TESTS} nccl-headers={_NCCL} nccl-library={_NCCL}\n"
            f"# Collective test starting: {self._program}\n"
            f"# nThread 1 nGpus {o.gpus} minBytes {o.min_bytes} maxBytes {o.max_bytes} "
            f"step: {o.factor}(factor) warmup iters: {o.warmup} iters: {o.iterations} agg iters: 1 "
            f"validation: {o.check} graph: 0 unalign: 0\n"
        )
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
        half = "  time  algbw  busbw  #wrong"
        self._print(f"#\n#  size  count  type  redop  root{half}{half}\n")
        self._write(',"results":[')

    def row(self, entry: Mapping[str, Any]) -> None:
        """One row, both of its halves, as JSON has it."""
        text = "{size:12d}  {count:12d}  {type:>8}  {redop:>6}  {root}".format(**entry)
        for name in ("out_of_place", "in_place"):
            half = entry[name]
            wrong = "N/A" if half["nwrong"] is None else f"{half['nwrong']:g}"
            text += "  {time:.2f}  {alg_bw:.2f}  {bus_bw:.2f}".format(**half) + f"  {wrong}"
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
    mean, deviation = fmean(times), pstdev(times)
    found = {"skipped_iterations": 0, "min_us": times[0], "max_us": times[-1], "avg_us": mean}
    found |= {"p99_us": times[-(-count * 99 // 100) - 1], "stdev_us": deviation}
    several = {"per_process_max_times_us": processes_us} if len(processes_us) > 1 else {}
    return {**found, "cv_pct": 100.0 * deviation / mean, "times_us": slowest, **several}
