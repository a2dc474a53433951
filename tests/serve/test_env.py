"""`dynamiccl-deploy env` as a job script uses it."""

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Shell, refused

BOX = "gpu=NVIDIA H100 80GB HBM3*8;mig=0;nic=infiniband*8;nccl=22809"


@pytest.fixture(name="so")
def so_fixture(tmp_path: Path) -> Path:
    """A plugin in a folder that a shell must not split or expand."""
    folder = tmp_path / "with $HOME and space"
    folder.mkdir()
    (folder / "libnccl-tuner-dynamiccl.so").touch()
    return folder / "libnccl-tuner-dynamiccl.so"


@pytest.fixture(autouse=True)
def untouched_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "NCCL_NET_PLUGIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "no.conf"))


@pytest.fixture(name="bound")
def bound_fixture(artifact: Path, shell: Shell) -> Path:
    assert shell("dynamiccl-deploy", "bind", artifact, "--fingerprint", BOX).code == 0
    return artifact


def test_env_is_exactly_what_a_job_needs(bound: Path, so: Path, shell: Shell) -> None:
    command = ("dynamiccl-deploy", "env", bound, "--plugin", so)
    wanted = {
        "NCCL_TUNER_PLUGIN": str(so),
        "NCCL_PROFILER_PLUGIN": str(so),
        "DYNAMICCL_ARTIFACT": str(bound),
    }
    assert shell(*command, "--json").json == wanted
    done = shell(*command)
    assert (done.code, done.err) == (0, "")
    assert len(done.out.splitlines()) == len(wanted)
    script = f"eval {shlex.quote(done.out)}; env"
    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert {f"{name}={value}" for name, value in wanted.items()} <= set(shown.stdout.split("\n"))


def test_artifact_that_knows_no_machine_says_how_to_bind(
    artifact: Path, so: Path, shell: Shell
) -> None:
    done = shell("dynamiccl-deploy", "env", artifact, "--plugin", so)
    assert done.code == 0
    assert "abstains there: run 'dynamiccl-deploy bind" in done.err
    assert all(line.startswith("# ") for line in done.err.splitlines())


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("table", ""),
        ("observe", "loads the profiler alone"),
        ("adaptive", "not bitwise reproducible"),
    ],
)
def test_modes_say_what_they_cannot_do(
    mode: str, said: str, bound: Path, so: Path, shell: Shell
) -> None:
    done = shell("dynamiccl-deploy", "env", bound, "--plugin", so, "--mode", mode)
    assert f"export DYNAMICCL_MODE={mode}\n" in done.out
    assert said in done.err
    assert ("NCCL_TUNER_PLUGIN" in done.out) == (mode != "observe")


def test_unknown_mode_and_system_list_the_choices(bound: Path, so: Path, shell: Shell) -> None:
    env = ("dynamiccl-deploy", "env", bound, "--plugin", so)
    assert "choose from table, observe, adaptive" in refused(shell(*env, "--mode", "x"), 2)
    assert "did you mean 'box'?" in refused(shell(*env, "--system", "Box"), 2)
    assert "DYNAMICCL_SYSTEM=box" in shell(*env, "--system", "box").out


def test_neighbours_are_named_with_the_variable_that_keeps_them(
    bound: Path, so: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    env = ("dynamiccl-deploy", "env", bound, "--plugin", so)
    monkeypatch.setenv("NCCL_TUNER_PLUGIN", "/opt/gib/libnccl-tuner.so")
    done = shell(*env)
    assert "displaces a tuner: NCCL_TUNER_PLUGIN=/opt/gib/libnccl-tuner.so" in done.err
    assert "export DYNAMICCL_NEXT_TUNER=/opt/gib/libnccl-tuner.so\n" in done.out
    assert f"{so.parent}/libnccl-tuner-dynamiccl-vendor.so" in done.out
    monkeypatch.setenv("DYNAMICCL_NEXT_TUNER", "/opt/gib/libnccl-tuner.so")
    assert shell(*env).err == ""
    monkeypatch.setenv("NCCL_TUNER_PLUGIN", str(so))
    assert shell(*env).err == ""
    monkeypatch.setenv("NCCL_PROFILER_PLUGIN", "inspector")
    assert shell(*env).err == ""  # a job's own profiler stays
    said = shell(*env, "--mode=observe").err
    assert "displaces a profiler: NCCL_PROFILER_PLUGIN=inspector" in said
    assert "mode observe calls none but ours" in said
    # A network plugin that is a tuner too, as AWS's is.
    monkeypatch.delenv("NCCL_TUNER_PLUGIN")
    monkeypatch.delenv("DYNAMICCL_NEXT_TUNER")
    net = tmp_path / "libnccl-net-ofi.so"
    net.write_bytes(b"\x7fELF ncclTunerPlugin_v3 ")
    monkeypatch.setenv("NCCL_NET_PLUGIN", str(net))
    assert f"inside the network plugin {net}; " in shell(*env).err
    monkeypatch.setenv("NCCL_PROFILER_PLUGIN", "none")
    said = shell(*env, "--mode=adaptive").err
    assert "NCCL_PROFILER_PLUGIN=none now, which these lines replace" in said
