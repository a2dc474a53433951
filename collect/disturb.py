"""Starts interference beside a launch, waits until it is under way, and ends it afterwards.

`cpu` and `gemm` are a program of ours on each node (stress.py). `traffic` is an endless second
nccl-tests on GPUs that the trial leaves free; its level is the share of 32 channels that it may use
(NCCL_MAX_CTAS): with Ring, bandwidth at large sizes grows about linearly with them. Measured on
eight B300 at 128 MiB (eunomia-bpf/nccl-eBPF @14f9bca): 29, 59, 117, 231, 427 and 625 GB/s with 1,
2, 4, 8, 16 and 32 channels. It has GPUs, ranks and a communicator of its own, and meets the trial
on NVSwitch, PCIe and NICs only. The launcher starts it, like a trial, but in the user's environment
without our tuner.
"""

import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dynamiccl.collect.ending import HELLO
from dynamiccl.collect.grid import REAL, Setting
from dynamiccl.collect.nodes import Nodes
from dynamiccl.datasets.schema import QUIET
from dynamiccl.errors import InvalidSweep, MachineError, UnknownName, UserError

#: Importing torch from a slow disk takes a minute, and so does NCCL's start on many nodes.
READY_S: Final = 300.0
#: A launcher may label each line with its rank.
_READY: Final = re.compile(r"(?:^|[\s:>\]])ready$")
#: A row of results: size, count, type, ... (nccl-tests writes comments with '#').
_ROW: Final = re.compile(r"^(?!\s*#).*?(?:^|[>:\]\s])\d+\s+\d+\s+[a-z]\w*\s+\w+\s+-?\d+\s+[\d.]")
#: Channels at level 1; NCCL takes fewer where the communicator has fewer.
_ALL_CHANNELS: Final = 32
#: Large enough that bandwidth, not latency, is what is taken away.
_SIZE: Final = "64M"
_KEPT_LINES: Final = 20
_END_S: Final = 10.0


class Disturber:
    """Disturbs launches on the nodes that a launcher reaches."""

    def __init__(self, nodes: Nodes, num_gpus: int | None) -> None:
        """Take the nodes, and how many GPUs each of them has (None: not known)."""
        self._nodes = nodes
        self._num_gpus = num_gpus

    @contextmanager
    def disturb(self, setting: Setting, program: str) -> Iterator["Disturbance"]:
        """Disturb what runs inside the `with`; nothing for a setting that runs alone.

        `program` is the path of the benchmark that traffic comes from, which is the launch's own.

        Raises MachineError when it does not get under way within READY_S, UnknownName for a kind
        that is no process, UserError for a level that is no share, InvalidSweep where traffic has
        no GPU. When it ends too early nothing is raised: ask `Disturbance.lost`.
        """
        beside = setting.interference
        if beside.kind == QUIET:
            yield Disturbance(beside.kind)
            return
        argv, ranks = self._argv(setting, program)
        process = self._nodes.start(argv, setting.hosts, ranks_per_node=ranks)
        try:
            disturbance = Disturbance(beside.kind, process)
        except BaseException:
            self._nodes.end(process)
            raise
        try:
            # Traffic prints for all its ranks together.
            count = 1 if beside.kind == "traffic" else setting.hosts
            disturbance.await_ready(count, READY_S)
            yield disturbance
        finally:
            self._nodes.end(process)
            disturbance.close()

    def _argv(self, setting: Setting, program: str) -> tuple[list[str], int]:
        """What disturbs, and its ranks on each node."""
        kind, level = setting.interference.kind, setting.interference.level
        if kind not in REAL:
            raise UnknownName("interference", kind, REAL, where="a sweep of real processes")
        if not 0 < level <= 1:
            raise UserError(
                f"the level of '{kind}' is {level:g}; give a share above 0 and at most 1"
            )
        if kind != "traffic":
            stress = ("-m", "dynamiccl.collect.stress", kind, "--level", f"{level:g}")
            return [sys.executable, *stress], 1
        used = setting.ranks_per_host
        if self._num_gpus is None:
            raise MachineError(
                "interference 'traffic' runs on the GPUs that a trial leaves free, and nobody "
                "knows how many the nodes have: is the NVIDIA driver there (nvidia-smi)?"
            )
        spare = self._num_gpus - used
        if spare < 1:
            raise InvalidSweep(
                f"interference 'traffic' needs GPUs that the trial leaves free, and {used} "
                f"ranks per node use all {self._num_gpus}; take groups with fewer ranks_per_node"
            )
        ranks, gpus = (1, spare) if self._nodes.one_process else (spare, 1)
        return traffic_argv(program, level, first_device=used, gpus_per_process=gpus), ranks


def traffic_argv(
    program: str, level: float, *, first_device: int, gpus_per_process: int
) -> list[str]:
    """Argument vector of the traffic (pure); it is under way with its first result row.

    `-N 0` never ends; `-c 0` since checking would pause the traffic.
    """
    channels = max(1, round(level * _ALL_CHANNELS))
    return [
        *("env", "-u", "NCCL_MIN_CTAS", f"NCCL_MAX_CTAS={channels}"),
        f"NCCL_TESTS_DEVICE={first_device}",
        program,
        *("-b", _SIZE, "-e", _SIZE, "-g", str(gpus_per_process)),
        *("-n", "100", "-w", "5", "-c", "0", "-N", "0"),
    ]


class Disturbance:
    """A running interference process, or none."""

    def __init__(self, kind: str, process: subprocess.Popen[bytes] | None = None) -> None:
        """Take the process; its output is read from now on, so that it never blocks on a pipe."""
        self.kind = kind
        self._process = process
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._ready_line = _ROW if kind == "traffic" else _READY
        self._ready = 0
        self._heard = threading.Condition()
        self._mute = False
        self._reader: threading.Thread | None = None
        if process is not None:
            self._reader = threading.Thread(target=self._read, args=(process,), daemon=True)
            self._reader.start()
            assert process.stdin is not None
            # So that it ends when we do. One that has ended already does not get ready.
            with suppress(BrokenPipeError):
                process.stdin.write(HELLO)
                process.stdin.flush()

    @property
    def lost(self) -> str | None:
        """Why it ended before it was told to; None while it runs.

        Ask after a trial: what was measured after it ended was measured without interference.
        """
        if self._process is None or (status := self._process.poll()) is None:
            return None
        return f"interference '{self.kind}' ended with status {status}; {self._last_words()}"

    def close(self) -> None:
        """Read what a process that has ended left in its pipe."""
        if self._reader is not None:
            # A process that it left behind may hold the pipe open: then the thread stays with it.
            self._reader.join(timeout=_END_S)

    def await_ready(self, count: int, timeout_s: float) -> None:
        """Return when `count` processes said that they are under way; raises MachineError."""
        with self._heard:
            self._heard.wait_for(lambda: self._ready >= count or self._mute, timeout_s)
            if self._ready >= count:
                return
        if self._process is not None and self._mute:
            # It closed its output: it is ending, and its status says why.
            self._process.wait(timeout=_END_S)
        raise MachineError(
            self.lost
            or f"interference '{self.kind}' was not ready after {timeout_s:g} s ({self._ready} of "
            f"{count} processes were); {self._last_words()}"
        )

    def _last_words(self) -> str:
        return f"its last output: {' | '.join(self._lines) or 'none'}"

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for raw in lines:
                line = raw.decode(errors="replace").rstrip()
                with self._heard:
                    self._lines.append(line)
                    self._ready += self._ready_line.search(line) is not None
                    self._heard.notify_all()
        with self._heard:
            self._mute = True
            self._heard.notify_all()
