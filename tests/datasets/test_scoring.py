from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import TaskGrid, rows_left_out, task_grid
from dynamiccl.datasets.splits import Split
from tests.rows import default, forced, frame

TEST_SIZE = 1 << 23
ALL = tuple(Split)


def score(*rows: dict[str, Any], splits: tuple[Split, ...] = ALL) -> TaskGrid:
    made = frame(*rows)
    return task_grid(made, Catalogue.from_frame(made), splits)


def task(
    default_us: float = 10.0, ring_us: float = 8.0, tree_us: float = 20.0, **columns: Any
) -> list[dict[str, Any]]:
    return [
        default(default_us, **columns),
        forced("Ring", "LL", ring_us, **columns),
        forced("Tree", "LL", tree_us, **columns),
    ]


def test_regret_is_time_over_the_best_measured() -> None:
    grid = score(*task())  # catalogue: ABSTAIN, Tree/LL, Ring/LL
    chosen = [grid.regret(np.array([action]))[0] for action in range(3)]
    assert chosen == pytest.approx([0.25, 1.5, 0.0])
    assert grid.oracle_us.tolist() == [8.0]
    assert grid.default_us.tolist() == [10.0]


@given(
    times=st.lists(st.tuples(*[st.floats(1.0, 1e6)] * 3), min_size=1, max_size=5),
)
@settings(deadline=None, max_examples=30)
def test_oracle_has_no_regret_and_no_choice_has_less(
    times: list[tuple[float, float, float]],
) -> None:
    rows = [r for i, t in enumerate(times) for r in task(*t, size_bytes=1 << (10 + i))]
    grid = score(*rows)
    assert len(grid.tasks) == len(times)
    best = np.nanargmin(grid.times_us, axis=1)
    assert grid.regret(best).tolist() == [0.0] * len(times)
    for action in range(3):
        assert (grid.regret(np.full(len(times), action)) >= 0.0).all()
    np.testing.assert_array_equal(grid.chosen_us(np.zeros(len(times), np.int64)), grid.default_us)


def test_times_are_medians_of_repeats() -> None:
    rows = [r for i, t in enumerate((10.0, 11.0, 90.0)) for r in task(t, run=f"c{i}", repeat=i)]
    grid = score(*rows)
    assert grid.default_us.tolist() == [11.0]
    assert grid.repeats.tolist() == [[3, 3, 3]]


def test_unmeasured_action_cannot_be_chosen() -> None:
    grid = score(*task(), forced("NVLS", None, 5.0, size_bytes=64))
    assert grid.mask.tolist() == [[True, True, True, False]]
    with pytest.raises(ValueError, match="not measured"):
        grid.chosen_us(np.array([3]))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (task()[1:], "NCCL's default was not measured"),
        (task()[:2], "fewer than 2 forced configs measured"),
        ([default()], "fewer than 2 forced configs measured"),
        ([*task()[:2], forced("Tree", "LL", None)], "fewer than 2 forced configs measured"),
        (
            [*task()[:2], forced("Ring", "LL", 8.1, repeat=1)],
            "fewer than 2 forced configs measured",
        ),
        ([default(1.0, status="failed"), *task()[1:]], "NCCL's default was not measured"),
    ],
)
def test_task_that_cannot_be_scored_is_listed_with_the_reason(
    rows: list[dict[str, Any]], reason: str
) -> None:
    grid = score(*rows)
    assert (grid.tasks.height, grid.times_us.shape[0]) == (0, 0)
    assert grid.unscored["unscored"].to_list() == [reason]


def test_plugin_of_the_source_is_neither_default_nor_config() -> None:
    """Rows that request nothing and are not the default: in the shipped sample there are 20."""
    unknown = forced(None, None, 1.0)
    assert score(*task(), unknown).default_us.tolist() == [10.0]
    assert score(unknown, *task()).oracle_us.tolist() == [8.0]
    assert score(unknown, *task()[1:]).unscored["unscored"].to_list() == [
        "NCCL's default was not measured"
    ]


def test_interfered_tasks_are_left_out() -> None:
    loud = {"interference_kind": "congestion", "interference_level": 1.0}
    grid = score(*task(), *task(1.0, 1.0, 1.0, **loud))
    assert grid.default_us.tolist() == [10.0]
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


@pytest.mark.parametrize("flags", [{"throttled": True}, {"ecc_errors": 3}])
def test_rows_of_unwell_gpus_are_in_no_verdict(flags: dict[str, object]) -> None:
    hot = [{**row, **flags, "repeat": 1} for row in task(1.0, 1.0, 1.0)]
    grid = score(*task(), *hot)
    assert (grid.default_us.tolist(), grid.oracle_us.tolist()) == ([10.0], [8.0])
    # Without another measurement the default was not measured.
    assert score(*hot[:1], *task()[1:]).unscored["unscored"].to_list() == [
        "NCCL's default was not measured"
    ]


def test_only_the_asked_splits_are_scored() -> None:
    rows = [r for k in range(20, 28) for r in task(size_bytes=1 << k)]
    sizes = {
        split: score(*rows, splits=(split,)).tasks["size_bytes"].sort().to_list() for split in ALL
    }
    assert sizes == {
        Split.TRAIN: [1 << k for k in (20, 22, 24, 26)],
        Split.VALIDATION: [1 << k for k in (21, 25)],
        Split.TEST: [1 << k for k in (23, 27)],
    }


@pytest.mark.parametrize(
    "change",
    [{"nccl_version": "2.28.9"}, {"launch_profile": "tuned"}, {"num_nodes": 2}],
)
def test_conditions_make_tasks_of_their_own(change: dict[str, Any]) -> None:
    grid = score(*task(), *task(5.0, **change))
    assert sorted(grid.default_us.tolist()) == [5.0, 10.0]


def test_in_place_and_out_of_place_are_two_measurements_of_one_task() -> None:
    grid = score(*task(), *task(40.0, 8.0, 20.0, in_place=True))
    assert grid.times_us == pytest.approx(np.array([[20.0, 20.0, 8.0]]))
    assert grid.repeats.tolist() == [[1, 1, 1]]


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
    # Of a placement without the default it is not known how far it is off.
    lone = score(*task(), *task(in_place=True)[1:])
    assert lone.times_us.tolist() == [[10.0, 20.0, 8.0]]


def test_unknown_conditions_are_one_task_and_simulated_ones_are_marked() -> None:
    unknown: dict[str, Any] = dict.fromkeys(("nccl_version", "gpu", "num_nodes", "datatype"))
    grid = score(*task(**unknown), *task(source="simulator", size_bytes=TEST_SIZE))
    assert grid.times_us.tolist() == [[10.0, 20.0, 8.0]] * 2
    marks = dict(grid.tasks.select("size_bytes", "simulated").iter_rows())
    assert marks == {1 << 20: False, TEST_SIZE: True}


def test_order_of_rows_changes_nothing() -> None:
    rows = [r for k in (20, 21, 30) for r in task(float(k), size_bytes=1 << k)]
    forward, backward = score(*rows), score(*reversed(rows))
    np.testing.assert_array_equal(forward.times_us, backward.times_us)
    assert forward.tasks["size_bytes"].to_list() == backward.tasks["size_bytes"].to_list()


def test_samples_are_the_repeats_behind_a_time() -> None:
    rows = [r for i in range(3) for r in task(10.0 + i, run=f"c{i}", repeat=i)]
    twice = {**rows[0], "time_us": 99.0}
    made = frame(*rows, twice, *task(77.0, size_bytes=64))
    catalogue = Catalogue.from_frame(made)
    grid = task_grid(made, catalogue, ALL)
    values = grid.samples
    assert sorted(values) == [(t, a) for t in range(2) for a in range(3)]
    big = grid.tasks["size_bytes"].to_list().index(1 << 20)
    assert sorted(values[big, 0].tolist()) == [10.0, 11.0, 12.0]
    for (number, action), times in values.items():
        assert np.median(times) == grid.times_us[number, action]
        assert len(times) == grid.repeats[number, action]


def test_nothing_to_score_is_an_empty_grid() -> None:
    grid = score(*task(size_bytes=1 << 20), splits=(Split.TEST,))
    assert grid.regret(np.zeros(0, np.int64)).tolist() == []
    assert grid.tasks.height == grid.unscored.height == 0
