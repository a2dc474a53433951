"""What compute loses to calls, as rows beside matrix products tell it."""

from typing import Any

import numpy as np
import pytest

from dynamiccl.datasets.job_tasks import losses_at, losses_of, near
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
