"""Whole command lines inside containers, and where host paths lie in them."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamiccl.collect.launchers import Command, Job, command, map_into_container
from dynamiccl.collect.launchers.settings import ContainerSettings, LauncherSettings
from dynamiccl.errors import InvalidSweep

JOB = Job(
    argv=("all_reduce_perf", "-g", "1"),
    env={"NCCL_PROTO": "LL", "NCCL_ALGO": "allreduce:ring,tree"},
    num_nodes=2,
    ranks_per_node=4,
    unset=("NCCL_TUNER_PLUGIN",),
)
#: Of the image's name: the first launch imports it, the others take what is there.
DIGEST = "16158d93"
MOUNTS = ("/home/me:/work", "/scratch:/scratch:ro")


def container(runtime: str, mounts: tuple[str, ...] = MOUNTS) -> ContainerSettings:
    return ContainerSettings.model_validate(
        {"runtime": runtime, "image": "nccl.sqsh", "mounts": mounts}
    )


def made(kind: str, runtime: str, job: Job = JOB, **more: object) -> Command:
    settings = LauncherSettings.model_validate(
        {"kind": kind, "container": container(runtime), **more}
    )
    return command(job, settings, uid=1000)


SRUN = "srun -N 2 -n 8 --ntasks-per-node=4 --export=ALL --kill-on-bad-exit=1"


def test_pyxis() -> None:
    found = made("srun", "pyxis", prefix=("numactl", "-l"), extra_args=("--mpi=pmix",))
    assert shlex.join(found.argv) == (
        f"{SRUN} --container-image=nccl.sqsh --container-name=dynamiccl-{DIGEST} "
        "--container-mounts=/home/me:/work,/scratch:/scratch:ro "
        "--container-env=NCCL_ALGO,NCCL_PROTO --mpi=pmix "
        "env -u NCCL_TUNER_PLUGIN numactl -l all_reduce_perf -g 1"
    )
    assert dict(found.env) == JOB.env


def test_pyxis_without_anything_to_hand_over() -> None:
    settings = LauncherSettings(kind="srun", container=container("pyxis", ()))
    assert shlex.join(command(Job(argv=("x",)), settings, uid=0).argv) == (
        "srun -N 1 -n 1 --ntasks-per-node=1 --export=ALL --kill-on-bad-exit=1 "
        f"--container-image=nccl.sqsh --container-name=dynamiccl-{DIGEST} x"
    )


@pytest.mark.parametrize("kind", ["local", "mpirun"])
def test_pyxis_needs_srun(kind: str) -> None:
    job = Job(argv=("x",))
    with pytest.raises(InvalidSweep, match=f"launcher '{kind}'; take launcher srun or sbatch, or"):
        made(kind, "pyxis", job)


def test_enroot_under_srun() -> None:
    assert shlex.join(made("srun", "enroot").argv) == (
        f"{SRUN} enroot start --rw -m /home/me:/work -m /scratch:/scratch:ro "
        "-e NCCL_ALGO=allreduce:ring,tree -e NCCL_PROTO=LL nccl.sqsh "
        "env -u NCCL_TUNER_PLUGIN all_reduce_perf -g 1"
    )


def test_apptainer_under_mpirun() -> None:
    found = made("mpirun", "apptainer")
    assert shlex.join(found.argv) == (
        "mpirun -np 8 --map-by ppr:4:node --bind-to none "
        "-x APPTAINERENV_NCCL_ALGO=allreduce:ring,tree -x APPTAINERENV_NCCL_PROTO=LL "
        "-x NCCL_ALGO=allreduce:ring,tree -x NCCL_PROTO=LL "
        "apptainer exec --nv --bind /home/me:/work --bind /scratch:/scratch:ro nccl.sqsh "
        "env -u NCCL_TUNER_PLUGIN all_reduce_perf -g 1"
    )


def test_apptainer_locally() -> None:
    job = Job(argv=("all_reduce_perf", "-g", "4"), env={"A": "1"}, ranks_per_node=4)
    found = made("local", "apptainer", job)
    assert shlex.join(found.argv) == (
        "apptainer exec --nv --bind /home/me:/work --bind /scratch:/scratch:ro nccl.sqsh "
        "all_reduce_perf -g 4"
    )
    assert dict(found.env) == {"A": "1", "APPTAINERENV_A": "1"}


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("/home/me/nccl/lib.so", "/work/nccl/lib.so"),
        ("/home/me", "/work"),
        ("/home/me/../me/x/", "/work/x"),
        ("/scratch/out", "/scratch/out"),
        ("/same/deep/file", "/same/deep/file"),
        ("/home/me/inner/f", "/inner/f"),
        ("/everything/else", "/host/everything/else"),
    ],
)
def test_paths_are_mapped_through_the_innermost_mount(path: str, inside: str) -> None:
    mounts = ("/:/host", *MOUNTS, "/same", "/home/me/inner:/inner:ro+rprivate")
    assert map_into_container(path, container("pyxis", mounts)) == inside


@pytest.mark.parametrize("path", ["/home/mel/x", "/", "/home"])
def test_a_path_under_no_mount_is_an_error_with_the_fix(path: str) -> None:
    with pytest.raises(InvalidSweep) as error:
        map_into_container(path, container("enroot"))
    assert str(error.value).startswith(f"{path} cannot be seen inside the container 'nccl.sqsh'")
    assert "(mounts: /home/me:/work, /scratch:/scratch:ro); add" in str(error.value)


def test_a_relative_path_cannot_be_mapped() -> None:
    with pytest.raises(InvalidSweep, match="'out/x' must be absolute"):
        map_into_container("out/x", container("enroot"))


def test_without_a_container_a_path_is_itself() -> None:
    assert map_into_container("out/x", None) == "out/x"


NAMES = st.text("abc", min_size=1, max_size=3)


@given(st.lists(NAMES, max_size=3), st.lists(NAMES, max_size=3), st.lists(NAMES, min_size=1))
def test_what_lies_under_a_mount_keeps_its_place_in_it(
    source: list[str], target: list[str], rest: list[str]
) -> None:
    mount = f"/{'/'.join(source)}:/{'/'.join(target)}"
    path = "/" + "/".join([*source, *rest])
    expected = "/" + "/".join([*target, *rest])
    assert map_into_container(path, container("apptainer", (mount,))) == expected
