"""How probes are played and counted, how sweeps are read, and how rivals choose."""

import math

import numpy as np
import pytest
from judge_worlds import Table, judge_table
from learning_belief import LOOKS, NEVER, interpolated, judged, play, probes_within

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


def test_interpolation_acts_as_far_as_left_out_octaves_agree() -> None:
    gain = np.array([0.3, 0.4, np.nan, 0.6, 0.7])
    smooth = np.column_stack([np.zeros(5), -gain])
    assert interpolated(NEAR, 2.0, smooth, SIZES).tolist() == [1] * 5
    assert not interpolated(np.zeros_like(NEAR), 2.0, smooth, SIZES).any()
    assert not interpolated(NEAR, math.inf, smooth, SIZES).any()
    rough = np.column_stack([np.zeros(5), [-0.3, 0.4, np.nan, -0.6, 0.3]])
    assert interpolated(NEAR, 2.0, rough, SIZES).tolist() == [1, 0, 0, 1, 0]
