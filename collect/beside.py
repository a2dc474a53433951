"""A collective beside matrix products, in one process for each rank: what both lose by it.

    python -m dynamiccl.collect.beside all_reduce_perf --edge 4096 --meet DIR/meet -b 4096 -e 65536

It makes as many calls in the same order as nccl-tests 2.19.6 (`src/common.cu`), so that plans are
played and read back as ever; options that a sweep does not give are refused.

It is one process, since products of another one get slices of time and not SMs. Ranks meet in the
file `--meet`; nothing but the calls goes over NCCL (`--cpu` tries it on gloo and the CPU). The
matrices are of normal numbers, since zeros draw less power, in bfloat16; products follow each other
without a pause, in a thread and on a stream of their own; `--persistent` takes our kernel in place
of cuBLAS's (on a CPU with TRITON_INTERPRET=1). A half of a block is

    products alone | one call | n calls beside products | checks | products alone

and its figures are means over ranks (datasets/schema.py, BESIDE_COLUMNS; nan: not known). They are
of all but the first of the n calls, in which ranks wait for each other, and of the *stretch* from
the begin of the first product that meets one of these to the end of the last, so that no product is
counted in part. Values are not checked: nccl-tests does that. PyTorch's all-reduce, broadcast and
reduce are in place: of their halves, two measurements of that, a row has the mean.
"""

import argparse
import math
import os
import platform
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from dynamiccl import cli
from dynamiccl.collect.grid import BINARIES, DATATYPE_BYTES, Setting, factor_ladder
from dynamiccl.collect.output import BESIDE
from dynamiccl.errors import MachineError
from dynamiccl.nccl import Collective

_COLLECTIVES: Final = {name: each for each, name in BINARIES.items() if each.tunable}
#: A piece of products alone, and how many it has at least.
_PIECE_S: Final = 0.05
_LEAST: Final = 8
_QUEUED: Final = 8
#: GPU cycles that the first call waits for each call to launch: 30 us (chosen, not measured).
_LAUNCH_CYCLES: Final = 60_000
#: Of Open MPI and Slurm.
_LAUNCHED: Final = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
#: Renamed in torch 2.13.
_REDUCE_SCATTER: Final = (
    dist.reduce_scatter_single
    if hasattr(dist, "reduce_scatter_single")
    else dist.reduce_scatter_tensor
)
_CUDA: Final[Any] = torch.cuda


class Rank(NamedTuple):
    """A process: its number, of how many, and its number on its node."""

    number: int
    size: int
    local: int


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The command line, in nccl-tests' letters."""
    parser = argparse.ArgumentParser(prog="dynamiccl.collect.beside", allow_abbrev=False)
    parser.add_argument("program", choices=_COLLECTIVES)
    parser.add_argument("--edge", type=int, required=True)
    parser.add_argument("--meet", required=True)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("-d", dest="datatype", choices=DATATYPE_BYTES, default="float")
    for letter, name, usual in (
        *(("b", "first", 32 << 20), ("e", "last", 32 << 20), ("f", "factor", 2), ("g", "gpus", 1)),
        *(("n", "iterations", 20), ("w", "warmup", 1), ("c", "checks", 1), ("N", "cycles", 1)),
    ):
        parser.add_argument(f"-{letter}", dest=name, type=int, default=usual)
    return parser.parse_args(arguments)


def mark(device: torch.device) -> Any:
    """A mark behind what the stream has queued; on a CPU, now."""
    if device.type == "cpu":
        return time.perf_counter()
    # Blocking leaves the core to NCCL's threads.
    event = _CUDA.Event(enable_timing=True, blocking=True)
    event.record()
    return event


def wait_for(mark: Any) -> None:
    """Wait until a mark is reached."""
    if not isinstance(mark, float):
        mark.synchronize()


def between_us(first: Any, last: Any) -> float:
    """Microseconds between two marks that are reached."""
    if isinstance(first, float):
        return 1e6 * float(last - first)
    return 1e3 * float(first.elapsed_time(last))


def stretch(at_us: Sequence[float], begin_us: float, end_us: float) -> tuple[int, int]:
    """First and last of the marks at `at_us` between which whole products meet the calls.

    >>> stretch([0, 100, 200, 350, 500, 600], begin_us=210, end_us=490)
    (2, 4)
    """
    return bisect_right(at_us, begin_us) - 1, bisect_left(at_us, end_us)


class Products:
    """Products of two squares, one behind the other."""

    def __init__(self, edge: int, device: torch.device, is_persistent: bool = False) -> None:
        is_cuda, self._device = device.type == "cuda", device
        dtype = torch.bfloat16 if is_cuda else torch.float32
        a, b, product = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(3))
        self._stream = _CUDA.Stream(device) if is_cuda else None
        #: A multiplication and a sum for each element and edge.
        self._tflop = 2e-12 * edge**3
        self._product: Callable[[], object] = partial(torch.mm, a, b, out=product)
        if is_persistent:
            from dynamiccl.collect.persistent import multiply

            programs = _CUDA.get_device_properties(device).multi_processor_count if is_cuda else 2
            self._product = partial(multiply, a, b, product, programs)
            self._product()  # compiled before anything is measured

    def rate(self, marks: list[Any]) -> float:
        """TFLOP/s, with one product between each two marks."""
        return self._tflop * (len(marks) - 1) * 1e6 / between_us(marks[0], marks[-1])

    def alone(self) -> float:
        """TFLOP/s beside nothing."""
        marks, until_s = list[Any](), time.perf_counter() + _PIECE_S
        self._multiply(marks, lambda: len(marks) > _LEAST and time.perf_counter() > until_s)
        return self.rate(marks[1:])  # of the first one the launch is a part

    def during(self, work: Callable[[], object]) -> list[Any]:
        """Marks of products; one ends before `work` begins, and one begins after it."""
        marks, over = list[Any](), threading.Event()
        with ThreadPoolExecutor(1) as pool:
            multiplying = pool.submit(self._multiply, marks, over.is_set)
            try:
                while len(marks) < 2 and not multiplying.done():
                    time.sleep(1e-4)
                if len(marks) > 1:
                    wait_for(marks[1])
                    work()
            finally:
                over.set()
        multiplying.result()
        return marks

    def _multiply(self, marks: list[Any], is_over: Callable[[], bool]) -> None:
        torch.set_num_threads(1)  # of this thread
        with torch.cuda.stream(self._stream):
            marks.append(mark(self._device))
            is_last = False
            while not is_last:
                is_last = is_over()
                self._product()
                marks.append(mark(self._device))
                wait_for(marks[-_QUEUED:][0])
        wait_for(marks[-1])


class Benchmark:
    """One rank of a launch."""

    def __init__(self, options: argparse.Namespace, rank: Rank) -> None:
        self._options, self._rank = options, rank
        self._collective, self._device = _COLLECTIVES[options.program], torch.device("cpu")
        self._stream = None
        if not options.cpu:
            if not torch.cuda.is_available():
                raise MachineError(
                    f"no CUDA device on {platform.node()} for torch {torch.__version__}: take one "
                    "built for CUDA; --cpu tries the program itself, without NCCL"
                )
            self._device = torch.device("cuda", rank.local % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
            self._stream = _CUDA.Stream(self._device)
        meet = f"file://{options.meet}"
        # What ranks tell each other goes by this group.
        dist.init_process_group("gloo", meet, rank=rank.number, world_size=rank.size)
        self._group = dist.new_group(backend="gloo" if options.cpu else "nccl")
        self._products = Products(options.edge, self._device, options.persistent)
        self._alone = math.nan

    def run(self) -> None:
        """Print head and rows."""
        options = self._options
        self._head()
        with torch.cuda.stream(self._stream):
            for size in factor_ladder(options.first, options.last, 2):
                call, *_ = self._calls(self._buffer(size))
                for _ in range(options.warmup):
                    call()
            self._settle()
            self._alone = self._products.alone()
            for _ in range(options.cycles):
                for size in factor_ladder(options.first, options.last, options.factor):
                    self._block(self._buffer(size))
        dist.destroy_process_group()

    def _buffer(self, size: int) -> torch.Tensor:
        """The larger buffer, of zeros, since sums that repeat in place would not stay finite."""
        name, ranks = self._options.datatype, self._rank.size
        setting = Setting(self._collective, 1, ranks, 1, ranks, name)
        count = setting.benchmark_bytes(size) // DATATYPE_BYTES[name]
        return torch.zeros(count, dtype=getattr(torch, name), device=self._device)

    def _calls(self, whole: torch.Tensor) -> list[Callable[[], object]]:
        share = whole.numel() // self._rank.size
        own = whole[self._rank.number * share :][:share]
        parts = (torch.zeros_like(own), own)
        group = {"group": self._group}
        calls: dict[Collective, list[Callable[[], object]]] = {
            Collective.AllGather: [
                partial(dist.all_gather_into_tensor, whole, part, **group) for part in parts
            ],
            Collective.ReduceScatter: [partial(_REDUCE_SCATTER, p, whole, **group) for p in parts],
            Collective.Broadcast: [partial(dist.broadcast, whole, 0, **group)],
            Collective.Reduce: [partial(dist.reduce, whole, 0, **group)],
            Collective.AllReduce: [partial(dist.all_reduce, whole, **group)],
        }
        return calls[self._collective]

    def _settle(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize()
        dist.barrier()

    def _block(self, whole: torch.Tensor) -> None:
        calls, halves = self._calls(whole), list[torch.Tensor]()
        for call in calls * (3 - len(calls)):
            call()
            halves.append(torch.tensor(self._half(call), dtype=torch.float64) / self._rank.size)
            dist.all_reduce(halves[-1])
            for _ in range(self._options.checks):  # of values nccl-tests sees to
                call()
        if len(calls) == 1:
            halves = [halves[0] * math.nan, (halves[0] + halves[1]) / 2]
        self._row(whole, halves)

    def _half(self, call: Callable[[], object]) -> tuple[float, ...]:
        """This rank's figures, in the order of `BESIDE`."""
        count, before, ends, mhz = self._options.iterations, self._alone, list[Any](), math.nan
        timed = max(count - 1, 1)
        self._settle()

        def work() -> None:
            nonlocal mhz
            if self._stream is not None:
                _CUDA._sleep(_LAUNCH_CYCLES * count)
            for number in range(count):
                if number == count - timed:
                    ends.append(mark(self._device))
                call()
            ends.append(mark(self._device))
            with suppress(Exception):  # NVML: no package, no driver, no right: each its own
                mhz = float(torch.cuda.clock_rate(self._device))
            wait_for(ends[1])

        marks = self._products.during(work)
        self._alone = self._products.alone()
        at_us, ends_us = ([between_us(marks[0], each) for each in some] for some in (marks, ends))
        first, last = stretch(at_us, *ends_us)
        beside, alone = self._products.rate(marks[first : last + 1]), (before + self._alone) / 2
        period_us, time_us = (at_us[last] - at_us[first]) / timed, (ends_us[1] - ends_us[0]) / timed
        share = math.nan if self._stream is None else time_us / period_us
        loss_us, differ = period_us * (1 - beside / alone), abs(before - self._alone) / alone
        return time_us, alone, beside, loss_us, period_us, share, mhz, differ

    def _head(self) -> None:
        gpu = "" if self._stream is None else torch.cuda.get_device_name(self._device)
        own = platform.node().partition(".")[0], os.getpid(), self._device.index or 0, gpu
        ranks: list[Any] = [None] * self._rank.size
        dist.all_gather_object(ranks, own)
        lines = [f"# Using devices, beside products of edge {self._options.edge}"]
        lines += [f"# NCCL version {'.'.join(map(str, _CUDA.nccl.version()))}"] if gpu else []
        for number, (host, pid, device, name) in enumerate(ranks):
            lines.append(f"#  Rank {number} Group 0 Pid {pid} on {host} device {device} [-] {name}")
        half = f"time algbw busbw #wrong {BESIDE}"
        lines += ["# out-of-place, in-place", f"# size count type {half} {half}"]
        self._print("\n".join(lines))

    def _row(self, whole: torch.Tensor, halves: list[torch.Tensor]) -> None:
        size_bytes = whole.numel() * whole.element_size()
        words: list[Any] = [size_bytes, whole.numel(), self._options.datatype]
        for time_us, *facts in (half.tolist() for half in halves):
            algbw = size_bytes / time_us / 1e3
            busbw = algbw * self._collective.bus_factor(self._rank.size)
            told = [time_us, algbw, busbw, "N/A", *facts]
            words += ["N/A"] * len(told) if math.isnan(time_us) else told
        texts = (f"{word:.7g}" if isinstance(word, float) else str(word) for word in words)
        self._print(" ".join(texts))

    def _print(self, text: str) -> None:
        if self._rank.number == 0:
            print(text, flush=True)  # noqa: T201 - what it is for


def _one_of_node(local: int, options: argparse.Namespace) -> None:
    Benchmark(options, Rank(local, options.gpus, local)).run()


def main() -> None:
    """Measure as the launcher's rank, or in a process for each of several GPUs."""
    options = options_of(sys.argv[1:])
    if options.gpus > 1:
        # Forked before CUDA is touched: one import of torch for all.
        processes: Any = torch.multiprocessing
        processes.start_processes(_one_of_node, (options,), options.gpus, start_method="fork")
        return
    told = ([os.environ[name] for name in names if name in os.environ] for names in _LAUNCHED)
    rank = next((Rank(*map(int, each)) for each in told if len(each) == 3), Rank(0, 1, 0))
    Benchmark(options, rank).run()


if __name__ == "__main__":
    cli.run(main)
