"""The sampler's loop, with readings that are made up and take their time."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dynamiccl.collect.telemetry.collectors import Group, Reading
from dynamiccl.collect.telemetry.record import FORMAT, Recorder
from dynamiccl.collect.telemetry.sampler import Plan, sample, start_pcie
from dynamiccl.collect.telemetry.samples import Samples, read_samples

PERIOD_S = 0.02


def group(
    name: str, device: str, counter: str, takes_s: Callable[[], float] = lambda: 0.0
) -> Group:
    def ask() -> tuple[float, ...]:
        time.sleep(takes_s())
        return (1.0,)

    return Group(name, [Reading(device, (counter,), ask)], lambda *_: None)


def run(path: Path, plan: Plan, rests: int) -> Samples:
    """Sample for so many rests, and read the file back."""
    left = itertools.count(1)

    def rest(seconds: float) -> bool:
        time.sleep(max(0.0, seconds))
        return next(left) >= rests

    with Recorder(path) as recorder:
        stop = start_pcie(plan, recorder)
        sample(plan, {"format": FORMAT, "host": "n1", "rate_hz": 50.0}, recorder, rest)
        stop()
    return read_samples(path)


def test_a_blocking_reading_delays_no_tick(tmp_path: Path) -> None:
    plan = Plan(
        fast=group("fast", "gpu0", "power_w"),
        slow=group("slow", "gpu0", "mig_mode"),
        blocking=(group("pcie-gpu0", "gpu0", "pcie_tx_kbytes_per_s", lambda: 0.15),),
        period_s=PERIOD_S,
        pcie_period_s=0.01,
    )
    samples = run(tmp_path / "s", plan, rests=25)
    assert len(samples.series["gpu0", "pcie_tx_kbytes_per_s"].values) >= 2
    gaps = np.diff(samples.series["gpu0", "power_w"].times_s)
    assert np.median(gaps) < 1.5 * PERIOD_S
    assert len(samples.series["gpu0", "power_w"].values) == 25


def test_a_slow_tick_costs_the_ticks_that_it_overran_and_no_more(tmp_path: Path) -> None:
    slept = itertools.chain([0.0, 0.0, 5.5 * PERIOD_S], itertools.repeat(0.0))
    plan = Plan(
        fast=group("fast", "gpu0", "power_w", lambda: next(slept)),
        slow=Group("slow", [], lambda *_: None),
        blocking=(),
        period_s=PERIOD_S,
        pcie_period_s=0.0,
    )
    times = run(tmp_path / "s", plan, rests=12).series["gpu0", "power_w"].times_s
    ticks = (times - times[0]) / PERIOD_S
    assert ticks[2] - ticks[1] > 5.0
    # Back on the grid at once: no burst that makes up for what was missed.
    assert np.median(np.diff(ticks)[3:]) > 0.8


def test_slow_readings_come_once_a_second(tmp_path: Path) -> None:
    plan = Plan(
        fast=group("fast", "gpu0", "power_w"),
        slow=group("slow", "gpu0", "mig_mode"),
        blocking=(),
        period_s=PERIOD_S,
        pcie_period_s=0.0,
    )
    samples = run(tmp_path / "s", plan, rests=60)
    gaps = np.diff(samples.series["gpu0", "mig_mode"].times_s)
    assert len(gaps) == 1
    assert 0.9 < gaps[0] < 1.5
