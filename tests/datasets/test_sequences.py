"""Calls of jobs become episodes, and nothing else than what was called becomes a step."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.features import FEATURES
from dynamiccl.datasets.history import WINDOW_COLUMN
from dynamiccl.datasets.steps import Steps, sequence_steps, timed_calls, training_noise
from tests.calls import call, calls_frame, traced
from tests.rows import default, forced, frame
from tests.steps import make_steps

#: A training bin, and a test bin.
SIZE, HELD_OUT = 1 << 20, 1 << 23
SWEEP = frame(
    *(default(100.0, size_bytes=size) for size in (SIZE, HELD_OUT)),
    *(forced("Ring", "LL", 80.0, size_bytes=size) for size in (SIZE, HELD_OUT)),
    forced("Tree", "LL", 90.0, size_bytes=SIZE),
    forced("Ring", "Simple", 95.0, channels=4, size_bytes=SIZE),
)
CATALOGUE = Catalogue.from_frame(SWEEP)
NOISE = training_noise(SWEEP)
RING, TREE, RING_4 = (
    next(i for i, config in enumerate(CATALOGUE.configs) if config.key.startswith(key))
    for key in ("Ring/LL", "Tree/LL", "Ring/Simple")
)


def steps_of(calls: pl.DataFrame) -> tuple[Steps, dict[str, int]]:
    steps, counts = sequence_steps(calls, SWEEP, CATALOGUE, ["default"], NOISE)
    assert steps is not None
    return steps, counts


def test_a_job_s_calls_of_one_key_are_one_episode_and_see_those_before() -> None:
    rows = [call(n, 100.0 + n) for n in range(4)]
    rows += [call(n, 200.0 + n, run="job-2") for n in range(3)]
    rows += [call(n, 300.0 + n, comm="00000000000000bb") for n in range(2)]
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    steps, counts = steps_of(calls_frame(*shuffled))
    assert (counts["steps"], counts["episodes"]) == (9, 3)
    assert np.diff(steps.starts).tolist() == [4, 2, 3]
    expected = [100, 101, 102, 103, 300, 301, 200, 201, 202]
    assert steps.calls.time_us.tolist() == expected
    assert steps.reward.tolist() == pytest.approx([-t / 100.0 for t in expected])
    assert not steps.terminated.any()
    steps, _ = steps_of(calls_frame(*(call(n, 100.0 * 2**n) for n in range(3))))
    found, mask, _ = steps.observe(np.arange(3), np.zeros(3, dtype=np.int64))
    times = found.window[:, :, WINDOW_COLUMN["log2_time"]]
    assert times[0].tolist() == [0.0] * 8
    assert times[2, -2:].tolist() == pytest.approx([np.log2(100.0), np.log2(200.0)])
    context = dict(zip([f.name for f in FEATURES], found.context[2], strict=False))
    assert (context["log2_ranks"], context["nccl_known"]) == (3.0, 1.0)
    assert context["log2_rtprop"] == pytest.approx(np.log2(100.0))
    assert np.flatnonzero(mask[0]).tolist() == sorted({0, RING, TREE, RING_4})


def test_actions_are_what_was_asked_for() -> None:
    steps, counts = steps_of(
        calls_frame(
            call(0),
            call(1, actual_algorithm="TREE"),
            call(2, decided=False),
            call(3, actual_protocol="SIMPLE", actual_num_channels=4),
            call(4, actual_protocol="SIMPLE", actual_num_channels=5),
            call(5, actual_algorithm=None),
        )
    )
    assert steps.action.tolist() == [RING, TREE, 0, RING_4]
    assert counts["without_action"] == 2


def test_what_cannot_be_learnt_from_is_counted() -> None:
    steps, counts = steps_of(
        calls_frame(
            call(0),
            call(1, None),
            call(2, ranks_agree=False),
            call(3, size_bytes=HELD_OUT),
            call(4, size_bytes=1 << 28),
            call(5, nccl_version="2.29.1"),
            call(6, collective="Broadcast"),
            # Traces have times, but not the config, or not whose choice it was.
            traced(1),
            call(0, source="inspector", decided=None, table=None),
        )
    )
    assert len(steps) == 1
    assert counts == {
        "calls": 9,
        "unusable": 4,
        "held_out": 1,
        "without_action": 0,
        "without_reward": 3,
        "steps": 1,
        "episodes": 1,
    }
    assert timed_calls(calls_frame(traced(1))).is_empty()
    none, counts = sequence_steps(
        calls_frame(call(0, size_bytes=HELD_OUT)), SWEEP, CATALOGUE, ["default"], NOISE
    )
    assert (none, counts["held_out"], counts["steps"]) == (None, 1, 0)


# --- What a step earns ---


def test_a_change_and_congestion_cost_what_is_asked() -> None:
    steps = make_steps(lengths=(4, 2))
    calls = replace(steps.calls, interference=np.array([-1.0, 0.5, 0.0, 2.0, 0.0, 0.5]))
    reward = np.full(6, -1.5, dtype=np.float32)
    steps = replace(steps, action=np.array([0, 0, 1, 1, 0, 1]), reward=reward, calls=calls)
    assert steps.charged(0.0, 0.0).reward is reward
    switched = steps.charged(0.2, 0.0).reward
    # The first step of an episode changes nothing.
    np.testing.assert_allclose(switched, [-1.5, -1.5, -1.7, -1.5, -1.5, -1.7], rtol=1e-6)
    congested = steps.charged(0.0, 0.1).reward
    np.testing.assert_allclose(congested, [-1.5, -1.55, -1.5, -1.7, -1.5, -1.55], rtol=1e-6)
    assert switched.dtype == congested.dtype == np.float32


@pytest.mark.parametrize("most", [1, 2, 8])
def test_a_held_action_is_rewarded_by_the_mean_of_its_calls(most: int) -> None:
    steps = make_steps(num_actions=2)
    held = steps.held(most)
    for row, found in enumerate(held.reward):
        end = int(steps.starts[steps.episode_of(np.array([row]))[0] + 1])
        rewards = []
        for later in range(row, min(end, row + most)):
            if steps.action[later] != steps.action[row]:
                break
            rewards.append(steps.reward[later])
        assert found == pytest.approx(np.mean(rewards), rel=1e-6)
    np.testing.assert_array_equal(held.action, steps.action)
