"""The text that nccl-tests prints, release by release (`src/common.cu`, later `src/util.cu`)."""

import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from dynamiccl.nccl import NcclVersion
from tests.fakes.nccl_tests.flags import Options
from tests.fakes.nccl_tests.numbers import narrow, old_time
from tests.fakes.nccl_tests.rows import Half, Iterations, Row

#: What cudaDeviceProp.name holds.
DEVICE_NAME: Final = "FAKE H100"
_TIME_FORMAT: Final = "%Y-%m-%d %H:%M:%S"
_SPLIT_UTIL: Final = NcclVersion(2, 17, 3)
_STAMPED: Final = NcclVersion(2, 17, 8)
_UNITS: Final = ("(us)", "(GB/s)", "(GB/s)", "")
_PER_ITERATION: Final = ("i_min", "i_max", "i_p99", "i_cv%")
_PER_ITERATION_UNITS: Final = ("(us)", "(us)", "(us)", "(%)")


def now() -> str:
    """The local time as nccl-tests writes it."""
    return datetime.now().astimezone().strftime(_TIME_FORMAT)


class Report:
    """Standard output of one process; only rank 0's main thread writes to it."""

    def __init__(self, options: Options, tests: NcclVersion, program: str, *, main: bool) -> None:
        """Take what shapes the output."""
        self._options = options
        self._tests = tests
        self._program = program
        self._main = main

    def write(self, text: str) -> None:
        """Print, on the main rank only."""
        if self._main:
            sys.stdout.write(text)

    def head(self, nccl_code: int) -> None:
        """The lines above the devices."""
        o = self._options
        if self._tests >= _STAMPED:
            version = f"nccl-headers={nccl_code} nccl-library={nccl_code}"
            self.write(f"# nccl-tests version {self._tests} {version}\n")
        if self._tests >= NcclVersion(2, 16):
            self.write(f"# Collective test starting: {self._program}\n")
        step = f"{o.step_factor}(factor)" if o.step_factor > 1 else f"{o.step_bytes}(bytes)"
        unalign = f" unalign: {o.unalign}" if self._tests >= NcclVersion(2, 18, 2) else ""
        self.write(
            f"# nThread {o.threads} nGpus {o.gpus} minBytes {o.min_bytes} maxBytes {o.max_bytes} "
            f"step: {step} warmup iters: {o.warmup} iters: {o.iterations} agg iters: "
            f"{o.aggregated} validation: {o.check} graph: {o.graph}{unalign}\n"
        )
        self.write("".join(f"# {line} \n" for line in self._modes()) + "#\n# Using devices\n")

    def devices(self, rank: int, host: str, devices: Sequence[int], pid: int, colour: int) -> str:
        """One line for each GPU of a process; returned too, since JSON is parsed from it."""
        lines = []
        for index, device in enumerate(devices):
            bus = f"{0x10 * (device + 1):02x}"
            pci = f"[0x{bus}]" if self._tests < NcclVersion(2, 16) else f"[0000:{bus}:00]"
            lines.append(
                f"#  Rank {rank + index:2d} Group {colour:2d} Pid {pid:6d} on {host:>10} device "
                f"{device:2d} {pci} {DEVICE_NAME}\n"
            )
        self.write("".join(lines))
        return lines[0]

    def table_head(self) -> None:
        """The three lines above the rows."""
        o = self._options
        time = "cputime" if o.cpu_time else "time"
        start = " ".join((f"# {'':>10}", *(f" {'':>{w}}" for w in (12, 8, 6, 6))))
        if o.per_iteration:
            gap = " " * 32
            place = f"              out-of-place (+ per-iteration){gap}in-place (+ per-iteration)"
        else:
            place = "           out-of-place                       in-place          "
        self.write(f"#\n{start}{place}\n")
        names = ("size", "count", "type", "redop", "root")
        half = (time, "algbw", "busbw", "#wrong")
        self.write(self._names(names, half, _PER_ITERATION, "timestamp"))
        units = ("(B)", "(elements)", "", "", "")
        self.write(self._names(units, _UNITS, _PER_ITERATION_UNITS, _TIME_FORMAT))

    def row_start(self, row: Row) -> None:
        """Size, count, type, operation and root."""
        self.write(
            f"{row.size_bytes:12d}  {row.count:12d}  {row.datatype:>8}  {row.operation:>6}  "
            f"{row.root:6d}"
        )

    def half(self, half: Half) -> None:
        """One half of a row."""
        wide = self._tests >= _SPLIT_UTIL
        if wide:
            time = narrow(half.time_us, 7, self._tests)
            bandwidths = [narrow(bw, 6, self._tests) for bw in (half.algbw, half.busbw)]
        else:
            time = old_time(half.time_us)
            bandwidths = [f"{bw:6.2f}" for bw in (half.algbw, half.busbw)]
        width = 6 if wide else 5
        wrong = "N/A" if half.wrong is None else f"{float(half.wrong):g}"
        self.write(f"  {time}  {bandwidths[0]}  {bandwidths[1]}  {wrong:>{width}}")
        if half.iterations is not None:
            self._iterations(half.iterations)
        if half.in_place and self._options.timestamps:
            self.write(f"{now():>21}")

    def row_end(self) -> None:
        """The end of a row."""
        self.write("\n")

    def foot(self, errors: int, busbw: float, min_busbw: float, memory: str | None) -> None:
        """Everything below the rows, up to what NCCL calls its last error."""
        bound = "" if min_busbw == -1 else "FAILED" if busbw < 0.9 * min_busbw else "OK"
        width = 20 if self._tests >= _STAMPED else 0
        wrong = "FAILED" if errors else "OK"
        self.write(f"# {'Out of bounds values':<{width}} : {errors} {wrong}\n")
        title = "Avg bus bandwidth" if width else "Avg bus bandwidth   "
        self.write(f"# {title:<{width}} : {busbw:g} {bound}\n#\n")
        if self._tests >= NcclVersion(2, 16):
            self.write(f"# Collective test concluded: {self._program}\n")
        if self._tests >= _STAMPED:
            if memory is not None:
                self.write(f"# {'GPU memory usage':<20} : {memory}\n")
            self.write("#\n")

    def last_error(self, error: str) -> None:
        """NCCL's last error, or an empty line."""
        marked = f"# error: {error}\n" if error and self._tests >= _SPLIT_UTIL else f"{error}\n"
        self.write(marked)

    def _modes(self) -> list[str]:
        o = self._options
        modes = []
        if o.blocking:
            modes.append(f"Blocking Enabled: {_blocking(o.blocking, self._tests)}")
        if o.per_iteration:
            text = "Per-Iteration Report: CUDA event timing; i_* uses max over process rows"
            modes.append(text + (f"; summary skips first {o.skip} iterations" if o.skip else ""))
        if o.parallel_init:
            modes.append("Parallel Init Enabled: threads call into NcclInitRank concurrently")
        return modes

    def _names(
        self,
        start: Sequence[str],
        half: Sequence[str],
        per_iteration: Sequence[str],
        stamp: str,
    ) -> str:
        line = f"# {start[0]:>10}"
        line += "".join(f"  {name:>{w}}" for name, w in zip(start[1:], (12, 8, 6, 6), strict=True))
        for _ in range(2):
            line += f"  {half[0]:>7}  {half[1]:>6}  {half[2]:>6}{self._wrong(half[3])}"
            if self._options.per_iteration:
                line += "".join(f"  {name:>7}" for name in per_iteration)
        if self._tests >= _STAMPED:
            line += f" {stamp:>19}" if self._options.timestamps else " "
        return f"{line}\n"

    def _wrong(self, name: str) -> str:
        """The fourth column's name: it was out of line with its numbers until 2.17.8."""
        if name:
            return f"  {name}" if self._tests >= _SPLIT_UTIL else f" {name}"
        return " " * (8 if self._tests >= _STAMPED else 7)

    def _iterations(self, iterations: Iterations) -> None:
        columns = (iterations.min_us, iterations.max_us, iterations.p99_us, iterations.cv_percent)
        self.write("".join(f"  {narrow(value, 7, self._tests)}" for value in columns))


def _blocking(mode: int, tests: NcclVersion) -> str:
    if tests < NcclVersion(2, 19, 2):
        if mode == 1 or tests < NcclVersion(2, 18, 2):
            return "wait for completion and barrier after each collective"
        return "wait for completion after each collective (no barrier)"
    if mode == 1:
        return "wait and barrier after each inner iteration (-m)"
    if mode == 2:
        return "wait after each inner iteration (-m), no barrier"
    return "wait and barrier after each outer iteration (-n); time excludes barrier"
