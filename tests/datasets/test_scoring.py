from typing import Any

import numpy as np
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import TaskGrid, rows_left_out, task_grid
from dynamiccl.datasets.splits import Split
from tests.rows import default, forced, frame

NO_DEFAULT = "NCCL's default was not measured"
FEW = "fewer than 2 forced configs measured"


def score(*rows: dict[str, Any], splits: tuple[Split, ...] = tuple(Split)) -> TaskGrid:
    made = frame(*rows)
    return task_grid(made, Catalogue.from_frame(made), splits)


def task(
    default_us: float = 10.0, ring_us: float = 8.0, tree_us: float = 20.0, **columns: Any
) -> list[dict[str, Any]]:
    """In the catalogue ABSTAIN, Tree/LL, Ring/LL."""
    return [
        default(default_us, **columns),
        forced("Ring", "LL", ring_us, **columns),
        forced("Tree", "LL", tree_us, **columns),
    ]


def test_samples_are_the_repeats_behind_a_median() -> None:
    rows = [r for i, t in enumerate((10.0, 11.0, 90.0)) for r in task(t, run=f"c{i}", repeat=i)]
    grid = score(*rows, {**rows[0], "time_us": 99.0}, *task(77.0, size_bytes=64))
    assert grid.tasks["size_bytes"].to_list() == [64, 1 << 20]
    assert grid.default_us.tolist() == [77.0, 11.0]
    np.testing.assert_array_equal(score(*reversed(rows)).times_us, grid.times_us[1:])
    assert grid.repeats.tolist() == [[1] * 3, [3] * 3]
    assert sorted(grid.samples) == [(t, a) for t in range(2) for a in range(3)]
    assert sorted(grid.samples[1, 0].tolist()) == [10.0, 11.0, 90.0]
    grid = score(*task(), forced("NVLS", None, 5.0, size_bytes=64))
    assert grid.mask.tolist() == [[True, True, True, False]]
    with pytest.raises(ValueError, match="not measured"):
        grid.chosen_us(np.array([3]))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (task()[1:], NO_DEFAULT),
        (task()[:2], FEW),
        ([default()], FEW),
        ([*task()[:2], forced("Tree", "LL", None)], FEW),
        ([*task()[:2], forced("Ring", "LL", 8.1, repeat=1)], FEW),
        ([default(1.0, status="failed"), *task()[1:]], NO_DEFAULT),
        ([default(1.0, throttled=True), *task()[1:]], NO_DEFAULT),
        # The choice of another tuner is neither the default nor a config.
        ([forced(None, None, 1.0), *task()[1:]], NO_DEFAULT),
    ],
)
def test_unscored_tasks_have_a_reason(rows: list[dict[str, Any]], reason: str) -> None:
    grid = score(*rows)
    assert (grid.tasks.height, grid.times_us.shape[0]) == (0, 0)
    assert grid.unscored["unscored"].to_list() == [reason]


@pytest.mark.parametrize(
    "more",
    [
        [forced(None, None, 1.0)],
        task(1.0, 1.0, 1.0, interference_kind="congestion", interference_level=1.0),
        task(1.0, 1.0, 1.0, throttled=True, repeat=1),
        task(1.0, 1.0, 1.0, ecc_errors=3, repeat=1),
        # Of a placement without the default it is not known how far it is off.
        task(in_place=True)[1:],
    ],
)
def test_rows_that_say_nothing_of_the_task_change_nothing(more: list[dict[str, Any]]) -> None:
    grid = score(*task(), *more)
    assert grid.times_us.tolist() == [[10.0, 20.0, 8.0]]
    assert grid.unscored.height == 0


def test_rows_in_no_task_are_told_by_the_first_reason() -> None:
    out: list[tuple[str, dict[str, Any]]] = [
        ("beside compute", {"interference_kind": "compute", "collective": "AlltoAll"}),
        ("beside other communicators", {"num_comms": 4}),
        ("without a time of healthy GPUs", {"throttled": True, "mig": True}),
        ("of collectives that no tuner is asked about", {"collective": "AlltoAll"}),
        ("of shared nodes, MIG instances or the plugin's default", {"exclusive_node": False}),
        ("of a size without a bin", {"size_bytes": 0}),
    ]
    rows = [
        row for number, (_, columns) in enumerate(out) for row in task(repeat=number, **columns)
    ]
    rows += [*task(in_place=True)[1:], forced(None, None, 1.0), default(status="failed")]
    found = rows_left_out(frame(*task(), *rows))
    assert sum(found.values()) == len(rows)
    rest = {"of a placement without NCCL's default": 2, "of a config that is not known": 1}
    assert found == {**dict.fromkeys((reason for reason, _ in out), 3), **rest} | {out[2][0]: 4}
    assert rows_left_out(frame(*task())) == {}


def test_only_the_asked_splits_are_scored() -> None:
    rows = [r for k in range(20, 28) for r in task(size_bytes=1 << k)]
    expected = {Split.TRAIN: (20, 22, 24, 26), Split.VALIDATION: (21, 25), Split.TEST: (23, 27)}
    for split, powers in expected.items():
        sizes = score(*rows, splits=(split,)).tasks["size_bytes"].sort().to_list()
        assert sizes == [1 << power for power in powers]
    empty = score(*task(), splits=(Split.TEST,))
    assert empty.regret(np.zeros(0, np.int64)).tolist() == []
    assert empty.tasks.height == empty.unscored.height == 0


def test_a_config_without_one_placement_is_not_judged_by_what_placements_differ_by() -> None:
    """In place takes twice as long: Ring lacks it in one run, Tree in all."""
    rows = []
    for run in ("c0", "c1", "c2"):
        rows += task(run=run)
        twice = task(20.0, 16.0, 40.0, run=run, in_place=True)
        rows += twice[:1] if run == "c2" else twice[:2]
    grid = score(*rows)
    assert grid.times_us[0] / grid.times_us[0, 0] == pytest.approx([1.0, 2.0, 0.8])
    assert grid.repeats.tolist() == [[3, 3, 3]]
    # Two measurements of one task: the geometric mean.
    both = score(*task(), *task(40.0, 8.0, 20.0, in_place=True))
    assert both.times_us == pytest.approx(np.array([[20.0, 20.0, 8.0]]))
    assert both.repeats.tolist() == [[1, 1, 1]]
