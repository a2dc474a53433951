"""Batches equal those of d3rlpy's own pickers, and every step is drawn as often as it should."""

import numpy as np
import pytest
from d3rlpy.dataset import (
    BasicTransitionPicker,
    Episode,
    MultiStepTransitionPicker,
    TransitionMiniBatch,
)

from dynamiccl.datasets.steps import Int64Array, Steps
from dynamiccl.train.replay import FeatureRows, Mixed, Replay
from tests.steps import make_steps


def episodes_of(steps: Steps) -> list[Episode]:
    """The same steps as d3rlpy holds them, windows and masks made in advance."""
    rows = np.arange(len(steps))
    seen, mask, _ = steps.observe(rows, steps.episode_of(rows))
    made = []
    for number, (start, end) in enumerate(zip(steps.starts[:-1], steps.starts[1:], strict=True)):
        part = slice(int(start), int(end))
        made.append(
            Episode(
                observations=[seen.window[part], seen.context[part], mask[part]],
                actions=steps.action[part, None].astype(np.float32),
                rewards=steps.reward[part, None],
                terminated=bool(steps.terminated[number]),
            )
        )
    return made


def assert_equal(ours: TransitionMiniBatch, theirs: TransitionMiniBatch) -> None:
    for name in ("observations", "next_observations"):
        window, context, mask = getattr(ours, name)
        their_window, their_context, their_mask = getattr(theirs, name)
        np.testing.assert_array_equal(window, their_window)
        np.testing.assert_array_equal(mask, their_mask)
        # Sums of logarithms against logarithms of products, in single precision.
        np.testing.assert_allclose(context, their_context, rtol=1e-5, atol=1e-6)
    for name in ("actions", "next_actions", "terminals", "intervals"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    np.testing.assert_allclose(ours.rewards, theirs.rewards, rtol=1e-6)


@pytest.mark.parametrize("kind", ["cached", "made anew", "own windows"])
@pytest.mark.parametrize(("num_steps", "gamma"), [(1, 0.0), (1, 0.9), (3, 0.5), (5, 0.99)])
def test_every_row_is_what_d3rlpys_picker_gives(
    num_steps: int, gamma: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = make_steps(own_windows=kind == "own windows")
    if kind == "made anew":
        monkeypatch.setattr("dynamiccl.train.replay.MAX_CACHED", 0)
    pickers = [MultiStepTransitionPicker(num_steps, gamma)]
    if num_steps == 1:
        pickers.append(BasicTransitionPicker())
    episodes = episodes_of(steps)
    choosable = [
        (number, index)
        for number, episode in enumerate(episodes)
        for index in range(episode.transition_count)
    ]
    assert len(choosable) == steps.choosable.sum()
    replay = Replay(steps, 4, seed=0, num_steps=num_steps, gamma=gamma)
    number = np.array([each for each, _ in choosable])
    rows = steps.starts[number] + np.array([index for _, index in choosable])
    ours = replay.batch(rows, number)
    for picker in pickers:
        picked = [picker(episodes[each], index) for each, index in choosable]
        assert_equal(ours, TransitionMiniBatch.from_transitions(picked))


def test_steps_are_drawn_alike_and_the_last_of_a_cut_off_episode_never() -> None:
    steps = make_steps()
    counts = draws(steps, balance=0.0)
    last = steps.starts[1:][~steps.terminated] - 1
    assert not counts[last].any()
    rest = np.delete(counts, last)
    assert rest.min() > 0.8 * rest.mean()
    assert rest.max() < 1.2 * rest.mean()


def test_steps_of_ended_episodes_are_drawn_alike() -> None:
    steps = make_steps()
    steps.terminated[:] = True
    counts = draws(steps, balance=0.0)
    assert counts.min() > 0.8 * counts.mean()
    assert counts.max() < 1.2 * counts.mean()


def test_balance_draws_every_group_alike() -> None:
    steps = make_steps()
    group = steps.tasks.group[steps.task[steps.episode_of(np.arange(len(steps)))]]
    plain = np.bincount(group, weights=draws(steps, balance=0.0))
    balanced = np.bincount(group, weights=draws(steps, balance=1.0))
    assert plain.max() > 1.5 * plain.min()
    assert balanced.max() < 1.05 * balanced.min()


def test_a_seed_gives_the_same_batches() -> None:
    steps = make_steps()
    first, again, other = (Replay(steps, 8, seed=seed) for seed in (1, 1, 2))
    assert_equal(first.sample(), again.sample())
    assert not np.array_equal(again.sample().observations[1], other.sample().observations[1])


def test_steps_of_which_none_leads_anywhere_are_refused() -> None:
    steps = make_steps(lengths=(1,))
    steps.terminated[:] = False
    with pytest.raises(ValueError, match="cut off"):
        Replay(steps, 4, seed=0)


class Noted(Replay):
    """Remembers what it drew."""

    drawn: Int64Array

    def batch(self, rows: Int64Array, episode: Int64Array) -> TransitionMiniBatch:
        self.drawn = rows
        return super().batch(rows, episode)


def draws(steps: Steps, *, balance: float) -> Int64Array:
    """How often each step is drawn."""
    replay = Noted(steps, 40_000, seed=0, balance=balance)
    replay.sample()
    return np.bincount(replay.drawn, minlength=len(steps))


def test_features_of_steps_with_windows_of_their_own_are_not_kept() -> None:
    with pytest.raises(ValueError, match="windows of their own"):
        FeatureRows(make_steps(own_windows=True))


def test_parts_of_the_features_join(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = make_steps(lengths=(30, 40))
    rows = np.arange(len(steps))
    whole, _, _ = FeatureRows(steps).observe(rows, steps.episode_of(rows))
    monkeypatch.setattr("dynamiccl.train.replay._PART", 7)
    parts, _, _ = FeatureRows(steps).observe(rows, steps.episode_of(rows))
    np.testing.assert_array_equal(parts.window, whole.window)
    np.testing.assert_array_equal(parts.context, whole.context)


def test_a_mixed_batch_has_its_part_of_each_replay() -> None:
    swept, called = make_steps(own_windows=True), make_steps(seed=1)
    random = np.random.default_rng(5)
    mixed = Mixed([Replay(swept, 8, seed=random), Replay(called, 8, seed=random, num_steps=3)])
    batch = mixed.sample()
    random = np.random.default_rng(5)
    parts = [Replay(swept, 8, seed=random), Replay(called, 8, seed=random, num_steps=3)]
    first, second = parts[0].sample(), parts[1].sample()
    for name in ("actions", "rewards", "next_actions", "terminals", "intervals"):
        joined = np.concatenate([getattr(first, name), getattr(second, name)])
        np.testing.assert_array_equal(getattr(batch, name), joined)
    for name in ("observations", "next_observations"):
        for whole, one, two in zip(
            getattr(batch, name), getattr(first, name), getattr(second, name), strict=True
        ):
            np.testing.assert_array_equal(whole, np.concatenate([one, two]))
    assert set(batch.intervals.ravel()) >= {1, 3}


def test_replays_that_draw_each_for_itself_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="share one generator"):
        Mixed([Replay(make_steps(), 8, seed=0), Replay(make_steps(), 8, seed=0)])
