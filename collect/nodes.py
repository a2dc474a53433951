"""The nodes of a sweep: programs on each of them, what they are, and how healthy they were.

Samplers on every node (sampler.py) tell the health of GPUs and NICs while a sweep runs. A trial may
be shorter than the time between two readings. So a stretch is judged by the readings inside it
*and* by the last before and the first after it: clocks that are down just before and just after
were down in between, and an error counter needs both to show a difference.
"""

import json
import logging
import math
import os
import re
import subprocess
import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Protocol, Self

from dynamiccl.collect.ending import HELLO
from dynamiccl.collect.launchers import LauncherSettings, Ranks, command, find_launcher
from dynamiccl.collect.node_facts import node_argv, parse_facts, row_columns
from dynamiccl.collect.process import Limits, end_session, run_process, start_session
from dynamiccl.collect.sampler import sampler_argv
from dynamiccl.errors import CorruptFile, MachineError
from dynamiccl.slurm import capture

_log = logging.getLogger(__name__)

#: Seconds for srun or mpirun to end ranks elsewhere before they are killed here.
_GRACE_S: Final = 5.0
#: A question to all nodes takes as long as a step takes to start.
_ANSWER_S: Final = 120.0
#: `OverSubscribe` of `scontrol show job` for a job that shares its nodes with nobody (slurm.conf(5)
#: and `src/api/job_info.c`, Slurm 22.05 to 24.11).
_ALONE: Final = frozenset({"NO", "EXCLUSIVE"})
_SCONTROL_S: Final = 30.0
#: A reading further than this from a stretch says nothing about it, in seconds.
MAX_GAP_S: Final = 3.0
#: How long the first reading of a sampler is waited for: readings must lie before the first trial.
_FIRST_READING_S: Final = 20.0
#: How long the reading that closes a launch may take, its way through the launcher included.
_NEXT_READING_S: Final = 1.25
#: How long the last words of ended samplers may take.
_END_S: Final = 10.0


class Nodes:
    """The nodes that a launcher reaches; our own programs run outside of any container."""

    def __init__(self, launcher: LauncherSettings) -> None:
        """Take the sweep's launcher."""
        extra = launcher.extra_args
        if find_launcher(launcher.kind).is_slurm:
            # Bound to the one core of its task, CPU stress would leave all others alone.
            extra = (*extra, "--cpu-bind=none")
        changes = {"container": None, "prefix": (), "extra_args": extra}
        self._launcher = launcher.model_copy(update=changes)

    @property
    def one_process(self) -> bool:
        """Whether all ranks of a node are one process."""
        return not find_launcher(self._launcher.kind).needs_mpi

    def ask(self, argv: Sequence[str], num_nodes: int) -> list[str]:
        """Run a program once on each node; returns its output lines, in any order.

        Raises MachineError when it fails or does not end.
        """
        started = command(Ranks(tuple(argv), num_nodes=num_nodes, overlap=True), self._launcher)
        done = run_process(started, Limits(_ANSWER_S, _ANSWER_S))
        if done.returncode != 0:
            raise MachineError(
                f"the nodes do not answer: '{started.text}' ended with status {done.returncode}: "
                f"{' | '.join(line.text for line in done.lines[-3:]) or 'no output'}"
            )
        return [line.text for line in done.lines]

    def start(
        self,
        argv: Sequence[str],
        num_nodes: int,
        *,
        ranks_per_node: int = 1,
    ) -> subprocess.Popen[bytes]:
        """Start a program in the background: one process on each node, or ranks of its own.

        Its standard input is a pipe, so that it can see us die; its output goes to a pipe that the
        caller closes. End it with `end`.
        """
        ranks = Ranks(tuple(argv), {}, num_nodes, ranks_per_node, overlap=True)
        return start_session(command(ranks, self._launcher), subprocess.PIPE, stdin=subprocess.PIPE)

    @staticmethod
    def end(process: subprocess.Popen[bytes]) -> None:
        """End a started program with all its processes; output stays for whoever reads it."""
        end_session(process, _GRACE_S)
        if process.stdin is not None:
            # What was written to one that had ended already is still in the buffer.
            with suppress(BrokenPipeError):
                process.stdin.close()


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """What is known of the nodes before anything runs."""

    #: Environment columns that all nodes agree on.
    columns: Mapping[str, Any]
    #: GPUs of a node, where all have as many.
    num_gpus: int | None


def ask_nodes(nodes: Nodes, num_nodes: int, environ: Mapping[str, str]) -> SiteFacts:
    """Ask each node what it is; columns on which nodes differ are left out, with a warning."""
    found = [facts for line in nodes.ask(node_argv(), num_nodes) if (facts := _facts(line))]
    if len(found) < num_nodes:
        _log.warning("only %d of %d nodes reported their facts", len(found), num_nodes)
    columns = agreed(found)
    alone = exclusive(environ)
    if alone is not None:
        columns["exclusive_node"] = alone
        if not alone:
            _log.warning(
                "the nodes are shared with other jobs: rows are flagged and kept out of verdicts "
                "on NCCL's default; ask for --exclusive"
            )
    if "SLURM_JOB_ID" in environ:
        columns["job_id"] = environ["SLURM_JOB_ID"]
    gpus = {facts["num_gpus"] for facts in found}
    return SiteFacts(columns, gpus.pop() if len(gpus) == 1 else None)


def agreed(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The environment columns that are equal on all nodes (pure); MIG on any node counts as MIG."""
    rows = [row_columns(node) for node in nodes]
    names = dict.fromkeys(name for row in rows for name in row)
    same = {
        name: rows[0][name]
        for name in names
        if all(row.get(name) == rows[0].get(name) for row in rows)
    }
    if differing := sorted(names.keys() - same.keys()):
        _log.warning("the nodes differ in %s: not recorded", ", ".join(differing))
    if any(row.get("mig") for row in rows):
        same["mig"] = True
    return same


def exclusive(environ: Mapping[str, str]) -> bool | None:
    """Whether a Slurm job has its nodes exclusively; None outside of Slurm or if unknown."""
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    try:
        done = capture(("scontrol", "show", "job", "--oneliner", job), timeout_s=_SCONTROL_S)
    except MachineError as error:
        # As in a container, which has the job's variables and not Slurm's programs.
        _log.warning("not known whether the nodes are ours alone: %s", error)
        return None
    found = re.search(r"\bOverSubscribe=(\S+)", done.stdout)
    return None if found is None else found[1] in _ALONE


def environment() -> Mapping[str, str]:
    """The environment variables of this process, for `exclusive`."""
    return os.environ


def _facts(line: str) -> dict[str, Any] | None:
    # A launcher may say something of its own between the nodes' lines.
    if not line.startswith("{"):
        return None
    try:
        return parse_facts(line)
    except CorruptFile as error:
        _log.warning("%s", error)
        return None


#: Name of a NIC's port, its retries and its congestion; None = unknown.
Port = tuple[str, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Health:
    """Health of the nodes during a time interval; None = unknown."""

    #: A GPU was slowed by heat or power (sampler.SLOWED).
    throttled: bool | None
    #: Uncorrected memory errors that were counted meanwhile.
    ecc_errors: int | None
    #: ("HOST DEVICE/PORT", retries, congestion) of every port that counts anything: packets lost or
    #: sent again; marked or slowed for congestion (sampler.py).
    ports: tuple[Port, ...] = ()

    def row_columns(self) -> dict[str, Any]:
        """The measurement columns that this fills."""
        worst = max(self.ports, key=lambda port: (port[1] or 0, port[2] or 0), default=None)
        return {
            "throttled": self.throttled,
            "ecc_errors": self.ecc_errors,
            "nic_retries": _sum([retries for _, retries, _ in self.ports]),
            "nic_congestion": _sum([congestion for _, _, congestion in self.ports]),
            "nic_worst": worst[0] if worst is not None and any(worst[1:]) else None,
        }


#: What is known of a node without a GPU that can be asked.
UNKNOWN: Final = Health(throttled=None, ecc_errors=None)


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive equal readings, from the first to the last (Unix seconds)."""

    begin_s: float
    end_s: float
    #: One value for each GPU, as sampler.py prints them.
    slowed: tuple[bool | None, ...]
    ecc_errors: tuple[int | None, ...]
    #: Counters of each port of a NIC since its driver loaded.
    nics: tuple[Port, ...] = ()


def parse_reading(line: str) -> tuple[str, Window] | None:
    """The sampler's name and the reading in its line of JSON; None for any other line.

    >>> gpus = '"slowed": [true], "ecc_errors": [0]'
    >>> parse_reading('0: {"sampler": "n1:7", "time_s": 5.0, ' + gpus + ', "nics": {}}')
    ('n1:7', Window(begin_s=5.0, end_s=5.0, slowed=(True,), ecc_errors=(0,), nics=()))
    """
    # A launcher may label each line with its rank, and says things of its own.
    _, brace, rest = line.partition("{")
    try:
        found = json.loads(brace + rest)
        slowed, errors = tuple(found["slowed"]), tuple(found["ecc_errors"])
        nics = tuple((port, *counts) for port, counts in found["nics"].items())
        return str(found["sampler"]), Window(found["time_s"], found["time_s"], slowed, errors, nics)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class NodeReadings:
    """The readings of one node."""

    def __init__(self, host: str = "") -> None:
        """Start without readings."""
        self._host = host
        self._windows: list[Window] = []

    def add(self, reading: Window) -> None:
        """Add a reading; times must increase."""
        last = self._windows[-1] if self._windows else None
        if (
            last is not None
            and reading.begin_s - last.end_s <= MAX_GAP_S
            and (reading.slowed, reading.ecc_errors, reading.nics)
            == (last.slowed, last.ecc_errors, last.nics)
        ):
            self._windows[-1] = replace(last, end_s=reading.end_s)
        else:
            self._windows.append(reading)

    def has_since(self, time_s: float) -> bool:
        """Whether there is a reading at `time_s` or later."""
        return bool(self._windows) and self._windows[-1].end_s >= time_s

    def forget_before(self, time_s: float) -> None:
        """Drop readings that are not needed from `time_s` on."""
        self._windows = [w for w in self._windows if w.end_s >= time_s - MAX_GAP_S]

    def health(self, begin_s: float, end_s: float) -> Health:
        """The node's health from `begin_s` to `end_s`."""
        near = self._around(begin_s, end_s)
        is_known = (
            bool(near)
            and near[0].begin_s <= begin_s
            and near[-1].end_s >= end_s
            and all(after.begin_s - w.end_s <= MAX_GAP_S for w, after in pairwise(near))
        )
        slowed = zip(*(w.slowed for w in near), strict=True)
        errors = zip(*(w.ecc_errors for w in near), strict=True)
        return Health(
            throttled=_any([_any(gpu) if any(gpu) or is_known else None for gpu in slowed]),
            ecc_errors=_sum(
                [_counted(gpu) if _counted(gpu) or is_known else None for gpu in errors]
            ),
            ports=self._ports(near, is_known=is_known),
        )

    def _ports(self, near: Sequence[Window], *, is_known: bool) -> tuple[Port, ...]:
        totals: dict[str, list[tuple[int | None, int | None]]] = defaultdict(list)
        for window in near:
            for port, retries, congestion in window.nics:
                totals[port].append((retries, congestion))
        found = []
        for port, counts in totals.items():
            each = [_counted(column) for column in zip(*counts, strict=True)]
            retries, congestion = (count if count or is_known else None for count in each)
            found.append((f"{self._host} {port}".strip(), retries, congestion))
        return tuple(found)

    def _around(self, begin_s: float, end_s: float) -> list[Window]:
        """The windows in the stretch, the last before and the first after, if they are near."""
        first = max(bisect_right(self._windows, begin_s, key=lambda w: w.begin_s) - 1, 0)
        last = bisect_left(self._windows, end_s, key=lambda w: w.end_s)
        return [
            w
            for w in self._windows[first : last + 1]
            if w.end_s >= begin_s - MAX_GAP_S and w.begin_s <= end_s + MAX_GAP_S
        ]


def worst_of(nodes: Iterable[Health]) -> Health:
    """The worst health of several nodes; unknown if any node is unknown and none is bad.

    >>> worst_of([Health(False, 0), UNKNOWN]).throttled is None
    True
    >>> worst_of([Health(True, 2), UNKNOWN])
    Health(throttled=True, ecc_errors=2, ports=())
    """
    every = list(nodes)
    return Health(
        throttled=_any([h.throttled for h in every]),
        ecc_errors=_sum([h.ecc_errors for h in every]),
        ports=tuple(port for h in every for port in h.ports),
    )


def _counted(totals: Sequence[int | None]) -> int | None:
    """Errors that one GPU counted; None when it does not tell and no error is known."""
    known = [total for total in totals if total is not None]
    # A counter that began anew (a driver reload) has counted what it shows since then.
    steps = [after - before if after >= before else after for before, after in pairwise(known)]
    return sum(steps) or (0 if len(known) == len(totals) else None)


def _any(verdicts: Sequence[bool | None]) -> bool | None:
    if any(verdicts):
        return True
    return None if not verdicts or None in verdicts else False


def _sum(counts: Sequence[int | None]) -> int | None:
    known = sum(count or 0 for count in counts)
    return None if not known and (not counts or None in counts) else known


class Watch(Protocol):
    """Reports the health of the nodes during given time intervals."""

    def health(self, stretches: Sequence[tuple[float, float]]) -> list[Health]:
        """The health in each (begin, end) interval, Unix seconds, in the order of time."""


class NoWatch:
    """No samplers: health is unknown."""

    def health(self, stretches: Sequence[tuple[float, float]]) -> list[Health]:
        """Unknown for every interval."""
        return [UNKNOWN] * len(stretches)


class NodeWatch:
    """A sampler process on each node; a context manager around a run."""

    def __init__(self, nodes: Nodes, num_nodes: int) -> None:
        """Take where samplers run."""
        self._nodes = nodes
        self._num_nodes = num_nodes
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = threading.Thread(target=self._listen, daemon=True)
        #: Guards what follows, and tells of news.
        self._heard = threading.Condition()
        self._readings: dict[str, NodeReadings] = {}
        self._last_words: deque[str] = deque(maxlen=2)
        self._is_over = False

    def __enter__(self) -> Self:
        """Start the samplers, and wait for their first readings."""
        self._process = self._nodes.start(sampler_argv(), self._num_nodes)
        try:
            self._reader.start()
            self._greet(self._process)
            if not self._await_readings(-math.inf, _FIRST_READING_S):
                words = " | ".join(self._last_words)
                _log.warning("no telemetry: the samplers do not write (%s)", words)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the samplers."""
        if self._process is not None:
            self._nodes.end(self._process)
            # A process that one left behind may hold the pipe open: then the thread stays with it.
            self._reader.join(timeout=_END_S)

    def health(self, stretches: Sequence[tuple[float, float]]) -> list[Health]:
        """The health in each interval: the worst of all nodes; unknown where a node is silent."""
        if not stretches:
            return []
        # Only the reading after it tells what happened at the end of a launch.
        self._await_readings(max(end for _, end in stretches), _NEXT_READING_S)
        with self._heard:
            for node in self._readings.values():
                node.forget_before(min(begin for begin, _ in stretches))
            silent = [UNKNOWN] * (self._num_nodes - len(self._readings))
            return [
                worst_of([*(node.health(*stretch) for node in self._readings.values()), *silent])
                for stretch in stretches
            ]

    @staticmethod
    def _greet(process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        # One that has ended already is seen by its silence, and its last words say why.
        with suppress(BrokenPipeError):
            process.stdin.write(HELLO)
            process.stdin.flush()

    def _await_readings(self, since_s: float, patience_s: float) -> bool:
        """Wait until every node has a reading at `since_s` or later; False on timeout."""
        with self._heard:
            self._heard.wait_for(lambda: self._is_over or self._are_read(since_s), patience_s)
            return self._are_read(since_s)

    def _are_read(self, since_s: float) -> bool:
        read = [node.has_since(since_s) for node in self._readings.values()]
        return len(read) >= self._num_nodes and all(read)

    def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._hear(line.decode(errors="replace"))
        with self._heard:
            self._is_over = True
            self._heard.notify_all()

    def _hear(self, line: str) -> None:
        found = parse_reading(line)
        with self._heard:
            if found is None:
                self._last_words.append(line.strip())
                return
            sampler, reading = found
            host = sampler.rpartition(":")[0]
            self._readings.setdefault(sampler, NodeReadings(host)).add(reading)
            self._heard.notify_all()
