"""Configs by the time of the step: on small tables, and against the simulator's own law."""

import numpy as np
import pytest

from dynamiccl.datasets.manifest import JobTask
from dynamiccl.datasets.objective import (
    change_of_task_us,
    fewest_within,
    may_take,
    step_change_us,
    sure_change_us,
)
from dynamiccl.simulator.system import Contention
from tests.simulator.test_contention import iteration_us, parts

NAN = float("nan")
#: NCCL's own choice, one with as many channels, fewer, fewer and slower, and more.
TIMES = np.array([[100.0, 90.0, 94.0, 99.5, 80.0]])
CHANNELS = np.array([[16, 16, 8, 4, 32]], dtype=np.int16)


@pytest.mark.parametrize(("slack", "chosen"), [(0.0, 1), (0.01, 1), (0.05, 2), (0.11, 3)])
def test_slack_takes_the_fewest_channels_and_never_more_than_nccl(
    slack: float, chosen: int
) -> None:
    assert fewest_within(TIMES, CHANNELS, slack).tolist() == [chosen]


def test_slack_differs_by_task_leaves_out_what_is_unknown_and_needs_nccls_own_time() -> None:
    two = np.vstack([TIMES, [[100.0, 90.0, NAN, 99.5, NAN]]])
    channels = np.vstack([CHANNELS, CHANNELS])
    assert fewest_within(two, channels, np.array([[0.05], [0.0]])).tolist() == [2, 1]
    assert fewest_within(two, channels, np.array([[0.0], [0.05]])).tolist() == [1, 1]
    with pytest.raises(ValueError, match="NCCL's own choice has no time"):
        fewest_within(np.array([[NAN, 1.0]]), CHANNELS[:, :2], 0.0)


@pytest.mark.parametrize("compute_us", [0.0, 300.0, 990.0, 1_500.0, 8_000.0])
def test_the_change_is_that_of_the_simulators_law(compute_us: float) -> None:
    law = Contention(100, 2000, memory_share=0.0, call_slowdown=0.0)
    runs = [parts(count, us) for count, us in [(24, 1000.0), (8, 1100.0), (2, 2000.0), (24, 400.0)]]
    steps = [iteration_us(law, ran, 1, compute_us) for ran in runs]
    loss = np.array([[ran.num_channels / 100 for ran in runs]])
    times = np.array([[ran.quiet_us for ran in runs]])
    traced = min(compute_us / 0.76, steps[0]), np.array([1000.0])
    found = step_change_us(times, loss, traced[1], np.array([traced[0]]))
    assert found[0].tolist() == pytest.approx([step - steps[0] for step in steps])


def task(compute_us: list[float], skew_us: float = 0.0) -> JobTask:
    """Calls of 100 us."""
    return JobTask(("AllReduce", 1, 8, 40), 100.0, skew_us, compute_us, {})


def test_less_than_what_was_measured_is_counted_on() -> None:
    # Two configs as fast, of which one takes half of what compute loses: 5 %, for 0.7 of 10 %.
    loss = np.array([[0.1, 0.05, NAN]])
    times = np.array([[100.0, 100.0, 90.0]])
    told = np.array([100.0]), np.array([500.0])
    plain = step_change_us(times, loss, *told)
    surely = sure_change_us(times, loss, *told)
    assert plain[0, 1] == pytest.approx(-5.0)
    assert surely[0, :2].tolist() == [0.0, pytest.approx(-2.0)]
    assert np.isnan(surely[0, 2])
    # Compute that ends with the call may end before it: what it gets back counts no more.
    assert sure_change_us(times, loss, told[0], told[0])[0, 1] == pytest.approx(0.0)


def test_a_call_may_take_longer_by_what_compute_gets_back() -> None:
    edges = np.array([[0.10, 0.05], [0.10, 0.056]])
    longer = may_take(edges, task([1_000.0]))
    # By the edge that says the least: 1.25 times as long, at 0.8 of 0.7 of the loss.
    assert longer.tolist() == pytest.approx([1.0, 1.25], abs=1e-4)
    change = change_of_task_us(np.tile(longer, (2, 1)), edges, task([1_000.0]))
    assert change.tolist() == pytest.approx([0.0, 0.0], abs=1e-3)
    assert may_take(np.array([[0.1, NAN]]), task([1_000.0]))[1] == 1.0


def test_calls_that_compute_waits_for_count_as_many_as_they_are() -> None:
    """Of ten calls one is exposed: 96 us longer there weighs more than 0.3 us less in nine."""
    edges = np.array([[0.06, 0.02]])
    assert may_take(edges, task([6_000.0]))[1] == pytest.approx(2.0, abs=1e-4)
    # 9 x (2 r - 0.7 x 6) + 100 (r - 1) = 0.
    assert may_take(edges, task([0.0, *[6_000.0] * 9]))[1] == pytest.approx(1.1678, abs=1e-3)
    change = change_of_task_us(np.array([[1.0, 1.96]]), edges, task([0.0, *[6_000.0] * 9]))
    assert change[1] > 5.0


def test_the_rank_that_the_others_wait_for_decides() -> None:
    """It waits for nobody: what compute gets back from waiting kernels is not its own."""
    edges = np.array([[0.10, 0.07]])
    alike = may_take(edges, task([9_000.0]))[1]
    assert may_take(edges, task([9_000.0], skew_us=400.0))[1] == pytest.approx(alike, abs=1e-3)
