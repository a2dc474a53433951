"""Rows and calls become steps: cold and warm ones, those beside others, and episodes of jobs.

Every time in the data sets of rows is unique, so that a time found in a window says whose it is."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import interfered, noise_bands, quiet
from dynamiccl.datasets.features import CONTEXT_COLUMN, FEATURES, HISTORY_SLICE
from dynamiccl.datasets.history import WINDOW_COLUMN, WINDOW_LENGTH, CallColumns
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.steps import (
    Steps,
    sequence_steps,
    timed_calls,
    training_noise,
    training_steps,
    with_interfered_reference,
    with_reference,
)
from dynamiccl.errors import NotEnoughData
from dynamiccl.nccl import Algorithm, Protocol
from dynamiccl.train.trigger import TriggerModule
from tests.calls import call, calls_frame, traced
from tests.rows import default, forced, frame, split_of

NUM_TASKS = 3
LENGTHS = (1, 2, 3, 5, 9, 20, 1, 2, 14)


def make_steps(
    *,
    seed: int = 0,
    lengths: tuple[int, ...] = LENGTHS,
    num_actions: int = 6,
    own_windows: bool = False,
) -> Steps:
    """Every second episode is cut off; some call attributes are unknown."""
    random = np.random.default_rng(seed)
    num_steps = sum(lengths)
    known = random.random((4, num_steps)) < 0.8
    algorithm = np.where(known[0], random.integers(0, len(Algorithm), num_steps), -1)
    protocol = np.where(known[1], random.integers(0, len(Protocol), num_steps), -1)
    calls = CallColumns(
        size_bytes=random.integers(1, 1 << 30, num_steps),
        time_us=np.exp2(random.uniform(0, 20, num_steps)).astype(np.float32),
        algorithm=algorithm.astype(np.int8),
        protocol=protocol.astype(np.int8),
        num_channels=np.where(known[2], random.integers(1, 65, num_steps), 0).astype(np.int16),
        interference=np.where(known[3], random.random(num_steps), -1.0).astype(np.float32),
        skew_us=np.where(known[0], random.random(num_steps), -1.0).astype(np.float32),
    )
    context = np.zeros((NUM_TASKS, len(FEATURES)), dtype=np.float32)
    context[:, : HISTORY_SLICE.start] = random.random((NUM_TASKS, HISTORY_SLICE.start))
    mask = (random.random((NUM_TASKS, num_actions)) < 0.6).astype(np.float32)
    mask[:, 0] = 1.0
    windows = random.integers(-1, num_steps, (num_steps, WINDOW_LENGTH))
    # Right-aligned: whatever stands before padding is padding.
    windows = np.where(np.minimum.accumulate(windows[:, ::-1], axis=1)[:, ::-1] < 0, -1, windows)
    return Steps(
        context=context,
        mask=mask,
        group=np.arange(NUM_TASKS) % 2,
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        task=np.arange(len(lengths)) % NUM_TASKS,
        terminated=np.arange(len(lengths)) % 2 == 0,
        calls=calls,
        action=random.integers(0, num_actions, num_steps),
        reward=-random.random(num_steps).astype(np.float32),
        windows=windows if own_windows else None,
    )


PROFILES = ("default",)
SIZE = CONTEXT_COLUMN["log2_size"]
TIME, VALID = WINDOW_COLUMN["log2_time"], WINDOW_COLUMN["valid"]
SIZES = [1 << k for k in range(18, 26)]
CONFIGS = [("Ring", "LL"), ("Ring", "Simple"), ("Tree", "LL")]


def grid(runs: int = 3, **columns: Any) -> list[dict[str, Any]]:
    """Sizes of all splits x (default + 3 configs) x runs; every time is another one."""
    rows = []
    for size in SIZES:
        for run in range(runs):
            where = {"size_bytes": size, "run": f"cycle-{run}", "repeat": run, **columns}
            rows.append(default(0.0, **where))
            rows.extend(forced(*config, 0.0, **where) for config in CONFIGS)
    for number, row in enumerate(rows):
        row["time_us"] = 100.0 * 1.01**number
    return rows


@dataclass(frozen=True)
class Seen:
    """All that training sees of some rows."""

    window: np.ndarray[Any, Any]
    context: np.ndarray[Any, Any]
    mask: np.ndarray[Any, Any]
    action: np.ndarray[Any, Any]
    reward: np.ndarray[Any, Any]
    group: np.ndarray[Any, Any]
    is_cold: np.ndarray[Any, Any]
    counts: dict[str, int]

    def __len__(self) -> int:
        return len(self.action)


def build(rows: list[dict[str, Any]], seed: int = 0) -> Seen:
    made = frame(*rows)
    found = training_steps(made, Catalogue.from_frame(made), PROFILES, seed=seed)
    steps = found.steps
    assert steps.terminated.all()
    assert np.diff(steps.starts).tolist() == [1] * len(steps)
    every = np.arange(len(steps))
    observations, mask, task = steps.observe(every, every)
    return Seen(
        observations.window,
        observations.context,
        mask,
        np.asarray(steps.action),
        steps.reward,
        steps.group[task],
        every < found.counts["cold"],
        found.counts,
    )


def trained(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if split_of(row["size_bytes"]) is Split.TRAIN]


def window_times(window: np.ndarray[Any, Any]) -> set[float]:
    """Times in a window, to the digits that float32 logarithms keep."""
    return {round(float(row[TIME]), 3) for row in window if row[VALID]}


def tag(row: dict[str, Any]) -> float:
    return round(math.log2(row["time_us"]), 3)


def test_cold_rows_are_the_training_measurements_in_order_and_see_nothing() -> None:
    rows = grid()
    found = build(rows)
    cold = found.is_cold
    assert found.counts["cold"] == int(cold.sum()) == len(trained(rows))
    sizes = [round(2 ** float(context[SIZE])) for context in found.context[cold]]
    assert sizes == [row["size_bytes"] for row in trained(rows)]
    assert found.counts["cold"] >= found.counts["warm"] > 0
    assert not found.window[cold].any()
    assert not found.context[cold, HISTORY_SLICE].any()
    assert found.window[~cold][:, -1, VALID].all()
    band = training_noise(frame(*rows))["noise_band"].item()
    noise = found.context[:, CONTEXT_COLUMN["noise_band"]]
    np.testing.assert_allclose(noise, np.log1p(band), rtol=1e-6)
    # What was measured once has no window, and an interpolated reference is told.
    ends = [default(10.0, size_bytes=1 << 20), default(20.0, size_bytes=1482896)]
    alone = build([*ends, forced("Ring", None, 30.0, size_bytes=1246960)])
    assert (len(alone), alone.counts["warm"], alone.counts["reference_interpolated"]) == (3, 0, 1)


@pytest.mark.parametrize("seed", range(3))
def test_warm_window_holds_other_training_times_of_the_same_task_and_run_only(seed: int) -> None:
    """Nor those of another system, or placement of the buffer, in runs of the same name."""

    def task(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in ("system", "in_place", "size_bytes", "run"))

    rows = [*grid(), *grid(1, system="other"), *grid(1, in_place=True)]
    for number, row in enumerate(rows):
        row["time_us"] = 100.0 * 1.01**number
    members = trained(rows)
    by_task: dict[tuple[Any, ...], set[float]] = {}
    for row in members:
        by_task.setdefault(task(row), set()).add(tag(row))
    found = build(rows, seed)
    cold, warm = np.flatnonzero(found.is_cold), np.flatnonzero(~found.is_cold)
    assert len(warm) == len(cold) == len(members)  # each is in a group of four
    for index in warm:
        size, seen = (
            round(2 ** float(found.context[index, SIZE])),
            window_times(found.window[index]),
        )
        owners = [members[i] for i in np.flatnonzero(found.reward[cold] == found.reward[index])]
        of_size = [each for each in owners if each["size_bytes"] == size]
        assert seen
        assert any(seen <= by_task[task(each)] - {tag(each)} for each in of_size)


def test_no_held_out_time_is_anywhere() -> None:
    """Changing every held-out time changes nothing that is trained on."""
    rows = grid()
    other = [
        row if split_of(row["size_bytes"]) is Split.TRAIN else {**row, "time_us": 7.0}
        for row in rows
    ]
    first, second = build(rows), build(other)
    for name in ("window", "context", "mask", "action", "reward"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_mask_allows_what_the_system_ran_and_abstaining() -> None:
    rows = [*grid(1), forced("NVLS", None, 5.0, system="other"), default(9.0, system="other")]
    made = frame(*rows)
    catalogue = Catalogue.from_frame(made)
    found = build(rows)
    nvls = [c.key for c in catalogue.configs].index("NVLS/auto")
    elsewhere = found.mask[found.group == 0]
    assert set(np.unique(found.mask)) == {0.0, 1.0}
    assert found.mask[np.arange(len(found)), found.action].all()
    assert found.mask[:, 0].all()
    assert not elsewhere[:, nvls].any()
    assert found.mask[found.group == 1, nvls].all()
    assert found.mask[found.group == 1].sum(axis=1).tolist() == [2.0] * (found.group == 1).sum()


def test_every_row_is_accounted_for() -> None:
    rows = [
        *grid(),
        default(None),
        default(1.0, status="failed"),
        default(1.0, throttled=True, repeat=9),
        default(1.0, ecc_errors=2, repeat=9),
        default(3.0, interference_kind="congestion", interference_level=1.0),
        default(3.0, collective="AlltoAll"),
        default(3.0, size_bytes=0),
        forced(None, None, 3.0),
        forced("Ring", "LL", 3.0, system="nobody measured the default"),
    ]
    counts = build(rows).counts
    assert counts["rows"] == len(rows)
    assert (counts["unusable"], counts["interfered"], counts["not_tuned"]) == (4, 1, 1)
    assert (counts["without_action"], counts["without_reward"]) == (1, 1)
    assert counts["held_out"] == len(grid()) - len(trained(grid())) + 1
    parts = ("unusable", "interfered", "not_tuned", "held_out", "without_action", "without_reward")
    assert sum(counts[part] for part in parts) + counts["cold"] == counts["rows"]


@pytest.mark.parametrize(
    "row",
    [
        forced("Ring"),
        default(launch_profile="tuned"),
        default(size_bytes=1 << 21),
        default(interference_kind="congestion"),
    ],
)
def test_without_a_quiet_default_there_is_nothing_to_train_on(row: dict[str, Any]) -> None:
    with pytest.raises(NotEnoughData, match="measure NCCL's default"):
        build([row, {**row, "repeat": 1}])


LOUD: dict[str, Any] = {"interference_kind": "congestion", "interference_level": 1.0}
KNOWN, LEVEL = CONTEXT_COLUMN["interference_known"], CONTEXT_COLUMN["interference"]


def slowed(by: float = 1.5, **columns: Any) -> list[dict[str, Any]]:
    """The grid beside a disturbance; the longer a call took, the more it is slowed."""
    rows = grid(**{**LOUD, **columns})
    for number, row in enumerate(rows):
        row["time_us"] *= by * 1.003**number
    return rows


def default_us(rows: list[dict[str, Any]], like: dict[str, Any]) -> float:
    """NCCL's default of the same size and run."""
    (found,) = [
        row["time_us"]
        for row in rows
        if row["is_default"] and all(row[k] == like[k] for k in ("size_bytes", "run"))
    ]
    return float(found)


def test_quiet_rows_are_as_without_them() -> None:
    loud = slowed()
    alone, both = build(grid()), build([*loud, *grid()])
    cold, quiet = alone.counts["cold"], len(alone)
    np.testing.assert_array_equal(both.context[:cold], alone.context[:cold])
    np.testing.assert_array_equal(both.reward[:cold], alone.reward[:cold])
    warm = slice(both.counts["cold"], both.counts["cold"] + alone.counts["warm"])
    for name in ("window", "context", "mask", "action", "reward"):
        wanted = getattr(alone, name)[cold:quiet]
        np.testing.assert_array_equal(getattr(both, name)[warm], wanted)
    assert training_noise(frame(*grid(), *loud)).equals(training_noise(frame(*grid())))
    # Every held-out time beside a disturbance is another one, and nothing that is trained on.
    for row in loud:
        if split_of(row["size_bytes"]) is not Split.TRAIN:
            row["time_us"] = 7.0
    again = build([*loud, *grid()])
    for name in ("window", "context", "mask", "action", "reward"):
        np.testing.assert_array_equal(getattr(again, name), getattr(both, name))
    # However much ran beside, at least half is cold; of an unknown strength it belongs together.
    strengths = [row for level in (1.0, 2.0, None) for row in slowed(interference_level=level)]
    most = build([*grid(), *strengths])
    assert most.counts["cold"] >= most.counts["warm"] > 3 * len(trained(grid()))
    assert most.counts["interfered_used"] == 3 * len(trained(grid()))
    assert not most.window[most.is_cold].any()
    assert not most.context[most.is_cold][:, HISTORY_SLICE].any()


def test_they_are_warm_know_their_interference_and_see_what_ran_beside_the_same() -> None:
    quiet, loud = grid(), [*slowed(), *slowed(3.0, interference_level=2.0)]
    found = build([*quiet, *loud])
    used = trained(loud)
    assert found.counts["interfered"] == len(loud)
    assert (found.counts["interfered_used"], found.counts["interfered_without_level"]) == (
        len(used),
        0,
    )
    first = len(found) - len(used)
    assert not found.is_cold[first:].any()
    by_group: dict[tuple[Any, ...], set[float]] = {}
    for row in used:
        by_group.setdefault(group(row), set()).add(tag(row))
    levels = {tag(row): level_of(row, quiet, loud) for row in used}
    seen = 0
    for index in range(first, len(found)):
        times = window_times(found.window[index])
        (others,) = [members for members in by_group.values() if times <= members]
        assert 0 < len(times) < len(others)
        (level,) = {levels[each] for each in others}
        assert (found.context[index, KNOWN], found.context[index, LEVEL]) == (
            1.0,
            pytest.approx(level, rel=1e-5),
        )
        valid = found.window[index, :, WINDOW_COLUMN["valid"]] > 0.0
        told = found.window[index, valid, WINDOW_COLUMN["interference"]]
        np.testing.assert_allclose(told, level, rtol=1e-5)
        seen += level > 0.5
    assert seen > len(used) // 2


def group(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["size_bytes"], row["run"], row["interference_level"]


def level_of(row: dict[str, Any], quiet: list[dict[str, Any]], loud: list[dict[str, Any]]) -> float:
    same = [each for each in loud if each["interference_level"] == row["interference_level"]]
    return round(default_us(same, row) / default_us(quiet, row) - 1.0, 9)


def test_their_reward_is_over_the_default_beside_the_same_disturbance() -> None:
    quiet, loud = grid(), slowed()
    found = build([*quiet, *loud])
    used = trained(loud)
    wanted = sorted(-row["time_us"] / default_us(loud, row) for row in used)
    rewards = sorted(found.reward[-len(used) :].tolist())
    assert rewards == pytest.approx(wanted, rel=1e-5)
    assert sum(reward == -1.0 for reward in rewards) == sum(row["is_default"] for row in used)


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param(lambda row: row["is_default"], id="none beside it"),
        pytest.param(
            lambda row: row["is_default"] and row["run"] == "cycle-0", id="none in that run"
        ),
    ],
)
def test_without_the_default_beside_the_same_disturbance_they_are_counted(gone: Any) -> None:
    loud = slowed()
    left = [row for row in loud if not gone(row)]
    found = build([*grid(), *left])
    runs = {row["run"] for row in left if row["is_default"]}
    used = sum(row["run"] in runs for row in trained(left))
    assert found.counts["interfered_used"] == used < len(trained(left))
    assert found.counts["interfered_without_level"] == len(trained(left)) - used
    assert (len(runs) > 0) == (used > 0)


def test_a_level_is_what_a_trigger_that_is_sure_tells() -> None:
    """60 quiet calls and 60 of the same stream that take 1.6 times as long."""
    trigger = TriggerModule()
    state = trigger.new_state(1)
    log_size = np.log(1 << 20, dtype=np.float32)
    for number in range(120):
        time_us = 100.0 * (1.6 if number >= 60 else 1.0)
        facts = torch.tensor([math.log(time_us)]), torch.tensor([log_size])
        with torch.no_grad():
            state, _, told = trigger(state, *facts)
    loud = [default(160.0, **LOUD), forced("Ring", "LL", 150.0, **LOUD)]
    found = with_interfered_reference(frame(*loud), frame(default(100.0), *loud))
    assert found["interference"].to_list() == pytest.approx([0.6, 0.6])
    assert float(told) == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize(
    ("quiet", "loud_us", "level"),
    [
        ({"time_us": 100.0}, 80.0, 0.0),
        # The bounds are the Trigger's.
        ({"time_us": 1.0}, 9e9, math.expm1(8.0)),
        # A quiet default that was not measured at the size gives none.
        ({"size_bytes": 1 << 21}, 160.0, None),
    ],
)
def test_levels_are_bounded(quiet: dict[str, Any], loud_us: float, level: float | None) -> None:
    rows = frame(default(loud_us, **LOUD), {**default(100.0), **quiet}, default(size_bytes=1 << 19))
    found = with_interfered_reference(interfered(rows), rows)
    told = found.select("interference", "reference_us").row(0)
    assert told == ((None, None) if level is None else pytest.approx((level, loud_us)))


def test_rows_beside_other_communicators_are_disturbed_cells_of_their_own_and_no_noise() -> None:
    at_once: dict[str, Any] = {"num_comms": 4, "comm_split": "DIV 8"}
    rows = frame(
        default(100.0),
        default(150.0, **at_once),
        default(300.0, num_comms=8, comm_split="DIV 8"),
        forced("Ring", time_us=120.0, **at_once),
    )
    assert rows["trial"].n_unique() == 4
    assert rows["trial"][0] == frame(default(num_comms=None, comm_split=None))["trial"][0]
    assert quiet(rows)["time_us"].to_list() == [100.0]
    assert noise_bands(quiet(rows)).is_empty()
    # Their reference is the default of as many at once, and they are none of a lone row.
    forced_rows = rows.filter(~rows["is_default"])
    found = with_interfered_reference(forced_rows, rows)
    assert found.select("reference_us", "interference").row(0) == pytest.approx((150.0, 0.5))
    alone = frame(forced("Ring", time_us=90.0))
    assert with_reference(alone, interfered(rows))["reference_us"].to_list() == [None]


#: A training bin, and a test bin.
TRAINED, TESTED = 1 << 20, 1 << 23
SWEEP = frame(
    *(default(100.0, size_bytes=size) for size in (TRAINED, TESTED)),
    *(forced("Ring", "LL", 80.0, size_bytes=size) for size in (TRAINED, TESTED)),
    forced("Tree", "LL", 90.0, size_bytes=TRAINED),
    forced("Ring", "Simple", 95.0, channels=4, size_bytes=TRAINED),
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
            call(3, size_bytes=TESTED),
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
        calls_frame(call(0, size_bytes=TESTED)), SWEEP, CATALOGUE, ["default"], NOISE
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
