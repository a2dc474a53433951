"""What the sweep's report costs a timed call: real nccl-tests with the report and without, in turn.

    NCCL_TESTS_DIR=nccl-tests/build pytest -s -m gpu tests/gpu/test_sweep_report.py
    SWEEP_REPORT_DIR=/nfs/me NCCL_TESTS_DIR=... (the same, with the report on that file system)

It needs a GPU, nccl-tests built with MPI=1 and Open MPI's mpirun; with two GPUs or more one process
drives them all, and with one its two ranks share it through sockets on the loopback, which is
noisy. It prints the shift, and that of two processes without a report (A/A), and takes some
minutes. `NCCL_TESTS_STAND_IN=1` runs the same with the stand-in, to check this file without a GPU.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from dynamiccl.collect.schedule import REPORT_NAME, SCHEDULE_NAME, read_report
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.schedule import Schedule, totals_of
from tests.collect.parsed import parse
from tests.gpu.ranks import SOCKETS_ONLY, STAND_IN, plain_environment

pytestmark = pytest.mark.gpu

#: A call of the smallest takes some 10 us: a store that faults would show there first.
SIZES_BYTES = (1 << 10, 1 << 13, 1 << 16)
CYCLES, TIMED, CHECKS = 8, 200, 1
#: Triples of processes: with the report, without, and without once more.
ROUNDS = 3 if STAND_IN else 12
CONFIG = Config(Algorithm.Ring, Protocol.LL, 1)
#: A shift below VISIBLE is less than what repeats of one config differ by, and nobody would call
#: NEGLIGIBLE one, though it may be measured well.
VISIBLE, NEGLIGIBLE, SIGNIFICANT = 0.03, 0.005, 0.01
LIMIT_S = 300


@dataclass(frozen=True)
class Group:
    """The ranks that this machine can have."""

    num_nodes: int
    num_ranks: int
    environment: Mapping[str, str]

    def command(self, program: Path) -> list[str]:
        gpus = self.num_ranks // self.num_nodes
        arguments = ["-b", "1K", "-e", "64K", "-f", "8", "-g", str(gpus), "-w", "0"]
        arguments += ["-n", str(TIMED), "-c", str(CHECKS), "-N", str(CYCLES)]
        # NCCL takes ranks with another host id for nodes, and lets nodes share a GPU.
        own_node = 'NCCL_HOSTID=rank$OMPI_COMM_WORLD_RANK exec "$@"'
        start = ["mpirun", "--oversubscribe", "-n", str(self.num_nodes), "sh", "-c", own_node]
        return [*start, "rank", str(program), *arguments]


@pytest.fixture(scope="module")
def group() -> Group:
    gpus = 1
    if not STAND_IN:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
        gpus = len(listed.stdout.splitlines())
    if gpus > 1:
        return Group(1, gpus, {})
    return Group(2, 2, SOCKETS_ONLY | {"NCCL_TESTS_DEVICE": "0"})


def run(folder: Path, binaries: Path, group: Group, plugin: Path, *, reports: bool) -> np.ndarray:
    """Log time of each row of one process; with a report, it must tell of every call."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    schedule = Schedule(
        collective=Collective.AllReduce,
        num_ranks=group.num_ranks,
        num_nodes=group.num_nodes,
        warmup=(),
        calls_per_half=1 + TIMED + CHECKS,
        sizes=SIZES_BYTES,
        cycles=((CONFIG,) * len(SIZES_BYTES),) * CYCLES,
    )
    (folder / SCHEDULE_NAME).write_bytes(schedule.to_bytes())
    environment = {
        **plain_environment(),
        **group.environment,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "NCCL_TUNER_PLUGIN": str(plugin),
        "DYNAMICCL_MODE": "sweep",
        "DYNAMICCL_SCHEDULE": str(folder / SCHEDULE_NAME),
        "DYNAMICCL_SCHEDULE_HASH": schedule.content_hash,
    }
    if reports:
        environment["DYNAMICCL_SWEEP_REPORT"] = str(folder / REPORT_NAME)
    done = subprocess.run(
        group.command(binaries / "all_reduce_perf"),
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if reports:
        played = read_report(folder)
        assert not isinstance(played, str), played
        assert played.calls == totals_of(schedule.to_bytes())[1]
        assert played.stopped_at_call is None
    rows = parse(done.stdout).rows
    assert len(rows) == schedule.num_blocks * schedule.halves, done.stdout
    return np.log([row["time_us"] for row in rows])


def shift_of(log_ratios: Sequence[float]) -> tuple[float, float, float]:
    """Mean relative difference of pairs, its p value, and the least that would have been seen.

    p is the share of the sign flips whose mean is at least as far from 0: exact for any noise that
    does not tell the first from the second. Three standard errors would have been seen, about.
    """
    values = np.array(log_ratios)
    means = np.abs(np.array(list(product((1.0, -1.0), repeat=len(values)))) @ values)
    as_far = means >= abs(values.sum()) * (1.0 - 1e-9)
    error = float(values.std(ddof=1)) / np.sqrt(len(values))
    return float(np.expm1(values.mean())), float(as_far.mean()), 3.0 * error


def test_a_report_shifts_no_time(
    tmp_path: Path, binaries: Path, group: Group, sweep_path: Path
) -> None:
    #   SWEEP_REPORT_DIR  tests/gpu: where sweep reports are written, a shared file system say.
    root = Path(os.environ.get("SWEEP_REPORT_DIR", tmp_path)) / f"sweep-report-{os.getpid()}"
    order = np.random.default_rng(0)
    shifts, noise = [], []
    try:
        for _ in range(ROUNDS):
            found: dict[int, float] = {}
            for kind in order.permutation(3):
                logs = run(root, binaries, group, sweep_path, reports=kind == 0)
                found[int(kind)] = float(np.median(logs.reshape(CYCLES, -1), axis=0).mean())
            shifts.append(found[0] - found[1])
            noise.append(found[2] - found[1])
    finally:
        shutil.rmtree(root, ignore_errors=True)
    shift, p_value, least_seen = shift_of(shifts)
    told = f"shift, p, least seen: {shift_of(shifts)}; A/A without a report: {shift_of(noise)}"
    print(f"\n{told}; {group.num_ranks} ranks in {root}")
    assert p_value > SIGNIFICANT or abs(shift) <= NEGLIGIBLE, told
    if least_seen > VISIBLE:
        pytest.skip(f"too noisy to tell, {told}: more GPUs, or nothing beside it")
