"""Whole command lines of each launcher and container: what a cluster would see, without one."""

import os
import shlex
from typing import Any

import pytest

from dynamiccl.collect.launchers import (
    ContainerSettings,
    LauncherSettings,
    Ranks,
    command,
    map_into_container,
)
from dynamiccl.errors import InvalidSweep

PERF = ("all_reduce_perf", "-g", "1")
ALGO = "allreduce:ring,tree"
RANKS = Ranks(PERF, {"NCCL_PROTO": "LL", "NCCL_ALGO": ALGO}, 2, 8, unset=("NCCL_TUNER_PLUGIN",))
ONE = Ranks(("x",))
MOUNTS = ("/home/me:/work", "/scratch:/scratch:ro")
#: How a command line begins: what is set in our own environment; and the rank: what is absent.
ENV = f"env NCCL_ALGO={ALGO} NCCL_PROTO=LL"
DROP = "env -u NCCL_TUNER_PLUGIN"
SRUN = "srun -N 2 -n 16 --ntasks-per-node=8 --export=ALL --kill-on-bad-exit=1"
SRUN_ONE = "srun -N 1 -n 1 --ntasks-per-node=1 --export=ALL --kill-on-bad-exit=1"
MPIRUN = "mpirun -np 16 --map-by ppr:8:node"
PASSED = f"-x NCCL_ALGO={ALGO} -x NCCL_PROTO=LL"
#: Of the image's name: the first launch imports it, the others take what is there.
PYXIS = "--container-image=nccl.sqsh --container-name=dynamiccl-16158d93"
APPTAINER = "apptainer exec --nv --bind /home/me:/work --bind /scratch:/scratch:ro nccl.sqsh"


def container(runtime: str, mounts: tuple[str, ...] = MOUNTS) -> ContainerSettings:
    return ContainerSettings.model_validate(
        {"runtime": runtime, "image": "nccl.sqsh", "mounts": mounts}
    )


def made(ranks: Ranks, kind: str, **more: Any) -> str:
    return shlex.join(command(ranks, LauncherSettings.model_validate({"kind": kind, **more})))


@pytest.fixture(autouse=True)
def not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)


LINES: dict[str, tuple[Ranks, dict[str, Any], str]] = {
    "local": (
        Ranks(("x", "-g", "8"), {"NCCL_ALGO": "Ring"}, ranks_per_node=8),
        {"kind": "local", "prefix": ["numactl", "-N0"], "env": {"UCX_TLS": "rc"}},
        "env NCCL_ALGO=Ring UCX_TLS=rc numactl -N0 x -g 8",
    ),
    "local drops variables": (
        Ranks(("x",), unset=("NCCL_ALGO", "NCCL_PROTO")),
        {"kind": "local", "env": {"NCCL_ALGO": "Tree"}},
        "env -u NCCL_ALGO -u NCCL_PROTO x",
    ),
    "mpirun": (
        RANKS,
        {"kind": "mpirun", "extra_args": ["--mca", "btl", "^openib"], "prefix": ["numactl", "-l"]},
        f"{ENV} {MPIRUN} --bind-to none {PASSED} --mca btl '^openib' {DROP} numactl -l "
        "all_reduce_perf -g 1",
    ),
    "mpirun leaves binding to the user": (
        ONE,
        {"kind": "mpirun", "extra_args": ["--bind-to", "numa"]},
        "mpirun -np 1 --map-by ppr:1:node --bind-to numa x",
    ),
    "mpirun beside another may share its nodes": (
        Ranks(("x",), {"A": "1"}, 2, unset=("B",), overlap=True),
        {"kind": "mpirun"},
        "env A=1 SLURM_OVERLAP=1 mpirun -np 2 --map-by ppr:1:node --bind-to none -x A=1 "
        "env -u B x",
    ),
    "srun": (
        RANKS,
        {"kind": "srun", "extra_args": ["--mpi=pmix"], "prefix": ["numactl", "-l"]},
        f"{ENV} {SRUN} --mpi=pmix {DROP} numactl -l all_reduce_perf -g 1",
    ),
    "a step beside another overlaps": (
        Ranks(("x",), num_nodes=1, overlap=True),
        {"kind": "srun"},
        f"{SRUN_ONE} --overlap x",
    ),
    "the ranks' variables win over the user's": (
        Ranks(("x",), {"NCCL_PROTO": "LL"}),
        {"kind": "srun", "env": {"NCCL_PROTO": "Simple", "UCX_TLS": "tcp"}},
        f"env NCCL_PROTO=LL UCX_TLS=tcp {SRUN_ONE} x",
    ),
    "pyxis": (
        RANKS,
        {"kind": "srun", "container": container("pyxis"), "prefix": ["numactl"],
         "extra_args": ["--mpi=pmix"]},
        f"{ENV} {SRUN} {PYXIS} --container-mounts=/home/me:/work,/scratch:/scratch:ro "
        f"--container-env=NCCL_ALGO,NCCL_PROTO --mpi=pmix {DROP} numactl all_reduce_perf -g 1",
    ),
    "apptainer under mpirun": (
        RANKS,
        {"kind": "mpirun", "container": container("apptainer")},
        f"env APPTAINERENV_NCCL_ALGO={ALGO} APPTAINERENV_NCCL_PROTO=LL "
        f"NCCL_ALGO={ALGO} NCCL_PROTO=LL {MPIRUN} --bind-to none -x APPTAINERENV_NCCL_ALGO={ALGO} "
        f"-x APPTAINERENV_NCCL_PROTO=LL {PASSED} {APPTAINER} {DROP} all_reduce_perf -g 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LINES)
def test_command_line(case: str) -> None:
    ranks, settings, line = LINES[case]
    assert made(ranks, **settings) == line
    # Slurm may take its KillWait to end ranks.
    grace_s = {"local": 5.0, "mpirun": 5.0, "srun": 40.0, "sbatch": 40.0}
    assert {k: LauncherSettings.model_validate({"kind": k}).grace_s for k in grace_s} == grace_s


def test_what_a_launcher_cannot_start_is_refused_with_the_fix() -> None:
    pyxis = container("pyxis")
    for ranks, kind, more, words in (
        (RANKS, "local", {}, "num_nodes = 2; take launcher mpirun, srun or sbatch"),
        (ONE, "local", {"extra_args": ["--mpi=pmix"]}, r"\(--mpi=pmix\); words before"),
        (ONE, "local", {"container": pyxis}, "take launcher srun or sbatch,"),
        (ONE, "mpirun", {"container": pyxis}, "'mpirun'; take"),
        (Ranks(("a=b/x",)), "local", {}, "give its path no '='"),
    ):
        with pytest.raises(InvalidSweep, match=words):
            made(ranks, kind, **more)


def test_paths_are_mapped_through_the_innermost_mount() -> None:
    mounts = ("/:/host", *MOUNTS, "/same", "/home/me/inner:/inner:ro+rprivate")
    for path, inside in (
        ("/home/me/nccl/lib.so", "/work/nccl/lib.so"),
        ("/home/me", "/work"),
        ("/home/me/../me/x/", "/work/x"),
        ("/scratch/out", "/scratch/out"),
        ("/same/deep/file", "/same/deep/file"),
        ("/home/me/inner/f", "/inner/f"),
        ("/everything/else", "/host/everything/else"),
    ):
        assert map_into_container(path, container("pyxis", mounts)) == inside
        assert map_into_container(path, None) == path
    for path in ("/home/mel/x", "/", "/home", "out/x"):
        said = rf"{path} cannot be seen inside the container 'nccl.sqsh' .mounts: /home/.*; add"
        with pytest.raises(InvalidSweep, match=said):
            map_into_container(path, container("apptainer"))
