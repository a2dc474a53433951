"""What compute loses to calls, as rows beside matrix products tell it."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dynamiccl.datasets.job_tasks import losses_at, losses_of, near
from dynamiccl.datasets.objective import change_of_call_us
from dynamiccl.sizes import size_bin
from tests.rows import default, forced, frame

#: The mean and the error of a share, by channels.
LOSSES = {"4096": {2: (0.02, 0.01), 8: (0.10, 0.0), 16: (0.12, 0.05)}}


def told(share: float, channels: int, **columns: Any) -> dict[str, Any]:
    beside = {"interference_kind": "matmul", "interference_level": 4096.0, "size_bytes": 1 << 20}
    row = {"compute_loss_us": 200.0 * share, "actual_num_channels": channels}
    made = forced("Ring", "LL", 200.0, channels=channels)
    return {**made, **beside, **row, "run": f"{share}", **columns}


def test_losses_are_shares_of_the_kernels_time_that_rise_with_channels() -> None:
    rows = [told(0.02, 1), told(0.04, 1), told(0.01, 4), told(0.13, 8), told(-0.2, 2)]
    by_place = losses_of(frame(*rows, default(100.0)))
    [(place, by_bin)] = by_place.items()
    assert place == ("AllReduce", 1, 8)
    [losses] = by_bin.values()
    [by_count] = losses.values()
    # One, two and four come to what lies between; nothing gains by a call.
    means = {n: mean for n, (mean, _) in by_count.items()}
    assert means == {1: 0.0, 2: 0.0, 4: pytest.approx(0.02), 8: pytest.approx(0.13)}
    # Of a single row no error is known: as large as what it says.
    assert by_count[8][1] == pytest.approx(0.13)


def test_the_nearest_size_within_an_octave_tells() -> None:
    by_bin = {40: {"1": {1: (0.1, 0.0)}}, 44: {"2": {1: (0.2, 0.0)}}}
    assert near(by_bin, 41) == by_bin[40]
    assert near(by_bin, 47) == by_bin[44]
    assert near(by_bin, 60) == {}


@pytest.mark.parametrize(
    ("channels", "shares"),
    [
        # Own channels lose the mean, fewer an error more, others the next count measured.
        ([16, 8, 2, 1, 4, 16], [0.12, 0.10, 0.03, 0.03, 0.10, 0.12]),
        # Never more than NCCL's own, of which the count below holds.
        ([12, 2, 8], [0.10, 0.03, 0.10]),
        ([16, 24, float("nan")], [0.12, np.nan, np.nan]),
        ([1, 1], [np.nan, np.nan]),
    ],
)
def test_what_was_not_measured_is_bounded_and_never_put_between(
    channels: list[float], shares: list[float]
) -> None:
    [found] = losses_at(LOSSES, channels)
    assert found.tolist() == pytest.approx(shares, nan_ok=True)


def test_what_an_h200_lost_foretells_what_its_jobs_gained() -> None:
    """Steps of 29,706 us took 2,636, 1,826 and 1,864 us less with 1, 2 and 4 channels than with 16.

    Medians of two jobs of each (tests/gpu/test_step.py, November 2026): an all-reduce of 16 MiB
    beside eight products of edge 8,192. Of the sweep before them one of two cycles was kept.
    """
    table = pl.read_csv(Path(__file__).parents[1] / "data" / "h200_beside.csv")
    plain = {"interference_kind": "matmul"}
    rows = [
        {**(default() if row["is_default"] else forced("Ring", "Simple")), **plain, **row}
        for row in table.to_dicts()
    ]
    measured = frame(*rows)
    [(_, by_bin)] = losses_of(measured).items()
    whole = by_bin[size_bin(64 << 20)]["8192"]
    means = [whole[count][0] for count in (1, 2, 4, 8, 16)]
    # Not by SMs, of which 16 channels are a quarter, but by waves of tiles.
    assert means == pytest.approx([0.01, 0.07, 0.13, 0.13, 0.18], abs=0.01)
    step = measured.filter(sweep="step")
    counts = [16, 1, 2, 4]
    [losses] = losses_of(step).values()
    lost = losses_at(losses[size_bin(16 << 20)], counts)
    times = np.array(
        [float(np.median(step.filter(actual_num_channels=n)["time_us"])) for n in counts]
    )
    compute_us = 8 * 2e-6 * 8192**3 / float(np.median(step["compute_alone_tflops"]))
    own_us = float(times[0])
    change = change_of_call_us(times / own_us, lost, own_us, own_us, compute_us)
    # What is surely gained is gained, and more; and one channel is foretold to be the best.
    gained_us = np.array([2_636.0, 1_826.0, 1_864.0])
    assert (change[1:] < 0.0).all()
    assert (-change[1:] < gained_us).all()
    assert change.argmin() == 1
