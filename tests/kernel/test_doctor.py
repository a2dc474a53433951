"""The engine of the doctors, the real machine, and NCCL's set-up on a recorded one."""

import json
import sys
from pathlib import Path

import pytest

from dynamiccl import doctor
from dynamiccl.libraries import TUNER_NAME
from tests.recorded import HEALTHY, Recorded, by_name

HERE = doctor.Machine()
OK, WARN, FAIL, UNKNOWN = doctor.CheckStatus
TUNER, PROFILER = doctor.ROLES


def test_a_failure_is_4(capsys: pytest.CaptureFixture[str]) -> None:
    for worst, code in [(OK, 0), (WARN, 0), (UNKNOWN, 0), (FAIL, 4)]:
        checks = [
            doctor.Check("clocks", WARN, "not locked", "lock them"),
            doctor.Check("b", worst, "y", "z"),
        ]
        assert doctor.report(checks, as_json=True) == code
        [_, second] = json.loads(capsys.readouterr().out)
        assert second == {"name": "b", "status": str(worst), "found": "y", "advice": "z"}
        assert doctor.report(checks, as_json=False) == code
        first, advice, *_, counts = capsys.readouterr().out.splitlines()
        assert (first, advice) == ("WARN  clocks: not locked", "      -> lock them")
        assert counts.endswith(f"{int(worst is FAIL)} failed, {int(worst is UNKNOWN)} unknown")


# --- The real machine, asked for things that every machine has ---


def test_a_program_may_be_gone_or_hang() -> None:
    code = "import os, sys; print(sys.stdin.read() == '', os.environ['LC_ALL'], flush=True); "
    code += "print('err', file=sys.stderr); sys.exit(3)"
    assert HERE.run(sys.executable, "-c", code) == doctor.ProgramResult(3, "True C\nerr\n")
    gone = HERE.run("no-such-program")
    assert gone == doctor.ProgramResult(None, "no-such-program: No such file or directory")
    hung = HERE.run(sys.executable, "-c", "import time; time.sleep(60)", limit_s=0.1)
    assert (hung, hung.worked) == (doctor.ProgramResult(None, "no end after 0.1 s"), False)


def test_files_and_programs_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.conf").write_text("x")
    (tmp_path / "a.conf").write_bytes(b"\xff")
    assert HERE.paths(f"{tmp_path}/*.conf") == [f"{tmp_path}/a.conf", f"{tmp_path}/b.conf"]
    texts = [HERE.read(f"{tmp_path}/{name}") for name in ("b.conf", "a.conf", "none", ".")]
    assert texts == ["x", "\ufffd", None, None]
    program = tmp_path / "all_reduce_perf"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert HERE.which("sh") is not None
    assert HERE.which("all_reduce_perf", str(tmp_path)) == str(program)
    assert HERE.which("sh", str(tmp_path)) is None
    # Room is that of the folder that will be made.
    assert (HERE.free_bytes(str(tmp_path / "a" / "b")) or 0) > 0


# --- NCCL's set-up ---


def test_settings_have_nccls_precedence() -> None:
    machine = (
        HEALTHY.with_env(NCCL_IB_HCA="mlx5", HOME="/root")
        .holding("~/.nccl.conf", "# ours\nNCCL_DEBUG = WARN\nNCCL_IB_HCA=mlx4\n")
        .holding("/etc/nccl.conf", "NCCL_DEBUG=INFO\nNCCL_NET=IB\n")
        .holding("/opt/nccl.conf", "NCCL_ALGO=Ring\n")
    )
    [check] = doctor.check_settings(machine)
    assert check.status is OK
    assert check.found == (
        "NCCL_IB_HCA=mlx5 (environment); NCCL_DEBUG=WARN (~/.nccl.conf); NCCL_NET=IB "
        "(/etc/nccl.conf)"
    )
    other = machine.with_env(NCCL_CONF_FILE="/opt/nccl.conf")
    assert doctor.nccl_settings(other)["NCCL_ALGO"] == ("Ring", "/opt/nccl.conf")
    assert doctor.nccl_settings(other)["NCCL_DEBUG"] == ("INFO", "/etc/nccl.conf")


def test_settings_that_overrule_a_tuner_are_told() -> None:
    for name, value, said in (
        ("NCCL_ALGO", "Ring", "beats any tuner"),
        ("NCCL_MAX_NCHANNELS", "8", "limits the channels"),
        *(("NCCL_CTA_POLICY", value, "choice of NVLS") for value in ("1", "3", "efficiency")),
        *(("NCCL_CTA_POLICY", value, "") for value in ("0", "2", "DEFAULT")),
        ("NCCL_ENQUEUE_REARCH_ENABLE", "1", "beats symmetric kernels"),
        ("NCCL_ENQUEUE_REARCH_ENABLE", "0", ""),
        ("NCCL_DEBUG", "INFO", ""),
    ):
        checks = by_name(doctor.check_settings(HEALTHY.with_env(**{name: value})))
        assert checks["NCCL settings"].found == f"{name}={value} (environment)"
        assert (name in checks) == bool(said)
        assert not said or said in checks[name].advice


def place(machine: Recorded) -> tuple[str, str]:
    """The other tuner, and where it was found."""
    found = doctor.find_other_plugin(machine, TUNER, behind_ours=True)
    return found or ("nothing", "")


@pytest.mark.parametrize("role", doctor.ROLES, ids=lambda role: role.name)
def test_a_stray_library_is_picked_up_unasked(role: doctor.Role) -> None:
    path = f"/opt/vendor/{role.library}"
    on_path = HEALTHY.holding(path, "ELF").with_env(LD_LIBRARY_PATH="/empty::/opt/vendor")
    cached = HEALTHY.answering(
        "/sbin/ldconfig", "-p", output=f"\t{role.library} (libc6,x86-64) => {path}\n"
    )
    for machine in (on_path, cached):
        found = doctor.find_other_plugin(machine, role)
        assert found == (role.library, f"{path}, which NCCL loads unasked")


def test_a_network_plugin_may_bring_a_tuner() -> None:
    for value, library in (
        ("", "/opt/net/libnccl-net.so"),
        ("ib,ofi", "/opt/net/libnccl-net-ofi.so"),
        ("libnccl-net-x.so", "/opt/net/libnccl-net-x.so"),
        ("/opt/else/own.so", "/opt/else/own.so"),
    ):
        machine = (
            HEALTHY.holding(library, "ELF")
            .with_env(LD_LIBRARY_PATH="/opt/net", NCCL_NET_PLUGIN=value)
            .answering("grep", "-aqE", "ncclTunerPlugin_v[0-9]", library)
        )
        assert place(machine)[1] == f"inside the network plugin {library}"
        assert doctor.find_other_plugin(machine, PROFILER) is None
        assert place(machine.with_env(NCCL_NET_PLUGIN="none")) == ("nothing", "")
        # It is found also behind a library of ours.
        ours = machine.with_env(NCCL_TUNER_PLUGIN=f"/x/{TUNER_NAME}")
        assert place(ours)[1] == f"inside the network plugin {library}"
        told = f"NCCL_TUNER_PLUGIN=/x/{TUNER_NAME} (environment)"
        assert doctor.find_other_plugin(ours, TUNER) == (f"/x/{TUNER_NAME}", told)
