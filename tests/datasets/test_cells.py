"""Configs, cells, their noise, which rows count, what is scored, and what it is compared with."""

import json
from typing import Any

import numpy as np
import polars as pl
import pytest

from dynamiccl.datasets import cells
from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import TaskGrid, rows_left_out, task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.steps import reward, with_reference
from dynamiccl.datasets.store import config_of
from dynamiccl.nccl import ABSTAIN
from tests.rows import default, forced, frame

WELL: tuple[dict[str, Any], ...] = ({}, {"throttled": False, "ecc_errors": 0})
UNWELL: tuple[dict[str, Any], ...] = (
    {"throttled": True},
    {"ecc_errors": 2},
    {"throttled": True, "ecc_errors": 1},
)


def repeats(*times: float, **columns: Any) -> list[dict[str, Any]]:
    return [forced("Ring", "LL", t, repeat=i, **columns) for i, t in enumerate(times)]


def ring(time_us: float, **columns: Any) -> dict[str, Any]:
    return {**forced("Ring", "LL", time_us), **columns}


@pytest.mark.parametrize(
    ("rows", "time_us", "count"),
    [
        (repeats(1.0, 100.0, 3.0, 4.0), 3.5, 4),
        # One measurement that was printed twice counts once.
        ([*repeats(1.0, 5.0), ring(9.0, repeat=1)], 3.0, 2),
        ([ring(1.0, run="a"), ring(3.0, run="b")], 2.0, 2),
        ([ring(1.0, sweep="a"), ring(3.0, sweep="b")], 2.0, 2),
        ([ring(1.0), ring(3.0, driver_version="1", actual_algorithm="Tree", repeat=1)], 2.0, 2),
    ],
)
def test_time_is_a_median(rows: list[dict[str, Any]], time_us: float, count: int) -> None:
    [cell] = cells.cell_times(frame(*rows)).to_dicts()
    assert (cell["time_us"], cell["repeats"]) == (time_us, count)


def test_calls_of_several_communicators_at_once_are_another_cell() -> None:
    beside = ring(2.0, num_comms=4, comm_split="DIV 8")
    assert cells.cell_times(frame(ring(1.0), beside)).height == 2


def test_rows_that_failed_or_whose_gpus_were_unwell_are_not_usable() -> None:
    statuses = ("failed", "infeasible", "timed_out", "wrong_values")
    failed = [default(None), default(0.0), *(default(1.0, status=each) for each in statuses)]
    assert cells.usable(frame(*failed)).is_empty()
    assert cells.cell_times(frame(*failed)).is_empty()
    assert cells.noise_bands(frame(*failed)).is_empty()
    rows = [default(float(i), **flags) for i, flags in enumerate((*WELL, *UNWELL), start=1)]
    assert cells.usable(frame(*rows))["time_us"].to_list() == [1.0, 2.0]
    assert [cells.is_unwell(row) for row in rows] == [False] * 2 + [True] * 3
    # One without a time was not left out for it.
    rows.append(default(None, throttled=True))
    assert cells.left_out(frame(*rows)) == {"throttled": 2, "ecc_errors": 2}


def test_noise_band_holds_nine_cells_of_ten_and_is_unknown_without_repeats() -> None:
    rows = [
        row
        for cell in range(11)
        for row in repeats(100.0, 100.0 + cell, size_bytes=1 << (10 + cell))
    ]
    [band] = cells.noise_bands(frame(*rows, default(1.0, system="once"))).to_dicts()
    assert band["system"] == "box"
    assert band["noise_band"] == pytest.approx(0.09)
    assert cells.pair_spread([5.0]) is cells.pair_spread([]) is None
    # Pairs 1.1, 1.2, 1.2/1.1: their median is 1.1.
    assert cells.pair_spread([120.0, 100.0, 110.0]) == pytest.approx(0.1)
    # Of very many, that of their distribution: the median of |x - y| of two normal draws is
    # 0.6745 * sqrt(2) standard deviations.
    many = np.exp(np.random.default_rng(0).normal(0.0, 0.02, size=20_000))
    assert cells.pair_spread(many.tolist()) == pytest.approx(0.02 * 0.6745 * 2**0.5, rel=0.03)


def inside(time_us: float | None, **columns: Any) -> dict[str, Any]:
    """NCCL's default as measured under our plugin."""
    return default(time_us, default_scope="profile", **columns)


def times(*rows: dict[str, Any]) -> list[float]:
    found: list[float] = cells.comparable(frame(*rows))["time_us"].to_list()
    return found


@pytest.mark.parametrize("make", [default, ring])
def test_shared_nodes_and_mig_instances_are_not_compared(make: Any) -> None:
    flags: tuple[dict[str, bool], ...] = (
        {},
        {"exclusive_node": True, "mig": False},
        {"exclusive_node": False},
        {"mig": True},
        {"exclusive_node": False, "mig": True},
    )
    assert times(*(make(float(i), **each) for i, each in enumerate(flags))) == [0.0, 1.0]


def test_default_under_our_plugin_gives_way_to_the_untouched_one() -> None:
    assert times(inside(1.0), default(2.0), ring(3.0)) == [2.0, 3.0]
    assert times(inside(1.0), ring(3.0)) == [1.0, 3.0]
    # Forced configs of any scope stay.
    assert times(default(2.0), ring(3.0, default_scope="profile")) == [2.0, 3.0]
    # Unknown conditions are equal to each other.
    unknown = {"nccl_version": None, "num_nodes": None, "in_place": None}
    assert times(inside(1.0, **unknown), default(2.0, **unknown)) == [2.0]


@pytest.mark.parametrize(
    "out",
    [
        *({"time_us": None, "status": "failed"}, {"status": "wrong_values"}, {"time_us": 0.0}),
        *UNWELL,
        *({"exclusive_node": False}, {"mig": True}),
        {"is_default": False, "requested_algorithm": "Ring"},
        *({"size_bytes": 64}, {"launch_profile": "net"}, {"in_place": True}),
        *({"datatype": "half"}, {"system": "other"}),
        {"interference_kind": "cpu", "interference_level": 0.5},
    ],
)
def test_only_a_usable_untouched_default_displaces_the_other(out: dict[str, Any]) -> None:
    assert 1.0 in times(inside(1.0), {**default(2.0), **out})


def test_both_defaults_are_measurements_and_their_difference_is_no_noise() -> None:
    rows = [inside(10.0), inside(10.5, repeat=1), default(20.0), default(22.0, repeat=1)]
    for ordered in (rows, rows[::-1]):
        assert sorted(cells.independent(frame(*ordered))["time_us"]) == [10.0, 10.5, 20.0, 22.0]
        [band] = cells.noise_bands(frame(*ordered)).to_dicts()
        assert band["noise_band"] == pytest.approx(0.1)


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


KB64 = 1 << 16
UNKNOWN = ("nccl_version", "gpu", "num_nodes", "in_place")


def reference(row: dict[str, object], *training: dict[str, object]) -> tuple[float | None, bool]:
    [found] = with_reference(frame(row), frame(*training)).to_dicts()
    return found["reference_us"], found["reference_measured"]


@pytest.mark.parametrize(
    ("row", "training"),
    [
        # The same run comes before others, and another sweep's run of one name is another run.
        ({"run": "a"}, [("a", 10.0), ("a", 30.0), ("b", 99.0), ("c", 99.0)]),
        ({"run": "z"}, [("a", 10.0), ("b", 20.0), ("c", 90.0)]),
        ({"sweep": "b"}, [("sweep a", 10.0), ("sweep b", 20.0), ("sweep c", 40.0)]),
        ({"sweep": "z"}, [("sweep a", 10.0), ("sweep b", 20.0), ("sweep c", 40.0)]),
    ],
)
def test_the_same_run_comes_first(row: dict[str, Any], training: list[tuple[str, float]]) -> None:
    rows = [
        default(us, repeat=i, **{"sweep" if "sweep" in name else "run": name[-1]})
        for i, (name, us) in enumerate(training)
    ]
    assert reference(forced("Ring", **row), *rows) == (20.0, True)


@pytest.mark.parametrize(
    "change",
    [
        {"throttled": True},
        {"in_place": True},
        {"num_nodes": 2},
        {"size_bytes": 1 << 30},
    ],
)
def test_default_of_other_conditions_is_no_reference(change: dict[str, object]) -> None:
    assert reference(forced("Ring"), default(10.0, **change)) == (None, False)


@pytest.mark.parametrize(
    ("row", "beside"),
    [
        # The quiet default, and that of the untouched environment, are those compared with.
        ({"interference_kind": "congestion", "interference_level": 1.0}, {}),
        ({"launch_profile": "tuned"}, {}),
        # Unknown conditions are equal to each other.
        (dict.fromkeys(UNKNOWN), dict.fromkeys(UNKNOWN)),
    ],
)
def test_what_a_row_is_compared_with(row: dict[str, Any], beside: dict[str, Any]) -> None:
    own = default(7.0, launch_profile="tuned")
    assert reference(forced("Ring", **row), default(10.0, **beside), own) == (10.0, True)


def test_default_under_our_plugin_is_no_reference() -> None:
    rows = [default(10.0), *(default(14.0, repeat=i, default_scope="profile") for i in (1, 2))]
    assert (
        reference(forced("Ring"), *rows) == reference(forced("Ring"), *rows[::-1]) == (10.0, True)
    )
    assert reference(forced("Ring"), *rows[1:]) == (None, False)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({KB64 // 2: 1.0, KB64 * 2: 4.0}, 2.0),
        ({KB64 // 2: 1000.0, KB64 - 100: 8.0, KB64 + 100: 8.0, KB64 * 2: 0.001}, 8.0),
        ({KB64 // 2 - 1: 1.0, KB64 * 2: 4.0}, None),
        ({KB64 // 2: 1.0, KB64 * 2 + 1: 4.0}, None),
        ({KB64 * 2: 1.0}, None),
        ({KB64 // 2: 1.0}, None),
    ],
)
def test_sizes_within_an_octave_are_near_enough(
    sizes: dict[int, float], found: float | None
) -> None:
    training = [default(time, size_bytes=size) for size, time in sizes.items()]
    told, measured = reference(forced("Ring", size_bytes=KB64), *training)
    assert not measured
    assert told == (None if found is None else pytest.approx(found))
    for power in (10, 19, 28, 29, 35):  # an octave is one at every size
        ends = [default(1.0, size_bytes=1 << power - 1), default(4.0, size_bytes=1 << power + 1)]
        assert reference(forced("Ring", size_bytes=1 << power), *ends)[0] == pytest.approx(2.0)


def test_rows_and_their_order_stay_and_references_are_of_training_rows_only() -> None:
    rows = frame(default(50.0), *(forced("Ring", None, i + 1.0, repeat=i) for i in range(20)))
    training = frame(default(10.0, run="other"), default(20.0, size_bytes=64))
    found = with_reference(rows, training)
    assert found["repeat"].to_list() == [0, *range(20)]
    assert set(found["reference_us"]) == {10.0}
    assert set(found.columns) - set(rows.columns) == {"reference_us", "reference_measured"}
    rewards = found.select(reward(pl.col("time_us"), pl.col("reference_us"))).to_series()
    assert rewards.to_list()[:3] == [-5.0, -0.1, -0.2]


def test_auto_is_never_merged_with_what_it_resolved_to_and_the_default_is_action_0() -> None:
    rows = frame(
        forced("Ring", None, actual_algorithm="Ring", actual_protocol="LL128"),
        forced("Ring", "LL128"),
        forced(None, "LL128"),
        forced("Ring", "LL128", channels=8, requested_chunk_bytes=4096),
        default(actual_algorithm="Ring", actual_protocol="LL128"),
        forced(None),  # a policy of the source's chose: neither NCCL's default nor a config
    )
    catalogue = Catalogue.from_frame(rows)
    assert catalogue.configs[0] == ABSTAIN
    rest = ["auto/LL128", "Ring/auto", "Ring/LL128", "Ring/LL128/8ch/4096B"]
    assert [config.key for config in catalogue.configs[1:]] == rest
    assert Catalogue.from_frame(rows.reverse()) == catalogue
    told = json.loads(json.dumps(catalogue.to_json()))
    assert tuple(map(config_of, told)) == catalogue.configs
    *asked, own, unknown = catalogue.actions(rows).to_list()
    assert sorted(asked) == [1, 2, 3, 4]
    assert (own, unknown) == (ABSTAIN_ACTION, None)
