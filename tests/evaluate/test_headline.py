"""The first screen of a report: sentences and verdicts from times that are known."""

from typing import Any

import numpy as np
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.evaluate.metrics import result_rows
from dynamiccl.evaluate.page import render, say
from dynamiccl.evaluate.report import facts_of, verdict_of
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from tests.evaluate.grids import grid, noise

MIB = 1 << 20
#: NCCL's default, and two configs: faster in the middle, slower at the end.
TIMES = [[10.0, 10.0], [10.0, 6.0], [10.0, 7.0], [10.0, 9.9], [10.0, 15.0]]
SIZES = [MIB >> 10, MIB, 16 * MIB, 64 * MIB, 256 * MIB]
CATALOGUE = Catalogue((ABSTAIN, Config(Algorithm.Ring, Protocol.LL)))
EVERY_OTHER = [[10.0, 5.0 if index % 2 == 0 else 10.0] for index in range(5)]
STANDS = "NCCL's own choice stands everywhere"
MOST = "a measured config takes up to 40 % less time (AllReduce 1M)"


def facts(actions: list[int], band: float | None = 0.03, times: Any = TIMES) -> dict[str, Any]:
    choices = {"p": np.array(actions)}
    return facts_of(result_rows(grid(SIZES, times), CATALOGUE, choices, noise(band)))


@pytest.mark.parametrize(
    ("actions", "changes", "told"),
    [
        (
            [0, 1, 1, 0, 1],
            {},
            "AllReduce 1M-16M: up to 40 % less time; AllReduce 256M: up to 50 % MORE time; "
            "elsewhere NCCL's own choice stands",
        ),
        ([0, 0, 0, 1, 0], {}, f"As fast as NCCL's own choice within the noise everywhere; {MOST}"),
        ([0] * 5, {}, f"{STANDS}; {MOST}"),
        (
            [1] * 5,
            {"band": None, "times": [[10.0, 10.0]] * 5},
            "As fast as NCCL's own choice everywhere; no measured config is faster (noise unknown: "
            "no repeats)",
        ),
        (
            [1] * 5,
            {"times": EVERY_OTHER},
            "AllReduce at 3 of 5 sizes, 1K-256M: up to 50 % less time; elsewhere as fast as NCCL's "
            "own choice within the noise",
        ),
    ],
)
def test_where_it_gains_and_loses(actions: list[int], changes: dict[str, Any], told: str) -> None:
    assert say("report", "sentence", facts(actions, **changes)) == told


def test_the_title_says_on_how_many_systems_each_policy_gains() -> None:
    gains, loses, rests = facts([0, 1, 1, 0, 0]), facts([0, 1, 1, 0, 1]), facts([0] * 5)
    told = {"mine": [gains, loses, rests], "other": [rests, rests, rests]}
    assert say("report", "headline", told) == (
        "mine takes up to 40 % less time than NCCL's own choice on 2 of 3 systems, and takes up to "
        "50 % MORE on 1 of 3 systems; other leaves everything to NCCL"
    )
    assert say("report", "headline", {"mine": [gains]}) == (
        "mine takes up to 40 % less time than NCCL's own choice"
    )
    means = {"mine": {"mean": 0.1, "least": -0.03}}
    assert render("report.txt", {"reports": [], "means": means}).strip() == (
        "mine takes 10 % less time than NCCL's own choice in the mean of the turns, 3.0 % MORE in "
        "the worst"
    )


@pytest.mark.parametrize(
    ("gain", "told"),
    [
        (0.10, "No simple table saves more than mine: 10 % less time than NCCL's own choice on"),
        (0.04, "1 of 2 simple tables is better than mine beyond the noise: 4.0 % less time than"),
        (-0.5, "2 of 2 simple tables are better than mine beyond the noise: 50 % MORE time"),
    ],
)
def test_a_verdict_sets_a_policy_beside_the_simple_tables(gain: float, told: str) -> None:
    """Searchers and the oracle are no simple tables."""
    gains = {"mine": gain, "near": 0.08, "far": 0.05, "oracle": 0.2, "descent": 0.2}
    rows = {
        name: {
            "policy": name,
            "gain": each,
            "probes": 4.0 * (name == "descent"),
            "noise_band": 0.03,
        }
        for name, each in gains.items()
    }
    found = verdict_of("mine", rows, ["mine"])
    assert found.startswith(told)
    assert found.endswith("on average, 8.0 % less with near.")
    unknown = {name: {**row, "noise_band": None} for name, row in rows.items()}
    assert "the noise" not in verdict_of("mine", unknown, ["mine"])
