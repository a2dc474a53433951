"""Measured interference: AllReduce by Ring on a B300 node, quiet and with all its cores busy."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dynamiccl.train.trigger.detector import Detector
from dynamiccl.train.trigger.module import TriggerModule
from tests.train.trigger.streams import t3

ROOT = Path(__file__).resolve().parents[3]
MEASURED = ROOT / "datasets" / "sample" / "b300_nvlink_allreduce.csv"
#: Repeats of one AllGather there, 20 launches: their coefficient of variation, and one that stands
#: for single calls, which vary more than averages of many do.
REPEAT_NOISE, CALL_NOISE = 0.0015, 0.05


def ring_times_us() -> pl.DataFrame:
    """Mean times by size: `quiet` and `stressed`."""
    rows = pl.read_csv(MEASURED, infer_schema_length=None).filter(
        pl.col("run").is_in(["interference-a3-baseline", "interference-a3"]), algorithm="RING"
    )
    factor = 2.0 * (1.0 - 1.0 / pl.col("ranks_per_node"))
    time_us = pl.col("size_bytes") * factor / (1000.0 * pl.col("busbw_gbytes_per_s"))
    return (
        rows.select("size_bytes", "mode", time_us=time_us)
        .pivot(on="mode", index="size_bytes", values="time_us")
        .rename({"isolated": "quiet", "cpu_stress": "stressed"})
        .sort("size_bytes")
    )


@pytest.mark.parametrize("noise", [REPEAT_NOISE, CALL_NOISE])
def test_cpu_stress_on_b300_is_detected_at_every_size(noise: float) -> None:
    times = ring_times_us()
    assert times["size_bytes"].to_list() == [1 << k for k in range(22, 28)]
    quiet, stressed = (np.log(times[name].to_numpy()) for name in ("quiet", "stressed"))
    levels = np.where(np.arange(400)[:, None] // 100 % 2 == 1, stressed, quiet)
    streams = levels + t3(np.random.default_rng(0), 400, 6, noise)
    detector = Detector(TriggerModule(0.02).eval())
    found = [detector.observe(np.arange(6), row) for row in streams]
    alarms = np.array([alarm for alarm, _ in found])
    slow = np.array([level for _, level in found])
    assert not alarms[:100].any()
    assert (alarms[110:200] == 1).all()
    assert not alarms[220:300].any()
    assert (alarms[310:400] == 1).all()
    wanted = np.exp(stressed - quiet) - 1.0
    np.testing.assert_allclose(np.median(slow[110:200], axis=0), wanted, rtol=0.1, atol=0.02)
