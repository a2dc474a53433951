"""`dynamiccl-deploy install`: what lies where; a bad artifact or a full disk changes nothing."""

import os
import resource
import shutil
import stat
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dynamiccl.libraries import JOB_NAMES, TUNER_NAME, VENDOR_NAME
from dynamiccl.serve.artifact import PluginIndex, open_artifact
from dynamiccl.serve.install import install, make_key
from tests.cli.conftest import Done, Shell, refused
from tests.cli.in_process import run

BOX = "gpu=NVIDIA H100 80GB HBM3*8;mig=0;nic=infiniband*8;nccl=22809"


Install = Callable[..., Done]


@pytest.fixture
def installed(shell: Shell, artifact: Path, plugin_path: Path) -> Install:
    """Installs the artifact into a place, with the libraries of the build or others."""

    def run(home: Path, *options: str, plugin: Path = plugin_path) -> Done:
        where = ("--to", home, "--plugin", plugin)
        return shell("dynamiccl-deploy", "install", artifact, "--ungated", *where, *options)

    return run


@pytest.fixture(name="home")
def home_fixture(artifact: Path, plugin_path: Path, tmp_path: Path) -> Path:
    return Path(install(artifact, tmp_path / "home", plugin_path)["directory"])


def test_nobody_else_may_change_what_is_written(home: Path) -> None:
    for path in (home, *home.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert not mode & 0o022, path
        assert path.is_symlink() == (path.relative_to(home) == Path("artifact")), path
        assert not path.name.startswith("."), path
    assert stat.S_IMODE((home / "key").stat().st_mode) == 0o600
    assert len((home / "key").read_bytes()) >= 32
    assert (home / "bin" / "dynamiccl-run").stat().st_mode & 0o111
    open_artifact(home / "artifact")
    probe = [str(home / "bin/dynamiccl-prepare"), "--facts", str(home / "artifact")]
    said = subprocess.run(probe, capture_output=True, check=True).stdout
    assert b'"artifact_problem": ""' in said


def test_again_keeps_the_key_and_the_kill_file(
    home: Path, artifact: Path, installed: Install, shell: Shell
) -> None:
    key = (home / "key").read_bytes()
    before = PluginIndex.read(home / "artifact").sha256
    (home / "artifact" / "kill").touch()
    assert shell("dynamiccl-deploy", "bind", artifact, "--fingerprint", BOX).code == 0
    said = installed(home, "--json").json
    assert said["previous_sha256"] == before != said["sha256"]
    assert (said["key_kept"], said["killed"]) == (True, True)
    assert (home / "key").read_bytes() == key
    assert PluginIndex.read(home / "artifact").systems == {BOX: "box"}
    assert (home / "artifact").readlink() == Path("artifacts", said["sha256"][:16])
    assert {p.name for p in (home / "artifacts").iterdir()} == {
        digest[:16] for digest in (before, said["sha256"])
    }
    text = installed(home).out
    assert "artifact/kill is there" in text
    assert "bin/dynamiccl-run COMMAND" in text


def test_a_bad_artifact_is_refused(home: Path, artifact: Path, installed: Install) -> None:
    before = {p: p.read_bytes() for p in home.rglob("*") if p.is_file()}
    (artifact / "policy.pt").write_bytes(b"?")
    assert "SHA-256 differs" in refused(installed(home), 3)
    assert {p: p.read_bytes() for p in home.rglob("*") if p.is_file()} == before


def test_the_newest_artifacts_stay(home: Path, artifact: Path, plugin_path: Path) -> None:
    first = (home / "artifact").resolve()
    table = next((first / "tables").rglob("*.dct"))
    # What killed installations left is no artifact.
    left = [home / "artifacts" / f".writing-{age}" for age in ("new", "old")]
    for folder, seconds in zip(left, (2**32, 0), strict=True):
        folder.mkdir()
        os.utime(folder, (seconds, seconds))
    for code in (22901, 22902, 22903):
        PluginIndex.read(artifact).bound("box", BOX.replace("22809", str(code))).write(artifact)
        install(artifact, home, plugin_path)
        if code == 22901:
            assert table.read_bytes()  # a job that runs goes on
            second = (home / "artifact").resolve()
    assert [folder.exists() for folder in left] == [True, False]
    left[0].rmdir()
    assert len(list((home / "artifacts").iterdir())) == 3
    assert not first.exists()
    # One that stays is taken again: whole, as it was made, and with the kill file of the link.
    latest = (home / "artifact").resolve()
    (second / "plugin.index").write_text("bound since")
    (second / "kill").touch()
    old = PluginIndex.read(latest)
    systems = {k: v for k, v in old.systems.items() if not k.endswith(("22902", "22903"))}
    replace(old, systems=systems).write(artifact)
    again = install(artifact, home, plugin_path)
    assert (home / "artifact").resolve() == second
    assert PluginIndex.read(second).sha256 == again["sha256"]
    assert not again["killed"]
    # One that a copy left half is made anew.
    for path in ("plugin.index", "manifest.json", "tables"):
        shutil.rmtree(second / path) if path == "tables" else (second / path).unlink()
    assert install(artifact, home, plugin_path)["sha256"] == again["sha256"]
    assert (second / table.relative_to(first)).read_bytes()


def test_whole_builds_are_installed(plugin_path: Path, installed: Install, tmp_path: Path) -> None:
    built, home = tmp_path / "built", tmp_path / "home"
    built.mkdir()
    for name in (*JOB_NAMES, "dynamiccl-prepare", "dynamiccl-arbiter"):
        shutil.copy(plugin_path.parent / name, built)
    (built / "dynamiccl-brain").touch()
    assert installed(home, plugin=built / TUNER_NAME).code == 0
    assert (home / "bin" / "dynamiccl-brain").exists()
    (built / VENDOR_NAME).unlink()
    done = installed(tmp_path / "other", plugin=built / TUNER_NAME)
    assert f"no library at {built / VENDOR_NAME}" in refused(done, 2)


def test_open_places_are_refused(plugin_path: Path, installed: Install, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o775)
    for place, plugin, said in (
        ("open", plugin_path, "chmod go-w"),
        ("a b", plugin_path, "letters, digits and"),
        ("x", Path("gone.so"), "leave --plugin out"),
    ):
        assert said in refused(installed(tmp_path / place, plugin=plugin), 2)


def test_a_copy_without_a_link_is_refused(home: Path, installed: Install, tmp_path: Path) -> None:
    copy = shutil.copytree(home, tmp_path / "copy")  # follows the link, as `cp -rL` does
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    line = refused(installed(copy), 2)
    assert f"{copy}/artifact is a directory, no link; move it away" in line
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before
    (copy / "artifact").rename(tmp_path / "away")
    assert installed(copy).code == 0


def test_texts_are_what_their_readers_can_read(home: Path) -> None:
    yaml = pytest.importorskip("yaml")
    for name in ("slurm.sh", "slurm-pyxis.sh"):
        subprocess.run(["bash", "-n", home / "snippets" / name], check=True)
        assert f"{home}/bin/dynamiccl-run" in (home / "snippets" / name).read_text()
    job = yaml.safe_load((home / "snippets" / "kubernetes.yaml").read_text())
    assert job["spec"]["pytorchReplicaSpecs"].keys() == {"Master", "Worker"}
    assert not any("@DIR@" in path.read_text() for path in (home / "snippets").iterdir())
    script = f'. {home}/env.sh; echo "$NCCL_TUNER_PLUGIN|$NCCL_PROFILER_PLUGIN|$DYNAMICCL_ARTIFACT"'
    plugin = home / "lib" / TUNER_NAME
    for shell in ("sh", "bash"):
        done = subprocess.run([shell, "-euc", script], capture_output=True, text=True, check=True)
        assert done.stdout == f"{plugin}|{plugin}|{home / 'artifact'}\n"


def test_ungated_is_to_be_said(
    artifact: Path, plugin_path: Path, shell: Shell, tmp_path: Path
) -> None:
    command = ("dynamiccl-deploy", "install", artifact, "--to", tmp_path / "home")
    line = refused(shell(*command, "--plugin", plugin_path), 2)
    assert "passed no gate" in line
    assert "say --ungated" in line
    assert not (tmp_path / "home").exists()
    told = shell(*command, "--plugin", plugin_path, "--ungated")
    assert "NOT gated; acts on no machine yet (dynamiccl-deploy bind); on one, in " in told.out
    assert "warning: no machine is bound to box: its tables act nowhere; " in told.err
    assert "bind" in told.err
    assert "install it again" in told.err


def test_doctor_finds_the_plugin_that_was_installed_with_the_artifact(
    home: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_TUNER_PLUGIN", raising=False)
    found = shell("dynamiccl-deploy", "doctor", home / "artifact").out
    assert f"{home}/lib/{TUNER_NAME} loads by itself" in found
    assert "WARN  gate: NOT gated; acts " in found
    # What is installed stays as it is: the same advice as that of `install`.
    assert "bind EXPORTED --system box" in found
    assert f"dynamiccl-deploy install EXPORTED --to {home}" in found
    assert f"bind {home}" not in found


def starved(most_bytes: int, line: str) -> None:
    """A command that can write no larger file, as on a disk that fills up, ends in one line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        code, said = run(line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 4, said
    assert said.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in said


def test_half_an_install_is_in_nobodys_way(policy: Path, plugin_path: Path, tmp_path: Path) -> None:
    out, home = tmp_path / "made" / "artifact", tmp_path / "home"
    out.parent.mkdir()
    export = f"dynamiccl-deploy export {policy} --out {out}"
    for most_bytes in (10, 4000):
        starved(most_bytes, export)
        assert list(out.parent.iterdir()) == []
    assert run(export)[0] == 0
    install = f"dynamiccl-deploy install {out} --ungated --plugin {plugin_path} --to {home}"
    starved(20_000, install)
    assert not [path for path in home.rglob("*") if path.name.startswith(".")]
    assert not (home / "artifact").exists()
    code, said = run(install)
    assert code == 0, said
    # Libraries fit, the artifact does not: nothing of an artifact is left, and what is there stays.
    small = tmp_path / "small"
    small.mkdir()
    for name in (*JOB_NAMES, "dynamiccl-prepare", "dynamiccl-arbiter"):
        (small / name).touch()
    other = f"dynamiccl-deploy install {out} --ungated --plugin {small / TUNER_NAME} --to "
    starved(20_000, f"{other}{tmp_path / 'other'}")
    assert list((tmp_path / "other" / "artifacts").iterdir()) == []
    here = {p: p.stat().st_ino for p in (home / "artifacts").rglob("*")}
    starved(20_000, f"{other}{home}")
    assert {p: p.stat().st_ino for p in (home / "artifacts").rglob("*")} == here


def test_of_those_that_install_at_once_one_makes_the_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            path = tmp_path / f"key{number}"
            assert sum(pool.map(make_key, [path] * 8)) == 1
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert len(path.read_bytes()) > 32
