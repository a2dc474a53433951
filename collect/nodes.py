"""The nodes of a sweep: programs on each of them, what they are, and how healthy they were.

    python -m dynamiccl.collect.nodes

prints what this node is as one line of JSON, which `ask_nodes` has a launcher do on every node. The
facts are named as the columns of a measurement that they fill; null = unknown. NICs are read from
/sys/class/infiniband/DEVICE/ports/N (Linux Documentation/ABI/stable/sysfs-class-infiniband) and
/sys/class/net/DEVICE (Documentation/ABI/testing/sysfs-class-net).

Samplers on every node (sampler.py) tell the health of GPUs and NICs while a sweep runs. A trial may
be shorter than the time between two readings. So a stretch is judged by the readings inside it
*and* by the last before and the first after it: clocks that are down just before and just after
were down in between, and an error counter needs both to show a difference.
"""

import argparse
import json
import logging
import math
import re
import shlex
import subprocess
import sys
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self

from dynamiccl import cli
from dynamiccl.collect.launchers import (
    LauncherSettings,
    Limits,
    Ranks,
    command,
    end_session,
    run_process,
    start_session,
)
from dynamiccl.collect.sampler import HELLO, SYSFS, ask_gpu, load_nvml, sampler_argv
from dynamiccl.errors import MachineError
from dynamiccl.fingerprint import node_part
from dynamiccl.slurm import capture

_log = logging.getLogger(__name__)

#: Seconds for srun or mpirun to end ranks elsewhere before they are killed here.
_GRACE_S: Final = 5.0
#: How long the last words of an ended program may take.
_END_S: Final = 10.0
#: A question to all nodes takes as long as a step takes to start.
_ANSWER_S: Final = 120.0
_KEPT_LINES: Final = 20


class Nodes:
    """The nodes that a launcher reaches; our own programs run outside of any container."""

    def __init__(self, launcher: LauncherSettings) -> None:
        """Take the sweep's launcher."""
        extra = launcher.extra_args
        if launcher.is_slurm:
            # Bound to the one core of its task, CPU stress would leave all others alone.
            extra = (*extra, "--cpu-bind=none")
        changes = {"container": None, "prefix": (), "extra_args": extra}
        self._launcher = launcher.model_copy(update=changes)

    @property
    def one_process(self) -> bool:
        """Whether all ranks of a node are one process."""
        return not self._launcher.is_distributed

    def ask(self, argv: Sequence[str], num_nodes: int) -> list[str]:
        """Run a program once on each node; returns its output lines, in any order.

        Raises MachineError when it fails or does not end.
        """
        started = command(Ranks(tuple(argv), num_nodes=num_nodes, overlap=True), self._launcher)
        done = run_process(started, Limits(_ANSWER_S, _ANSWER_S))
        if done.returncode != 0:
            raise MachineError(
                f"the nodes do not answer: '{shlex.join(started)}' ended with status "
                f"{done.returncode}: {' | '.join(done.lines[-3:]) or 'no output'}"
            )
        return list(done.lines)

    def start(
        self,
        argv: Sequence[str],
        num_nodes: int,
        hear: Callable[[str], object],
        *,
        ranks_per_node: int = 1,
    ) -> "Companion":
        """Start a program in the background: one process on each node, or ranks of its own.

        `hear` takes each line of output. Raises MachineError where it cannot be started.
        """
        ranks = Ranks(tuple(argv), {}, num_nodes, ranks_per_node, overlap=True)
        started = command(ranks, self._launcher)
        return Companion(start_session(started, subprocess.PIPE, stdin=subprocess.PIPE), hear)


class Companion:
    """A program on the nodes, beside the launches; a thread reads what it says.

    `heard` guards what the function that hears it changes.
    """

    def __init__(self, process: subprocess.Popen[bytes], hear: Callable[[str], object]) -> None:
        """Take a started process, with pipes for input and output."""
        self.process = process
        self.heard = threading.Condition()
        self._hear = hear
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._is_over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert process.stdin is not None
        # So that it ends when we do. One that has ended already tells that by its silence.
        with suppress(BrokenPipeError):
            process.stdin.write(HELLO)
            process.stdin.flush()

    def wait_for(self, done: Callable[[], bool], patience_s: float) -> bool:
        """Wait until `done()`, or until it closed its output; returns `done()`."""
        with self.heard:
            self.heard.wait_for(lambda: self._is_over or done(), patience_s)
            if self._is_over and not done():
                # It is ending, and its status says why.
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=_END_S)
            return done()

    @property
    def last_words(self) -> str:
        """The end of its output, on one line."""
        return " | ".join(self._lines)

    def end(self) -> None:
        """End it with all its processes."""
        end_session(self.process, _GRACE_S)
        # What was written to one that had ended already is still in the buffer.
        with suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]
        # A process that it left behind may hold the pipe open: then the thread stays with it.
        self._reader.join(timeout=_END_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for raw in lines:
                line = raw.decode(errors="replace").rstrip()
                with self.heard:
                    self._lines.append(line)
                    self._hear(line)
                    self.heard.notify_all()
        with self.heard:
            self._is_over = True
            self.heard.notify_all()


# --- What the nodes are ---

PROC: Final = Path("/proc")
#: nvmlNvLinkVersion (nvml.h, NVML_NVLINK_VERSION_*) -> generation.
_NVLINK_GENERATION: Final[Mapping[int, int]] = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
#: NVML_NVLINK_DEVICE_TYPE_SWITCH.
_SWITCH: Final = 2
#: NVML_NVLINK_MAX_LINKS was 18 until NVLink 5; a driver refuses a link that it does not have.
_MAX_LINKS: Final = 36
#: Of /proc/cpuinfo.
_CPU_VENDORS: Final = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "CPU implementer": "arm"}
#: Facts that are no column of a measurement.
_OTHER: Final = ("nvml_error", "num_gpus")
#: `OverSubscribe` of `scontrol show job` for a job that shares its nodes with nobody (slurm.conf(5)
#: and `src/api/job_info.c`, Slurm 22.05 to 24.11).
_ALONE: Final = frozenset({"NO", "EXCLUSIVE"})
_SCONTROL_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """What is known of the nodes before anything runs."""

    #: Environment columns that all nodes agree on.
    columns: Mapping[str, Any]
    #: GPUs of a node, where all have as many.
    num_gpus: int | None


def node_argv() -> list[str]:
    """Argument vector that prints a node's facts as one line of JSON."""
    return [sys.executable, "-m", "dynamiccl.collect.nodes"]


def ask_nodes(nodes: Nodes, num_nodes: int, environ: Mapping[str, str]) -> SiteFacts:
    """Ask each node what it is; columns on which nodes differ are left out, with a warning.

    `cuda_version` is no fact of a node: a driver runs programs built with other CUDA versions.
    """
    found: list[dict[str, Any]] = []
    for line in nodes.ask(node_argv(), num_nodes):
        # A launcher may say something of its own between the nodes' lines.
        with suppress(ValueError):
            facts = json.loads(line)
            found += [facts] if isinstance(facts, dict) and facts.keys() >= set(_OTHER) else []
    if len(found) != num_nodes:
        _log.warning("only %d of %d nodes reported their facts", len(found), num_nodes)
    columns = agreed(found)
    if "SLURM_JOB_ID" in environ:
        columns["job_id"] = environ["SLURM_JOB_ID"]
        alone = exclusive(environ["SLURM_JOB_ID"])
        columns |= {} if alone is None else {"exclusive_node": alone}
        if alone is False:
            _log.warning(
                "the nodes are shared with other jobs: rows are flagged and kept out of verdicts "
                "on NCCL's default; ask for --exclusive"
            )
    gpus = {facts["num_gpus"] for facts in found}
    return SiteFacts(columns, gpus.pop() if len(gpus) == 1 else None)


def agreed(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The environment columns that are equal on all nodes; MIG on any node counts as MIG."""
    names = dict.fromkeys(name for node in nodes for name in node if name not in _OTHER)
    values = {name: {node.get(name) for node in nodes} for name in names}
    if differing := sorted(name for name, found in values.items() if len(found) > 1):
        _log.warning("the nodes differ in %s: not recorded", ", ".join(differing))
    same = {name: found.pop() for name, found in values.items() if len(found) == 1}
    if any(node.get("mig") for node in nodes):
        same["mig"] = True
    return {name: fact for name, fact in same.items() if fact is not None}


def exclusive(job: str) -> bool | None:
    """Whether a Slurm job has its nodes exclusively; None if unknown."""
    try:
        done = capture(("scontrol", "show", "job", "--oneliner", job), timeout_s=_SCONTROL_S)
    except MachineError as error:
        # As in a container, which has the job's variables and not Slurm's programs.
        _log.warning("not known whether the nodes are ours alone: %s", error)
        return None
    found = re.search(r"\bOverSubscribe=(\S+)", done.stdout)
    return None if found is None else found[1] in _ALONE


def node_facts(sysfs: Path = SYSFS, proc: Path = PROC) -> dict[str, Any]:
    """The facts of this node; what cannot be read is unknown, and no error.

    `nvml_error` says why NVML gave nothing, `nvlink_generation` 0 = no NVLink, `nic_kind`
    (infiniband, roce, efa, socket) what the fastest active NICs are, `node_fingerprint` the node as
    the plugin names it (dynamiccl/fingerprint.py), null where not all of it is known.
    """
    nics, cpus = _nic_facts(sysfs), _text(proc / "cpuinfo")
    facts = {
        "nvml_error": None,
        "num_gpus": None,
        "cpu_vendor": next((name for word, name in _CPU_VENDORS.items() if word in cpus), None),
        "node_fingerprint": _fingerprint(proc / "driver" / "nvidia", nics),
        **nics,
    }
    try:
        return facts | _gpu_facts(load_nvml())
    except MachineError as error:
        return facts | {"nvml_error": str(error)}


def _gpu_facts(nvml: Any) -> dict[str, Any]:
    """GPU 0 stands for all in its capability and NVLinks."""
    ask, num_gpus = partial(ask_gpu, nvml), nvml.nvmlDeviceGetCount()
    if not num_gpus:
        raise MachineError("NVML shows no GPU")
    # One that the driver does not name is taken to be like the others.
    names = {ask(gpu, "nvmlDeviceGetName") for gpu in range(num_gpus)} - {None}
    modes = [ask(gpu, "nvmlDeviceGetMigMode") for gpu in range(num_gpus)]
    migs = [None if mode is None else bool(mode[0]) for mode in modes]
    capability = ask(0, "nvmlDeviceGetCudaComputeCapability")
    # A link that is not there is refused.
    links = [k for k in range(_MAX_LINKS) if ask(0, "nvmlDeviceGetNvLinkState", k)]
    version = ask(0, "nvmlDeviceGetNvLinkVersion", links[0]) if links else 0
    remote = ask(0, "nvmlDeviceGetNvLinkRemoteDeviceType", links[0]) if links else 0
    return {
        "num_gpus": num_gpus,
        "driver_version": nvml.nvmlSystemGetDriverVersion(),
        "gpu": names.pop() if len(names) == 1 else None,
        "compute_capability": capability and float(f"{capability[0]}.{capability[1]}"),
        "mig": True if any(migs) else None if None in migs else False,
        "nvlink_generation": _NVLINK_GENERATION.get(version) if version else version,
        "nvlinks_per_gpu": len(links),
        "nvswitch": None if remote is None else remote == _SWITCH,
    }


def _fingerprint(driver: Path, nics: Mapping[str, Any]) -> str | None:
    """The node's fingerprint, as `serve/plugin/identity/fingerprint.cpp` computes it."""
    models = []
    for path in (driver / "gpus").glob("*/information"):
        # Byte by byte, as the plugin does.
        text = _text(path, encoding="latin-1")
        fields = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
        if fields.get("GPU Excluded") != "Yes":
            models.append(fields.get("Model"))
    named = [model for model in models if model]
    if not models or named != models:
        return None
    is_mig = any((driver / "capabilities").glob("gpu*/mig/gi*"))
    kind, count = nics["nic_kind"], nics["nics_per_node"] or 0
    return node_part(named, mig=is_mig, nic_kind=kind, num_nics=count)


def _nic_facts(sysfs: Path) -> dict[str, Any]:
    """Facts of the fastest active RDMA ports, which NCCL would use, else of the fastest socket."""
    found: Counter[tuple[float, str]] = Counter()
    for port in (sysfs / "class" / "infiniband").glob("*/ports/*"):
        if _text(port / "state").endswith(": ACTIVE"):
            driver = (port.parents[1] / "device" / "driver").resolve().name
            layer = _text(port / "link_layer").lower()
            kind = "roce" if layer == "ethernet" else "infiniband"
            found[_number(port / "rate"), "efa" if driver == "efa" else kind] += 1
    if not found:
        paths = (sysfs / "class" / "net").glob("*")
        devices = [path for path in paths if path.is_dir() and path.name != "lo"]
        # Only where none has hardware are virtual ones meant, of which a node may have hundreds.
        real = [path for path in devices if (path / "device").exists()]
        # In Mbit/s; a virtual device has none (EINVAL), or -1.
        speeds = [_number(path / "speed") for path in real or devices]
        found = Counter((speed / 1000.0, "socket") for speed in speeds)
    best, count = max(found.items(), default=((0.0, None), None))
    return {"nic_kind": best[1], "nic_gbits_per_s": best[0] or None, "nics_per_node": count}


def _number(path: Path) -> float:
    """The number that a file begins with; 0 without one."""
    found = re.match(r"[0-9]+(\.[0-9]+)?(?=\s|$)", _text(path))
    return float(found[0]) if found else 0.0


def _text(path: Path, encoding: str = "utf-8") -> str:
    """A file's text; empty where it is not there (EFA has no link_layer) or cannot be read."""
    try:
        return path.read_text(encoding=encoding, errors="replace").strip()
    except OSError:
        return ""


# --- How healthy they were ---

Row = dict[str, Any]
#: A reading further than this from a stretch says nothing about it, in seconds.
MAX_GAP_S: Final = 3.0
#: How long the first reading of a sampler is waited for: readings must lie before the first trial.
_FIRST_READING_S: Final = 20.0
#: How long the reading that closes a launch may take, its way through the launcher included.
_NEXT_READING_S: Final = 1.25
#: What a sampler prints (sampler.py).
_READING: Final = {"sampler", "time_s", "slowed", "ecc_errors", "nics"}
#: Health of the nodes, as columns of a measurement; None = unknown.
UNKNOWN: Final[Mapping[str, Any]] = dict.fromkeys(
    ("throttled", "ecc_errors", "nic_retries", "nic_congestion", "nic_worst")
)


def parse_reading(line: str) -> Row | None:
    """The reading in a sampler's line of JSON; None for any other line."""
    # A launcher may label each line with its rank, and says things of its own.
    _, brace, rest = line.partition("{")
    try:
        found: Row = json.loads(brace + rest)
    except ValueError:
        return None
    return found if found.keys() == _READING else None


def add_reading(readings: list[Row], reading: Row) -> None:
    """Add a reading to those of its node; equal ones after each other are one, until `end_s`."""
    reading = reading | {"end_s": reading["time_s"]}
    last = readings[-1] if readings else {"end_s": -math.inf}
    near = reading["time_s"] - last["end_s"] <= MAX_GAP_S
    if near and all(reading[name] == last[name] for name in ("slowed", "ecc_errors", "nics")):
        last["end_s"] = reading["end_s"]
    else:
        readings.append(reading)


def health_of(nodes: Sequence[Sequence[Row]], begin_s: float, end_s: float) -> Row:
    """The worst of all nodes' readings; unknown where one is silent and none is bad.

    Columns as `UNKNOWN` has them; `nic_worst` is the port with most retries, else congestion.
    """
    slowed, errors, retries, congestion = (list[int | None]() for _ in range(4))
    worst, worst_port = (0, 0), None
    for readings in nodes:
        near, is_whole = _around(readings, begin_s, end_s)
        unknown: list[int | None] = [] if is_whole else [None]
        slowed += [gpu for reading in near for gpu in reading["slowed"]] + unknown or [None]
        gpus = zip(*(reading["ecc_errors"] for reading in near), strict=True)
        errors += [_counted(gpu) for gpu in gpus] + unknown or [None]
        for port in near[0]["nics"] if near else ():
            lost, marked = map(_counted, zip(*(r["nics"][port] for r in near), strict=True))
            retries.append(lost)
            congestion.append(marked)
            if (lost or 0, marked or 0) > worst:
                worst = (lost or 0, marked or 0)
                worst_port = f"{near[0]['sampler'].rpartition(':')[0]} {port}"
        retries += unknown
        congestion += unknown
    throttled = _sum(slowed)
    return {
        "throttled": None if throttled is None else throttled > 0,
        "ecc_errors": _sum(errors),
        "nic_retries": _sum(retries),
        "nic_congestion": _sum(congestion),
        "nic_worst": worst_port,
    }


def _around(readings: Sequence[Row], begin_s: float, end_s: float) -> tuple[Sequence[Row], bool]:
    """Readings in a stretch, the last before and the first after it, if they are near.

    Also whether they tell all of it, without a hole.
    """
    first = max(bisect_right(readings, begin_s, key=lambda r: r["time_s"]) - 1, 0)
    last = bisect_left(readings, end_s, key=lambda r: r["end_s"])
    low_s, high_s = begin_s - MAX_GAP_S, end_s + MAX_GAP_S
    found = readings[first : last + 1]
    near = [r for r in found if r["end_s"] >= low_s and r["time_s"] <= high_s]
    is_whole = bool(near) and near[0]["time_s"] <= begin_s and near[-1]["end_s"] >= end_s
    holes = [after["time_s"] - before["end_s"] > MAX_GAP_S for before, after in pairwise(near)]
    return near, is_whole and not any(holes)


def _counted(totals: Sequence[int | None]) -> int | None:
    """What a counter rose by; None when it does not always tell and no rise is known."""
    known = [total for total in totals if total is not None]
    # A counter that began anew (a driver reload) has counted what it shows since then.
    steps = [after - before if after >= before else after for before, after in pairwise(known)]
    return sum(steps) or (0 if len(known) == len(totals) else None)


def _sum(counts: Sequence[int | None]) -> int | None:
    known = sum(count or 0 for count in counts)
    return None if not known and (not counts or None in counts) else known


class Watch:
    """What tells how healthy the nodes were; this one has no samplers, and knows nothing."""

    def health(self, stretches: Sequence[tuple[float, float]]) -> list[Row]:
        """The health in each (begin, end) interval, Unix seconds, in the order of time."""
        return [{**UNKNOWN} for _ in stretches]


class NodeWatch(Watch):
    """A sampler process on each node; a context manager around a run."""

    def __init__(self, nodes: Nodes, num_nodes: int) -> None:
        """Take where samplers run."""
        self._nodes = nodes
        self._num_nodes = num_nodes
        self._readings: dict[str, list[Row]] = {}

    def __enter__(self) -> Self:
        """Start the samplers, and wait for their first readings."""
        self._samplers = self._nodes.start(sampler_argv(), self._num_nodes, self._hear)
        try:
            if not self._samplers.wait_for(lambda: self._are_read(-math.inf), _FIRST_READING_S):
                said = self._samplers.last_words
                _log.warning("no telemetry: the samplers do not write (%s)", said)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the samplers."""
        self._samplers.end()

    def health(self, stretches: Sequence[tuple[float, float]]) -> list[Row]:
        """The health in each interval: the worst of all nodes; unknown where a node is silent."""
        if not stretches:
            return []
        # Only the reading after it tells what happened at the end of a launch.
        end_s = max(end for _, end in stretches)
        self._samplers.wait_for(lambda: self._are_read(end_s), _NEXT_READING_S)
        oldest_s = min(begin for begin, _ in stretches) - MAX_GAP_S
        with self._samplers.heard:
            for sampler, readings in self._readings.items():
                self._readings[sampler] = [r for r in readings if r["end_s"] >= oldest_s]
            silent: list[list[Row]] = [[]] * (self._num_nodes - len(self._readings))
            nodes = [*self._readings.values(), *silent]
            return [health_of(nodes, *stretch) for stretch in stretches]

    def _are_read(self, since_s: float) -> bool:
        read = [bool(one) and one[-1]["end_s"] >= since_s for one in self._readings.values()]
        return len(read) >= self._num_nodes and all(read)

    def _hear(self, line: str) -> None:
        reading = parse_reading(line)
        if reading is not None:
            add_reading(self._readings.setdefault(reading["sampler"], []), reading)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print this node's facts as a line of JSON."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args(arguments)
    sys.stdout.write(json.dumps(node_facts()) + "\n")


if __name__ == "__main__":
    cli.run(main)
