"""Worlds drawn at random: what is another in each draw, and what stays."""

import hashlib
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from worlds import FIELD_SIGMA, NO_NOISE, WORLDS, paired, summary

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import tuned, usable
from dynamiccl.datasets.scoring import task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.system import Call
from dynamiccl.simulator.systems import find_system

#: SHA-256 of the true times of each kind's draw 0.
TRUE_TIMES = {
    "h100": "c42da1199c64baa3",
    "b300": "e3f7a96d9748b53a",
    "gb10": "d8963b163ab556a6",
    "a100": "2047ea17a2a69306",
}


def test_field_is_smooth_and_as_wide_as_it_says() -> None:
    group, config = Group(4, 8), Config(Algorithm.Ring, Protocol.Simple)
    base = find_system("h100-ib")
    off = []
    for seed in range(60):
        system = WORLDS["h100"].make(seed)
        here, near, far = (
            Call(group, Collective.AllReduce, size) for size in (1 << 20, 3 << 19, 1 << 29)
        )
        off.append(
            [
                np.log(system.parts(c, config).quiet_us / base.parts(c, config).quiet_us)
                for c in (here, near, far)
            ]
        )
    logs = np.array(off)
    assert logs.std(axis=0) == pytest.approx(FIELD_SIGMA, rel=0.35)
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] > 0.95
    assert abs(np.corrcoef(logs[:, 0], logs[:, 2])[0, 1]) < 0.6


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


def test_pairs_are_of_one_draw() -> None:
    both = pl.DataFrame([*rows("a", [0.1, 0.3, 0.5]), *rows("b", [0.2, 0.4, 0.6])])
    found = paired(both, "a", "b")
    assert found["regret"] == pytest.approx(-0.1)
    assert found["regret_lo"] == pytest.approx(-0.1)
    assert found["head_hi"] == pytest.approx(-0.1)
