"""Columns of steps: what a step sees, on the way to files and back."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynamiccl.datasets.features import CONTEXT_COLUMN, HISTORY_SLICE, WINDOW_LENGTH
from dynamiccl.datasets.history import UNKNOWN, Call, history_arrays
from dynamiccl.datasets.step_files import open_steps, write_steps
from dynamiccl.datasets.steps import Steps
from dynamiccl.errors import CorruptFile, MissingPath
from dynamiccl.nccl import Algorithm, Protocol
from tests.steps import make_steps


def call_of(steps: Steps, row: int) -> Call:
    calls = steps.calls
    algorithm, protocol = int(calls.algorithm[row]), int(calls.protocol[row])
    interference, skew_us = float(calls.interference[row]), float(calls.skew_us[row])
    return Call(
        size_bytes=int(calls.size_bytes[row]),
        time_us=float(calls.time_us[row]),
        algorithm=None if algorithm == UNKNOWN else Algorithm(algorithm),
        protocol=None if protocol == UNKNOWN else Protocol(protocol),
        num_channels=int(calls.num_channels[row]) or None,
        interference=None if interference == UNKNOWN else interference,
        skew_us=None if skew_us == UNKNOWN else skew_us,
    )


@pytest.mark.parametrize("own_windows", [False, True])
def test_a_step_sees_the_calls_before_it(own_windows: bool) -> None:
    steps = make_steps(own_windows=own_windows)
    rows = np.arange(len(steps))
    episode = steps.episode_of(rows)
    observations, mask, task = steps.observe(rows, episode)
    for row in rows:
        start = int(steps.starts[episode[row]])
        seen = list(range(max(start, int(row) - WINDOW_LENGTH), int(row)))
        if steps.windows is not None:
            seen = [int(each) for each in steps.windows[row] if each >= 0]
        window, history = history_arrays([call_of(steps, each) for each in seen])
        np.testing.assert_array_equal(observations.window[row], window)
        found = observations.context[row, HISTORY_SLICE]
        np.testing.assert_array_equal(found, history)
        log2_size = observations.context[row, CONTEXT_COLUMN["log2_size"]]
        assert log2_size == np.float32(np.log2(steps.calls.size_bytes[row]))
    np.testing.assert_array_equal(mask, steps.tasks.mask[steps.task[episode]])
    np.testing.assert_array_equal(task, steps.task[episode])


def test_observing_leaves_the_tasks_as_they_are() -> None:
    steps = make_steps()
    before = steps.tasks.context.copy()
    rows = np.arange(len(steps))
    steps.observe(rows, steps.episode_of(rows))
    np.testing.assert_array_equal(steps.tasks.context, before)


def test_steps_come_back_from_files(tmp_path: Path) -> None:
    first, second = make_steps(seed=1), make_steps(seed=2, lengths=(4, 4))
    second = Steps(
        tasks=first.tasks,
        starts=second.starts,
        task=second.task,
        terminated=second.terminated,
        calls=second.calls,
        action=second.action,
        reward=second.reward,
    )
    num_steps = len(first) + len(second)
    num_episodes = len(first.task) + len(second.task)
    write_steps(tmp_path, [first, second], num_steps=num_steps, num_episodes=num_episodes)
    found = open_steps(tmp_path)
    assert len(found) == num_steps
    for part, shift in ((first, 0), (second, len(first))):
        rows = np.arange(len(part))
        wanted, mask, _ = part.observe(rows, part.episode_of(rows))
        there = rows + shift
        got, got_mask, _ = found.observe(there, found.episode_of(there))
        np.testing.assert_array_equal(got.window, wanted.window)
        np.testing.assert_array_equal(got.context, wanted.context)
        np.testing.assert_array_equal(got_mask, mask)
        np.testing.assert_array_equal(found.action[there], part.action)
        np.testing.assert_array_equal(found.reward[there], part.reward)


def test_files_say_what_is_wrong_with_them(tmp_path: Path) -> None:
    steps = make_steps()
    with pytest.raises(ValueError, match="instead of"):
        write_steps(tmp_path / "few", [steps], num_steps=len(steps) + 1, num_episodes=9)
    own = make_steps(own_windows=True)
    with pytest.raises(ValueError, match="windows"):
        write_steps(tmp_path / "own", [own], num_steps=len(own), num_episodes=len(own.task))
    with pytest.raises(MissingPath, match="write_steps"):
        open_steps(tmp_path / "nothing")
    write_steps(tmp_path, [steps], num_steps=len(steps), num_episodes=len(steps.task))
    np.save(tmp_path / "starts.npy", np.array([0, 5, 5, len(steps)]))
    with pytest.raises(CorruptFile, match="has no step"):
        open_steps(tmp_path)
    np.save(tmp_path / "starts.npy", np.array([0, 3]))
    with pytest.raises(CorruptFile, match="do not cover"):
        open_steps(tmp_path)
    (tmp_path / "reward.npy").write_bytes(b"not a column")
    with pytest.raises(CorruptFile, match="no column"):
        open_steps(tmp_path)


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


def test_a_change_that_costs_once_is_spread_over_what_follows_it() -> None:
    steps = make_steps(lengths=(6,))
    action = np.array([0, 0, 1, 1, 1, 1])
    reward = np.array([-1.5, -1.5, -2.2, -1.2, -1.2, -1.2], dtype=np.float32)
    held = replace(steps, action=action, reward=reward).held(4)
    np.testing.assert_allclose(held.reward, [-1.5, -1.5, -1.45, -1.2, -1.2, -1.2], rtol=1e-6)
