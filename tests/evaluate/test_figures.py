"""Figures of a report: what they show stands in them as text, and colour alone says nothing."""

import re
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.evaluate.baselines import FAMILY
from dynamiccl.evaluate.metrics import result_rows
from dynamiccl.evaluate.page import draw_map
from dynamiccl.evaluate.report import changes_of
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.sizes import size_bin
from tests.evaluate.grids import NAN, grid, noise

pytestmark = pytest.mark.usefixtures("drawn")
CATALOGUE = Catalogue(
    (ABSTAIN, Config(Algorithm.Ring, Protocol.LL, 2), Config(Algorithm.Tree, Protocol.LL128))
)
SIZES = [1 << 10, 1 << 11, 1 << 12, 1 << 20]
TIMES = [[10.0, 20.0, NAN], [10.0, 9.9, 40.0], [25.0, 20.0, 240.0], [20.0, 90.0, 10.0]]
CHOICES = {
    "nccl-default": [0, 0, 0, 0],
    "mine": [0, 1, 1, 2],
    "other": [1, 1, 0, 2],
    "near": [0, 0, 0, 2],
    "oracle": [0, 1, 1, 2],
}


def rows(band: float | None = 0.02) -> pl.DataFrame:
    """The `result_rows` of a family of four sizes."""
    columns = dict.fromkeys(FAMILY, "x") | {"system": "s", "collective": "AllReduce"}
    known = grid(SIZES, TIMES, **columns)
    splits = pl.Series("split", ["train", "test", "train", "validation"])
    bins = pl.Series("bin", [size_bin(size) for size in SIZES])
    known = replace(known, tasks=known.tasks.with_columns(splits, bins))
    choices = {name: np.array(each) for name, each in CHOICES.items()}
    return result_rows(known, CATALOGUE, choices, noise(band))


def texts(svg: str) -> list[str]:
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


def test_the_map_says_what_is_best_and_chosen_and_changes_are_listed() -> None:
    found = texts(draw_map(rows(), ["mine", "other"]))
    # Ring/LL at 2K is faster by 1 %: within the noise, which the row of the best says.
    marks = [text for text in found if re.fullmatch(r"·|[AB] -?\d+", text)]
    best, mine, other = ["·", "·", "A 20", "B 50"], ["·", "A 1", "A 20", "B 50"], ["A -100", "A 1"]
    assert marks == [*best, *mine, *other, "·", "B 50"]
    family = "AllReduce, x x x ranks, launch profile x: best measured"
    assert {"1K", "2K *", "4K", "1M", family} <= {*found}
    assert {"mine", "other"} <= {*found}
    for legend in ("A  Ring/LL", "B  Tree/LL128"):
        assert legend in found
    assert any(text.endswith("NCCL's own choice, or as fast within the noise") for text in found)
    changed = changes_of(rows(), "other", "mine")
    assert (changed["system"], changed["before"], changed["after"]) == ("s", "other", "mine")
    keys = ("size_bytes", "split", "before", "after", "saved")
    assert [tuple(task[key] for key in keys) for task in changed["tasks"]] == [
        (1 << 10, "train", "Ring/LL/2ch", "ABSTAIN", 0.5),
        (1 << 12, "train", "ABSTAIN", "Ring/LL/2ch", pytest.approx(0.2)),
    ]
    assert changes_of(rows(), "mine", "mine")["tasks"] == []
