"""The programs of nccl-tests: found on the machine and in containers, asked for their options."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dynamiccl.collect.grid import BINARIES
from dynamiccl.collect.launch import NcclTestsRunner, find_program
from dynamiccl.collect.launchers import ContainerSettings
from dynamiccl.collect.run import run_sweep
from dynamiccl.collect.strategies import make_strategy
from dynamiccl.datasets import store
from dynamiccl.errors import InvalidSweep, MachineError
from dynamiccl.nccl import Collective
from tests.collect.benchmark.stand_in import run, site, sweep, wanted
from tests.fakes.nccl_tests.install import install_stand_in


def test_every_binary_is_found_and_a_collective_without_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = install_stand_in(tmp_path / "bin")
    for collective, name in BINARIES.items():
        assert find_program(collective, built, None) == str(built / name)
    without = next(c for c in Collective if c not in BINARIES)
    with pytest.raises(InvalidSweep, match=f"no nccl-tests binary for {without.wire}; choose from"):
        find_program(without, built, None)
    monkeypatch.setenv("PATH", f"{built}:/usr/bin:/bin")
    assert find_program(Collective.AllReduce, None, None) == str(built / "all_reduce_perf")


def test_missing_binary_is_named_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "all_reduce_perf").write_text("source")  # cannot be run
    for directory in (tmp_path, tmp_path / "gone"):
        said = f"no executable all_reduce_perf in {directory}; build nccl-tests .*--nccl-tests-dir"
        with pytest.raises(MachineError, match=said):
            find_program(Collective.AllReduce, directory, None)


def test_benchmark_of_the_host_is_found_where_a_mount_shows_it(tmp_path: Path) -> None:
    mounts = (f"{tmp_path}:/mine",)
    container = ContainerSettings(runtime="apptainer", image="i.sqsh", mounts=mounts)
    built = tmp_path / "built"
    found = [find_program(Collective.Reduce, at, container) for at in (built, Path("/opt"), None)]
    assert found == ["/mine/built/reduce_perf", "/opt/reduce_perf", "reduce_perf"]


#: Takes `exec --nv --bind A:B ... IMAGE` off, notes it, makes what is bound be there by links, and
#: runs the rest.
APPTAINER = """#!/bin/bash
shift 2
while [ "$1" = --bind ]; do ln -sfn "${{2%%:*}}" "${{2#*:}}"; shift 2; done
ln -sfn "$1" {inside}/image
shift
echo "$@" >> {log}
exec "$@"
"""


def launcher(image: Path, *mounts: str) -> str:
    listed = ", ".join(f'"{mount}"' for mount in mounts)
    container = f'{{ runtime = "apptainer", image = "{image}", mounts = [{listed}] }}'
    return f'{{ kind = "local", container = {container} }}'


def test_benchmark_of_the_image_is_told_paths_inside_the_container(
    tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, log, program = tmp_path / "inside", tmp_path / "calls", tmp_path / "apptainer"
    inside.mkdir()
    program.write_text(APPTAINER.format(inside=inside, log=log))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    image, out = install_stand_in(tmp_path / "bin"), tmp_path / "out"
    mounts = (f"{out}:{inside}/data", f"{sweep_path.parent}:{inside}/plugin")
    made = sweep(cycles="1", launcher=launcher(image, *mounts))
    where = replace(site(made, tmp_path, sweep_path), nccl_tests_dir=inside / "image")
    out.mkdir()
    strategy = make_strategy(made.file, made.trials)
    runner = NcclTestsRunner(made.file, where)
    assert run_sweep(made, strategy, runner, out, resume=False)["ended"] == "done"
    forced = wanted(store.read(out))
    assert forced.height == 2 * 3 * 8
    assert forced["verified"].all()
    calls = log.read_text().splitlines()
    assert len(calls) == 3  # the grid, the reference, the read-back
    assert all(f"{inside}/image/all_reduce_perf" in call for call in calls)
    assert not any(str(hidden) in call for call in calls for hidden in (out, sweep_path.parent))


def test_what_the_container_cannot_see_is_refused_before_anything_runs(
    tmp_path: Path, sweep_path: Path
) -> None:
    made = sweep(cycles="1", launcher=launcher(tmp_path, f"{tmp_path}:{tmp_path}"))
    seen = r"libnccl-tuner-dynamiccl-sweep\.so cannot be seen inside"
    with pytest.raises(InvalidSweep, match=seen):
        run(made, tmp_path, sweep_path)
