"""`dynamiccl-run`, really executed: what the command that it becomes finds in its environment."""

import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamiccl.libraries import ADAPTIVE_NAME, PROFILER_NAME, TUNER_NAME, VENDOR_NAME
from dynamiccl.serve.artifact import PluginIndex
from dynamiccl.serve.install import install
from tests.fakes.nvml.build import build_fake_nvml
from tests.serve.abi import compiled
from tests.serve.conftest import MACHINE, Runner

#: The strictest comes first; what all of them do is tested once.
SHELLS = [found for found in map(shutil.which, ("dash", "bash")) if found]


@pytest.fixture(name="run")
def run_fixture(home: Path) -> Runner:
    return Runner(home, SHELLS[0])


@pytest.mark.parametrize("shell", SHELLS, ids=os.path.basename)
def test_all_shells_do_alike(shell: str, run: Runner, tmp_path: Path) -> None:
    other = Runner(run.home, shell)
    same = {"DYNAMICCL_JOB_ID": "one", "SLURM_JOB_ID": "12", "MASTER_PORT": os.urandom(4).hex()}
    for options in ((), ("--mode=adaptive",), ("--mode", "observe")):
        ours, theirs = (
            {name: value for name, value in each.items() if name.startswith(("NCCL", "DYNAMICCL"))}
            for each in (run.shown(*options, **same), other.shown(*options, **same))
        )
        assert ours == theirs
    for wrong in (("--mode", "fast", "env"), ("sh", "-c", 'printf "%s|" "$@"; exit 7', "x", "a b")):
        assert other(*wrong).stdout == run(*wrong).stdout
        assert other(*wrong).stderr == run(*wrong).stderr
    # What the shell evaluates is only ever text.
    odd = f"{tmp_path}/it's $(touch {tmp_path}/ran) `id`\n\"; x"
    Path(odd).mkdir(parents=True)
    shown = other("sh", "-c", 'printf %s "$DYNAMICCL_KILL_FILE"', env={"DYNAMICCL_ARTIFACT": odd})
    assert shown.stdout == f"{odd}/kill"
    assert not (tmp_path / "ran").exists()


def test_command_gets_all_that_it_needs(run: Runner) -> None:
    shown = run.shown()
    plugin = str(run.home / "lib" / TUNER_NAME)
    assert shown["NCCL_TUNER_PLUGIN"] == shown["NCCL_PROFILER_PLUGIN"] == plugin
    assert re.fullmatch("[0-9a-f]{16}", shown["DYNAMICCL_JOB"])
    assert shown["DYNAMICCL_HOST"] == os.uname().nodename
    assert (shown["DYNAMICCL_MACHINE"], shown["DYNAMICCL_SYSTEMS"]) == (MACHINE, "22809=box")
    digest = PluginIndex.read(run.home / "artifact").sha256[:16]
    assert re.fullmatch("[0-9a-f]{16}", shown["DYNAMICCL_INDEX"])
    assert shown["DYNAMICCL_TABLES"] == f"{run.home}/artifacts/{digest}/tables"
    assert list(Path(shown["DYNAMICCL_TABLES"], "box").glob("nodes*_ranks*.dct"))
    assert shown["DYNAMICCL_KILL_FILE"] == f"{run.home}/artifact/kill"
    assert re.fullmatch("[0-9a-f]{32}", shown["DYNAMICCL_KEY"])
    assert shown["DYNAMICCL_WORD"] == "1"
    assert not shown.keys() & {"DYNAMICCL_ARBITER", "DYNAMICCL_PROBLEM", "DYNAMICCL_MODE"}
    assert run.shown()["DYNAMICCL_JOB"] != shown["DYNAMICCL_JOB"]
    # Mode adaptive has an arbiter on one host, too.
    port = os.urandom(4).hex()  # names a job that runs nowhere else on this machine
    adaptive = run.shown("--mode=adaptive", MASTER_PORT=port)
    assert Path(adaptive["DYNAMICCL_ARTIFACT"]) == run.home / "artifact"
    assert (adaptive["DYNAMICCL_JOB_ID"], adaptive["DYNAMICCL_WORD"]) == (port, "1")
    assert re.fullmatch(r"127\.0\.0\.1:[23]\d{4}", adaptive["DYNAMICCL_ARBITER"])
    # Switched off it is not there.
    off = run.shown(DYNAMICCL_DISABLE="1")
    assert {name for name in off if name.startswith(("NCCL", "DYNAMICCL"))} == {
        *("DYNAMICCL_DISABLE", "DYNAMICCL_TEST_ROOT")
    }


def test_command_takes_its_words_and_its_exit_code_along(run: Runner) -> None:
    done = run("sh", "-c", 'printf "%s|" "$@"; exit 7', "x", "a b", "", "--mode", "*")
    assert (done.returncode, done.stdout) == (7, "a b||--mode|*|")
    assert run("--", "printf", "%s", "-h").stdout == "-h"
    assert run("/no/such/program").returncode == 127
    for words, said in (
        ((), "no COMMAND"),
        (("--mode",), "--mode needs a value"),
        (("--mode", "fast", "env"), "choose from table, observe, adaptive"),
        (("--what", "env"), "unknown option '--what'"),
    ):
        done = run(*words)
        assert (done.returncode, done.stdout, said in done.stderr) == (2, "", True)
    assert run("--help").stdout.startswith("usage: dynamiccl-run")


THEIRS, TAKEN = (
    "/opt/libnccl-tuner.so",
    "mode adaptive needs the profiler's place, and inspector has it",
)
LOSES = "NCCL_CTA_POLICY is {}"
#: Mode, the job's setting NCCL_..., tuner and profiler then (None: NCCL loads none), what is said.
LOADED = [
    ("table", "", TUNER_NAME, TUNER_NAME, ""),
    ("adaptive", "", ADAPTIVE_NAME, ADAPTIVE_NAME, ""),
    ("observe", "", None, PROFILER_NAME, ""),
    # A vendor's tuner is asked first.
    ("table", f"TUNER_PLUGIN={THEIRS}", VENDOR_NAME, VENDOR_NAME, f"has {THEIRS} asked before"),
    ("table", f"TUNER_PLUGIN=/elsewhere/{TUNER_NAME}", TUNER_NAME, TUNER_NAME, ""),
    ("adaptive", f"TUNER_PLUGIN={THEIRS}", THEIRS, None, "mode adaptive asks no other tuner"),
    # The tuner needs a profiler's place on NCCL 2.27 alone, and takes it from nobody.
    ("table", "PROFILER_PLUGIN=NONE", TUNER_NAME, TUNER_NAME, ""),
    ("table", f"PROFILER_PLUGIN=/elsewhere/{PROFILER_NAME}", TUNER_NAME, TUNER_NAME, ""),
    ("table", "PROFILER_PLUGIN=inspector", TUNER_NAME, "inspector", ""),
    ("adaptive", "PROFILER_PLUGIN=inspector", None, "inspector", TAKEN),
    # What any tuner would disable is left alone.
    ("table", "CTA_POLICY=efficiency", None, None, LOSES.format("efficiency")),
    ("table", "CTA_POLICY=3", None, None, LOSES.format("3")),
    ("table", "CTA_POLICY=2", TUNER_NAME, TUNER_NAME, ""),
    ("observe", "CTA_POLICY=1", None, PROFILER_NAME, ""),
    ("table", "ENQUEUE_REARCH_ENABLE=1", None, None, "NCCL_ENQUEUE_REARCH_ENABLE is 1"),
    ("table", "ENQUEUE_REARCH_ENABLE=0", TUNER_NAME, TUNER_NAME, ""),
]


def test_mode_and_settings_choose_the_libraries(run: Runner, tmp_path: Path) -> None:
    def name(value: str | None) -> str | None:
        return value if value in {None, THEIRS} else Path(str(value)).name

    for mode, setting, tuner, profiler, said in LOADED:
        key, _, value = setting.partition("=")
        env = {f"NCCL_{key}": value} if key else {}
        shown = run.shown(f"--mode={mode}", said=said, **env)
        found = [shown.get(f"NCCL_{role}_PLUGIN") for role in ("TUNER", "PROFILER")]
        assert [*map(name, found)] == [tuner, profiler], (mode, setting)
        asked = shown.get("DYNAMICCL_NEXT_TUNER")
        assert asked == (THEIRS if tuner == VENDOR_NAME else None)
    assert "NCCL_TUNER_PLUGIN" not in run.shown(DYNAMICCL_MODE="observe")
    named = {"NCCL_TUNER_PLUGIN": THEIRS, "DYNAMICCL_NEXT_TUNER": "/opt/other.so"}
    assert run.shown(**named)["DYNAMICCL_NEXT_TUNER"] == "/opt/other.so"
    # As NCCL reads it from its own file, where the environment does not say otherwise.
    (tmp_path / ".nccl.conf").write_text("# ours\nNCCL_DEBUG=INFO\n NCCL_CTA_POLICY = 1 \n")
    assert "NCCL_TUNER_PLUGIN" not in run.shown(said="NCCL_CTA_POLICY is 1,")
    for env in ({"NCCL_CTA_POLICY": "2"}, {"NCCL_CONF_FILE": "/dev/null"}):
        assert "NCCL_TUNER_PLUGIN" in run.shown(**env)


def test_what_the_user_set_stays(run: Runner) -> None:
    own = {"DYNAMICCL_KEY_FILE": "/k", "DYNAMICCL_JOB_ID": "mine", "DYNAMICCL_KILL_FILE": "/off"}
    assert own.items() <= run.shown(**own).items()
    # The arbiter, which it is for, is elsewhere.
    assert Path(run.shown(DYNAMICCL_METRICS_DIR="m")["DYNAMICCL_METRICS_DIR"]).is_absolute()
    said = "the artifact's index: there is no such file, /a b/plugin.index;"
    shown = run.shown(said=said, DYNAMICCL_ARTIFACT="/a b")
    assert Path(shown["DYNAMICCL_ARTIFACT"]) == Path("/a b")
    assert shown["DYNAMICCL_PROBLEM"].startswith(said)


def test_what_the_wrapper_calls_its_own_things_is_no_variable_of_the_jobs(run: Runner) -> None:
    script = (run.home / "bin" / "dynamiccl-run").read_text(encoding="utf-8")
    names = set(re.findall(r"^\s*(?:for )?([a-z_]+)(?:=| in )", script, re.MULTILINE))
    names |= {name.removeprefix("dynamiccl_") for name in names}
    own = {name: "the job's" for name in names if not name.startswith("dynamiccl_")}
    assert own.items() <= run.shown(**own).items()


@pytest.fixture(name="opt")
def opt_fixture(tmp_path: Path) -> Path:
    """A folder with network plugins: AWS's, which is a tuner too, and one that is none."""
    folder = tmp_path / "opt with space"
    folder.mkdir()
    for name, symbol in (("ofi", "ncclTunerPlugin_v6"), ("ib", "ncclNetPlugin_v8")):
        compiled(folder / f"libnccl-net-{name}.so", f"int {symbol}[4];\n", "-s")
    return folder


@pytest.mark.parametrize(
    ("named", "asked"),
    [("ib,ofi", "libnccl-net-ofi.so"), ("{opt}/libnccl-net-ofi.so",) * 2, (None, "libnccl-net.so")],
)
def test_a_network_plugin_is_asked(named: str | None, asked: str, run: Runner, opt: Path) -> None:
    (opt / "libnccl-net.so").symlink_to("libnccl-net-ofi.so")
    asked = asked.format(opt=opt)
    env = {"LD_LIBRARY_PATH": f":/nowhere:{opt}"}
    env |= {} if named is None else {"NCCL_NET_PLUGIN": named.format(opt=opt)}
    shown = run.shown(said=f"has {asked} asked before ours", **env)
    for found in (shown, run.shown(**shown)):  # again, as each rank of a job that was started so
        assert found["DYNAMICCL_NEXT_TUNER"] == asked
        assert found["NCCL_TUNER_PLUGIN"].endswith(VENDOR_NAME)
    said = f"loads nothing: mode adaptive asks no other tuner, and NCCL has {asked}"
    assert "NCCL_TUNER_PLUGIN" not in run.shown("--mode=adaptive", said=said, **env)
    # NCCL looks there only where it is told of no tuner.
    said = "has /opt/t.so asked before ours"
    theirs = run.shown(NCCL_TUNER_PLUGIN="/opt/t.so", said=said, **env)
    assert theirs["DYNAMICCL_NEXT_TUNER"] == "/opt/t.so"
    env["NCCL_TUNER_PLUGIN"] = "none"
    assert run.shown(**env)["NCCL_TUNER_PLUGIN"].endswith(TUNER_NAME)
    for none in ("ib", "none", "gone", "/gone/libnccl-net-ofi.so"):
        shown = run.shown(LD_LIBRARY_PATH=str(opt), NCCL_NET_PLUGIN=none)
        assert "DYNAMICCL_NEXT_TUNER" not in shown


def test_libraries_that_nccl_loads_unasked_keep_their_places(run: Runner, opt: Path) -> None:
    for role in ("tuner", "profiler"):
        (opt / f"libnccl-{role}.so").symlink_to("libnccl-net-ofi.so")
    shown = run.shown(LD_LIBRARY_PATH=str(opt), said="has libnccl-tuner.so asked before ours")
    assert shown["DYNAMICCL_NEXT_TUNER"] == "libnccl-tuner.so"
    assert shown["NCCL_PROFILER_PLUGIN"] == "libnccl-profiler.so"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda home: (home / "artifact").unlink(), "there is no such file"),
        (lambda home: (home / "artifact/plugin.index").chmod(0o666), "others may write to it"),
        (lambda home: (home / "artifact/plugin.index").write_text("x\n"), "not a DynamICCL index"),
        (lambda home: (home / "artifact/plugin.index").write_text("x"), "it is cut off"),
        (lambda home: replaced(home, "nic=none", "nic=x"), "does not know this machine, gpu=none"),
        (lambda home: (home.parent / "machine/proc/driver/nvidia/gpus/0").mkdir(parents=True),
         "a GPU or NIC of this machine cannot be read"),
    ],
)  # fmt: skip
def test_what_keeps_it_from_a_table_is_a_problem_and_the_command_runs(
    spoil: Callable[[Path], object], said: str, run: Runner
) -> None:
    spoil(run.home)
    shown = run.shown(said=said)
    assert said in shown["DYNAMICCL_PROBLEM"]
    assert "DYNAMICCL_TABLES" not in shown or "DYNAMICCL_SYSTEMS" in shown
    # Of many ranks one speaks.
    run.shown(RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")


def replaced(home: Path, before: str, after: str) -> None:
    index = home / "artifact" / "plugin.index"
    index.write_text(index.read_text().replace(before, after))


def test_a_machine_of_two_names_has_none_and_another_release_may_have_one(run: Runner) -> None:
    line = f"system\tbox\t{MACHINE};nccl=22809\n"
    other = line.replace("box", "box-2")
    replaced(run.home, line, line + other + line.replace("22809", "23007"))
    assert run.shown()["DYNAMICCL_SYSTEMS"] == "23007=box"
    replaced(run.home, line, other.replace("22809", "22907"))
    assert run.shown()["DYNAMICCL_SYSTEMS"] == "22809=box-2 22907=box-2 23007=box"
    assert run.shown(DYNAMICCL_SYSTEM="box")["DYNAMICCL_SYSTEMS"] == "23007=box"
    said = "does not know this machine as DYNAMICCL_SYSTEM=x"
    assert "DYNAMICCL_SYSTEMS" not in run.shown(DYNAMICCL_SYSTEM="x", said=said)


def test_a_running_job_keeps_its_tables(run: Runner, artifact: Path, plugin_path: Path) -> None:
    before = run.shown()
    PluginIndex.read(artifact).bound("box", f"{MACHINE};nccl=23007").write(artifact)
    install(artifact, run.home, plugin_path)
    after = run.shown()
    assert after["DYNAMICCL_INDEX"] != before["DYNAMICCL_INDEX"]
    for shown in (before, after):
        assert list(Path(shown["DYNAMICCL_TABLES"], "box").glob("*.dct"))
    assert after["DYNAMICCL_KILL_FILE"] == before["DYNAMICCL_KILL_FILE"]
    # A kill file at the start is told, and is no problem of later communicators.
    Path(after["DYNAMICCL_KILL_FILE"]).touch()
    assert "DYNAMICCL_PROBLEM" not in run.shown(said="artifact/kill is there")


def test_a_preparation_that_fails_is_a_problem_and_the_command_runs(run: Runner) -> None:
    program = run.home / "bin" / "dynamiccl-prepare"
    for broken in ("", "exit 3", "kill -9 $$"):
        program.unlink()
        if broken:
            program.write_text(f"#!/bin/sh\necho export NCCL_ALGO=Ring\n{broken}\n")
            program.chmod(0o755)
        shown = run.shown(said="NCCL's own choice stands")
        assert shown["DYNAMICCL_PROBLEM"].startswith("dynamiccl-prepare failed on ")
        assert "NCCL_ALGO" not in shown
        program.touch()


# --- which job it is ----------------------------------------------------------------------------

TORCH = {
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "7",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
}
SRUN = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_NODES": "1"}
SRUN |= {"SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "n1"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "88.1"}
MPIRUN |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


def job(run: Runner, **env: str) -> str:
    return run.shown(DYNAMICCL_MODE="observe", **env)["DYNAMICCL_JOB"]


#: Environments of two ranks of one job.
ALIKE = [
    # Each agent of torchrun counts the failures of its own processes.
    ({**TORCH, "RANK": "0"}, {**TORCH, "RANK": "3", "TORCHELASTIC_RESTART_COUNT": "1"}),
    # Rank 0 knows its own host by another name.
    ({**TORCH, "RANK": "1"}, {**TORCH, "RANK": "0", "MASTER_ADDR": "localhost"}),
    # srun starts the agent of each node by itself.
    ({**TORCH, **SRUN, "RANK": "1"}, {**TORCH, **SRUN, "RANK": "0", "SLURM_STEP_ID": "4"}),
    # mpirun starts the ranks of its own node itself, and the others by srun.
    ({**MPIRUN, "SLURM_JOB_ID": "12"}, {**MPIRUN, **SRUN}),
    (SRUN, {**SRUN, "SLURM_NODEID": "1", "SLURM_LOCALID": "3"}),
]
#: What makes another job, step or attempt of SRUN.
OTHERS = {"SLURM_JOB_ID": "13", "SLURM_STEP_ID": "4", "SLURM_RESTART_COUNT": "1"}
OTHERS |= {"DYNAMICCL_RESTART": "1", "DYNAMICCL_JOB_ID": "mine", "MASTER_PORT": "29501"}
OTHERS |= {"PMIX_NAMESPACE": "slurm.pmix.12.4"}


def test_ranks_of_one_job_name_it_alike_and_no_others_do(run: Runner) -> None:
    for one, other in ALIKE:
        assert job(run, **one) == job(run, **other)
    for name, value in OTHERS.items():
        assert job(run, **SRUN) != job(run, **{**SRUN, name: value}), name


def test_one_in_another_prepares_anew(run: Runner) -> None:
    said = "there is no such file"
    outer = run.shown(said=said, DYNAMICCL_ARTIFACT="/nowhere", SLURM_JOB_ID="12")
    inner = run.shown(**{**outer, **SRUN, "DYNAMICCL_ARTIFACT": ""})
    assert "DYNAMICCL_PROBLEM" not in inner
    assert inner["DYNAMICCL_JOB"] != outer["DYNAMICCL_JOB"]
    assert run.shown(**{**inner, **SRUN})["DYNAMICCL_ARTIFACT"] == inner["DYNAMICCL_ARTIFACT"]


def test_ranks_of_slurm_meet_on_the_first_node(run: Runner) -> None:
    second = {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "DYNAMICCL_TEST_LIMIT_MS": "100"}
    for nodes, first in (
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu-[003-005,9],m1", "gpu-003"),
        ("a[7]-x,b", "a7-x"),
        ("rack1-n[1,3]", "rack1-n1"),
        ("rack[1-2]n[3-4],m", "rack1n3"),
    ):
        said = f"no arbiter of this job answers at {first}:"
        run.shown(said=said, **SRUN | second | {"SLURM_STEP_NODELIST": nodes})


def test_around_a_launcher_of_several_hosts_it_says_how_to_start_it(run: Runner) -> None:
    said = "start each rank through dynamiccl-run"
    shown = run.shown(said=said, SLURM_JOB_ID="12", SLURM_JOB_NUM_NODES="2")
    assert "DYNAMICCL_ARBITER" not in shown
    run.shown(SLURM_JOB_ID="12", SLURM_JOB_NUM_NODES="1")


# --- words --------------------------------------------------------------------------------------

TWO_HOSTS = {"MASTER_ADDR": "127.0.0.1", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


def test_word_is_for_ranks_that_are_surely_on_one_host(run: Runner, tmp_path: Path) -> None:
    gpu = tmp_path / "machine/proc/driver/nvidia/gpus/0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t NVIDIA Test GPU\n")
    common = TWO_HOSTS | {"LD_LIBRARY_PATH": str(tmp_path), "DYNAMICCL_MODE": "observe"}
    # This machine may have an NVML; else a GPU's is not there to be asked.
    if b"libnvidia-ml" not in subprocess.run(["ldconfig", "-p"], stdout=-1, check=False).stdout:
        assert run.shown(**common)["DYNAMICCL_WORD"] == "0"
    build_fake_nvml(tmp_path)
    one, denied = {"FAKE_NVML_CLUSTER": "1"}, "nvmlDeviceGetGpuFabricInfo"
    for env, word in (
        ({}, "1"),
        ({"FAKE_NVML_DENY": f"{denied}=3"}, "1"),  # a GPU without a fabric
        (one, "0"),
        ({"FAKE_NVML_DENY": f"{denied}=999"}, "0"),  # not known
        (one | {"NCCL_MNNVL_ENABLE": "0"}, "1"),
        (one | {"LOCAL_WORLD_SIZE": "4"}, "1"),
    ):
        assert run.shown(**common | env)["DYNAMICCL_WORD"] == word, env


def test_words_that_nobody_needs_any_more_are_removed(run: Runner) -> None:
    mine = f"dynamiccl-{os.geteuid()}-{os.urandom(8).hex()}-"
    words = [Path("/dev/shm", mine + name) for name in ("old", "new")]
    other = Path("/dev/shm", f"dynamiccl-{os.geteuid()}x-{os.urandom(8).hex()}")
    try:
        for path in (*words, other):
            path.touch()
        two_hours_ago = time.time() - 7200
        for path in (words[0], other):
            os.utime(path, (two_hours_ago, two_hours_ago))
        run.shown()
        assert [path.exists() for path in (*words, other)] == [False, True, True]
    finally:
        for path in (*words, other):
            path.unlink(missing_ok=True)


# --- the installation ---------------------------------------------------------------------------


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


def test_wrapper_is_found_at_any_place_or_says_what_lacks(run: Runner, tmp_path: Path) -> None:
    """As where a container mounts the installation elsewhere."""
    shutil.copytree(run.home, tmp_path / "mounted", symlinks=True)
    run.home = tmp_path / "mounted"
    shown = run.shown()
    assert Path(shown["DYNAMICCL_ARTIFACT"]) == run.home / "artifact"
    assert Path(shown["DYNAMICCL_TABLES"]).is_relative_to(run.home)
    (run.home / "env.sh").unlink()
    done = run("env")
    assert (done.returncode, "dynamiccl-deploy install" in done.stderr) == (4, True)
