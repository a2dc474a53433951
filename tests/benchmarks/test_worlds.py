"""Worlds drawn at random: what is another in each draw, and what stays."""

import hashlib
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from worlds import NO_NOISE, WORLDS, summary

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import tuned, usable
from dynamiccl.datasets.scoring import task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read

#: SHA-256 of the true times of each kind's draw 0.
TRUE_TIMES = {
    "h100": "c42da1199c64baa3",
    "b300": "e3f7a96d9748b53a",
    "gb10": "d8963b163ab556a6",
    "a100": "2047ea17a2a69306",
}


@pytest.mark.parametrize(("kind", "digest"), TRUE_TIMES.items())
def test_draw_0_is_the_one_that_the_figures_of_the_pages_are_of(
    kind: str, digest: str, tmp_path: Path
) -> None:
    """If numpy, the simulator or a split draws otherwise, docs/results.json is of other worlds.

    Logarithms are rounded to 1e-6, so that another processor's last bits are no change.
    """
    exact = tuned(read(WORLDS[kind].sweep(tmp_path, 0, "truth", 1, NO_NOISE)))
    truth = task_grid(exact, Catalogue.from_frame(usable(exact)), [Split.TEST])
    logs = np.round(np.log(truth.times_us).ravel() * 1e6)
    logs = np.where(np.isnan(logs), -(2.0**62), logs)
    assert hashlib.sha256(logs.astype("<i8").tobytes()).hexdigest()[:16] == digest


def rows(policy: str, regrets: list[float]) -> list[dict[str, object]]:
    return [
        {
            "policy": policy,
            "draw": draw,
            "regret": regret,
            "headroom": True,
            "worse": regret > 0.5,
            "gain": 1.0 - regret,
            "possible": 1.0,
        }
        for draw, regret in enumerate(regrets)
        for _ in range(4)
    ]


def test_figures_are_means_over_tasks_with_intervals_over_draws() -> None:
    found = summary(pl.DataFrame(rows("a", [0.0, 0.2, 0.4, 0.6])))
    assert found["mean_regret"] == found["headroom_regret"] == pytest.approx(0.3)
    assert found["share_worse"] == 0.25
    assert found["gain_kept"] == pytest.approx(0.7)
    assert found["mean_regret_lo"] < 0.15
    assert found["mean_regret_hi"] > 0.45
