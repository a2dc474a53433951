"""The real runner on the stand-in: real processes, the real plugin, times of the simulator.

Also what it makes of configs that hang, crash or lie, and how programs are found."""

import itertools
import os
import platform
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dynamiccl.collect import launch, launchers
from dynamiccl.collect.batch import RunOptions
from dynamiccl.collect.cli import start_sweep
from dynamiccl.collect.grid import BINARIES
from dynamiccl.collect.launch import find_program
from dynamiccl.collect.launchers import ContainerSettings, Interrupt
from dynamiccl.collect.output import MEANT_AS_ROW
from dynamiccl.collect.run import SweepProgress
from dynamiccl.datasets import store
from dynamiccl.errors import InvalidSweep, MachineError
from dynamiccl.nccl import Collective
from tests.collect.benchmark.stand_in import Lab, sweep, wanted
from tests.fakes.nccl_tests.install import install_stand_in


def test_a_row_knows_machine_moment_and_iterations(lab: Lab) -> None:
    """The rest of a row: tests/golden/data/sweeps-plain.json."""
    algorithms = '["Tree", "CollNetDirect"]'
    made = sweep(cycles="1", algorithms=algorithms, runner="{ per_iteration = true }")
    # The grid and the reference; and what runs is read back.
    assert lab.run(made)["launches_run"] == 3
    lost = lab.rows.filter(pl.col("reason") == "NCCL's cost table has no such cell here")
    assert (lost.height, lost["time_us"].null_count()) == (3 * 2, 3 * 2)
    found = lab.rows.filter(pl.col("status") == "ok")
    # How wide is up to the machine: the stand-in has a real clock, and others may be busy.
    assert found["aa_noise_band"].min() > 0  # type: ignore[operator]
    assert not found["partial_launch"].any()
    # Each block began when the one before it had ended.
    assert found.group_by("launch").agg(pl.col("timestamp").n_unique())["timestamp"].min() > 1  # type: ignore[operator]
    # Times of single iterations come from JSON, the release from the text.
    assert set(found["iteration_times_us"].list.len()) == {5}
    host = platform.node().partition(".")[0]
    told = ("source", "nccl_tests_version", "gpu", "hosts")
    assert found.select(told).unique().rows() == [("nccl-tests-json", "2.19.6", "FAKE H100", host)]
    assert set(store.read(lab.out, "costs")["gpu"]) == {"FAKE H100"}


def test_what_takes_long_and_does_not_win_is_not_started(lab: Lab) -> None:
    made = sweep(
        algorithms='["Ring"]',
        num_channels="[0]",
        sizes='{ list = ["1M", "4M"] }',
        cycles="1",
        runner=f'{{ plugin = "{lab.plugin}", slow_max = "2M", read_back = false }}',
    )
    file = lab.folder / "s.toml"
    start_sweep(made, RunOptions(sweep_file=file, out=lab.out, nccl_tests_dir=lab.programs))
    [reason] = lab.rows.filter(pl.col("status") == "infeasible")["reason"]
    assert "(runner.slow_max)" in reason
    ok = wanted(lab.rows).group_by("requested_protocol", "size_bytes").len().sort(pl.all())
    assert ok.rows() == [("LL", 1 << 20, 2), ("Simple", 1 << 20, 2), ("Simple", 4 << 20, 2)]


def test_tuned_collectives_alone_are_played_with_chunks(lab: Lab) -> None:
    made = sweep(
        collectives='["ReduceScatter", "Reduce", "AlltoAll", "SendRecv"]',
        algorithms='["Ring"]',
        protocols='["Simple"]',
        num_channels="[0]",
        chunk_sizes='[0, "64K", "256K"]',
        # Of ReduceScatter whole shares of a rank run; whatever the walk does, the warm-up doubles.
        sizes="{ list = [1000000, 4000000] }",
        cycles="1",
    )
    lab.run(made)
    found = lab.rows
    forced = wanted(found)
    assert set(forced["collective"]) == {"ReduceScatter", "Reduce"}
    assert forced["verified"].all()
    asked = forced.drop_nulls("requested_chunk_bytes")
    assert asked.height == 2 * 2 * 2 * 2
    assert (asked["actual_chunk_bytes"] <= asked["requested_chunk_bytes"]).all()
    left = forced.filter(pl.col("requested_chunk_bytes").is_null())
    assert left["actual_chunk_bytes"].null_count() == left.height
    others = found.filter(~pl.col("collective").is_in(["ReduceScatter", "Reduce"]))
    assert set(others["collective"]) == {"AlltoAll", "SendRecv"}
    assert set(others["status"]) == {"ok"}
    assert others["is_default"].all()


#: Where a launch is lost without waiting for it: the others may be late on a busy machine.
PATIENT = "{ startup_timeout_s = 40, stall_timeout_s = 20, retry_after_s = 0 }"
TIMED_ONLY = PATIENT.replace(" }", ", read_back = false }")
QUICK_TIMED = "{ startup_timeout_s = 5, stall_timeout_s = 2, retry_after_s = 0, read_back = false }"
CONFIG = ("requested_algorithm", "requested_protocol", "requested_num_channels")
#: One row of each measurement.
ONCE = ("trial", "run", "repeat", "default_scope", "in_place")


@pytest.mark.parametrize(
    ("mischief", "runner", "told"),
    [
        ("FAKE_HANG", QUICK_TIMED, ("timed_out", "no (new )?row")),
        # Found by the launch that reads back: what times it does not try it any more.
        ("FAKE_CRASH", PATIENT, ("failed", "exit code")),
    ],
)
def test_config_that_ends_two_launches_is_kept_out(
    mischief: str, runner: str, told: tuple[str, str], lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(mischief, "Tree/LL/4ch")
    lab.run(sweep(cycles="1", runner=runner))
    found = lab.rows
    bad = found.filter(pl.col("status") != "ok")
    assert set(bad.select(CONFIG).rows()) == {("Tree", "LL", 4)}
    assert bad.height == 3
    assert told[0] in set(bad["status"])
    assert bad["reason"].str.contains(told[1]).any()
    # Both halves of: each size x (7 other configs, default twice here and in the reference).
    good = found.filter(pl.col("status") == "ok")
    assert good.height >= 2 * 3 * (7 + 2 + 2)
    assert good.filter(~pl.col("is_default"))["verified"].all() == (mischief == "FAKE_CRASH")


def test_config_in_play_when_something_went_once_runs_again(lab: Lab) -> None:
    """A node or a cable that fails once is no reason to leave a config out."""
    # The first sweep alone sees a config crash.
    lab.lose("sweep", 1, by="export FAKE_CRASH=Ring/Simple/4ch")
    assert lab.run(sweep(cycles="1", runner=PATIENT))["launches_run"] == 3 + 1
    found = lab.rows
    assert set(found["status"]) == {"ok"}
    assert found.filter(~pl.col("is_default"))["verified"].all()


def test_wrong_values_are_of_their_config_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WRONG", "Tree/Simple")
    lab.run(sweep(cycles="1"))
    found = lab.rows
    wrong = found.filter(pl.col("status") == "wrong_values")
    assert wrong.height == 2 * 2 * 3  # both halves, with and without a number of channels
    assert set(wrong.select(CONFIG[:2]).rows()) == {("Tree", "Simple")}
    assert (wrong["wrong_values"] > 0).all()
    assert all(reason.endswith(" wrong values") for reason in wrong["reason"])
    assert (found.filter(pl.col("status") == "ok")["wrong_values"] == 0).all()


def test_a_torn_row_runs_again_with_what_follows(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {True: itertools.count(), False: itertools.count()}

    def run_process(
        argv: Sequence[str], patience_s: Any, grace_s: float, on_line: Any, interrupt: Interrupt
    ) -> int | None:
        def line(text: str, arrived_s: float) -> bool:
            if MEANT_AS_ROW.search(text) and next(numbers["DYNAMICCL_MODE=sweep" in argv]) == 4:
                text = text[:40]
            return bool(on_line(text, arrived_s))

        done = launchers.run_process(argv, patience_s, grace_s, line, interrupt)
        Path(argv[argv.index("-J") + 1]).unlink()  # it would have the row
        return done

    monkeypatch.setattr(launch, "run_process", run_process)
    summary = lab.run(sweep(cycles="1", runner=TIMED_ONLY))
    assert summary["launches_run"] == 2 + 2
    found = lab.rows
    assert set(found["status"]) == {"ok"}
    assert found.filter(pl.col("repeat") < 2).height == 2 * 3 * (8 + 2 + 2)


def test_what_cannot_be_read_back_is_not_verified(lab: Lab) -> None:
    lab.lose("read-back", 1, 2)
    made = sweep(cycles="1", datatypes='["float", "half"]', runner=PATIENT)
    # One never begins, and is not tried a third time.
    assert lab.run(made)["launches_run"] == 2 + 2 * 2
    forced = lab.rows.filter(~pl.col("is_default"))
    assert (set(forced["status"]), forced.height) == ({"ok"}, 2 * 2 * 3 * 8)
    verified = forced.select("datatype", "verified").unique()
    assert verified.height == 2
    assert set(verified["verified"]) == {True, False}


def test_a_plugin_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_REPORT_S", 0.5)  # for its report it is not worth waiting
    broken = Lab(tmp_path, tmp_path / "libbroken.so")
    (tmp_path / "libbroken.so").write_text("no library")
    with pytest.raises(MachineError, match="the configs are not known"):
        broken.run(sweep(cycles="1", runner=TIMED_ONLY))
    assert "sweep" not in "".join(broken.rows["launch"])


def test_asked_to_stop_it_keeps_what_it_has(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SECONDS_PER_ROW", "0.05")
    made = sweep(cycles="1", runner="{ read_back = false }")
    seen = itertools.count(1)

    def stop_at_the_tenth_row(_: SweepProgress, __: int) -> None:
        if next(seen) == 10:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched, Interrupt() as interrupt:
        patched.setattr(SweepProgress, "measured", stop_at_the_tenth_row)
        first = lab.run(made, interrupt=interrupt)
    assert first["ended"] == "interrupted"
    before = lab.rows
    assert 0 < before.height < 2 * 3 * 12
    monkeypatch.delenv("FAKE_SECONDS_PER_ROW")
    assert lab.run(made, resume=True)["ended"] == "done"
    after = lab.rows
    # A launch that was cut short leaves gaps, which further repeats of the default fill.
    assert after.filter(pl.col("repeat") < 2).height == 2 * 3 * 12
    # What was measured is still there, and nothing was measured twice.
    assert after.join(before, on=before.columns[:9], how="semi").height >= before.height
    assert after.select(ONCE).unique().height == after.height


def test_what_cannot_be_measured_here_is_refused(tmp_path: Path) -> None:
    lab, inside = Lab(tmp_path, None), '{ container = { runtime = "apptainer", image = "i.sif" } }'
    split = sweep(groups='[{ num_nodes = 2, ranks_per_node = 4, split = "MOD 4" }]')
    congestion = sweep(interference='[{ kind = "congestion", level = 0.5 }]')
    traffic = sweep(interference='[{ kind = "traffic", level = 0.5 }]', launcher=inside)
    for made, said in (
        (congestion, "'congestion' cannot run"),
        (traffic, "'traffic' cannot run here; choose from none, cpu, matmul"),
        (split, "shares out processes, and launcher 'local'"),
    ):
        with pytest.raises(InvalidSweep, match=said):
            lab.check(made)


def test_configs_without_a_plugin_are_refused(lab: Lab) -> None:
    needs = r"needs NCCL 2\.24\.\d or later, and nccl_version is 2\."
    with pytest.raises(MachineError, match=needs):
        lab.check(sweep(nccl_version='"2.23.4"'))
    lab.plugin = None
    with pytest.raises(MachineError, match="needs the sweep plugin, and there is none: build it"):
        lab.check(sweep())


def test_binaries_are_found_here_or_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = install_stand_in(tmp_path / "bin")
    for collective, name in BINARIES.items():
        assert find_program(collective, built, None) == str(built / name)
    without = next(c for c in Collective if c not in BINARIES)
    with pytest.raises(InvalidSweep, match=f"no nccl-tests binary for {without.wire}; choose from"):
        find_program(without, built, None)
    monkeypatch.setenv("PATH", f"{built}:/usr/bin:/bin")
    assert find_program(Collective.AllReduce, None, None) == str(built / "all_reduce_perf")
    mounts = (f"{tmp_path}:/mine",)
    container = ContainerSettings(runtime="apptainer", image="i.sqsh", mounts=mounts)
    built = tmp_path / "built"
    found = [find_program(Collective.Reduce, at, container) for at in (built, Path("/opt"), None)]
    assert found == ["/mine/built/reduce_perf", "/opt/reduce_perf", "reduce_perf"]
    (tmp_path / "all_reduce_perf").write_text("source")  # cannot be run
    for directory in (tmp_path, tmp_path / "gone"):
        said = f"no executable all_reduce_perf in {directory}; build nccl-tests .*--nccl-tests-dir"
        with pytest.raises(MachineError, match=said):
            find_program(Collective.AllReduce, directory, None)


#: Takes `exec --nv --bind A:B ... IMAGE` off, makes what is bound be there by links, notes the
#: rest with the variables that it would set, and runs it.
APPTAINER = """#!/bin/bash
shift 2
while [ "$1" = --bind ]; do ln -sfn "${{2%%:*}}" "${{2#*:}}"; shift 2; done
ln -sfn "$1" {inside}/image
shift
echo "$@" $(env | grep ^APPTAINERENV_) >> {log}
exec "$@"
"""


def launcher(image: Path, *mounts: str) -> str:
    listed = ", ".join(f'"{mount}"' for mount in mounts)
    container = f'{{ runtime = "apptainer", image = "{image}", mounts = [{listed}] }}'
    return f'{{ kind = "local", container = {container} }}'


def test_an_image_is_told_paths_of_its_inside(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, log = lab.folder / "inside", lab.folder / "calls"
    plugins = str(lab.plugin and lab.plugin.parent)
    program = lab.folder / "apptainer"
    inside.mkdir()
    lab.out.mkdir()
    program.write_text(APPTAINER.format(inside=inside, log=log))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{lab.folder}:{os.environ['PATH']}")
    mounts = (f"{lab.out}:{inside}/data", f"{plugins}:{inside}/plugin")
    made = sweep(cycles="1", launcher=launcher(lab.programs, *mounts))
    there = replace(lab.site(made), nccl_tests_dir=inside / "image")
    assert lab.run(made, site=there)["ended"] == "done"
    forced = wanted(lab.rows)
    assert forced.height == 2 * 3 * 8
    assert forced["verified"].all()
    calls = log.read_text().splitlines()
    assert len(calls) == 3  # the grid, the reference, the read-back
    assert all(f"{inside}/image/all_reduce_perf" in call for call in calls)
    assert not any(hidden in call for call in calls for hidden in (str(lab.out), plugins))


def test_what_the_container_cannot_see_is_refused(lab: Lab) -> None:
    seen = r"libnccl-tuner-dynamiccl-sweep\.so cannot be seen inside"
    with pytest.raises(InvalidSweep, match=seen):
        lab.run(sweep(launcher=launcher(lab.folder, f"{lab.folder}:{lab.folder}")))
