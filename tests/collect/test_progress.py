import io

import pytest
from rich.console import Console

from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.outcomes import Outcome, decode_outcomes, encode_outcomes
from dynamiccl.collect.runner import Launch, LaunchMode, LaunchResult, Measured, Pick
from dynamiccl.collect.runs.progress import BestSoFar, SweepProgress
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol

SETTING = Setting(Collective.AllReduce, 1, 8)
RING = Config(Algorithm.Ring, Protocol.LL)
TREE = Config(Algorithm.Tree, Protocol.Simple)


def trial(config: Config = ABSTAIN, size_bytes: int = 1024) -> Trial:
    return Trial(SETTING, size_bytes, config)


def best(*times: tuple[Trial, float]) -> str:
    found = BestSoFar()
    for one, time_us in times:
        found.add(one, time_us)
    return found.text()


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


def test_smallest_time_counts_of_default_and_config_alike() -> None:
    assert best((trial(), 20.0), (trial(), 10.0), (trial(RING), 8.0), (trial(RING), 16.0)) == (
        "best 1.25x: AllReduce:1x8:1024:Ring/LL"
    )


def test_default_that_nothing_beats_is_said_to_be_best() -> None:
    assert best((trial(), 10.0), (trial(RING), 10.0)) == "default is best so far"


def launch(mode: LaunchMode, *picks: Pick) -> Launch:
    return Launch("0:x", 3, SETTING, mode, picks)


def test_outcome_of_a_pick_is_its_out_of_place_time() -> None:
    pick = Pick(trial(RING))
    rows = ({"time_us": 7.0, "in_place": True}, {"time_us": 5.0, "in_place": False})
    result = LaunchResult((Measured(pick, rows),))
    encoded = encode_outcomes(launch(LaunchMode.SWEEP, pick), result)
    assert list(decode_outcomes(encoded)) == [Outcome(pick.trial.key, 3, 5.0, ok=True)]


@pytest.mark.parametrize("flags", [{"throttled": True}, {"ecc_errors": 1}])
def test_time_of_unwell_gpus_is_no_time_and_no_failure(flags: dict[str, object]) -> None:
    pick = Pick(trial(RING))
    result = LaunchResult((Measured(pick, ({"time_us": 5.0, **flags},)),))
    encoded = encode_outcomes(launch(LaunchMode.SWEEP, pick), result)
    assert list(decode_outcomes(encoded)) == [Outcome(pick.trial.key, 3, None, ok=True)]


def test_wrong_value_in_one_half_is_a_failure_without_a_time() -> None:
    pick = Pick(trial(RING))
    rows = ({"time_us": 5.0}, {"time_us": 7.0, "in_place": True, "status": "wrong_values"})
    [outcome] = encode_outcomes(
        launch(LaunchMode.FORCED, pick), LaunchResult((Measured(pick, rows),))
    )["outcomes"]
    assert outcome == [pick.trial.key, 3, None, False, False]


def test_only_halves_in_place_give_their_time() -> None:
    pick = Pick(trial(RING))
    rows = ({"time_us": 7.0, "in_place": True},)
    [outcome] = encode_outcomes(
        launch(LaunchMode.SWEEP, pick), LaunchResult((Measured(pick, rows),))
    )["outcomes"]
    assert outcome[2:] == [7.0, True, False]


@pytest.mark.parametrize("mode", [LaunchMode.REFERENCE, LaunchMode.READ_BACK])
def test_what_nobody_picked_has_no_outcome(mode: LaunchMode) -> None:
    pick = Pick(trial())
    result = LaunchResult((Measured(pick, ({"time_us": 5.0},)),))
    found = encode_outcomes(launch(mode, pick), result)
    assert found["outcomes"] == []
    assert len(found.get("references", [])) == (mode is LaunchMode.REFERENCE)


def drawn(*, terminal: bool) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=160, color_system=None)
    with SweepProgress("night", console, lambda: False) as progress:
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


def test_bar_says_done_failed_left_and_best() -> None:
    last = drawn(terminal=True)
    assert "night" in last
    assert "3/40" in last
    # What cannot run is no failure.
    assert "1 failed" in last
    assert "2 failed" not in last
    assert "best 1.25x: AllReduce:1x8:1024:Ring/LL" in last


def test_bar_is_silent_where_there_is_no_terminal() -> None:
    assert drawn(terminal=False).strip() == ""


def test_bar_before_anything_is_known_can_be_drawn() -> None:
    screen = io.StringIO()
    with SweepProgress("night", Console(file=screen, force_terminal=True), lambda: False):
        pass
    assert "night" in screen.getvalue()


def test_who_may_stop_is_asked_each_time() -> None:
    answers = iter([False, True])
    progress = SweepProgress("night", Console(file=io.StringIO()), lambda: next(answers))
    assert [progress.stopping(), progress.stopping()] == [False, True]


def test_bar_is_taken_away_when_the_run_fails() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160)
    progress = SweepProgress("night", console, lambda: False)
    with pytest.raises(ZeroDivisionError), progress:
        raise ZeroDivisionError
    before = screen.getvalue()
    progress.advance(1)
    assert screen.getvalue() == before
