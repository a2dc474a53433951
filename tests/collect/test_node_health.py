"""Verdicts on a stretch of time."""

import pytest

from dynamiccl.collect.nodes import (
    MAX_GAP_S,
    UNKNOWN,
    Health,
    NodeReadings,
    Window,
    parse_reading,
    worst_of,
)
from dynamiccl.collect.sampler import is_slowed

Gpus = tuple[bool | None, ...]
Counts = tuple[int | None, ...]


def node(*readings: tuple[float, Gpus, Counts]) -> NodeReadings:
    found = NodeReadings()
    for time_s, slowed, errors in readings:
        found.add(Window(time_s, time_s, slowed, errors))
    return found


def slowed(*values: bool | None) -> NodeReadings:
    """One GPU, read once a second."""
    return node(*((float(t), (value,), (0,)) for t, value in enumerate(values)))


def counted(*values: int | None) -> NodeReadings:
    return node(*((float(t), (False,), (value,)) for t, value in enumerate(values)))


@pytest.mark.parametrize(
    ("bits", "verdict"),
    [
        (0x0, False),  # full speed
        (0x1, False),  # idle
        (0x2, False),  # clocks that the user chose
        (0x40, True),  # heat
        (0x4 | 0x1, True),  # power cap
        (0x8, True),
        (0x20, True),
        (0x80, True),
        (0x10, False),
        (0x100, False),
    ],
)
def test_only_heat_and_power_count_as_throttling(bits: int, verdict: bool) -> None:
    assert is_slowed(bits) is verdict


def test_stretch_between_two_readings_is_judged_by_both() -> None:
    cooling = slowed(False, True, False, False)
    assert cooling.health(1.2, 1.3).throttled is True
    assert cooling.health(0.2, 0.3).throttled is True
    assert cooling.health(2.2, 2.3).throttled is False


def test_readings_that_are_far_say_nothing() -> None:
    hot = slowed(True)
    assert hot.health(MAX_GAP_S, MAX_GAP_S + 9).throttled is True
    assert hot.health(MAX_GAP_S + 0.1, MAX_GAP_S + 9).throttled is None


def test_stretch_without_a_reading_on_one_side_is_not_known() -> None:
    ended = slowed(False, False)
    assert ended.health(0.5, 5.0).throttled is None
    assert ended.health(-3.0, 0.5).throttled is None


def test_hole_in_the_readings_is_not_known() -> None:
    stalled = node(*((t, (False,), (0,)) for t in (0.0, 1.0, 9.0, 10.0)))
    assert stalled.health(0.5, 9.5) == UNKNOWN
    assert stalled.health(9.2, 9.8) == Health(throttled=False, ecc_errors=0)


def test_what_was_seen_counts_even_when_the_rest_is_not_known() -> None:
    died_hot = node((0.0, (False,), (0,)), (1.0, (True,), (2,)))
    assert died_hot.health(0.5, 50.0) == Health(throttled=True, ecc_errors=2)


def test_one_gpu_of_the_node_is_enough() -> None:
    both = node((0.0, (False, False), (0, 0)), (1.0, (False, True), (0, 1)))
    assert both.health(0.2, 0.8) == Health(throttled=True, ecc_errors=1)


def test_gpu_that_does_not_answer_leaves_the_others_unknown() -> None:
    one = node(*((float(t), (False, None), (None, 0)) for t in range(3)))
    assert one.health(0.5, 1.5) == UNKNOWN
    known = node(*((float(t), (True, None), (None, t)) for t in range(3)))
    assert known.health(0.5, 1.5) == Health(throttled=True, ecc_errors=2)


def test_memory_errors_are_those_counted_inside_the_stretch() -> None:
    totals = counted(5, 5, 7, 7, 8)
    assert totals.health(1.5, 2.5).ecc_errors == 2
    assert totals.health(2.5, 2.9).ecc_errors == 0
    assert totals.health(0.1, 3.9).ecc_errors == 3


def test_counter_that_began_anew_has_counted_what_it_shows() -> None:
    assert counted(5, 5, 1, 1).health(0.5, 2.5).ecc_errors == 1


def test_without_a_gpu_nothing_is_known() -> None:
    assert node(*((float(t), (), ()) for t in range(3))).health(0.5, 1.5) == UNKNOWN
    assert node().health(0.5, 1.5) == UNKNOWN


def test_what_is_forgotten_is_only_what_is_too_old_to_matter() -> None:
    cooling = slowed(*[True] * 2, *[False] * 8)
    cooling.forget_before(8.0)
    assert cooling.health(8.0, 8.5).throttled is False
    assert cooling.health(0.0, 1.0).throttled is None
    hot = slowed(True, False, False)
    hot.forget_before(2.5)
    assert hot.health(0.0, 0.5).throttled is True


def test_last_reading_tells_until_when_a_node_is_known() -> None:
    assert slowed(False, False).has_since(1.0)
    assert not slowed(False, False).has_since(1.1)
    assert not node().has_since(float("-inf"))


def test_bad_node_makes_the_stretch_bad_and_no_node_makes_it_unknown() -> None:
    fine, bad = Health(throttled=False, ecc_errors=0), Health(throttled=True, ecc_errors=3)
    assert worst_of([fine, fine]) == fine
    assert worst_of([fine, UNKNOWN, bad]) == bad
    assert worst_of([fine, UNKNOWN]) == UNKNOWN
    assert worst_of([]) == UNKNOWN


@pytest.mark.parametrize(
    "line",
    [
        "",
        "srun: step created\n",
        '{"sampler": "n1:7", "time_s": 1.0, "slowed": [fal',
        '{"sampler": "n1:7"}\n',
        '{"sampler": "n1:7", "time_s": 1.0, "slowed": 1, "ecc_errors": []}',
    ],
)
def test_what_is_no_reading_is_none(line: str) -> None:
    assert parse_reading(line) is None
