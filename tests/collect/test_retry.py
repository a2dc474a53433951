"""--retry-failed: what failed is measured once more, in a round with a default of its own."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dynamiccl.collect.outcomes import Outcome
from dynamiccl.collect.runner import Launch, LaunchResult, Measured
from dynamiccl.collect.runs.retry import that_count, without_retries
from dynamiccl.collect.trial_rows import pick_row
from dynamiccl.datasets import store
from tests.collect.test_run import PICKS, TEXT, Flaky, Interrupted, Watch, run, sweep

ONE = TEXT.replace('"AllReduce", "AllGather"', '"AllReduce"')


class Mended(Flaky):
    """The same machine after somebody mended it; Ring/Simple is the fastest of all now."""

    def run(self, launch: Launch, progress: Callable[[int], None]) -> LaunchResult:  # noqa: ARG002
        done = []
        for pick in launch.picks:
            time_us = 1.0 if pick.trial.config.key == "Ring/Simple" else 5.0
            row = pick_row(self._file, launch, pick) | dict(self.environment())
            done.append(Measured(pick, (row | {"time_us": time_us},)))
        return LaunchResult(tuple(done))


class Dies(Flaky):
    """A machine that goes down at once."""

    def run(self, launch: Launch, progress: Callable[[int], None]) -> LaunchResult:  # noqa: ARG002
        raise Interrupted


#: Ring/Simple at 2 and 4 MiB, in three cycles.
FAILED = 2 * 3


@pytest.fixture(name="failed")
def failed_fixture(tmp_path: Path) -> Path:
    """A finished sweep in which a config hung, and was kept out from then on."""
    made = sweep(ONE)
    assert run(tmp_path, made, runner=Flaky(made)).ended == "done"
    return tmp_path


def test_all_that_failed_is_measured_in_one_more_round(failed: Path) -> None:
    made = sweep(ONE)
    before = store.read(failed)
    summary = run(failed, made, runner=Mended(made), resume=True, retry_failed=True)
    assert summary.ended == "done"
    rows = store.read(failed)
    new = rows.filter(pl.col("run") == "cycle-3")
    forced = new.filter(~pl.col("is_default"))
    assert forced.height == FAILED
    assert set(forced["status"]) == {"ok"}
    assert set(forced["size_bytes"]) == {2 << 20, 4 << 20}
    # Nothing that was there is gone, and no measurement is there twice.
    assert rows.height == before.height + new.height
    asked = Counter(rows.select("trial", "run", "repeat", "default_scope").rows())
    assert set(asked.values()) == {1}


def test_nothing_is_tried_again_without_the_option_or_a_failure(failed: Path) -> None:
    made = sweep(ONE)
    assert run(failed, made, runner=Mended(made), resume=True).launches_run == 0
    run(failed, made, runner=Mended(made), resume=True, retry_failed=True)
    assert run(failed, made, runner=Mended(made), resume=True, retry_failed=True).launches_run == 0


def test_config_that_fails_again_is_in_quarantine_again(failed: Path) -> None:
    made = sweep(ONE)
    again = Flaky(made)
    run(failed, made, runner=again, resume=True, retry_failed=True)
    hung = f"AllReduce:2x8:{2 << 20}:Ring/Simple"
    assert sum(again.tried.values()) >= 1
    assert again.tried[hung] <= 1
    assert run(failed, made, runner=Flaky(made), resume=True).launches_run == 0


def test_retry_that_was_killed_goes_on_with_a_plain_resume(failed: Path) -> None:
    made = sweep(ONE)
    with pytest.raises(Interrupted):
        run(failed, made, runner=Dies(made), resume=True, retry_failed=True)
    assert run(failed, made, runner=Mended(made), resume=True).ended == "done"
    assert store.read(failed).filter(pl.col("run") == "cycle-3").height >= FAILED


def test_what_is_left_of_the_sweep_comes_first(tmp_path: Path) -> None:
    made = sweep(ONE)
    run(tmp_path, made, runner=Flaky(made), watcher=Watch(stop_after=4))
    run(tmp_path, made, runner=Mended(made), resume=True, retry_failed=True)
    rows = store.read(tmp_path)
    rounds = rows.group_by("run").agg(pl.len()).sort("run")["run"].to_list()
    assert rounds == ["cycle-0", "cycle-1", "cycle-2", "cycle-3"]


def test_cycles_that_are_added_later_are_all_measured(failed: Path) -> None:
    made = sweep(ONE)
    run(failed, made, runner=Mended(made), resume=True, retry_failed=True)
    longer = sweep(ONE.replace("cycles = 3", "cycles = 5"))
    run(failed, longer, runner=Mended(longer), resume=True)
    whole = store.read(failed).filter(pl.col("size_bytes") == 1 << 20, ~pl.col("is_default"))
    assert whole.filter(pl.col("status") == "ok").group_by("run").len().height == 5


def test_choice_follows_from_what_was_measured_at_last(failed: Path) -> None:
    made = sweep(ONE)
    choices = failed / "choices" / "system=sim" / "sweep=grid.csv"
    before = choices.read_text()
    run(failed, made, runner=Mended(made), resume=True, retry_failed=True)
    assert choices.read_text() != before


def outcome(key: str, number: int, *, ok: bool) -> Outcome:
    return Outcome(key, number, 1.0 if ok else None, ok)


def test_only_failures_before_the_retry_of_the_same_trial_are_forgotten() -> None:
    rounds: list[dict[str, Any]] = [{"picks": []}, {"picks": [["a", 0, None]], "retry": True}]
    old, good, other = (
        outcome("a", 0, ok=False),
        outcome("a", 0, ok=True),
        outcome("b", 0, ok=False),
    )
    new = outcome("a", 1, ok=False)
    assert that_count([old, good, other, new], rounds) == [good, other, new]


def test_strategy_counts_its_own_rounds() -> None:
    rounds: list[dict[str, Any]] = [{}, {"retry": True, "picks": []}, {}]
    history = [outcome("a", number, ok=True) for number in range(3)]
    number, own = without_retries(3, history, rounds)
    assert number == 2
    assert [one.round for one in own] == [0, 0, 1]


def test_picks_of_the_plain_sweep_are_as_before(tmp_path: Path) -> None:
    assert run(tmp_path, retry_failed=True).rows_by_status["ok"] == 3 * PICKS
