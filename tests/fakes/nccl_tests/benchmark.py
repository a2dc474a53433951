"""One run of a benchmark program: its call order, its rows, its exit (`src/common.cu`)."""

import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from dynamiccl.nccl import Collective
from tests.fakes.nccl_tests.install import PROGRAMS
from tests.fakes.nccl_tests.nccl import Choice, Nccl, die, hang
from tests.fakes.nccl_tests.program import Options, Stop
from tests.fakes.nccl_tests.report import STEP_BYTES, Report, iterations
from tests.fakes.nccl_tests.tuner import NcclFailed
from tests.fakes.nccl_tests.world import colours, communicator, slowdowns, world_of

#: `testResult_t` of an NCCL call that failed, and the exit status of wrong values.
_NCCL_ERROR, _WRONG = 3, 7
_TYPES: Final = (
    "1 int8 uint8 f8e4m3 f8e5m2",
    "2 half bfloat16",
    "4 int32 uint32 float",
    "8 int64 uint64 double",
)
_TYPE_BYTES: Final = {name: int(line[0]) for line in _TYPES for name in line.split()[1:]}
_PER_RANK: Final = frozenset({Collective.AllGather, Collective.ReduceScatter, Collective.AlltoAll})
_ROOTED: Final = frozenset({Collective.Broadcast, Collective.Reduce})
#: Collectives without an operation, and those whose in-place halves are timed and not checked.
_NO_OPERATION: Final = frozenset({Collective.AllGather, Collective.Broadcast, Collective.AlltoAll})
_NOT_IN_PLACE: Final = frozenset({Collective.AlltoAll, Collective.SendRecv})
_WRONG_VALUES: Final = 17


class Benchmark:
    """Runs one test, and counts errors for its footer."""

    def __init__(
        self, arguments: Sequence[str], options: Options, environment: Mapping[str, str]
    ) -> None:
        """Print the head; `arguments[0]` is the program's path."""
        program = arguments[0].rpartition("/")[2]
        self._world = world_of(environment)
        self._colours = colours(self._world.size, environment)
        self._slow = slowdowns(self._colours, environment)
        self._options = options
        self._environment = environment
        own = communicator(self._world, self._colours)
        self._nccl = Nccl(environment, own, options.gpus, self._colours[self._world.rank])
        self._report = Report(options, program, is_first=self._world.rank == 0)
        self._collective = PROGRAMS[program]
        self._type_bytes = _TYPE_BYTES[options.datatype]
        self._busbw: list[float] = []
        self._wrong_halves = 0
        self._noise = float(environment.get("FAKE_NOISE", "0.015"))
        self._launch = environment.get("FAKE_LAUNCH", f"{os.getpid()}-{time.time_ns()}")
        self._report.head(arguments, environment, [*self._devices()])

    def run(self) -> None:
        """Everything from the communicators to the footer. Raises Stop where it fails."""
        options, report = self._options, self._report
        try:
            self._nccl.connect()
        except NcclFailed as error:
            raise self._failure(error, "common.cu:222") from error
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
            raise Stop(_WRONG, self._origin())

    def _devices(self) -> Iterator[dict[str, Any]]:
        """A record for each rank, as JSON has them."""
        gpus, world = self._options.gpus, self._world
        for process, host in enumerate(world.hosts):
            local = world.hosts[:process].count(host)
            local = world.local_rank if process == world.rank else local
            first = int(self._environment.get("NCCL_TESTS_DEVICE", local * gpus))
            for device in range(first, first + gpus):
                yield {
                    "rank": process * gpus + device - first,
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
            size = size * factor if factor > 1 else size + STEP_BYTES

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
        """One call by every GPU of this process. Raises Stop."""
        try:
            return self._nccl.call(self._collective, count * self._type_bytes)
        except NcclFailed as error:
            raise self._failure(error, "common.cu:619") from error

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
        # By default the mean of all ranks is printed, whatever communicator they are of.
        time_us = noisy(own_us * sum(self._slow) / len(self._slow))
        algbw = size / (1000.0 * time_us)
        self._busbw.append(algbw * collective.bus_factor(self._nccl.num_ranks))
        figures = {"time": time_us, "alg_bw": algbw, "bus_bw": self._busbw[-1]}
        entry[name] = {**{key: round(figures[key], 6) for key in figures}, "nwrong": wrong}
        if options.per_iteration:
            each = [
                [noisy(own_us * slow) for _ in range(options.iterations)] for slow in self._slow
            ]
            entry[f"{name}_per_iter"] = iterations(each)

    def _is_told(self, name: str, choice: Choice | None) -> bool:
        """Whether FAKE_HANG, FAKE_CRASH or FAKE_WRONG names this call."""
        return self._environment.get(name) in ({"ABSTAIN"} if choice is None else choice.keys)

    def _failure(self, error: NcclFailed, place: str) -> Stop:
        """What a process prints of its failure, from the inside out."""
        host, last = self._world.host, self._nccl.log.last_error
        said = f"{host}: Test NCCL failure {place} '{error} / {last}'\n"
        return Stop(_NCCL_ERROR, said + self._origin())

    def _origin(self) -> str:
        return f" .. {self._world.host} pid {os.getpid()}: Test failure common.cu:1454\n"
