"""How probes are played and counted, how sweeps are read, and how rivals choose."""

import math

import numpy as np
import pytest
from judge_worlds import Table, judge_table, shipped_table, small_sweep
from learning_belief import LOOKS, NEVER, judged, play, probes_within, ratio, with_interval
from learning_rivals import NOISE, WAYS, Probes, grid_of, interpolated, nearest
from learning_sweeps import cells, choices

from dynamiccl.nccl import Collective

SIZES = (10.0, 11.0, 12.0, 13.0, 14.0)
NEAR = np.ones((5, 2), dtype=np.bool_)


@pytest.fixture(scope="module")
def table() -> Table:
    return judge_table("perturbed gb10", 7)


def test_a_table_is_judged_by_true_times(table: Table) -> None:
    log_time = table.log_time_us
    own = judged(log_time, np.zeros(len(log_time), dtype=np.int64))
    assert own["regret"] > 0.0
    assert own["acts"] == own["worse"] == own["gain"] == 0
    best = judged(log_time, log_time.argmin(axis=1))
    assert best["regret"] == 0.0
    assert best["gain"] == pytest.approx(own["possible"])
    assert judged(log_time, log_time.argmax(axis=1))["worse"] > len(log_time) // 2


def test_costs_are_those_of_the_table(table: Table) -> None:
    grid = grid_of(table)
    for action in range(1, len(table.configs)):
        cell = grid.cells.index((table.configs[action].algorithm, table.configs[action].protocol))
        costs = [row[cell] for row in grid.log_costs]
        assert costs == pytest.approx(table.log_cost_us[:, action])


@pytest.mark.parametrize("way", WAYS)
def test_every_way_probes_configs_and_the_default_beside_them(table: Table, way: str) -> None:
    probes = Probes(table, np.random.default_rng(0))
    player = WAYS[way](probes)
    for _ in range(6):
        place = player.pick()
        assert probes.can.flat[place]
        told = probes.probe(place)
        size, action = divmod(place, probes.can.shape[1])
        true = table.log_time_us[size, action] - table.log_time_us[size, 0]
        assert told == pytest.approx(true, abs=8 * NOISE)
        player.tell(told)
    places, _, variance = probes.rows()
    assert set(places // probes.can.shape[1] * probes.can.shape[1]) <= set(places)
    assert NOISE**2 / variance.min() == pytest.approx(round(NOISE**2 / variance.min()))
    assert 7 <= probes.count <= 12


def test_probes_help_and_without_any_nothing_is_changed(table: Table) -> None:
    rows = [row for row in play(table, 0, "worth", (0, 40)) if row["choose"] == "belief"]
    assert rows[0]["acts"] == 0
    assert rows[1]["regret"] < 0.5 * rows[0]["regret"]


def test_probes_are_counted_from_where_the_regret_stays_low() -> None:
    def curve(low_from: int, *, and_at: int = -1) -> list[dict[str, float]]:
        low = [look >= low_from or look == and_at for look in LOOKS]
        return [{"look": k, "regret": 0.01 if v else 0.5} for k, v in zip(LOOKS, low, strict=True)]

    assert probes_within(curve(20)) == 20.0
    assert probes_within(curve(20, and_at=5)) == 20.0
    assert probes_within(curve(20) + curve(60)) == 60.0
    assert probes_within(curve(999)) == NEVER


def test_intervals_are_over_worlds() -> None:
    rows = [{"worse": i % 2, "acts": 2} for i in range(100)]
    found = with_interval("share", rows, ratio("worse", "acts"))
    assert found["share"] == 0.25
    half = 1.96 * 0.25 / math.sqrt(100)
    assert found["share_lo"] == pytest.approx(0.25 - half, abs=0.02)
    assert found["share_hi"] == pytest.approx(0.25 + half, abs=0.02)
    assert ratio("worse", "acts")([{"worse": 0, "acts": 0}]) == 0.0


def test_interpolation_acts_as_far_as_left_out_octaves_agree() -> None:
    gain = np.array([0.3, 0.4, np.nan, 0.6, 0.7])
    smooth = np.column_stack([np.zeros(5), -gain])
    assert interpolated(NEAR, 2.0, smooth, SIZES).tolist() == [1] * 5
    assert not interpolated(np.zeros_like(NEAR), 2.0, smooth, SIZES).any()
    assert not interpolated(NEAR, math.inf, smooth, SIZES).any()
    rough = np.column_stack([np.zeros(5), [-0.3, 0.4, np.nan, -0.6, 0.3]])
    assert interpolated(NEAR, 2.0, rough, SIZES).tolist() == [1, 0, 0, 1, 0]


def test_the_nearest_measured_size_tells_what_was_fastest_there() -> None:
    log_us = np.full((5, 2), np.nan)
    assert not nearest(log_us, SIZES).any()
    log_us[1], log_us[4] = [0.0, -1.0], [0.0, 1.0]
    assert nearest(log_us, SIZES).tolist() == [1, 1, 1, 0, 0]


def test_a_sweep_is_read_with_its_noise_and_chosen_from() -> None:
    table = shipped_table("gb10", Collective.AllReduce)
    sweep = small_sweep(table, np.random.default_rng(0), sizes=41, configs=len(table.configs))
    grid, can = grid_of(table), np.isfinite(table.log_time_us)
    places, log_us, variance = cells(grid, sweep.log_times_us)
    assert len(places) == can.sum()
    off = log_us - table.log_time_us.flat[places]
    assert np.sqrt(np.median(variance)) == pytest.approx(off.std(), rel=0.5)
    for name, chosen in choices(grid, sweep.log_times_us, can).items():
        scores = judged(table.log_time_us, chosen)
        assert scores["gain"] > 0.8 * scores["possible"], name
