"""`dynamiccl-run`, really executed: what the command that it becomes finds in its environment."""

import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dynamiccl.libraries import ADAPTIVE_NAME, PROFILER_NAME, TUNER_NAME, VENDOR_NAME
from dynamiccl.serve.install import install
from tests.cli.conftest import Shell

SHELLS = [found for found in map(shutil.which, ("dash", "bash")) if found]


@pytest.fixture(name="home")
def home_fixture(artifact: Path, plugin_path: Path, tmp_path: Path) -> Path:
    return install(artifact, tmp_path / "home", plugin_path).directory


class Runner:
    """Runs the wrapper with an environment that is all its own."""

    def __init__(self, home: Path, shell: str, tmp_path: Path) -> None:
        self.home = home
        self._shell = shell
        self._base = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def __call__(
        self, *arguments: str, env: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self._shell, str(self.home / "bin" / "dynamiccl-run"), *arguments],
            env={**self._base, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )

    def shown(self, *options: str, said: str = "", **env: str) -> dict[str, str]:
        done = self(*options, "env", env=env)
        assert done.returncode == 0, done.stderr
        assert said in done.stderr if said else done.stderr == ""
        return dict(line.split("=", 1) for line in done.stdout.splitlines())


@pytest.fixture(name="run", params=SHELLS, ids=os.path.basename)
def run_fixture(request: pytest.FixtureRequest, home: Path, tmp_path: Path) -> Runner:
    return Runner(home, request.param, tmp_path)


@pytest.fixture(name="listening")
def listening_fixture() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


def test_command_gets_all_that_it_needs(run: Runner) -> None:
    shown = run.shown()
    plugin = str(run.home / "lib" / TUNER_NAME)
    assert shown["NCCL_TUNER_PLUGIN"] == shown["NCCL_PROFILER_PLUGIN"] == plugin
    assert shown["DYNAMICCL_ARTIFACT"] == str(run.home / "artifact")
    assert shown["DYNAMICCL_KEY_FILE"] == str(run.home / "key")
    host, port = shown["DYNAMICCL_COORDINATOR"].split(":")
    assert host == "127.0.0.1"
    assert 20000 <= int(port) < 32000
    assert shown["DYNAMICCL_JOB_ID"] == shown["DYNAMICCL_COORDINATOR"]
    assert "DYNAMICCL_MODE" not in shown


def test_command_takes_its_words_and_its_exit_code_along(run: Runner) -> None:
    done = run("sh", "-c", 'printf "%s|" "$@"; exit 7', "x", "a b", "", "--mode", "*")
    assert (done.returncode, done.stdout) == (7, "a b||--mode|*|")
    assert run("--", "printf", "%s", "-h").stdout == "-h"
    assert run("/no/such/program").returncode == 127


def test_the_mode_chooses_the_library(run: Runner) -> None:
    shown = run.shown("--mode", "adaptive")
    assert shown["NCCL_TUNER_PLUGIN"] == shown["NCCL_PROFILER_PLUGIN"]
    assert shown["NCCL_TUNER_PLUGIN"].endswith(ADAPTIVE_NAME)
    assert shown["DYNAMICCL_MODE"] == "adaptive"
    watching = run.shown("--mode=observe")
    assert "NCCL_TUNER_PLUGIN" not in watching
    assert watching["NCCL_PROFILER_PLUGIN"].endswith(PROFILER_NAME)
    assert "NCCL_TUNER_PLUGIN" not in run.shown(DYNAMICCL_MODE="observe")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no COMMAND"),
        (("--mode",), "--mode needs a value"),
        (("--mode", "fast", "env"), "choose from table, observe, adaptive"),
        (("--what", "env"), "unknown option '--what'"),
    ],
)
def test_wrong_usage_is_exit_2(run: Runner, arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert run("--help").stdout.startswith("usage: dynamiccl-run")


def test_what_the_user_set_stays(run: Runner) -> None:
    own = {
        "DYNAMICCL_COORDINATOR": "none",
        "DYNAMICCL_KEY_FILE": "/k",
        "DYNAMICCL_JOB_ID": "mine",
        "DYNAMICCL_ARTIFACT": "/a",
    }
    assert own.items() <= run.shown(**own).items()


def test_switched_off_it_is_not_there(run: Runner) -> None:
    shown = run.shown(DYNAMICCL_DISABLE="1")
    assert {name for name in shown if name.startswith(("NCCL", "DYNAMICCL"))} == {
        "DYNAMICCL_DISABLE"
    }


def test_a_vendors_tuner_is_asked_first(run: Runner) -> None:
    theirs = "/opt/libnccl-tuner.so"
    shown = run.shown(NCCL_TUNER_PLUGIN=theirs, said=f"has {theirs} asked before ours")
    assert shown["DYNAMICCL_NEXT_TUNER"] == theirs
    assert shown["NCCL_TUNER_PLUGIN"].endswith(VENDOR_NAME)
    assert shown["NCCL_PROFILER_PLUGIN"] == shown["NCCL_TUNER_PLUGIN"]
    own = run.shown(NCCL_TUNER_PLUGIN=theirs, DYNAMICCL_NEXT_TUNER="/opt/other.so")
    assert own["DYNAMICCL_NEXT_TUNER"] == "/opt/other.so"
    for value in ("none", f"/elsewhere/{TUNER_NAME}", TUNER_NAME):
        shown = run.shown(NCCL_TUNER_PLUGIN=value)
        assert "DYNAMICCL_NEXT_TUNER" not in shown
        assert shown["NCCL_TUNER_PLUGIN"].endswith(TUNER_NAME)


@pytest.fixture(name="opt")
def opt_fixture(tmp_path: Path) -> Path:
    """A folder with network plugins: AWS's, which is a tuner too, and one that is none."""
    folder = tmp_path / "opt with space"
    folder.mkdir()
    source = tmp_path / "net.c"
    for name, symbol in (("ofi", "ncclTunerPlugin_v3"), ("ib", "ncclNetPlugin_v8")):
        source.write_text(f"int {symbol}[4];\n")
        to = folder / f"libnccl-net-{name}.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-s", "-o", to, source], check=True)
    return folder


@pytest.mark.parametrize(
    ("named", "asked"),
    [
        ("ofi", "libnccl-net-ofi.so"),
        ("libnccl-net-ofi.so", "libnccl-net-ofi.so"),
        ("ib,ofi", "libnccl-net-ofi.so"),
        ("{opt}/libnccl-net-ofi.so", "{opt}/libnccl-net-ofi.so"),
        (None, "libnccl-net.so"),
    ],
)
def test_a_tuner_in_the_network_plugin_is_asked_first(
    named: str | None, asked: str, run: Runner, opt: Path
) -> None:
    (opt / "libnccl-net.so").symlink_to("libnccl-net-ofi.so")
    asked = asked.format(opt=opt)
    env = {"LD_LIBRARY_PATH": f":/nowhere:{opt}"}
    env |= {} if named is None else {"NCCL_NET_PLUGIN": named.format(opt=opt)}
    shown = run.shown(said=f"has {asked} asked before ours", **env)
    assert shown["DYNAMICCL_NEXT_TUNER"] == asked
    assert shown["NCCL_TUNER_PLUGIN"].endswith(VENDOR_NAME)
    again = run.shown(**shown)  # as each rank of a job that was started so
    assert again["DYNAMICCL_NEXT_TUNER"] == asked
    assert again["NCCL_TUNER_PLUGIN"].endswith(VENDOR_NAME)
    said = f"loads nothing: mode adaptive asks no other tuner, and NCCL has {asked}"
    assert "NCCL_TUNER_PLUGIN" not in run.shown("--mode=adaptive", said=said, **env)
    # NCCL looks there only where it is told of no tuner.
    said = "has /opt/t.so asked before ours"
    theirs = run.shown(NCCL_TUNER_PLUGIN="/opt/t.so", said=said, **env)
    assert theirs["DYNAMICCL_NEXT_TUNER"] == "/opt/t.so"
    assert run.shown(NCCL_TUNER_PLUGIN="none", **env)["NCCL_TUNER_PLUGIN"].endswith(TUNER_NAME)


@pytest.mark.parametrize("named", ["ib", "none", "gone", "/gone/libnccl-net-ofi.so"])
def test_a_network_plugin_without_a_tuner_displaces_none(
    named: str, run: Runner, opt: Path
) -> None:
    shown = run.shown(LD_LIBRARY_PATH=str(opt), NCCL_NET_PLUGIN=named)
    assert "DYNAMICCL_NEXT_TUNER" not in shown
    assert shown["NCCL_TUNER_PLUGIN"].endswith(TUNER_NAME)


def test_libraries_that_nccl_loads_unasked_keep_their_places(run: Runner, opt: Path) -> None:
    for role in ("tuner", "profiler"):
        (opt / f"libnccl-{role}.so").symlink_to("libnccl-net-ofi.so")
    shown = run.shown(LD_LIBRARY_PATH=str(opt), said="has libnccl-tuner.so asked before ours")
    assert shown["DYNAMICCL_NEXT_TUNER"] == "libnccl-tuner.so"
    assert shown["NCCL_PROFILER_PLUGIN"] == "libnccl-profiler.so"


def test_a_jobs_own_profiler_stays(run: Runner) -> None:
    for value in ("NONE", f"/elsewhere/{TUNER_NAME}", f"/elsewhere/{PROFILER_NAME}"):
        shown = run.shown(NCCL_PROFILER_PLUGIN=value)
        assert shown["NCCL_PROFILER_PLUGIN"] == str(run.home / "lib" / TUNER_NAME)
    # The tuner needs a profiler's place on NCCL 2.27 alone, and takes it from nobody.
    assert run.shown(NCCL_PROFILER_PLUGIN="inspector")["NCCL_PROFILER_PLUGIN"] == "inspector"


@pytest.mark.parametrize("mode", ["adaptive", "observe"])
def test_modes_that_need_the_profilers_place_load_nothing_where_it_is_taken(
    mode: str, run: Runner
) -> None:
    said = f"mode {mode} needs the profiler's place, and inspector has it"
    shown = run.shown(f"--mode={mode}", NCCL_PROFILER_PLUGIN="inspector", said=said)
    assert shown["NCCL_PROFILER_PLUGIN"] == "inspector"
    assert "NCCL_TUNER_PLUGIN" not in shown
    taken = {"NCCL_TUNER_PLUGIN": "/opt/t.so"}
    if mode == "adaptive":
        taken["said"] = "mode adaptive asks no other tuner"
    assert run.shown(f"--mode={mode}", **taken)["NCCL_TUNER_PLUGIN"] == "/opt/t.so"


def test_a_policy_that_any_tuner_would_disable_is_left_alone(run: Runner, tmp_path: Path) -> None:
    for value in ("EFFICIENCY", "efficiency", "1", "3"):
        shown = run.shown(NCCL_CTA_POLICY=value, said=f"NCCL_CTA_POLICY is {value}")
        assert "NCCL_TUNER_PLUGIN" not in shown
    assert "NCCL_TUNER_PLUGIN" in run.shown(NCCL_CTA_POLICY="0")
    assert "NCCL_PROFILER_PLUGIN" in run.shown("--mode=observe", NCCL_CTA_POLICY="1")
    # As NCCL reads it from its own file, where the environment does not say otherwise.
    (tmp_path / ".nccl.conf").write_text("# ours\nNCCL_DEBUG=INFO\n NCCL_CTA_POLICY = 1 \n")
    assert "NCCL_TUNER_PLUGIN" not in run.shown(said="NCCL_CTA_POLICY is 1,")
    assert "NCCL_TUNER_PLUGIN" in run.shown(NCCL_CTA_POLICY="2")
    assert "NCCL_TUNER_PLUGIN" in run.shown(NCCL_CONF_FILE="/dev/null")


def test_the_new_enqueue_is_left_alone(run: Runner) -> None:
    shown = run.shown(NCCL_ENQUEUE_REARCH_ENABLE="1", said="NCCL_ENQUEUE_REARCH_ENABLE is 1")
    assert "NCCL_TUNER_PLUGIN" not in shown
    assert "NCCL_TUNER_PLUGIN" in run.shown(NCCL_ENQUEUE_REARCH_ENABLE="0")


def meeting(shown: Mapping[str, str]) -> tuple[str, str]:
    return shown["DYNAMICCL_COORDINATOR"], shown["DYNAMICCL_JOB_ID"]


def test_ranks_of_torchrun_meet_at_rank_0(run: Runner) -> None:
    job = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "7"}
    ranks = {meeting(run.shown(RANK=str(rank), LOCAL_RANK="0", **job)) for rank in range(3)}
    [(coordinator, name)] = ranks
    assert coordinator.startswith("n1:")
    assert name == "7"
    other = meeting(run.shown(RANK="0", **{**job, "MASTER_PORT": "29501"}))
    assert other[0] != coordinator


@pytest.mark.parametrize(
    "options",
    [
        ("--master-addr", "n1", "--master-port", "29500"),
        ("--master_addr=n1", "--master_port=29500"),
        ("--rdzv-endpoint", "n1:29500"),
        ("--rdzv_endpoint=n1:29500",),
    ],
)
def test_torchrun_on_each_node_meets_where_its_options_say(
    run: Runner, options: tuple[str, ...]
) -> None:
    # `env NAME=VALUE... ` stands for torchrun: it takes words and prints the environment.
    done = run("sh", "-c", "env", "torchrun", "--nnodes", "2", *options, "train.py")
    shown = dict(line.split("=", 1) for line in done.stdout.splitlines())
    by_environment = run.shown(MASTER_ADDR="n1", MASTER_PORT="29500")
    assert meeting(shown) == meeting(by_environment)


def test_ipv6_addresses_get_brackets(run: Runner) -> None:
    assert run.shown(MASTER_ADDR="fd00::1")["DYNAMICCL_COORDINATOR"].startswith("[fd00::1]:")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu-[003-005,9],m1", "gpu-003"),
        ("a[7]-x,b", "a7-x"),
        ("rack1-n[1,3]", "rack1-n1"),
    ],
)
def test_ranks_of_slurm_meet_on_the_first_node(run: Runner, nodes: str, first: str) -> None:
    job = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": nodes}
    job["PATH"] = without_scontrol(run.home)
    ranks = {meeting(run.shown(SLURM_PROCID=str(rank), **job)) for rank in range(3)}
    [(coordinator, name)] = ranks
    assert coordinator.rpartition(":")[0] == first
    assert name == "12.3"
    assert meeting(run.shown(SLURM_PROCID="0", **{**job, "SLURM_STEP_ID": "4"}))[1] == "12.4"


def without_scontrol(home: Path) -> str:
    """A PATH with the few programs that a container has."""
    folder = home.parent / "path"
    folder.mkdir(exist_ok=True)
    for name in ("env", "sed", "cksum", "awk", "tr", "date", "dirname", "hostname", "uname"):
        found = shutil.which(name)
        if found and not (folder / name).exists():
            (folder / name).symlink_to(found)
    return str(folder)


def test_slurm_is_asked_where_it_can_be(run: Runner, tmp_path: Path) -> None:
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "scontrol").write_text('#!/bin/sh\n[ "$2" = hostnames ] && printf "x9\\nx1\\n"\n')
    (fake / "scontrol").chmod(0o755)
    shown = run.shown(
        PATH=f"{fake}:{os.environ['PATH']}", SLURM_JOB_ID="5", SLURM_JOB_NODELIST="x[9,1]"
    )
    assert shown["DYNAMICCL_COORDINATOR"].startswith("x9:")
    assert shown["DYNAMICCL_JOB_ID"] == "5"


def test_ranks_of_mpi_on_several_hosts_need_a_hint(run: Runner) -> None:
    several = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    said = "the host of rank 0 is not known here"
    shown = run.shown(said=said, OMPI_COMM_WORLD_LOCAL_SIZE="2", **several)
    assert "DYNAMICCL_COORDINATOR" not in shown
    alone = run.shown(OMPI_COMM_WORLD_LOCAL_SIZE="4", **several)
    assert "DYNAMICCL_COORDINATOR" not in alone  # one node meets over a local socket


def test_taken_port_is_told_by_who_starts_the_ranks(
    run: Runner, listening: socket.socket, tmp_path: Path
) -> None:
    port = listening.getsockname()[1]
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "awk").write_text(f"#!/bin/sh\necho {port}\n")
    (fake / "awk").chmod(0o755)
    job = {"PATH": f"{fake}:{os.environ['PATH']}", "MASTER_ADDR": "127.0.0.1"}
    run.shown(said=f"port {port} of 127.0.0.1 is taken", **job)
    run.shown(RANK="1", **job)
    # Alone on one node it takes another.
    own = run.shown(PATH=job["PATH"])["DYNAMICCL_COORDINATOR"]
    assert own != f"127.0.0.1:{port}"


def test_user_who_cannot_read_the_key_gets_one_of_his_own(run: Runner, tmp_path: Path) -> None:
    (run.home / "key").unlink()
    shown = run.shown()
    key = Path(shown["DYNAMICCL_KEY_FILE"])
    assert key == tmp_path / ".config" / "dynamiccl" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert len(key.read_bytes()) == 64
    before = key.read_bytes()
    assert run.shown()["DYNAMICCL_KEY_FILE"] == str(key)
    assert key.read_bytes() == before
    assert [path.name for path in key.parent.iterdir()] == ["key"]


def test_incomplete_installation_is_exit_4(run: Runner) -> None:
    (run.home / "env.sh").unlink()
    done = run("env")
    assert done.returncode == 4
    assert "dynamiccl-deploy install" in done.stderr


def test_wrapper_is_found_at_any_place(run: Runner, shell: Shell, tmp_path: Path) -> None:
    """As where a container mounts the installation elsewhere."""
    assert shell("dynamiccl-deploy", "verify", run.home / "artifact").code == 0
    shutil.copytree(run.home, tmp_path / "mounted")
    run.home = tmp_path / "mounted"
    assert run.shown()["DYNAMICCL_ARTIFACT"] == str(tmp_path / "mounted" / "artifact")
