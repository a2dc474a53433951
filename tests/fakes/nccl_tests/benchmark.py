"""One run of a benchmark program: its call order, its rows, its exit (`src/common.cu`)."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dynamiccl.nccl import Collective, NcclVersion
from tests.fakes.nccl_tests import mischief
from tests.fakes.nccl_tests.flags import Options
from tests.fakes.nccl_tests.json_report import JsonReport
from tests.fakes.nccl_tests.library import Library, NcclFailed
from tests.fakes.nccl_tests.model import Choice
from tests.fakes.nccl_tests.report import Report
from tests.fakes.nccl_tests.rows import Half, Row
from tests.fakes.nccl_tests.timing import BLOCKING_US, LAUNCH_US, Clock, Place
from tests.fakes.nccl_tests.world import World

#: `testResult_t`.
CUDA_ERROR, NCCL_ERROR, TIMEOUT, NOT_IMPLEMENTED = 2, 3, 4, 5
TYPE_BYTES: Final = {
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "half": 2,
    "float": 4,
    "double": 8,
    "bfloat16": 2,
    "f8e4m3": 1,
    "f8e5m2": 1,
}
OPERATIONS: Final = ("sum", "prod", "max", "min", "avg", "mulsum")
_REDUCTIONS: Final = frozenset(
    {Collective.AllReduce, Collective.ReduceScatter, Collective.Reduce, Collective.SendRecv}
)
_PER_RANK: Final = frozenset({Collective.AllGather, Collective.ReduceScatter, Collective.AlltoAll})
_ROOTED: Final = frozenset({Collective.Broadcast, Collective.Reduce})
#: Their in-place halves are timed and not checked.
_NOT_IN_PLACE: Final = frozenset({Collective.AlltoAll, Collective.SendRecv})
_WRONG_VALUES: Final = 17
_ERROR_TEXTS: Final = {
    1: "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    2: "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    3: "internal error - please report this issue to the NCCL developers",
    4: "invalid argument (run with NCCL_DEBUG=WARN for details)",
    5: "invalid usage (run with NCCL_DEBUG=WARN for details)",
    6: "remote process exited or there was a network error",
}


class Failed(Exception):
    """Raised when a run stops in the middle: exit status, output, origin."""

    def __init__(self, status: int, text: str, places: Sequence[str]) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.places = tuple(places)


@dataclass(frozen=True, slots=True)
class Test:
    """A benchmark program on one communicator."""

    collective: Collective
    program: str
    options: Options
    tests: NcclVersion
    #: All processes, of all communicators.
    world: World
    environment: Mapping[str, str]
    #: By what factor the communicator of each process is slower than the model's.
    slow: Sequence[float] = (1.0,)


class Benchmark:
    """Runs one test, and counts errors for its footer."""

    def __init__(
        self, test: Test, library: Library, report: Report, json_report: JsonReport | None
    ) -> None:
        """Take everything that is open already."""
        self._test = test
        self._options = test.options
        self._library = library
        self._report = report
        self._json = json_report
        self._clock = Clock(test.environment)
        self._num_ranks = library.num_ranks
        self._busbw: list[float] = []
        self._wrong_halves = 0
        self._source = f"{test.program.removesuffix('_perf')}.cu"

    def run(self) -> int:
        """Everything from the communicators to the footer; returns the exit status.

        Raises Failed.
        """
        options, report = self._options, self._report
        self._check_memory()
        try:
            self._library.connect()
        except NcclFailed as error:
            raise self._nccl_failure(error, "common.cu:222", ["common.cu:1620"]) from error
        sys.stdout.flush()
        report.table_head()
        if self._json is not None:
            self._json.results()
        for datatype in self._datatypes():
            for operation in self._operations():
                for root in self._roots():
                    self._time_test(datatype, operation, root)
        self._library.finish()
        least = float(self._test.environment.get("NCCL_TESTS_MIN_BW", "-1"))
        busbw = sum(self._busbw) / len(self._busbw) if self._busbw else float("nan")
        last_error = self._library.log.last_error
        memory = "Initialization 1.2 GB | User-Allocated 128 MB | Collective 0.00 B | Total  1.3 GB"
        report.foot(self._wrong_halves, busbw, least, memory if options.memory else None)
        report.last_error(last_error)
        if self._json is not None:
            self._json.foot(self._wrong_halves, busbw, least, last_error)
        return self._status(busbw, least)

    def _status(self, busbw: float, least: float) -> int:
        if not (self._wrong_halves or busbw < 0.9 * least):
            return 0
        tests = self._test.tests
        if tests < NcclVersion(2, 17):
            return 1
        return 6 if tests < NcclVersion(2, 17, 8) else 7

    def _check_memory(self) -> None:
        if "FAKE_OOM" in self._test.environment:
            self._library.log.fail("Cuda failure 2 'out of memory'", "allocator.cc:46")
            error = NcclFailed(1)
            raise self._nccl_failure(error, "common.cu:1107", ["common.cu:1643"]) from error

    def _datatypes(self) -> list[str]:
        if self._options.datatype == "all":
            fp8 = self._library.version >= NcclVersion(2, 24) and self._test.tests.minor >= 16
            return [name for name in TYPE_BYTES if fp8 or not name.startswith("f8")]
        return [self._options.datatype]

    def _operations(self) -> list[str]:
        if self._test.collective not in _REDUCTIONS:
            return ["none"]
        return list(OPERATIONS) if self._options.operation == "all" else [self._options.operation]

    def _roots(self) -> Iterator[int]:
        if self._test.collective not in _ROOTED:
            yield -1
        elif self._options.root == -1:
            yield from range(self._num_ranks)
        else:
            yield self._options.root

    def _time_test(self, datatype: str, operation: str, root: int) -> None:
        options = self._options
        for size in self._warm_up_sizes():
            row = self._row(size, datatype, operation, root)
            for _ in range(options.warmup):
                self._call(row, place="common.cu:928")
        cycle = 0
        while options.cycles == 0 or cycle < options.cycles:
            for size in self._sizes():
                row = self._row(size, datatype, operation, root)
                self._report.row_start(row)
                if self._json is not None:
                    self._json.row_start(row)
                time.sleep(float(self._test.environment.get("FAKE_SECONDS_PER_ROW", "0")))
                for in_place in (False, True):
                    self._half(row, cycle, in_place)
                self._report.row_end()
                if self._json is not None:
                    self._json.row_end(options.iterations)
            cycle += 1

    def _warm_up_sizes(self) -> Iterator[int]:
        options = self._options
        if self._test.tests < NcclVersion(2, 16):
            yield from (options.max_bytes, options.min_bytes)
            return
        size = options.min_bytes
        while size <= options.max_bytes:
            yield size
            if size == 0:
                return  # the real one never gets out of here
            size *= 2

    def _sizes(self) -> Iterator[int]:
        options = self._options
        size = options.min_bytes
        while size <= options.max_bytes:
            yield size
            larger = size * options.step_factor
            size = larger if options.step_factor > 1 else size + options.step_bytes

    def _row(self, size: int, datatype: str, operation: str, root: int) -> Row:
        type_bytes = TYPE_BYTES[datatype]
        count = size // type_bytes
        if self._test.collective not in _PER_RANK:
            return Row(count * type_bytes, count, datatype, operation, root)
        share = count // self._num_ranks & ~(16 // type_bytes - 1)
        return Row(share * type_bytes * self._num_ranks, share, datatype, operation, root)

    def _call(self, row: Row, *, place: str, repeat: int = 1) -> Choice | None:
        """One call (or a group of them) by every thread of this process."""
        type_bytes = TYPE_BYTES[row.datatype]
        try:
            return self._library.collective(
                self._test.collective, row.count, type_bytes, row.datatype, repeat
            )
        except NcclFailed as error:
            alone = self._options.gpus == 1
            inner = [f"{self._source}:507"] if alone else []
            first, *rest = [*inner, "common.cu:597" if alone else "common.cu:619"]
            raise self._nccl_failure(
                error, first, [*rest, place, f"{self._source}:574", "common.cu:972"]
            ) from error

    def _half(self, row: Row, cycle: int, in_place: bool) -> None:
        options, environment = self._options, self._test.environment
        collective = self._test.collective
        choice = self._call(row, place="common.cu:702")
        for iteration in range(options.iterations):
            choice = self._call(row, place="common.cu:734", repeat=options.aggregated)
            if iteration == 0:
                self._misbehave(choice)
        checked = options.check > 0 and not (in_place and collective in _NOT_IN_PLACE)
        wrong = None
        if checked:
            wrong = 0
            if mischief.wants(environment, "FAKE_WRONG", collective, choice):
                wrong = _WRONG_VALUES * self._num_ranks
                self._wrong_halves += 1
        for _ in range(1 if wrong else options.check):
            self._call(row, place="common.cu:817")
        half = self._timed(row, choice, Place(cycle, row.size_bytes, in_place, str(choice)), wrong)
        self._busbw.append(half.busbw)
        self._report.half(half)
        if self._json is not None:
            self._json.half(half, cpu_time=bool(options.cpu_time))

    def _timed(self, row: Row, choice: Choice | None, place: Place, wrong: int | None) -> Half:
        options = self._options
        quiet_us = self._library.model.time_us(self._test.collective, row.size_bytes, choice)
        quiet_us += BLOCKING_US if options.blocking else 0.0
        # Nothing but -a says whose time is printed, and by default it is the mean of all ranks.
        quiet_us *= sum(self._test.slow) / len(self._test.slow)
        time_us = self._clock.measured_us(quiet_us, place)
        algbw = row.size_bytes / (1000.0 * time_us)
        iterations = None
        if options.per_iteration:
            iterations = self._clock.iterations(
                time_us, place, options.iterations, self._test.slow, options.skip
            )
        shown_us = LAUNCH_US if options.cpu_time else time_us
        busbw = algbw * self._test.collective.bus_factor(self._num_ranks)
        return Half(place.in_place, shown_us, algbw, busbw, wrong, iterations)

    def _misbehave(self, choice: Choice | None) -> None:
        environment, collective = self._test.environment, self._test.collective
        if mischief.wants(environment, "FAKE_CRASH", collective, choice):
            mischief.die(mischief.SEGMENTATION_FAULT)
        if mischief.wants(environment, "FAKE_HANG", collective, choice):
            if not self._options.timeout_s:
                mischief.hang()
            time.sleep(self._options.timeout_s)
            host = self._test.world.host
            text = f"{host}: Test timeout ({self._options.timeout_s}s) common.cu:523\n"
            raise Failed(TIMEOUT, text, ["common.cu:939", "common.cu:972", "common.cu:1768"])

    def _nccl_failure(self, error: NcclFailed, place: str, places: Sequence[str]) -> Failed:
        said = _ERROR_TEXTS.get(error.result, "unknown result code")
        text = f"{self._test.world.host}: Test NCCL failure {place} '{said} / "
        return Failed(NCCL_ERROR, f"{text}{self._library.log.last_error}'\n", places)


def print_failure(failed: Failed, test: Test) -> None:
    """The lines of a failure, on every process that has it, from the inside out."""
    sys.stdout.write(failed.text)
    last = ["common.cu:1454"] if test.tests >= NcclVersion(2, 17) else []
    for place in [*failed.places, *last]:
        sys.stdout.write(f" .. {test.world.host} pid {os.getpid()}: Test failure {place}\n")
