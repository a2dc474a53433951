"""The nodes of a sweep: programs on each of them (on_node.py), facts, health, interference.

A trial may be shorter than the time between two readings of a sampler. So a stretch is judged by
the readings inside it *and* by the last before and the first after it: clocks that are down on both
sides were down in between, and an error counter needs both to show a difference.

Of interference (`disturb`) `cpu` is busy cores. `traffic` is an endless second nccl-tests on GPUs
that the trial leaves free, without our tuner; its level is the share of 32 channels that it may use
(NCCL_MAX_CTAS): on eight B300 at 128 MiB (eunomia-bpf/nccl-eBPF @14f9bca) Ring reaches 29, 59, 117,
231, 427 and 625 GB/s with 1, 2, 4, 8, 16 and 32. Products are in the calls' process (beside.py).
"""

import json
import logging
import os
import re
import shlex
import subprocess
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any, Final

from dynamiccl.collect import launchers
from dynamiccl.collect.grid import PRODUCTS, Setting
from dynamiccl.collect.on_node import FACTS_ARGV, HELLO, ON_NODE, READY, SAMPLER_ARGV
from dynamiccl.collect.output import MEANT_AS_ROW
from dynamiccl.datasets.schema import QUIET
from dynamiccl.doctor import Machine
from dynamiccl.errors import InvalidSweep, MachineError

_log = logging.getLogger(__name__)
_Hear = Callable[[str], object]
_END_S: Final = 10.0
#: For a step to start, or a busy Slurm to answer.
_ANSWER_S: Final = 120.0


class Nodes:
    """The nodes that a launcher reaches; our programs run outside of any container."""

    def __init__(self, settings: launchers.LauncherSettings) -> None:
        # Bound to its task's core, CPU stress would leave all others alone.
        unbound = ("--cpu-bind=none",) if settings.is_slurm else ()
        changes = {"container": None, "prefix": (), "extra_args": (*settings.extra_args, *unbound)}
        self._launcher = settings.model_copy(update=changes)
        self.one_process = not settings.is_distributed

    def ask(self, argv: Sequence[str], num_nodes: int) -> list[str]:
        """Run a program once on each node; its lines in any order. Raises MachineError."""
        lines: list[str] = []
        with self.start(argv, num_nodes, lines.append) as program:
            program.wait_for(lambda: False, _ANSWER_S)
        if program.process.returncode != 0:
            raise MachineError(
                f"the nodes do not answer: '{program.text}' ended with status "
                f"{program.process.returncode}: {' | '.join(lines[-3:]) or 'no output'}"
            )
        return lines

    @contextmanager
    def start(
        self, argv: Sequence[str], num_nodes: int, hear: _Hear, *, ranks_per_node: int = 1
    ) -> Iterator["Companion"]:
        """Run a program beside the `with`, once on each node or as ranks. Raises MachineError."""
        ranks = launchers.Ranks(tuple(argv), {}, num_nodes, ranks_per_node, overlap=True)
        program = Companion(launchers.command(ranks, self._launcher), hear)
        try:
            yield program
        finally:
            # srun or mpirun end ranks elsewhere, before they are killed here.
            launchers.end_session(program.process, 5.0)
            program.process.stdin.close()  # type: ignore[union-attr]
            # What it left behind may hold the pipe open: the thread stays with it.
            program.reader.join(timeout=_END_S)


class Companion:
    """A program beside the launches; a thread hands on what it says."""

    def __init__(self, argv: Sequence[str], hear: _Hear) -> None:
        self.text = shlex.join(argv)
        self.process = launchers.start_session(argv, subprocess.PIPE, stdin=subprocess.PIPE)
        self._lines: deque[str] = deque(maxlen=20)
        self.reader = threading.Thread(target=self._read, args=(hear,), daemon=True)
        self.reader.start()
        # So that it ends when we do; its silence tells when it has.
        with suppress(BrokenPipeError):
            os.write(self.process.stdin.fileno(), HELLO)  # type: ignore[union-attr]

    def wait_for(self, done: Callable[[], bool], patience_s: float) -> bool:
        """Wait until `done()`, or until it closed its output."""
        deadline = time.monotonic() + patience_s
        while not done() and time.monotonic() < deadline:
            if not self.reader.is_alive():
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=_END_S)
                break
            time.sleep(0.01)
        return done()

    @property
    def last_words(self) -> str:
        """The end of its output, on one line."""
        return " | ".join([*self._lines]) or "no output"

    def _read(self, hear: _Hear) -> None:
        with self.process.stdout as lines:  # type: ignore[union-attr]
            for raw in lines:
                line = raw.decode(errors="replace").rstrip()
                self._lines.append(line)
                hear(line)


def ask_nodes(nodes: Nodes, num_nodes: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """What all nodes have alike: columns, and `num_gpus` of each; MIG on any counts as MIG."""
    said = map(_object_in, nodes.ask(FACTS_ARGV, num_nodes))
    found = [facts for facts in said if "nvml_error" in facts]
    if len(found) != num_nodes:
        _log.warning("only %d of %d nodes reported their facts", len(found), num_nodes)
    names = sorted({name for node in found for name in node} - {"nvml_error"})
    values = {name: {node.get(name) for node in found} for name in names}
    if differing := [name for name in names if len(values[name]) > 1]:
        _log.warning("the nodes differ in %s: not recorded", ", ".join(differing))
    facts = {name: values[name].pop() for name in names if len(values[name]) == 1}
    if any(node.get("mig") for node in found):
        facts["mig"] = True
    if job := environ.get("SLURM_JOB_ID"):
        facts |= {"job_id": job, "exclusive_node": exclusive(job)}
        if facts["exclusive_node"] is False:
            _log.warning(
                "the nodes are shared with other jobs: rows are flagged and kept out of verdicts "
                "on NCCL's default; ask for --exclusive"
            )
    return {name: fact for name, fact in facts.items() if fact is not None}


def _object_in(line: str) -> dict[str, Any]:
    """A line's JSON object, behind a launcher's label; or {}."""
    found: dict[str, Any] = {}
    with suppress(ValueError):
        found = json.loads(line[line.index("{") :])
    return found


def exclusive(job: str) -> bool | None:
    """Whether a Slurm job has its nodes to itself; None if unknown, as without scontrol."""
    said = Machine().run("scontrol", "show", "job", job, limit_s=_ANSWER_S)
    # slurm.conf(5), `src/api/job_info.c`, Slurm 22.05 to 24.11.
    found = re.search(r"\bOverSubscribe=(\S+)", said.output)
    return None if found is None else found[1] in {"NO", "EXCLUSIVE"}


Row = dict[str, Any]
_TIME, _END = itemgetter("time_s"), itemgetter("end_s")
#: A reading further off says nothing about a stretch.
MAX_GAP_S: Final = 3.0
#: For the first reading, which must lie before the first trial.
_FIRST_READING_S: Final = 20.0
#: For the reading after a launch, through the launcher.
_NEXT_READING_S: Final = 1.25
_READ: Final = ("throttled", "ecc_errors", "nic_retries", "nic_congestion")
#: Columns of a measurement; None = unknown.
UNKNOWN: Final[Mapping[str, Any]] = dict.fromkeys((*_READ, "nic_worst"))
#: By (begin, end), Unix seconds, in the order of time.
Health = Callable[[Sequence[tuple[float, float]]], list[Row]]


@contextmanager
def watch_health(nodes: Nodes, num_nodes: int) -> Iterator[Health]:
    """Run a sampler on each node; gives what judges by their readings."""
    heard: dict[str, list[Row]] = {}

    def are_read(since_s: float) -> bool:
        return sum(1 for one in [*heard.values()] if _END(one[-1]) >= since_s) >= num_nodes

    def health(stretches: Sequence[tuple[float, float]]) -> list[Row]:
        end_s = max((end for _, end in stretches), default=0.0)
        samplers.wait_for(lambda: are_read(end_s), _NEXT_READING_S)
        oldest_s = min((begin for begin, _ in stretches), default=0.0) - MAX_GAP_S
        for readings in [*heard.values()]:
            # The next may continue the last.
            del readings[: bisect_left(readings[:-1], oldest_s, key=_END)]
        return [health_of({**heard}, num_nodes, *stretch) for stretch in stretches]

    with nodes.start(SAMPLER_ARGV, num_nodes, partial(add_reading, heard)) as samplers:
        if not samplers.wait_for(lambda: are_read(0.0), _FIRST_READING_S):
            _log.warning("no telemetry: the samplers do not write (%s)", samplers.last_words)
        yield health


def add_reading(heard: dict[str, list[Row]], line: str) -> None:
    """Add a sampler's line; equal readings after each other are one, `time_s` to `end_s`."""
    reading = _object_in(line)
    if reading.keys() != {"sampler", "time_s", "read"}:
        return
    reading["end_s"] = reading["time_s"]
    readings = heard.setdefault(reading["sampler"], [reading])
    last = readings[-1]
    if reading["time_s"] - last["end_s"] <= MAX_GAP_S and reading["read"] == last["read"]:
        last["end_s"] = reading["time_s"]
    else:
        readings.append(reading)


def health_of(
    heard: Mapping[str, Sequence[Row]], num_nodes: int, begin_s: float, end_s: float
) -> Row:
    """The worst of all nodes' readings, by sampler; unknown where one is silent and none is bad."""
    parts: list[tuple[str, dict[str, int | None]]] = []
    for sampler, readings in heard.items():
        first = max(bisect_right(readings, begin_s, key=_TIME) - 1, 0)
        found = readings[first : bisect_left(readings, end_s, key=_END) + 1]
        low_s, high_s = begin_s - MAX_GAP_S, end_s + MAX_GAP_S
        near = [one for one in found if _END(one) >= low_s and _TIME(one) <= high_s]
        is_whole = bool(near) and _TIME(near[0]) <= begin_s and _END(near[-1]) >= end_s
        if not is_whole or any(_TIME(two) - _END(one) > MAX_GAP_S for one, two in pairwise(near)):
            parts.append(("", dict.fromkeys(_READ)))
        for part, columns in near[0]["read"].items() if near else ():
            rows = [one["read"][part] for one in near]
            bad = {column: _count(column, [row[column] for row in rows]) for column in columns}
            parts.append((f"{sampler.rpartition(':')[0]} {part}", bad))
    health = {**UNKNOWN}
    for column in _READ:
        counts = [bad[column] for _, bad in parts if column in bad]
        total = sum(count or 0 for count in counts)
        if total or (None not in counts and len(heard) == num_nodes):
            health[column] = total > 0 if column == "throttled" else total
    ports = [(bad.get("nic_retries") or 0, bad.get("nic_congestion") or 0, p) for p, bad in parts]
    *counted, worst = max(ports, default=(0, 0, ""))
    return health | {"nic_worst": worst if any(counted) else None}


def _count(column: str, values: Sequence[int | None]) -> int | None:
    """Throttled readings, or what a counter rose by; None: perhaps more than 0."""
    known = [value for value in values if value is not None]
    # After a driver reload a counter begins anew.
    rises = [two - one if two >= one else two for one, two in pairwise(known)]
    count = sum(known if column == "throttled" else rises)
    return count or (0 if len(known) == len(values) else None)


#: NCCL takes a minute on many nodes.
READY_S: Final = 300.0


@contextmanager
def disturb(
    nodes: Nodes, num_gpus: int | None, setting: Setting, program: str
) -> Iterator[Callable[[], str | None]]:
    """Disturb what runs inside the `with`; gives a function that tells why that ended too early.

    Raises MachineError when it is not under way within READY_S, InvalidSweep where traffic has no
    GPU left.
    """
    kind, level = setting.interference.kind, setting.interference.level
    if kind in {QUIET, *PRODUCTS}:
        yield lambda: None
        return
    # `ready` of each node, but one row for all ranks of traffic.
    count, ranks = setting.hosts, 1
    argv = [*ON_NODE, "busy", f"{level:g}"]
    if kind == "traffic":
        count = 1
        argv, ranks = _traffic(nodes, num_gpus, setting, program)
    ready: list[str] = []

    def hear(line: str) -> None:
        if len(ready) < count and (MEANT_AS_ROW.search(line) or line == READY):
            ready.append(line)

    with nodes.start(argv, setting.hosts, hear, ranks_per_node=ranks) as started:

        def lost() -> str | None:
            status, said = started.process.poll(), started.last_words
            told = f"interference '{kind}' ended with status {status}; its last output: {said}"
            return None if status is None else told

        if not started.wait_for(lambda: len(ready) >= count, READY_S):
            slow = f"interference '{kind}' was not ready after {READY_S:g} s ({len(ready)} of "
            slow += f"{count} processes were); its last output: {started.last_words}"
            raise MachineError(lost() or slow)
        yield lost


def _traffic(
    nodes: Nodes, num_gpus: int | None, setting: Setting, program: str
) -> tuple[list[str], int]:
    used = setting.ranks_per_host
    if num_gpus is None or num_gpus <= used:
        have = num_gpus or "nobody knows how many (does NVML answer there?)"
        raise InvalidSweep(
            f"interference 'traffic' needs GPUs that the trial leaves free; {used} ranks per node "
            f"use one each, of {have}; take groups with fewer ranks_per_node"
        )
    spare = num_gpus - used
    ranks, gpus = (1, spare) if nodes.one_process else (spare, 1)
    channels = max(1, round(setting.interference.level * 32))
    # A size that takes bandwidth, not latency. `-N 0` never ends; `-c` would pause the traffic.
    return [
        *("env", "-u", "NCCL_MIN_CTAS", f"NCCL_MAX_CTAS={channels}"),
        *(f"NCCL_TESTS_DEVICE={used}", program, "-b", "64M", "-e", "64M", "-g", str(gpus)),
        *("-n", "100", "-w", "5", "-c", "0", "-N", "0"),
    ], ranks
