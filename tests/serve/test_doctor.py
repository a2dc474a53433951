"""`dynamiccl-deploy doctor`: findings on recorded machines, and the command on this one."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dynamiccl.checks import Check, Verdict
from dynamiccl.errors import MachineError, PluginError
from dynamiccl.libraries import TUNER_NAME, VENDOR_NAME
from dynamiccl.machine import ProgramResult, ThisMachine
from dynamiccl.nccl import Algorithm, Config, NcclVersion, Protocol
from dynamiccl.nccl_setup import ROLES, find_other_plugin
from dynamiccl.serve.artifact import TableInfo
from dynamiccl.serve.doctor import (
    Question,
    check_channels,
    check_key,
    check_nccl,
    check_plugin,
    check_settings,
    run_checks,
)
from dynamiccl.serve.table import DecisionTable
from dynamiccl.serve.this_machine import NcclLibrary, ask_probe, nccl_libraries
from tests.cli.conftest import Shell
from tests.collect.doctor.recorded import Recorded


def library(text: str, path: str = "/opt/libnccl.so.2") -> NcclLibrary:
    return NcclLibrary(path, "--nccl", NcclVersion.parse(text))


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        ("2.20.5", Verdict.FAIL, "tuners need NCCL 2.21.0"),
        ("2.21.5", Verdict.WARN, "takes tuner v2"),
        ("2.26.6", Verdict.WARN, "before NCCL 2.27.0 a tuner is not told which communicator it is"),
        ("2.27.7", Verdict.OK, "takes tuner v4 and profiler v4"),
        ("2.28.9", Verdict.OK, "takes tuner v5 and profiler v5"),
        ("2.29.7", Verdict.OK, "takes tuner v5 and profiler v6"),
        ("2.30.7", Verdict.OK, "takes tuner v6 and profiler v6"),
        ("2.31.2", Verdict.WARN, "every job keeps NCCL's own choice"),
        ("2.32.3", Verdict.WARN, "takes tuner v6 and profiler v6"),
    ],
)
def test_nccls_release_decides_which_interfaces_it_takes(
    version: str, status: Verdict, said: str
) -> None:
    [check] = check_nccl([library(version)])
    assert check.status is status
    assert said in check.found + check.advice


def test_nccl_that_is_not_one_is_told() -> None:
    [none] = check_nccl([])
    assert none.status is Verdict.UNKNOWN
    checks = list(check_nccl([library("2.28.9"), library("2.27.5", "/usr/lib/libnccl.so.2")]))
    assert checks[-1].found == "several versions: 2.27.5, 2.28.9"
    [broken] = check_nccl([NcclLibrary("/x", "--nccl", None, "libcudart.so.13: cannot open")])
    assert "libcudart.so.13" in broken.found


def test_libraries_are_found_where_jobs_find_them(libnccl: Path) -> None:
    machine = Recorded(
        env={"LD_LIBRARY_PATH": f":/nowhere:{libnccl.parent}"}, files={str(libnccl): ""}
    )
    [found] = nccl_libraries(machine)
    assert (found.path, found.origin) == (str(libnccl), "the loader's path")
    assert found.version is None  # nothing recorded says its version
    assert found.problem == "no such file or directory"


def test_plugin_is_loaded_alone(plugin_path: Path, tmp_path: Path) -> None:
    [loads, needs] = check_plugin(ThisMachine(), plugin_path)
    assert "loads by itself" in loads.found
    assert needs.status is Verdict.OK
    [gone] = check_plugin(ThisMachine(), tmp_path / "gone.so")
    assert gone.status is Verdict.FAIL
    source = tmp_path / "needy.c"
    source.write_text("int nobody_has_this(void); int call(void) { return nobody_has_this(); }\n")
    needy = tmp_path / TUNER_NAME
    subprocess.run(["cc", "-shared", "-fPIC", "-o", needy, source], check=True)
    [broken] = check_plugin(ThisMachine(), needy)
    assert "undefined symbol: nobody_has_this" in broken.found
    source.write_text('const char text[] = "GLIBC_2.34"; int ncclTunerPlugin_v4;\n')
    subprocess.run(["cc", "-shared", "-fPIC", "-o", needy, source], check=True)
    [lacks, new] = check_plugin(ThisMachine(), needy)
    assert (lacks.status, new.status) == (Verdict.FAIL, Verdict.WARN)
    assert "lacks ncclTunerPlugin_v2, ncclTunerPlugin_v3, ncclTunerPlugin_v5" in lacks.found
    assert "needs glibc 2.34" in new.found


def neighbours(machine: Recorded) -> list[Check]:
    question = Question(Path("gone.so"), None)
    found = run_checks(machine, question)
    return [check for check in found if check.name in {"NCCL's tuner", "NCCL's profiler"}]


def test_neighbours_are_told_with_the_way_to_keep_them() -> None:
    [tuner, profiler] = neighbours(Recorded(env={"NCCL_TUNER_PLUGIN": "/opt/v.so"}))
    assert tuner.status is Verdict.WARN
    assert "which asks it before ours" in tuner.advice
    assert profiler.status is Verdict.OK
    kept = {"NCCL_TUNER_PLUGIN": "/opt/v.so", "DYNAMICCL_NEXT_TUNER": "/opt/v.so"}
    assert neighbours(Recorded(env=kept))[0].status is Verdict.OK
    theirs = {"NCCL_PROFILER_PLUGIN": "/opt/p.so"}
    [_, profiler] = neighbours(Recorded(env=theirs))
    assert profiler.status is Verdict.OK
    assert "it stays" in profiler.found
    theirs |= {"DYNAMICCL_MODE": "adaptive"}
    [_, profiler] = neighbours(Recorded(env=theirs))
    assert profiler.status is Verdict.WARN
    assert "mode adaptive calls none but ours" in profiler.advice
    ours = {"NCCL_TUNER_PLUGIN": f"/x/{TUNER_NAME}", "NCCL_PROFILER_PLUGIN": "none"}
    [tuner, profiler] = neighbours(Recorded(env=ours | {"DYNAMICCL_MODE": "adaptive"}))
    assert tuner.found.startswith("ours, by NCCL_TUNER_PLUGIN")
    assert profiler.status is Verdict.WARN


def test_stray_library_is_found() -> None:
    stray = Recorded(
        env={"LD_LIBRARY_PATH": "/stray"}, files={"/stray/libnccl-tuner.so": "", "/x": ""}
    )
    found = find_other_plugin(stray, ROLES[0])
    assert found is not None
    assert found.library == "libnccl-tuner.so"
    assert "/stray/libnccl-tuner.so, which NCCL loads unasked" in neighbours(stray)[0].found


def test_tuner_in_the_network_plugin_is_found_also_behind_ours() -> None:
    net = "/opt/libnccl-net-ofi.so"
    machine = Recorded(
        env={"LD_LIBRARY_PATH": "/opt", "NCCL_NET_PLUGIN": "ib,ofi"},
        files={net: "", "/opt/libnccl-net-ib.so": ""},
    ).answering("grep", "-aqE", "ncclTunerPlugin_v[0-9]", net)
    [tuner, profiler] = neighbours(machine)
    assert (tuner.status, tuner.found) == (Verdict.WARN, f"inside the network plugin {net}")
    assert profiler.status is Verdict.OK
    ours = dict(machine.env) | {"NCCL_TUNER_PLUGIN": f"/x/{TUNER_NAME}"}
    [tuner, _] = neighbours(replace(machine, env=ours))
    assert tuner.status is Verdict.WARN
    assert f"in place of a tuner: inside the network plugin {net}" in tuner.found
    ours |= {"NCCL_TUNER_PLUGIN": f"/x/{VENDOR_NAME}", "DYNAMICCL_NEXT_TUNER": net}
    assert neighbours(replace(machine, env=ours))[0].status is Verdict.OK


def test_settings_that_weaken_tables_are_told() -> None:
    assert list(check_settings(Recorded(env={"NCCL_DEBUG": "INFO"}))) == []
    [forced, policy] = check_settings(
        Recorded(env={"NCCL_ALGO": "Ring", "NCCL_CTA_POLICY": "EFFICIENCY"})
    )
    assert forced.found == "NCCL_ALGO=Ring"
    assert "skips this policy's choice of NVLS" in policy.advice
    assert not list(check_settings(Recorded(env={"NCCL_ENQUEUE_REARCH_ENABLE": "0"})))
    [enqueue] = check_settings(Recorded(env={"NCCL_ENQUEUE_REARCH_ENABLE": "1"}))
    assert "beats symmetric kernels" in enqueue.advice


def test_key_must_be_a_secret(tmp_path: Path) -> None:
    key = tmp_path / "key"

    def verdict() -> str:
        check = check_key(Recorded(env={"DYNAMICCL_KEY_FILE": str(key)}))
        return f"{check.status}: {check.found} {check.advice}"

    assert check_key(Recorded()).status is Verdict.OK
    assert verdict().startswith("fail")
    key.write_text("x" * 32)
    key.chmod(0o644)
    assert "mode 0644 chmod 600" in verdict()
    key.chmod(0o600)
    assert verdict().startswith("ok")
    key.write_text("short")
    assert "has 5 bytes" in verdict()
    (tmp_path / "link").symlink_to(key)
    key = tmp_path / "link"
    assert "a link does not count" in verdict()


def test_sampling_that_is_off_is_said() -> None:
    env = {"DYNAMICCL_SAMPLE_PERCENT": "0", "DYNAMICCL_MODE": "adaptive"}
    checks = run_checks(Recorded(env=env), Question(Path("gone"), None))
    assert checks[-1].found.startswith("none are taken")
    assert "GPU times" not in {c.name for c in run_checks(Recorded(), Question(Path("gone"), None))}


def test_channels_that_a_late_nccl_only_lowers_to_are_told(tmp_path: Path) -> None:
    configs = [Config(Algorithm.Ring, Protocol.Simple, num_channels=8), None]
    table = DecisionTable.from_configs([configs] * 5, num_nodes=1, num_ranks=8)
    (tmp_path / "table").write_bytes(table.to_bytes())
    tables = [TableInfo("box", 1, 8, "table", entries=10, acting=5)]
    assert not list(check_channels(tmp_path, tables, [library("2.30.7")]))
    [told] = check_channels(tmp_path, tables, [library("2.30.7"), library("2.32.3")])
    assert told.found.endswith("5 entries for 1 nodes, 8 ranks")
    assert "only where it is below its own" in told.advice


def test_command_knows_a_bound_machine_and_an_unknown_one(
    artifact: Path, plugin_path: Path, libnccl: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_TUNER_PLUGIN", "DYNAMICCL_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    options = ("--plugin", plugin_path, "--nccl", libnccl)
    doctor = ("dynamiccl-deploy", "doctor", artifact, *options)
    done = shell(*doctor)
    assert done.code == 4
    assert "unknown to the artifact, so every job here abstains" in done.out
    assert f"dynamiccl-deploy bind {artifact} --system NAME" in done.out
    assert shell("dynamiccl-deploy", "bind", artifact, *options).code == 0
    found = {check["name"]: check for check in shell(*doctor, "--json").json}
    machine = found["machine"]["found"]
    assert "nccl=22809: known, box" in machine
    # What a login node says of itself is no promise for the nodes of a job.
    assert (found["machine"]["status"] == "unknown") == ("gpu=none*0" in machine)
    assert found["libnccl"]["found"].startswith("NCCL 2.28.9")
    (artifact / "kill").touch()
    assert "WARN  kill file" in shell(*doctor).out


def test_command_without_an_nccl_knows_less(
    artifact: Path, plugin_path: Path, shell: Shell, tmp_path: Path
) -> None:
    (tmp_path / "libnccl.so.2").write_text("not a library")
    doctor = ("dynamiccl-deploy", "doctor", artifact, "--plugin", plugin_path)
    done = shell(*doctor, "--nccl", tmp_path / "libnccl.so.2")
    assert done.code == 0
    assert "does not load" in done.out
    assert "the jobs' NCCL is not known" in done.out
    bind = ("bind", artifact, "--plugin", plugin_path, "--nccl", tmp_path / "libnccl.so.2")
    assert "give the whole --fingerprint" in shell("dynamiccl-deploy", *bind).err


def test_artifact_that_the_plugin_would_not_trust_is_found(
    artifact: Path, plugin_path: Path, libnccl: Path, shell: Shell
) -> None:
    (artifact / "plugin.index").chmod(0o666)
    doctor = ("dynamiccl-deploy", "doctor", artifact, "--plugin", plugin_path, "--nccl", libnccl)
    done = shell(*doctor)
    assert done.code == 4
    assert "the plugin refuses" in done.out
    (artifact / "policy.pt").unlink()
    assert "lacks policy.pt" in shell(*doctor).out


def test_probe_that_says_nothing_is_no_answer(plugin_path: Path, tmp_path: Path) -> None:
    probe = str(plugin_path.parent / "dynamiccl-probe")
    machine = replace(Recorded(), runs={(probe,): ProgramResult(0, "hello\n")})
    with pytest.raises(PluginError, match="printed no facts: hello"):
        ask_probe(machine, plugin_path)
    with pytest.raises(MachineError, match="no dynamiccl-probe beside"):
        ask_probe(machine, tmp_path / "x.so")


@pytest.mark.parametrize("command", ["doctor", "bind", "install", "env"])
def test_commands_say_how_they_are_used(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dynamiccl.serve.cli", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Example: " in done.stdout
