"""The judge's worlds: what they are drawn from, what stays, and what was measured."""

import hashlib

import numpy as np
import pytest
from judge_worlds import (
    KINDS,
    SHIPPED,
    judge_table,
    judge_tables,
    shipped_table,
    small_sweep,
)
from sweeps import FEW, NO_DEFAULT, public_tables

from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config
from dynamiccl.simulator.system import Call, Group
from dynamiccl.simulator.systems import find_system

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


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_tables_are_the_files_own(name: str) -> None:
    table = shipped_table(name, Collective.AllReduce)
    system = find_system(
        {"b300": "b300-nvlink", "gb10": "gb10-roce", "a100": "a100-nvswitch"}[name]
    )
    assert (table.sizes_bytes[0], table.sizes_bytes[-1]) == (1 << 10, 1 << 30)
    call = Call(Group(*table.shape), Collective.AllReduce, 1 << 20)
    row = table.sizes_bytes.index(1 << 20)
    expected = [np.log(system.parts(call, config).quiet_us) for config in table.configs]
    assert table.log_time_us[row] == pytest.approx(expected)


def test_unknown_kinds_are_told_apart() -> None:
    with pytest.raises(ValueError, match=r"no kind of worlds 'h100'; choose from perturbed b300,"):
        judge_table("h100", 0)
    with pytest.raises(ValueError, match=r"no shipped table 'h100'; choose from b300, gb10, a100"):
        shipped_table("h100", Collective.AllReduce)


def test_a_small_sweep_is_what_a_user_measures() -> None:
    table = shipped_table("b300", Collective.AllReduce)
    sweep = small_sweep(table, np.random.default_rng(0))
    assert sweep.log_times_us.shape == (18, 30, 3)
    assert (sweep.rows[0], sweep.rows[-1], sweep.columns[0]) == (0, 40, 0)
    assert len(set(sweep.columns.tolist())) == 30
    off = sweep.log_times_us - table.log_time_us[np.ix_(sweep.rows, sweep.columns)][..., None]
    assert np.median(np.abs(off)) == pytest.approx(0.02 * 0.6745, rel=0.15)
    assert 0.0 < (off > 0.1).mean() < 0.02


def test_public_sweeps_are_tables_or_say_why_not() -> None:
    tables, _ = public_tables()
    assert len({table.name for table in tables}) == len(tables)
    assert sum(not table.left_out for table in tables) >= 2
    for table in tables:
        assert table.configs[0] == ABSTAIN
        has = table.is_measured()
        assert table.left_out in {"", FEW, NO_DEFAULT}
        assert (table.left_out == NO_DEFAULT) == (not has[:, 0].any())
        if not table.left_out:
            assert (has[:, 0] & (has[:, 1:].sum(axis=1) >= 2)).sum() >= 3
        # All but NCCL's own choice were measured somewhere.
        assert has[:, 1:].any(axis=0).all()
    name = "b300_nvlink_allreduce: b300-nvlink-8x AllReduce 1x8 2.29.7"
    (b300,) = (table for table in tables if table.name == name)
    ring = b300.log_times_us[b300.sizes_bytes.index(1 << 20), b300.configs.index(RING)]
    # 48.9 GB/s of bus bandwidth, measured once.
    assert np.exp(ring[np.isfinite(ring)]) == pytest.approx((1 << 20) * 1.75 / 48.9e3, rel=1e-3)
