from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect.doctor.context import Context, context_of
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.nccl import Collective


def sweep(**tables: Any) -> SweepFile:
    return SweepFile.model_validate(
        {
            "name": "night",
            "system": "lab",
            "collectives": ["all_reduce", "AllGather"],
            "groups": [
                {"num_nodes": 4, "ranks_per_node": 2},
                {"num_nodes": 1, "ranks_per_node": 8},
            ],
            "sizes": {"min": "1K", "max": "1M", "factor": 2},
            **tables,
        }
    )


def test_without_a_sweep_the_usual_is_wanted() -> None:
    assert context_of(None, nccl_tests_dir=None, out=Path()) == Context()


def test_a_sweep_says_what_it_needs() -> None:
    file = sweep(
        chunk_sizes=[0, "256K"],
        runner={"mode": "sweep", "plugin": "/opt/tuner.so", "per_iteration": True},
        launcher={"kind": "srun", "container": {"runtime": "pyxis", "image": "x.sqsh"}},
        interference=[{"kind": "none"}, {"kind": "gemm", "level": 0.5}],
        telemetry={"enabled": False},
    )
    assert context_of(file, nccl_tests_dir=Path("/opt/t"), out=Path("/data")) == Context(
        collectives=(Collective.AllReduce, Collective.AllGather),
        nccl_tests_dir="/opt/t",
        mode="sweep",
        wants_chunk_sizes=True,
        wants_iteration_times=True,
        plugin="/opt/tuner.so",
        launcher="srun",
        container="pyxis",
        num_nodes=4,
        ranks_per_node=8,
        interference=frozenset({"none", "gemm"}),
        wants_telemetry=False,
        out="/data",
    )


def test_inside_the_container_none_is_wanted() -> None:
    container = {"runtime": "pyxis", "image": "x.sqsh"}
    file = sweep(launcher={"kind": "srun", "container": container})
    assert context_of(file, nccl_tests_dir=None, out=Path(), inside=True).container is None


@pytest.mark.parametrize(
    "launcher",
    [
        {"kind": "sbatch", "sbatch_header": ["--time=1:00:00", "--partition=gpu"]},
        {"kind": "sbatch", "sbatch_header": ["#SBATCH -p gpu"]},
        {"kind": "srun", "extra_args": ["--mpi=pmix", "--partition=gpu"]},
        {"kind": "srun", "extra_args": ["-p", "gpu"]},
    ],
)
def test_a_partition_is_found_however_it_is_written(launcher: dict[str, Any]) -> None:
    file = sweep(launcher=launcher)
    assert context_of(file, nccl_tests_dir=None, out=Path()).partition == "gpu"


def test_other_options_name_no_partition() -> None:
    file = sweep(launcher={"kind": "sbatch", "sbatch_header": ["--parsable", "--priority=3"]})
    assert context_of(file, nccl_tests_dir=None, out=Path()).partition is None
