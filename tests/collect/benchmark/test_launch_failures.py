"""What the runner makes of configs that hang, crash or lie, and of being told to stop."""

import itertools
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dynamiccl.collect import launch, launchers
from dynamiccl.collect.launch import NcclTestsRunner
from dynamiccl.collect.launchers import Interrupt
from dynamiccl.collect.output import MEANT_AS_ROW
from dynamiccl.collect.run import SweepProgress
from dynamiccl.errors import InvalidSweep, MachineError
from tests.collect.benchmark.stand_in import lost, rows, run, site, statuses, sweep

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
def test_config_that_ends_two_launches_is_kept_out_and_everything_else_is_measured(
    mischief: str,
    runner: str,
    told: tuple[str, str],
    tmp_path: Path,
    sweep_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(mischief, "Tree/LL/4ch")
    run(sweep(cycles="1", runner=runner), tmp_path, sweep_path)
    found = rows(tmp_path)
    bad = found.filter(pl.col("status") != "ok")
    assert set(bad.select(CONFIG).rows()) == {("Tree", "LL", 4)}
    assert bad.height == 3
    assert told[0] in set(bad["status"])
    assert bad["reason"].str.contains(told[1]).any()
    # Both halves of: each size x (7 other configs, default twice here and in the reference).
    good = found.filter(pl.col("status") == "ok")
    assert good.height >= 2 * 3 * (7 + 2 + 2)
    assert good.filter(~pl.col("is_default"))["verified"].all() == (mischief == "FAKE_CRASH")


def test_config_in_play_when_something_went_once_runs_again(
    tmp_path: Path, sweep_path: Path
) -> None:
    """A node or a cable that fails once is no reason to leave a config out."""
    # The first sweep alone sees a config crash.
    once = lost(tmp_path, "sweep", [1]).replace(
        "echo NCCL went away; exit 1", "export FAKE_CRASH=Ring/Simple/4ch"
    )
    summary = run(sweep(cycles="1", runner=PATIENT), tmp_path, sweep_path, loses=once)
    assert summary["launches_run"] == 3 + 1
    found = rows(tmp_path)
    assert statuses(found).keys() == {"ok"}
    assert found.filter(~pl.col("is_default"))["verified"].all()


def test_wrong_values_belong_to_their_config_alone(
    tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WRONG", "Tree/Simple")
    run(sweep(cycles="1"), tmp_path, sweep_path)
    found = rows(tmp_path)
    wrong = found.filter(pl.col("status") == "wrong_values")
    assert wrong.height == 2 * 2 * 3  # both halves, with and without a number of channels
    assert set(wrong.select(CONFIG[:2]).rows()) == {("Tree", "Simple")}
    assert (wrong["wrong_values"] > 0).all()
    assert all(reason.endswith(" wrong values") for reason in wrong["reason"])
    assert (found.filter(pl.col("status") == "ok")["wrong_values"] == 0).all()


def test_row_that_another_rank_tore_runs_again_with_what_follows(
    tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    summary = run(sweep(cycles="1", runner=TIMED_ONLY), tmp_path, sweep_path)
    assert summary["launches_run"] == 2 + 2
    found = rows(tmp_path)
    assert statuses(found).keys() == {"ok"}
    assert found.filter(pl.col("repeat") < 2).height == 2 * 3 * (8 + 2 + 2)


def test_what_cannot_be_read_back_is_measured_and_not_verified(
    tmp_path: Path, sweep_path: Path
) -> None:
    twice = lost(tmp_path, "read-back", [1, 2])
    made = sweep(cycles="1", datatypes='["float", "half"]', runner=PATIENT)
    # One never begins, and is not tried a third time.
    assert run(made, tmp_path, sweep_path, loses=twice)["launches_run"] == 2 + 2 * 2
    forced = rows(tmp_path).filter(~pl.col("is_default"))
    assert statuses(forced) == {"ok": 2 * 2 * 3 * 8}
    verified = forced.select("datatype", "verified").unique()
    assert verified.height == 2
    assert set(verified["verified"]) == {True, False}


def test_plugin_that_does_not_load_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_REPORT_S", 0.5)  # for its report it is not worth waiting
    broken = tmp_path / "libbroken.so"
    broken.write_text("no library")
    with pytest.raises(MachineError, match="the configs are not known"):
        run(sweep(cycles="1", runner=TIMED_ONLY), tmp_path, broken)
    assert "sweep" not in "".join(rows(tmp_path)["launch"])


def test_asked_to_stop_it_keeps_the_rows_of_the_running_process(
    tmp_path: Path, sweep_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SECONDS_PER_ROW", "0.05")
    made = sweep(cycles="1", runner="{ read_back = false }")
    seen = itertools.count(1)

    def stop_at_the_tenth_row(_: SweepProgress, __: int) -> None:
        if next(seen) == 10:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched, Interrupt() as interrupt:
        patched.setattr(SweepProgress, "measured", stop_at_the_tenth_row)
        first = run(made, tmp_path, sweep_path, interrupt=interrupt)
    assert first["ended"] == "interrupted"
    before = rows(tmp_path)
    assert 0 < before.height < 2 * 3 * 12
    monkeypatch.delenv("FAKE_SECONDS_PER_ROW")
    assert run(made, tmp_path, sweep_path, resume=True)["ended"] == "done"
    after = rows(tmp_path)
    # A launch that was cut short leaves gaps, which further repeats of the default fill.
    assert after.filter(pl.col("repeat") < 2).height == 2 * 3 * 12
    # What was measured is still there, and nothing was measured twice.
    assert after.join(before, on=before.columns[:9], how="semi").height >= before.height
    assert after.select(ONCE).unique().height == after.height


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"interference": '[{ kind = "congestion", level = 0.5 }]'},
            "'congestion' cannot run",
        ),
        (
            {
                "interference": '[{ kind = "traffic", level = 0.5 }]',
                "launcher": '{ container = { runtime = "apptainer", image = "i.sif" } }',
            },
            "'traffic' cannot run here; choose from none, cpu, matmul",
        ),
        (
            {"groups": '[{ num_nodes = 2, ranks_per_node = 4, split = "MOD 4" }]'},
            "shares out processes, and launcher 'local'",
        ),
    ],
)
def test_what_cannot_be_measured_here_is_refused(
    keys: dict[str, str], said: str, tmp_path: Path
) -> None:
    made = sweep(algorithms="[]", **keys)
    with pytest.raises(InvalidSweep, match=said):
        NcclTestsRunner(made.file, site(made, tmp_path, None)).check(made.trials)


def test_configs_without_a_plugin_that_can_play_them_are_refused(
    tmp_path: Path, sweep_path: Path
) -> None:
    made = sweep()
    with pytest.raises(MachineError, match="needs the sweep plugin, and there is none: build it"):
        NcclTestsRunner(made.file, site(made, tmp_path, None)).check(made.trials)
    old = sweep(nccl_version='"2.23.4"')
    with pytest.raises(
        MachineError, match=r"needs NCCL 2\.24\.\d or later, and nccl_version is 2\."
    ):
        NcclTestsRunner(old.file, site(old, tmp_path, sweep_path)).check(old.trials)
