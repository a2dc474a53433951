"""What a person sees of a running sweep, and what a strategy is told of a trial."""

import io
from typing import Any

import pytest
from rich.console import Console

from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.progress import SweepProgress
from dynamiccl.collect.strategies import Outcome, outcome_of
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol

SETTING = Setting(Collective.AllReduce, 1, 8)
RING = Config(Algorithm.Ring, Protocol.LL)
TREE = Config(Algorithm.Tree, Protocol.Simple)


def trial(config: Config = ABSTAIN, size_bytes: int = 1024) -> Trial:
    return Trial(SETTING, size_bytes, config)


def best(*times: tuple[Trial, float]) -> str:
    progress = SweepProgress("night")
    for one, time_us in times:
        progress.outcome(one, Outcome(one.key, 0, time_us, ok=True))
    return progress.best()


def test_nothing_is_best_before_a_default_and_a_config_of_one_task() -> None:
    assert best() == ""
    assert best((trial(), 10.0)) == ""
    assert best((trial(RING), 10.0)) == ""
    assert best((trial(RING), 10.0), (trial(size_bytes=64), 10.0)) == ""


def test_best_is_the_largest_gain_of_all_tasks_in_any_order() -> None:
    times = [
        (trial(), 10.0),
        (trial(RING), 8.0),
        (trial(TREE), 5.0),
        (trial(size_bytes=64), 3.0),
        (trial(RING, 64), 2.0),
    ]
    assert best(*times) == best(*reversed(times)) == "best 2.00x: AllReduce:1x8:1024:Tree/Simple"
    # The smallest time counts, of default and config alike.
    assert best((trial(), 20.0), (trial(), 10.0), (trial(RING), 8.0), (trial(RING), 16.0)) == (
        "best 1.25x: AllReduce:1x8:1024:Ring/LL"
    )
    assert best((trial(), 10.0), (trial(RING), 10.0)) == "default is best so far"


def drawn(*, terminal: bool) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=160, color_system=None)
    with SweepProgress("night", console) as progress:
        progress.expect(40)
        progress.advance(3)
        progress.outcome(trial(), Outcome("d", 0, 10.0, ok=True))
        progress.outcome(trial(RING), Outcome("r", 0, 8.0, ok=True))
        progress.outcome(trial(TREE), Outcome("t", 0, None, ok=False))
        # Worked, on GPUs that were slowed: no time, and no failure.
        progress.outcome(trial(TREE), Outcome("t", 0, None, ok=True))
        impossible = Trial(SETTING, 64, TREE, "for a reason")
        progress.outcome(impossible, Outcome("i", 0, None, ok=False, infeasible=True))
    return screen.getvalue()


def test_bar_says_done_failed_left_and_best_on_a_terminal_alone() -> None:
    last = drawn(terminal=True)
    assert "night" in last
    assert "3/40" in last
    # What cannot run is no failure.
    assert "1 failed" in last
    assert "2 failed" not in last
    assert "best 1.25x: AllReduce:1x8:1024:Ring/LL" in last
    assert drawn(terminal=False).strip() == ""


def test_bar_is_taken_away_when_the_run_fails() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160)
    progress = SweepProgress("night", console)
    with pytest.raises(ZeroDivisionError), progress:
        raise ZeroDivisionError
    before = screen.getvalue()
    assert "night" in before
    progress.advance(1)
    assert screen.getvalue() == before


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        # The time is that of the out-of-place half, where there is one.
        ([{"time_us": 7.0, "in_place": True}, {"time_us": 5.0, "in_place": False}], (5.0, True)),
        ([{"time_us": 7.0, "in_place": True}], (7.0, True)),
        # The time of GPUs that are not well is none, and no failure.
        ([{"time_us": 5.0, "throttled": True}], (None, True)),
        ([{"time_us": 5.0, "ecc_errors": 1}], (None, True)),
        ([{"time_us": 5.0}, {"time_us": 7.0, "status": "wrong_values"}], (None, False)),
        ([{"status": "timed_out"}], (None, False)),
        ([{"status": "infeasible"}], (None, False, True)),
    ],
)
def test_outcome_of_a_trial_is_read_from_its_rows(
    rows: list[dict[str, Any]], outcome: tuple[Any, ...]
) -> None:
    assert outcome_of("key", 3, rows) == Outcome("key", 3, *outcome)
