"""`dynamiccl-deploy doctor` on recorded machines and on this one; fingerprints of made-up ones."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect.on_node import node_facts
from dynamiccl.datasets.store import file_sha256
from dynamiccl.doctor import ASK_VERSION, Check, CheckStatus, Machine, ProgramResult
from dynamiccl.libraries import TUNER_NAME, VENDOR_NAME, check_fingerprint
from dynamiccl.serve.build import PROBE_NAME
from dynamiccl.serve.doctor import check_for_job
from tests.cli.conftest import Shell
from tests.collect import sysfs
from tests.recorded import HEALTHY, Recorded, by_name
from tests.serve.abi import compiled

OK, WARN, FAIL, UNKNOWN = CheckStatus
NOTHING = Recorded(runs={}, files={}, programs={})


def found(machine: Machine, plugin: Path = Path("gone.so")) -> dict[str, Check]:
    return by_name(check_for_job(machine, plugin, nccl=Path("/n.so")))


def test_tables_act_under_releases_whose_source_was_read() -> None:
    for version, status, said in (
        ("22304", FAIL, "our tuners need NCCL 2.24.0"),
        ("22403", WARN, "before NCCL 2.27.0 a tuner is not told which communicator it is"),
        ("22707", OK, "NCCL 2.27.7, /n.so"),
        ("23102", WARN, "every job keeps NCCL's own choice"),
    ):
        machine = NOTHING.answering(sys.executable, "-c", ASK_VERSION, "/n.so", output=version)
        check = found(machine)["libnccl"]
        assert (check.status, said in check.found + check.advice) == (status, True)


def test_libraries_are_found_as_in_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Path("gone.so")
    assert by_name(check_for_job(NOTHING, gone))["libnccl"].status is UNKNOWN
    machine = NOTHING.holding("/a/libnccl.so.2", "").with_env(LD_LIBRARY_PATH=":/nowhere:/a")
    check = by_name(check_for_job(machine, gone))["libnccl"]
    assert check.found == "/a/libnccl.so.2 does not load: no such file or directory"
    wheel = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    wheel.parent.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    for path, version in ((str(wheel), "22809"), ("/a/libnccl.so.2", "22707")):
        machine = machine.holding(path, "").answering(
            sys.executable, "-c", ASK_VERSION, path, output=version
        )
    [first, second, *_] = check_for_job(machine, gone)
    assert (first.found, second.found) == (f"NCCL 2.28.9, {wheel}", "NCCL 2.27.7, /a/libnccl.so.2")
    assert "several versions are here (2.27.7, 2.28.9)" in first.advice


def test_plugin_is_loaded_alone(plugin_path: Path, tmp_path: Path) -> None:
    said = f"{plugin_path} loads by itself, {file_sha256(plugin_path)[:16]}"
    assert found(Machine(), plugin_path)["our plugin"].found == said
    assert "No such file" in found(Machine(), tmp_path / "gone.so")["our plugin"].found
    calls = "int nobody_has_this(void); int call(void) { return nobody_has_this(); }\n"
    needy = compiled(tmp_path / TUNER_NAME, calls)
    broken = found(Machine(), needy)["our plugin"]
    assert (broken.status, "undefined symbol: nobody_has_this" in broken.found) == (FAIL, True)
    compiled(needy, "int ncclTunerPlugin_v5;\n")
    lacks = found(Machine(), needy)["our plugin"]
    assert "lacks ncclTunerPlugin_v4, ncclTunerPlugin_v6" in lacks.advice


OURS, VENDORS = f"/x/{TUNER_NAME}", f"/x/{VENDOR_NAME}"
STRAY = {"LD_LIBRARY_PATH": "/stray"}


def test_neighbours_can_be_kept() -> None:
    for env, status, said in (
        ({}, OK, "none is set or found"),
        ({"TUNER_PLUGIN": "/opt/v.so"}, WARN, "asks it before ours"),
        ({"TUNER_PLUGIN": "/opt/v.so", "NEXT_TUNER": "/opt/v.so"}, OK, "asked before ours"),
        ({"TUNER_PLUGIN": "none"}, WARN, "take NCCL_TUNER_PLUGIN out"),
        ({"TUNER_PLUGIN": "/opt/v.so", "MODE": "adaptive"}, WARN, "calls none but ours"),
        ({"TUNER_PLUGIN": OURS}, OK, f"ours, {OURS}"),
        ({"TUNER_PLUGIN": OURS} | STRAY, WARN, "in place of /stray/libnccl-tuner.so"),
        ({"TUNER_PLUGIN": OURS, "NEXT_TUNER": "v.so"} | STRAY, WARN, "in place of /stray"),
        ({"TUNER_PLUGIN": VENDORS, "NEXT_TUNER": "v.so"} | STRAY, OK, f"ours, {VENDORS}: "),
        ({"PROFILER_PLUGIN": "/opt/p.so"}, OK, "it stays, and on NCCL 2.27"),
        ({"PROFILER_PLUGIN": "/opt/p.so", "MODE": "adaptive"}, WARN, "calls none but ours"),
    ):
        before = {"MODE": "DYNAMICCL_", "NEXT_TUNER": "DYNAMICCL_", "LD_LIBRARY_PATH": ""}
        full = {before.get(name, "NCCL_") + name: value for name, value in env.items()}
        machine = NOTHING.holding("/stray/libnccl-tuner.so", "").with_env(**full)
        role = "profiler" if "PROFILER_PLUGIN" in env else "tuner"
        check = found(machine)[f"NCCL's {role}"]
        assert (check.status, said in f"{check.found}: {check.advice}") == (status, True)


def test_key_is_secret(plugin_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, link, short, shown = (tmp_path / name for name in ("key", "link", "short", "shown"))
    link.symlink_to(key)
    for path, text, mode in ((key, "x" * 32, 0o600), (short, "x", 0o600), (shown, "x" * 32, 0o640)):
        path.write_text(text)
        path.chmod(mode)
    for named, said in (
        ("", "ok: DYNAMICCL_KEY_FILE is not set"),
        (key, f"ok: {key}"),
        (tmp_path / "gone", "there is no such file; take it out"),
        (link, "it is a symbolic link; take it out"),
        (short, "it is shorter than 16 bytes; take it out"),
        (shown, f"others may read it; chmod 600 {shown}, or take it out"),
    ):
        monkeypatch.setenv("DYNAMICCL_KEY_FILE", str(named))
        check = found(Machine(), plugin_path)["key"]
        assert said in f"{check.status}: {check.found}; {check.advice}"
        assert (check.status is OK) == said.startswith("ok")


def test_command_knows_a_bound_machine_and_an_unknown_one(
    artifact: Path, plugin_path: Path, libnccl: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_TUNER_PLUGIN", "DYNAMICCL_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    options = ("--plugin", plugin_path, "--nccl", libnccl)
    doctor = ("dynamiccl-deploy", "doctor", artifact, *options)
    done = shell(*doctor)
    assert done.code == 4
    assert "unknown to the artifact\n      -> every job here abstains" in done.out
    assert f"dynamiccl-deploy bind {artifact} --system NAME" in done.out
    assert "WARN  tables: no machine is bound to box: its tables act nowhere" in done.out
    assert shell("dynamiccl-deploy", "bind", artifact, *options).code == 0
    checks = {check["name"]: check for check in shell(*doctor, "--json").json}
    machine = checks["machine"]["found"]
    assert "nccl=22809: known, box" in machine
    # What a login node says of itself is no promise for the nodes of a job.
    assert (checks["machine"]["status"] == "unknown") == ("gpu=none*0" in machine)
    assert "tables" not in checks
    acting = checks["tables that act here"]
    assert acting["status"] == "ok"
    assert acting["found"].startswith("8 ranks on 1 nodes (")
    (artifact / "kill").touch()
    (artifact / "plugin.index").chmod(0o666)
    done = shell(*doctor)
    assert done.code == 4
    assert "WARN  kill file" in done.out
    assert "FAIL  index: the plugin refuses plugin.index: others may write to it" in done.out
    (artifact / "policy.pt").unlink()
    assert "lacks policy.pt" in shell(*doctor).out


def test_command_without_an_nccl_knows_less(
    artifact: Path, plugin_path: Path, shell: Shell, tmp_path: Path
) -> None:
    (tmp_path / "libnccl.so.2").write_text("not a library")
    options = (artifact, "--plugin", plugin_path, "--nccl", tmp_path / "libnccl.so.2")
    done = shell("dynamiccl-deploy", "doctor", *options)
    assert done.code == 0
    assert "does not load" in done.out
    assert "the jobs' NCCL is not known" in done.out
    assert "give the whole --fingerprint" in shell("dynamiccl-deploy", "bind", *options).err


def test_key_is_told_of_whatever_the_probe_knows(plugin_path: Path) -> None:
    names = ("machine", "machine_problem", "systems", "artifact_problem", "key_problem")
    whole = dict.fromkeys(names, "") | {"key_problem": "it is short"}
    lacks = {name: "" for name in names if name != "key_problem"}
    refused = whole | {"machine_problem": "no GPU", "artifact_problem": "others may"}
    probe = str(plugin_path.parent / "dynamiccl-prepare")
    for told, machine_said, key_status in (
        ("hello", "printed no facts: hello", UNKNOWN),
        (json.dumps(lacks), "is of another release; install it again", UNKNOWN),
        (json.dumps(refused), "no GPU", FAIL),
    ):
        machine = replace(HEALTHY, runs={(probe, "--facts"): ProgramResult(0, f"{told}\n")})
        checks = found(machine, plugin_path)
        assert machine_said in checks["machine"].found
        assert [checks[name].status for name in ("machine", "key")] == [UNKNOWN, key_status]
        # The machine may be unknown, and the index refused all the same.
        assert ("index" in checks) == (key_status is FAIL)
    assert "no dynamiccl-prepare beside" in found(HEALTHY, Path("x.so"))["machine"].found


H100 = "NVIDIA H100 80GB HBM3"
NODE = f"gpu={H100}*8;mig=0;nic=infiniband*8"
#: What is said of a machine where there is no artifact, or none that knows it.
NO_FACTS = dict.fromkeys(
    ("machine", "machine_problem", "systems", "artifact_problem", "key_problem"), ""
)
Build = Callable[[Path], None]


@pytest.fixture(name="probe", scope="module")
def probe_fixture(plugin_path: Path) -> Path:
    return plugin_path.parent / PROBE_NAME


def ask(probe: Path, root: Path, key: str = "") -> tuple[int, dict[str, Any]]:
    """Exit code and facts."""
    env = {"DYNAMICCL_TEST_ROOT": str(root), "DYNAMICCL_KEY_FILE": key}
    done = subprocess.run([probe, "--facts"], env=env, stdout=subprocess.PIPE, check=False)
    return done.returncode, json.loads(done.stdout)


def gpu(root: Path, number: int, model: str = H100, *, excluded: str = "No") -> None:
    folder = root / "proc" / "driver" / "nvidia" / "gpus" / f"0000:{number:02x}:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text(
        f"Model: \t\t {model}\nIRQ:   \t\t 42\nGPU UUID: \t GPU-1\nBus Type: \t PCIe\n"
        f"GPU Excluded:\t {excluded}\n"
    )


def dgx(root: Path, mig: str = "") -> None:
    for number in range(8):
        gpu(root, number)
        sysfs.infiniband(root / "sys", f"mlx5_{number}")
    for name in ("mig/config", f"gpu3/mig/{mig}") if mig else ():
        (root / "proc/driver/nvidia/capabilities" / name).mkdir(parents=True)


def two_models(root: Path) -> None:
    for number, model in enumerate(("NVIDIA L4", "NVIDIA A10", "NVIDIA L4")):
        gpu(root, number, model)
    gpu(root, 4, "NVIDIA B200", excluded="Yes")
    sysfs.efa(root / "sys", "rdmap0")


def slow_and_dead_ports(root: Path) -> None:
    gpu(root, 0)
    for number, told in enumerate(({"layer": "Ethernet"},) * 2 + ({"state": "1: DOWN"},)):
        sysfs.infiniband(root / "sys", f"mlx5_{number}", **told)
    for number, rate in ((3, "2.5 Gb/sec (1X SDR)"), (4, "unknown")):  # one is for storage
        sysfs.write(sysfs.infiniband(root / "sys", f"mlx5_{number}"), rate=rate)


def sockets(root: Path) -> None:
    gpu(root, 0, 'Odd; "na\\me" = 1*2+3')
    for name, speed in (("eth0", 25000), ("eth1", 100000), ("eth2", 100000), ("lo", 800000)):
        sysfs.ethernet(root / "sys", name, speed=speed, hardware=True)
    sysfs.ethernet(root / "sys", "docker0", speed=400000)
    sysfs.write(root / "sys", class__net__bonding_masters="bond0")


def container(root: Path) -> None:
    gpu(root, 0)
    sysfs.ethernet(root / "sys", "eth0")
    sysfs.ethernet(root / "sys", "eth1")


@pytest.mark.parametrize(
    ("build", "wanted"),
    [
        (dgx, NODE),
        (two_models, "gpu=NVIDIA A10*1+NVIDIA L4*2;mig=0;nic=efa*1"),
        (partial(dgx, mig="gi2/ci0"), NODE.replace("mig=0", "mig=1")),
        (partial(dgx, mig="."), NODE),  # it is off
        (slow_and_dead_ports, f"gpu={H100}*1;mig=0;nic=roce*2"),
        (sockets, "gpu=Odd_ _na_me_ _ 1_2_3*1;mig=0;nic=socket*2"),
        (container, f"gpu={H100}*1;mig=0;nic=socket*2"),
        (partial(gpu, number=0), f"gpu={H100}*1;mig=0;nic=none*0"),
    ],
)
def test_both_name_a_machine_alike(build: Build, wanted: str, probe: Path, tmp_path: Path) -> None:
    build(tmp_path)
    assert node_facts(tmp_path / "sys", tmp_path / "proc")["node_fingerprint"] == wanted
    assert ask(probe, tmp_path) == (0, NO_FACTS | {"machine": wanted})
    check_fingerprint(f"{wanted};nccl=22809")


def test_gpu_without_a_usable_name_gives_no_fingerprint(probe: Path, tmp_path: Path) -> None:
    assert ask(probe, tmp_path)[1]["machine"] == "gpu=none*0;mig=0;nic=none*0"  # no driver
    for number, model in enumerate(("", "x" * 120)):
        root = tmp_path / str(number)
        dgx(root)
        gpu(root, 9, model)
        swept = node_facts(root / "sys", root / "proc")["node_fingerprint"]
        assert swept is None or model
        why = "a GPU or NIC of this machine cannot be read in /proc or /sys"
        problems = {"machine_problem": why, "key_problem": "there is no such file"}
        assert ask(probe, root, "/gone") == (4, NO_FACTS | problems)
