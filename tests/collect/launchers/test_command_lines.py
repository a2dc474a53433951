"""Whole command lines, one a launcher: what a cluster would see, without a cluster."""

import shlex

import pytest

from dynamiccl.collect.launchers import LAUNCHERS, Command, Job, command, per_node_command
from dynamiccl.collect.launchers.settings import LauncherSettings
from dynamiccl.errors import InvalidSweep, UnknownName

JOB = Job(
    argv=("all_reduce_perf", "-g", "1"),
    env={"NCCL_PROTO": "LL128", "NCCL_ALGO": "allreduce:ring,tree"},
    num_nodes=2,
    ranks_per_node=8,
    unset=("NCCL_TUNER_PLUGIN",),
)
LOCAL = Job(argv=("all_reduce_perf", "-g", "8"), env={"NCCL_ALGO": "Ring"}, ranks_per_node=8)


def settings(kind: str, **more: object) -> LauncherSettings:
    return LauncherSettings.model_validate({"kind": kind, **more})


def line(job: Job, made: LauncherSettings, uid: int = 1000) -> str:
    return shlex.join(command(job, made, uid=uid).argv)


def test_local() -> None:
    made = settings("local", prefix=("numactl", "-N0"), env={"UCX_TLS": "rc"})
    found = command(LOCAL, made, uid=1000)
    assert shlex.join(found.argv) == "numactl -N0 all_reduce_perf -g 8"
    assert dict(found.env) == {"UCX_TLS": "rc", "NCCL_ALGO": "Ring"}


def test_local_drops_variables_from_our_environment() -> None:
    job = Job(argv=("x",), unset=("NCCL_ALGO", "NCCL_PROTO"))
    made = settings("local", env={"NCCL_ALGO": "Tree"})
    assert command(job, made, uid=0) == Command(("x",), {}, ("NCCL_ALGO", "NCCL_PROTO"))


def test_local_refuses_several_nodes_and_says_what_does_not() -> None:
    with pytest.raises(InvalidSweep, match=r"num_nodes = 2; take launcher mpirun, srun or sbatch"):
        command(JOB, settings("local"), uid=0)


def test_local_refuses_launcher_arguments() -> None:
    with pytest.raises(InvalidSweep, match=r"\(--mpi=pmix\); words before .* launcher.prefix"):
        command(LOCAL, settings("local", extra_args=["--mpi=pmix"]), uid=0)


def test_mpirun() -> None:
    made = settings("mpirun", extra_args=("--mca", "btl", "^openib"), prefix=("numactl", "-l"))
    assert line(JOB, made) == (
        "mpirun -np 16 --map-by ppr:8:node --bind-to none "
        "-x NCCL_ALGO=allreduce:ring,tree -x NCCL_PROTO=LL128 --mca btl '^openib' "
        "env -u NCCL_TUNER_PLUGIN numactl -l all_reduce_perf -g 1"
    )


def test_mpirun_as_root() -> None:
    job = Job(argv=("x",), ranks_per_node=4)
    assert line(job, settings("mpirun"), uid=0) == (
        "mpirun --allow-run-as-root -np 4 --map-by ppr:4:node --bind-to none x"
    )


@pytest.mark.parametrize("extra", [("--bind-to", "numa"), ("--rankfile", "r.txt")])
def test_mpirun_leaves_binding_to_the_user(extra: tuple[str, ...]) -> None:
    assert "none" not in line(JOB, settings("mpirun", extra_args=extra))


def test_mpirun_sees_the_variables_itself_too() -> None:
    made = settings("mpirun", env={"OMPI_MCA_btl": "self,tcp"})
    found = command(JOB, made, uid=1)
    assert dict(found.env) == {"OMPI_MCA_btl": "self,tcp", **JOB.env}
    assert found.unset == ("NCCL_TUNER_PLUGIN",)


SRUN = (
    "srun -N 2 -n 16 --ntasks-per-node=8 --export=ALL --kill-on-bad-exit=1 "
    "--mpi=pmix numactl -l all_reduce_perf -g 1"
)


@pytest.mark.parametrize("kind", ["srun", "sbatch"])
def test_srun_is_also_what_a_batch_job_starts(kind: str) -> None:
    made = settings(kind, extra_args=("--mpi=pmix",), prefix=("numactl", "-l"))
    found = command(JOB, made, uid=0)
    assert shlex.join(found.argv) == SRUN
    assert (dict(found.env), found.unset) == (JOB.env, JOB.unset)


def test_srun_keeps_values_off_its_command_line() -> None:
    job = Job(argv=("x",), env={"A": "1,2", "B": "x y"}, num_nodes=1, ranks_per_node=1)
    found = command(job, settings("srun"), uid=0)
    assert "--export=ALL" in found.argv
    assert not [word for word in found.argv if "1,2" in word or "x y" in word]


def test_per_node_command_of_each_launcher() -> None:
    lines = {
        kind: shlex.join(per_node_command(JOB, settings(kind), uid=5).argv)
        for kind in ("mpirun", "srun")
    }
    assert lines == {
        "mpirun": "mpirun -np 2 --map-by ppr:1:node --bind-to none -x NCCL_ALGO=allreduce:ring,tree"
        " -x NCCL_PROTO=LL128 env -u NCCL_TUNER_PLUGIN all_reduce_perf -g 1",
        "srun": "srun -N 2 -n 2 --ntasks-per-node=1 --export=ALL --kill-on-bad-exit=1 "
        "--overlap all_reduce_perf -g 1",
    }
    assert per_node_command(LOCAL, settings("local"), uid=0).argv == LOCAL.argv


def test_mpirun_beside_another_may_share_its_nodes() -> None:
    found = per_node_command(JOB, settings("mpirun"), uid=0)
    assert found.env == {**JOB.env, "SLURM_OVERLAP": "1"}


def test_a_step_beside_another_overlaps() -> None:
    job = Job(argv=("x",), overlap=True)
    assert "--overlap" in command(job, settings("srun"), uid=0).argv


def test_the_jobs_variables_win_over_the_users() -> None:
    made = settings("srun", env={"NCCL_PROTO": "Simple", "UCX_TLS": "tcp"})
    assert command(JOB, made, uid=0).env["NCCL_PROTO"] == "LL128"


def test_a_variable_cannot_be_set_and_absent() -> None:
    with pytest.raises(ValueError, match="set and unset A"):
        command(Job(argv=("x",), env={"A": "1"}, unset=("A",)), settings("srun"), uid=0)


def test_text_is_a_line_for_a_shell() -> None:
    made = Command(("echo", "a b"), {"X": "1 2", "A": "$HOME"}, ("Y",))
    assert made.text == "env -u Y 'A=$HOME' 'X=1 2' echo 'a b'"
    assert Command(("echo", "a"), {}).text == "echo a"


def test_only_local_keeps_ranks_in_one_process() -> None:
    found = {name: launcher.needs_mpi for name, launcher in LAUNCHERS.items()}
    assert found == {"local": False, "mpirun": True, "srun": True, "sbatch": True}


def test_unknown_launcher_is_an_error_that_names_the_choices() -> None:
    wanted = r"unknown launcher 'pbs'; choose from local, mpirun, srun, sbatch"
    with pytest.raises(UnknownName, match=wanted):
        command(Job(("true",)), LauncherSettings(kind="pbs"), uid=0)
