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

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from dynamiccl import cli
from dynamiccl.collect import launchers
from dynamiccl.collect.sampler import HELLO, SAMPLER_ARGV, SYSFS, ask_gpu, load_nvml
from dynamiccl.errors import MachineError
from dynamiccl.libraries import node_part
from dynamiccl.slurm import capture

_log = logging.getLogger(__name__)
#: Takes each line of a program's output.
_Hear = Callable[[str], object]
#: For the last words of an ended program.
_END_S: Final = 10.0
#: A question to all nodes takes as long as a step takes to start; to Slurm, as it is busy.
_ANSWER_S: Final = 120.0


class Nodes:
    """The nodes that a launcher reaches; our own programs run outside of any container."""

    def __init__(self, settings: launchers.LauncherSettings) -> None:
        # Bound to the one core of its task, CPU stress would leave all others alone.
        unbound = ("--cpu-bind=none",) if settings.is_slurm else ()
        changes = {"container": None, "prefix": (), "extra_args": (*settings.extra_args, *unbound)}
        self._launcher = settings.model_copy(update=changes)
        #: Whether all ranks of a node are one process.
        self.one_process = not settings.is_distributed

    def ask(self, argv: Sequence[str], num_nodes: int) -> list[str]:
        """Run a program once on each node; returns its output lines, in any order.

        Raises MachineError when it fails or does not end.
        """
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
        """Run a program beside the `with`: one process on each node, or ranks of its own.

        Raises MachineError where it cannot be started.
        """
        ranks = launchers.Ranks(tuple(argv), {}, num_nodes, ranks_per_node, overlap=True)
        program = Companion(launchers.command(ranks, self._launcher), hear)
        try:
            yield program
        finally:
            # In 5 s srun or mpirun end ranks elsewhere, before they are killed here.
            launchers.end_session(program.process, 5.0)
            program.process.stdin.close()  # type: ignore[union-attr]
            # A process that it left behind may hold the pipe open: then the thread stays with it.
            program.reader.join(timeout=_END_S)


class Companion:
    """A program on the nodes, beside the launches; a thread hands on what it says."""

    def __init__(self, argv: Sequence[str], hear: _Hear) -> None:
        self.text = shlex.join(argv)
        self.process = launchers.start_session(argv, subprocess.PIPE, stdin=subprocess.PIPE)
        self._lines: deque[str] = deque(maxlen=20)
        self.reader = threading.Thread(target=self._read, args=(hear,), daemon=True)
        self.reader.start()
        # So that it ends when we do. One that has ended already tells that by its silence.
        with suppress(BrokenPipeError):
            os.write(self.process.stdin.fileno(), HELLO)  # type: ignore[union-attr]

    def wait_for(self, done: Callable[[], bool], patience_s: float) -> bool:
        """Wait until `done()`, or until it closed its output; returns `done()`."""
        deadline = time.monotonic() + patience_s
        while not done() and time.monotonic() < deadline:
            if not self.reader.is_alive():
                # It is ending, and its status says why.
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


NODE_ARGV: Final = (sys.executable, "-m", "dynamiccl.collect.nodes")
#: nvmlNvLinkVersion (nvml.h, NVML_NVLINK_VERSION_*) -> generation.
_NVLINK_GENERATION: Final[Mapping[int, int]] = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
#: Of /proc/cpuinfo.
_CPU_VENDORS: Final = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "CPU implementer": "arm"}


def ask_nodes(nodes: Nodes, num_nodes: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """What all nodes have alike: columns of a measurement, and `num_gpus` of each node.

    Facts on which nodes differ are left out, with a warning; MIG on any node counts as MIG.
    `cuda_version` is no fact of a node: a driver runs programs built with other CUDA versions.
    """
    said = map(_object_in, nodes.ask(NODE_ARGV, num_nodes))
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
    """The JSON object of a line, which a launcher may label with a rank; {} in one of its own."""
    found: dict[str, Any] = {}
    with suppress(ValueError):
        found = json.loads(line[line.index("{") :])
    return found


def exclusive(job: str) -> bool | None:
    """Whether a Slurm job has its nodes to itself; None if unknown, as where no scontrol is."""
    said = ""
    with suppress(MachineError):
        said = capture(("scontrol", "show", "job", job), timeout_s=_ANSWER_S).stdout
    # slurm.conf(5) and `src/api/job_info.c`, Slurm 22.05 to 24.11.
    found = re.search(r"\bOverSubscribe=(\S+)", said)
    return None if found is None else found[1] in {"NO", "EXCLUSIVE"}


def node_facts(sysfs: Path = SYSFS, proc: Path = Path("/proc")) -> dict[str, Any]:
    """The facts of this node; what cannot be read is unknown, and no error.

    `nvml_error` says why NVML gave nothing, `nvlink_generation` 0 = no NVLink, `nic_kind`
    (infiniband, roce, efa, socket) what the fastest active NICs are, `node_fingerprint` the node as
    the plugin names it (dynamiccl/libraries.py), null where not all of it is known.
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
    # A link that is not there is refused; NVML_NVLINK_MAX_LINKS was 18 until NVLink 5.
    links = [k for k in range(36) if ask(0, "nvmlDeviceGetNvLinkState", k)]
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
        "nvswitch": None if remote is None else remote == 2,  # NVML_NVLINK_DEVICE_TYPE_SWITCH
    }


def _fingerprint(driver: Path, nics: Mapping[str, Any]) -> str | None:
    """The node's fingerprint, as `serve/plugin/prepare/prepare.cpp` computes it."""
    models = []
    for path in (driver / "gpus").glob("*/information"):
        # Byte by byte, as the plugin does.
        text = _text(path, encoding="latin-1")
        fields = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
        if fields.get("GPU Excluded") != "Yes":
            models.append(fields.get("Model", ""))
    if not models or not all(models):
        return None
    is_mig = any((driver / "capabilities").glob("gpu*/mig/gi*"))
    kind, count = nics["nic_kind"], nics["nics_per_node"] or 0
    return node_part(models, mig=is_mig, nic_kind=kind, num_nics=count)


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


Row = dict[str, Any]
_TIME, _END = itemgetter("time_s"), itemgetter("end_s")
#: A reading further than this from a stretch says nothing about it, in seconds.
MAX_GAP_S: Final = 3.0
#: How long the first reading of a sampler is waited for: readings must lie before the first trial.
_FIRST_READING_S: Final = 20.0
#: How long the reading that closes a launch may take, its way through the launcher included.
_NEXT_READING_S: Final = 1.25
#: What a sampler reads (sampler.py), named as the columns of a measurement.
_READ: Final = ("throttled", "ecc_errors", "nic_retries", "nic_congestion")
#: Health of the nodes, as columns of a measurement; None = unknown.
UNKNOWN: Final[Mapping[str, Any]] = dict.fromkeys((*_READ, "nic_worst"))
#: Gives the health in each (begin, end) interval, Unix seconds, in the order of time.
Health = Callable[[Sequence[tuple[float, float]]], list[Row]]


@contextmanager
def watch_health(nodes: Nodes, num_nodes: int) -> Iterator[Health]:
    """Run a sampler on each node beside the `with`; gives the function that judges by them."""
    # Another thread adds at the end of the lists.
    heard: dict[str, list[Row]] = {}

    def are_read(since_s: float) -> bool:
        return sum(1 for one in [*heard.values()] if _END(one[-1]) >= since_s) >= num_nodes

    def health(stretches: Sequence[tuple[float, float]]) -> list[Row]:
        # Only the reading after it tells what happened at the end of a launch.
        end_s = max((end for _, end in stretches), default=0.0)
        samplers.wait_for(lambda: are_read(end_s), _NEXT_READING_S)
        oldest_s = min((begin for begin, _ in stretches), default=0.0) - MAX_GAP_S
        for readings in [*heard.values()]:
            # The last one stays: the next may continue it.
            del readings[: bisect_left(readings[:-1], oldest_s, key=_END)]
        return [health_of({**heard}, num_nodes, *stretch) for stretch in stretches]

    with nodes.start(SAMPLER_ARGV, num_nodes, partial(add_reading, heard)) as samplers:
        if not samplers.wait_for(lambda: are_read(0.0), _FIRST_READING_S):
            _log.warning("no telemetry: the samplers do not write (%s)", samplers.last_words)
        yield health


def add_reading(heard: dict[str, list[Row]], line: str) -> None:
    """Add what a sampler's line says to its readings; other lines say nothing.

    Equal readings after each other are one, from `time_s` until `end_s`.
    """
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
    """The worst of all nodes' readings; unknown where one is silent and none is bad.

    `heard` has the readings by sampler. Columns as `UNKNOWN` has them: whether a GPU was seen
    throttled, what counters of all GPUs and ports rose by, and the port with most retries, else
    congestion. What does not always tell is unknown.
    """
    #: Of each GPU and port, by column.
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
    """How often a GPU was throttled, or what a counter rose by; None: perhaps more than 0."""
    known = [value for value in values if value is not None]
    # A counter that began anew (a driver reload) has counted what it shows since then.
    rises = [two - one if two >= one else two for one, two in pairwise(known)]
    count = sum(known if column == "throttled" else rises)
    return count or (0 if len(known) == len(values) else None)


def main() -> None:
    """Print this node's facts as a line of JSON."""
    sys.stdout.write(json.dumps(node_facts()) + "\n")


if __name__ == "__main__":
    cli.run(main)
