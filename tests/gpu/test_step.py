"""What rows beside products foretell of a step, and what a job's step does: real NCCL, torch's own.

    pytest -s -m gpu tests/gpu/test_step.py

It needs a CUDA build of torch with NCCL 2.24 or later, a compiler and Open MPI's mpirun, and takes
four minutes. A sweep beside matrix products tells what compute loses to 1, 2, 4 and NCCL's own
channels. Then jobs of an all-reduce beside such products take these configs in turn, and the one
that shortens the step most by `datasets/objective.py` must not be slower than NCCL's own choice.
Two ranks meet through sockets on the loopback. On one GPU each has half of its multiprocessors, by
MPS (a daemon of the user, which is ended); with several each has its own.
"""

import os
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dynamiccl.datasets.manifest import JobTask
from dynamiccl.datasets.objective import change_of_task_us, losses_at, losses_of
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from tests.gpu.ranks import collected, run_ranks, shared, skip_without_nccl, write_bound_artifact

pytestmark = pytest.mark.gpu

SIZE_BYTES, EDGE, PRODUCTS = 16 << 20, 8192, 8
COUNTS = (1, 2, 4)
RANKS = 2
ROUNDS = 2
#: Less than what repeats of a step differ by on a GPU that two ranks share.
NOISE = 0.02
OUT = Path(__file__).resolve().parents[2] / "out" / "gpu" / "step"
SWEEP = """
name = "step"
system = "gpus"
collectives = ["AllReduce"]
groups = [{{ num_nodes = 2, ranks_per_node = 1, num_hosts = 1 }}]
sizes = {{ list = [{size}] }}
algorithms = ["Ring"]
protocols = ["Simple"]
num_channels = [1, 2, 4]
cycles = 2
iterations = 10
warmup_iterations = 2
interference = [{{ kind = "matmul", level = {edge} }}]

[runner]
plugin = "{plugin}"

[launcher]
kind = "mpirun"
{launcher}
"""


@pytest.fixture(name="half", scope="module")
def half_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What gives two ranks on one GPU half of it each; nothing with several GPUs."""
    skip_without_nccl((2, 24))
    import torch

    if torch.cuda.device_count() > 1:
        yield {}
        return
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        pytest.skip("one GPU and no MPS: ranks would get slices of its time")
    pipe = str(tmp_path_factory.mktemp("mps"))
    where = {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": pipe}
    subprocess.run([control, "-d"], env={**os.environ, **where}, check=True, timeout=30)
    try:
        # Else sockets have two channels, and there is nothing to give back.
        more = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50", "NCCL_MIN_NCHANNELS": "16"}
        yield {**where, **more}
    finally:
        subprocess.run(
            [control],
            input="quit\n",
            text=True,
            env={**os.environ, **where},
            check=False,
            timeout=60,
        )


def measured(folder: Path, plugin: Path, half: dict[str, str]) -> pl.DataFrame:
    """The rows of the sweep beside products."""
    told = {"plugin": plugin, "launcher": shared(**half), "size": SIZE_BYTES, "edge": EDGE}
    return collected(folder, SWEEP.format(**told), 600).filter(pl.col("status") == "ok")


def step_us(root: Path, plugin: Path, count: int, half: dict[str, str]) -> float:
    """The median step of a job whose all-reduces take so many channels; 0: NCCL's own choice."""
    root.mkdir()
    told = {name: str(value) for name, value in (("SIZE_BYTES", SIZE_BYTES), ("EDGE", EDGE))}
    told |= {"PRODUCTS": str(PRODUCTS), "STEP_FILE": str(root / "step"), **half}
    config = Config(Algorithm.Ring, Protocol.Simple, count or 1)
    write_bound_artifact(root / "artifact", plugin, config, RANKS)
    if count:
        told |= {"NCCL_TUNER_PLUGIN": str(plugin), "DYNAMICCL_MODE": "table"}
    logs = run_ranks(root, RANKS, told, lambda: None, "steps")
    acts = [log for log in logs if "the artifact's table, from call 0" in log]
    assert len(acts) == (RANKS if count else 0)
    return float((root / "step").read_text())


def test_what_is_foretold_of_the_step_is_so(
    tmp_path: Path, plugin_path: Path, sweep_path: Path, half: dict[str, str]
) -> None:
    import torch

    gpus = torch.cuda.device_count()
    rows = measured(tmp_path, sweep_path, half)
    own = rows.filter("is_default")
    most = min(own["actual_num_channels"].drop_nulls().to_list())
    if most <= max(COUNTS):
        pytest.skip(f"NCCL's own choice has {most} channels: none to give back")
    by_count = {0: own, **{n: rows.filter(requested_num_channels=n) for n in COUNTS}}
    times = np.array([np.median(part["time_us"].to_numpy()) for part in by_count.values()])
    [by_bin] = losses_of(rows).values()
    [losses] = by_bin.values()
    configs = [ABSTAIN, *(Config(Algorithm.Ring, Protocol.Simple, n) for n in COUNTS)]
    lost, longer = losses_at(losses, configs)
    product_us = 2e-6 * EDGE**3 / float(np.median(rows["compute_alone_tflops"].to_numpy()))
    # The products beside the call are those that its own choice slows already.
    compute_us = [PRODUCTS * product_us]
    task = JobTask(("AllReduce", 2, 2, 0), float(times[0]), 0.0, compute_us, losses)
    change = change_of_task_us(longer, lost, task)
    took = {count: list[float]() for count in by_count}
    for turn in range(ROUNDS):
        for count in np.random.default_rng(turn).permutation([*by_count]).tolist():
            job = tmp_path / f"job-{turn}-{count}"
            took[count].append(step_us(job, plugin_path, count, half))
    steps = {count: statistics.median(each) for count, each in took.items()}
    shutil.rmtree(OUT, ignore_errors=True)
    shutil.copytree(tmp_path / "data", OUT, ignore=shutil.ignore_patterns(".journal"))
    print(f"\n{gpus} GPUs; NCCL's own {most} channels; a call {times[0]:.0f} us")
    for place, count in enumerate(by_count):
        share = lost[0, place]
        print(
            f"{count or most:3} channels: call {times[place]:6.0f} us, compute loses {share:6.1%}; "
            f"step foretold to change by {change[place]:6.0f} us at most, changed by "
            f"{steps[count] - steps[0]:6.0f} of {steps[0]:.0f} ({took[count]})"
        )
    for place, count in enumerate(by_count):
        # What is surely gained is gained; NaN: nobody measured it.
        if count and not np.isnan(change[place]):
            assert steps[count] - steps[0] <= change[place] + NOISE * steps[0]
    best = [*by_count][int(np.nanargmin(change))]
    assert best, "nothing is foretold to shorten the step"
    assert steps[best] < steps[0]
