"""What benchmarks are judged by: frozen worlds, rivals, probes, the small online world."""

import hashlib
import math
from functools import partial

import numpy as np
import pytest
from bench_mvfst import best_fixed, threshold_rule
from judge_worlds import KINDS, Table, judge_table, judge_tables
from learning_belief import interpolated, judged, play
from online_play import Judge, recipe_of
from online_world import Setting
from sweeps import public_tables

from dynamiccl.nccl import ABSTAIN, Algorithm, Config

RING = Config(Algorithm.Ring)
#: SHA-256 of costs, cells and true times of the first two worlds of each kind.
FROZEN = "0d8fa6d8e854d4d1"


def test_the_worlds_are_those_that_were_frozen() -> None:
    """Logarithms are rounded to 1e-6, so that another processor's last bits are no change."""
    digest = hashlib.sha256()
    for table in judge_tables(2 * len(KINDS), 0):
        digest.update(repr((table.kind, table.collective, table.shape, table.configs)).encode())
        for numbers in (table.log_cost_us * 1e6, table.log_time_us * 1e6, table.cells):
            digest.update(np.round(numbers).astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == FROZEN


def test_public_sweeps_are_tables() -> None:
    tables = public_tables()
    assert len({table.name for table in tables}) == len(tables)
    assert sum(table.has_octaves for table in tables) >= 2
    for table in tables:
        assert table.configs[0] == ABSTAIN
        has = table.is_measured()
        if table.has_octaves:
            assert (has[:, 0] & (has[:, 1:].sum(axis=1) >= 2)).sum() >= 3
        # All but NCCL's own choice were measured somewhere.
        assert has[:, 1:].any(axis=0).all()
    name = "b300_nvlink_allreduce: b300-nvlink-8x AllReduce 1x8 2.29.7"
    (b300,) = (table for table in tables if table.name == name)
    ring = b300.log_times_us[b300.sizes_bytes.index(1 << 20), b300.configs.index(RING)]
    # 48.9 GB/s of bus bandwidth, measured once.
    assert np.exp(ring[np.isfinite(ring)]) == pytest.approx((1 << 20) * 1.75 / 48.9e3, rel=1e-3)


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


def test_interpolation_acts_as_far_as_left_out_octaves_agree() -> None:
    gain = np.array([0.3, 0.4, np.nan, 0.6, 0.7])
    smooth = np.column_stack([np.zeros(5), -gain])
    assert interpolated(NEAR, 2.0, smooth, SIZES).tolist() == [1] * 5
    assert not interpolated(np.zeros_like(NEAR), 2.0, smooth, SIZES).any()
    assert not interpolated(NEAR, math.inf, smooth, SIZES).any()
    rough = np.column_stack([np.zeros(5), [-0.3, 0.4, np.nan, -0.6, 0.3]])
    assert interpolated(NEAR, 2.0, rough, SIZES).tolist() == [1, 0, 0, 1, 0]


RECIPE = recipe_of(jobs=4, steps=4)


def test_an_oracle_scores_1_nccl_0_and_a_rule_that_looks_more_than_a_table() -> None:
    judge = Judge.of(Setting(), RECIPE)
    oracle = judge.play(lambda env: env.costs().argmin(2))
    assert judge.score_of(oracle) == pytest.approx(1.0)
    assert judge.score_of(judge.play(lambda env: np.zeros(env.shape, dtype=np.int64))) == 0.0
    table = judge.score_of(judge.play(partial(best_fixed, 0.0)))
    assert table < judge.score_of(judge.play(partial(threshold_rule, 0.15, 32, {}))) < 1.0
