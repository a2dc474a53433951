"""Links that change: long-run shares, dwell times, bounds, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dynamiccl.simulator.scenario import BurstsLink, MarkovLink, TraceLink

FOLLOWING = [[0.0, 0.7, 0.3], [0.6, 0.0, 0.4], [0.5, 0.5, 0.0]]
DWELL = [200.0, 60.0, 20.0]


def markov(slowdowns: Any, dwell_us: Any, following: Any, links: int = 1) -> MarkovLink:
    facts = {"slowdowns": slowdowns, "dwell_us": dwell_us, "following": following, "links": links}
    return MarkovLink(on="inter", kind="markov", **facts)


def bursts(pause_us: float, shortest_us: float, tail: float, share: Any) -> BurstsLink:
    facts: Any = {"pause_us": pause_us, "shortest_us": shortest_us, "tail": tail, "share": share}
    return BurstsLink(on="inter", kind="bursts", **facts)


def trace(shares: Any, interval_us: float) -> TraceLink:
    return TraceLink(on="inter", kind="trace", shares=shares, interval_us=interval_us)


def course(
    link: MarkovLink | BurstsLink | TraceLink, *, jobs: int, steps: int, elapsed_us: float = 1.0
) -> np.ndarray:
    random = np.random.default_rng(0)
    process = link.play(jobs, random)
    next(process)
    elapsed = np.full(jobs, elapsed_us)
    return np.stack([process.send(elapsed).copy() for _ in range(steps)])


def test_congestion_stays_as_long_as_it_says() -> None:
    seen = course(markov([1.0, 2.0, 4.0], DWELL, FOLLOWING), jobs=200, steps=4_000)
    for level, dwell in zip((1.0, 2.0, 4.0), DWELL, strict=True):
        inside = seen == level
        leaves = (inside[:-1] & ~inside[1:]).sum()
        assert inside[:-1].sum() / leaves == pytest.approx(dwell, rel=0.1)


def test_shares_of_time_are_the_usual_ones_from_the_start() -> None:
    link = markov([1.0, 2.0, 4.0], DWELL, FOLLOWING)
    seen = course(link, jobs=4_000, steps=50)
    shares = [float((seen == level).mean()) for level in (1.0, 2.0, 4.0)]
    # Balance by hand: flow into each state equals flow out of it.
    rates = 1.0 / np.array(DWELL)
    flow = (link.usual() * rates) @ np.array(FOLLOWING)
    assert flow == pytest.approx(link.usual() * rates)
    assert shares == pytest.approx(link.usual(), abs=0.03)


def test_what_changes_does_so_by_time_and_not_by_calls() -> None:
    slow, fast = (
        (np.diff(course(markov([1.0, 2.0], [100.0, 100.0], [[0, 1], [1, 0]]), jobs=100, steps=1_000,
                        elapsed_us=each), axis=0) != 0).mean()
        for each in (1.0, 10.0)
    )  # fmt: skip
    assert fast == pytest.approx(1 - np.exp(-0.1), rel=0.1)
    assert slow == pytest.approx(1 - np.exp(-0.01), rel=0.1)


def test_of_several_links_the_slowest_counts() -> None:
    args = ([1.0, 3.0], [90.0, 10.0], [[0, 1], [1, 0]])
    one = (course(markov(*args), jobs=2_000, steps=20) > 1).mean()
    four = (course(markov(*args, links=4), jobs=2_000, steps=20) > 1).mean()
    assert four == pytest.approx(1 - (1 - one) ** 4, abs=0.03)


def test_bursts_take_their_share_while_they_last() -> None:
    seen = course(bursts(90.0, 5.0, 2.0, (0.5, 0.75)), jobs=400, steps=3_000)
    busy = seen > 1
    assert seen[busy].min() >= 2.0
    assert seen[busy].max() <= 4.0
    # Pareto's mean: shortest x tail / (tail - 1) = 10 us of bursts for 90 of pauses.
    assert busy.mean() == pytest.approx(0.1, abs=0.03)


def test_a_trace_comes_round_and_every_job_begins_elsewhere() -> None:
    seen = course(trace([1.0, 0.5, 0.25], 10.0), jobs=300, steps=60)
    assert set(np.unique(seen)) == {1.0, 2.0, 4.0}
    assert (seen[:30] == seen[30:]).all()
    assert (seen == 4.0).mean() == pytest.approx(1 / 3, abs=0.02)
    assert len(np.unique(seen[0])) == 3


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: markov([1.0], [1.0, 2.0], [[0.0]]), "need"),
        (lambda: markov([1.0, 2.0], [1.0, 1.0], [[0.5, 0.5], [1.0, 0.0]]), "sum to 1"),
        (lambda: markov([0.5, 2.0], [1.0, 1.0], [[0, 1], [1, 0]]), "greater than or equal to 1"),
        (lambda: bursts(1.0, 1.0, 1.0, (0.1, 0.2)), "tail"),
        (lambda: bursts(1.0, 1.0, 2.0, (0.3, 0.2)), "in order"),
        (lambda: trace([0.5, 0.0], 1.0), "shares.1"),
        (lambda: trace([0.5], 0.0), "interval_us"),
    ],
)
def test_what_is_no_process_is_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()
