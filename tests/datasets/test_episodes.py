"""Every time in these data sets is unique, so that a time found in a window says whose it is."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.features import CONTEXT_COLUMN, HISTORY_SLICE
from dynamiccl.datasets.history import WINDOW_COLUMN
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.steps import training_noise, training_steps
from dynamiccl.errors import NotEnoughData
from tests.rows import default, forced, frame, split_of

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
