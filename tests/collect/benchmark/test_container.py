"""Sweeps and the doctor inside a container: a stand-in of Apptainer that runs on the host."""

import os
from pathlib import Path

import pytest

from dynamiccl.collect.doctor.inside import check_inside
from dynamiccl.collect.launchers.settings import ContainerSettings, LauncherSettings
from dynamiccl.errors import InvalidSweep
from tests.collect.benchmark.stand_in import rows, run, wanted
from tests.collect.benchmark.sweeps import sweep

ROOT = Path(__file__).resolve().parents[3]
#: Takes `exec --nv --bind A:B ... IMAGE` off, notes it, and runs the rest here.
APPTAINER = """#!/bin/sh
echo "$@" >> {log}
shift 2
while [ "$1" = --bind ]; do shift 2; done
shift
exec "$@"
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in of Apptainer, first on PATH, notes how it was called."""
    folder = tmp_path / "runtime"
    folder.mkdir()
    path = tmp_path / "calls"
    program = folder / "apptainer"
    program.write_text(APPTAINER.format(log=path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return path


def settings(*mounts: Path) -> str:
    listed = ", ".join(f'"{mount}:{mount}"' for mount in mounts)
    container = f'{{ runtime = "apptainer", image = "nccl.sif", mounts = [{listed}] }}'
    return f'{{ kind = "local", container = {container} }}'


def test_whole_sweep_runs_inside_the_container(log: Path, tmp_path: Path, sweep_path: Path) -> None:
    made = sweep(cycles="1", launcher=settings(tmp_path, sweep_path.parent))
    run(made, tmp_path, sweep_path)
    forced = wanted(rows(tmp_path))
    assert forced.height == 2 * 3 * 8
    assert forced["verified"].all()
    assert log.read_text().count("nccl.sif") == 3  # the grid, the reference, the read-back


def test_plugin_that_no_mount_shows_is_refused_with_the_mount_to_add(
    log: Path, tmp_path: Path, sweep_path: Path
) -> None:
    made = sweep(cycles="1", launcher=settings(tmp_path))
    with pytest.raises(
        InvalidSweep, match=r"libnccl-tuner-dynamiccl-sweep\.so cannot be seen inside"
    ):
        run(made, tmp_path, sweep_path)
    assert not log.exists()


def test_doctor_looks_inside(log: Path, tmp_path: Path) -> None:
    made = sweep()
    (tmp_path / "s.toml").write_text(made.text)
    container = ContainerSettings(runtime="apptainer", image="nccl.sif", mounts=("/:/",))
    launcher = LauncherSettings(container=container)
    checks = check_inside(tmp_path / "s.toml", launcher, ())
    assert len(checks) > 5
    assert all(check.name.startswith("inside the container: ") for check in checks)
    assert "doctor" in log.read_text()


def test_doctor_that_cannot_be_seen_inside_says_what_to_mount(log: Path, tmp_path: Path) -> None:
    container = ContainerSettings(runtime="apptainer", image="nccl.sif", mounts=("/nowhere:/x",))
    [check] = check_inside(tmp_path / "s.toml", LauncherSettings(container=container), ())
    assert check.status == "unknown"
    assert "cannot be seen inside the container" in check.found
    assert not log.exists()
