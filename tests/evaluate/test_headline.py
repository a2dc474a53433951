"""The first screen of a report: sentences and verdicts from times that are known."""

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.evaluate.baselines import FAMILY
from dynamiccl.evaluate.blocks import FigureBlock, TableBlock
from dynamiccl.evaluate.figures.changes import change_blocks
from dynamiccl.evaluate.headline import first_sentence, table_verdict
from dynamiccl.evaluate.metrics import Summary
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from tests.evaluate.grids import grid

MIB = 1 << 20
#: NCCL's default, and two configs: faster in the middle, slower at the end.
TIMES = [[10.0, 10.0], [10.0, 6.0], [10.0, 7.0], [10.0, 9.9], [10.0, 15.0]]
SIZES = [MIB >> 10, MIB, 16 * MIB, 64 * MIB, 256 * MIB]
BANDS: dict[tuple[str, str | None], float] = {("s", None): 0.03, ("s", "AllReduce"): 0.03}


def sentence(actions: list[int], bands: Any = BANDS, times: Any = TIMES) -> str:
    known = grid(SIZES, times)
    oracle = np.nanargmin(known.times_us, axis=1)
    return first_sentence("s", known, np.array(actions), oracle, bands)


def test_a_gain_is_told_with_its_sizes_and_its_most() -> None:
    told = "AllReduce 1-16 MiB: up to 40 % less time; elsewhere NCCL's own choice stands"
    assert sentence([0, 1, 1, 0, 0]) == told


def test_a_loss_is_told_beside_a_gain() -> None:
    assert sentence([0, 1, 1, 0, 1]) == (
        "AllReduce 1-16 MiB: up to 40 % less time; AllReduce 256 MiB: up to 50 % MORE time; "
        "elsewhere NCCL's own choice stands"
    )


def test_a_difference_within_the_noise_is_none() -> None:
    assert sentence([0, 0, 0, 1, 0]) == (
        "As fast as NCCL's own choice within the noise everywhere; a measured config takes up to "
        "40 % less time (AllReduce 1 MiB)"
    )
    assert "AllReduce 64 MiB: up to 1.0 % less time" in sentence([0, 0, 0, 1, 0], {})
    assert sentence([0, 0, 0, 1, 0], {}).endswith("(noise unknown: no repeats)")


def test_who_abstains_everywhere_is_told_what_there_is_to_gain() -> None:
    stands = "NCCL's own choice stands everywhere"
    assert sentence([0] * 5).startswith(f"{stands}; a measured config takes up to 40 % less time")
    flat = [[10.0, 10.1]] * 5
    assert sentence([0] * 5, times=flat) == (
        f"{stands}; no measured config is faster beyond the noise"
    )


def test_many_ranges_are_counted() -> None:
    times = [[10.0, 5.0 if index % 2 == 0 else 10.0] for index in range(5)]
    assert sentence([1] * 5, times=times).startswith(
        "AllReduce at 3 of 5 sizes, 1 KiB-256 MiB: up to 50 % less time; elsewhere as fast as"
    )


def row(name: str, mean: float) -> Summary:
    rest = dict.fromkeys(("p50", "p95", "max", "time_weighted", "abstained", "probes"), 0.0)
    return Summary(
        policy=name,
        tasks=5,
        mean=mean,
        ratio_to_default=1.0,
        crossfit=None,
        interval=None,
        tasks_with_interval=0,
        slower_than_default=0.0,
        **rest,
    )


@pytest.mark.parametrize(
    ("mean", "told"),
    [
        (0.01, "No simple table is better than mine: mean regret 1.00% against 2.00% of near"),
        (0.03, "mine is level with the best simple table within the noise"),
        (0.06, "1 of 2 simple tables is better than mine beyond the noise"),
        (0.60, "2 of 2 simple tables are better than mine beyond the noise"),
    ],
)
def test_a_verdict_sets_a_policy_beside_the_simple_tables(mean: float, told: str) -> None:
    rows = [row("mine", mean), row("near", 0.02), row("far", 0.05), row("oracle", 0.0)]
    assert table_verdict("mine", rows, ["mine"], 0.03).startswith(told)


def changed(before: list[int], after: list[int]) -> list[Any]:
    known: TaskGrid = grid(SIZES, TIMES)
    more = {name: pl.lit(None) for name in FAMILY if name not in known.tasks.columns}
    splits = pl.Series("split", ["train", "test", "train", "test", "train"])
    tasks = known.tasks.with_columns(splits, **more)
    catalogue = Catalogue((ABSTAIN, Config(Algorithm.Ring, Protocol.LL)))
    old, new = ("old", np.array(before)), ("new", np.array(after))
    return change_blocks("s", replace(known, tasks=tasks), catalogue, old, new)


@pytest.mark.usefixtures("drawn")
def test_what_changes_between_two_policies_is_drawn_and_listed() -> None:
    figure, table = changed([0, 0, 1, 0, 0], [0, 1, 1, 0, 1])
    assert isinstance(figure, FigureBlock)
    assert isinstance(table, TableBlock)
    assert "2 of 5 tasks" in figure.note
    assert ">-40<" in figure.svg
    assert ">+50<" in figure.svg
    assert [cells[1:] for cells in table.rows] == [
        ["1M", "test", "ABSTAIN", "Ring/LL", "-40.0 %"],
        ["256M", "seen", "ABSTAIN", "Ring/LL", "+50.0 %"],
    ]
    assert changed([0, 1, 0, 0, 0], [0, 1, 0, 0, 0]) == []
