"""Figures of a report: what they show stands in them as text, and colour alone says nothing."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.evaluate.baselines import FAMILY as FAMILY_COLUMNS
from dynamiccl.evaluate.blocks import Block, FigureBlock, Section, TableBlock
from dynamiccl.evaluate.figures.drawing import line_style
from dynamiccl.evaluate.figures.families import crossover_map, curves, heat_map
from dynamiccl.evaluate.page import render
from dynamiccl.evaluate.report import default_names
from dynamiccl.evaluate.systems import regret_by_octave, regret_by_size
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from tests.evaluate.grids import NAN, grid
from tests.rows import default, forced, frame

pytestmark = pytest.mark.usefixtures("drawn")
CATALOGUE = Catalogue(
    (ABSTAIN, Config(Algorithm.Ring, Protocol.LL), Config(Algorithm.Tree, Protocol.LL128))
)
SPLITS = pl.Series("split", ["train", "test", "train", "validation"])
FAMILY = grid(
    [1 << 10, 1 << 11, 1 << 12, 1 << 20],
    [[10.0, 20.0, NAN], [10.0, 13.0, 40.0], [25.0, 20.0, 240.0], [20.0, 90.0, 10.0]],
)
FAMILY.tasks.insert_column(0, SPLITS)
ROWS = [0, 1, 2, 3]


def texts(svg: str) -> list[str]:
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


def test_heat_map_says_every_slowdown_in_its_cell() -> None:
    found = texts(heat_map(FAMILY, ROWS, CATALOGUE))
    assert found.count("•") == 4
    for figure in ("2.0", "1.30", "4.0", "1.25", "12x", "9.0"):
        assert figure in found
    assert {"1K", "2K *", "4K", "1M", "Ring/LL", "Tree/LL128", "ABSTAIN"} <= set(found)


def test_lines_are_told_apart_without_colour() -> None:
    styles = [(s["linestyle"], s["marker"]) for s in map(line_style, range(12))]
    assert len(set(styles)) == 12
    names = ["policy", "nccl-default"]
    choices = {name: np.zeros(4, dtype=np.int64) for name in names}
    assert set(names) <= set(texts(curves(FAMILY, ROWS, choices)))


def test_crossover_map_names_what_is_chosen_and_who_chose_it() -> None:
    choices = {
        "nccl-default": np.array([0, 0, 0, 0]),
        "policy": np.array([0, 1, 1, 2]),
        "oracle": np.array([0, 0, 1, 2]),
    }
    defaults = ["Tree/LL128", "Tree/LL128", "Ring/LL", None]
    found = texts(crossover_map(FAMILY, ROWS, CATALOGUE, choices, defaults))
    # A: not read back, B: Ring/LL, C: Tree/LL128
    for legend in ("A  NCCL's own, not read back", "B  Ring/LL", "C  Tree/LL128"):
        assert legend in found
    marks = [text for text in found if re.fullmatch(r"\(?[A-Z]\)?", text)]
    assert marks == ["(C)", "(B)", "(A)", "(C)", "B", "C", "(C)", "B", "C"]


def test_own_choice_is_known_where_all_runs_read_it_back_alike() -> None:
    tree: dict[str, Any] = {"actual_algorithm": "Tree", "actual_protocol": "LL128"}
    rows = frame(
        *(default(run=run, size_bytes=1 << 20, **tree) for run in "ab"),
        default(run="a", size_bytes=1 << 21, **tree),
        default(run="b", size_bytes=1 << 21, actual_algorithm="Ring", actual_protocol="LL"),
        default(run="a", size_bytes=1 << 22, **tree),
        default(run="b", size_bytes=1 << 22),
        *(forced(a, "LL", size_bytes=1 << k) for a in ("Ring", "Tree") for k in (20, 21, 22)),
    )
    tasks = task_grid(rows, Catalogue.from_frame(rows), list(Split)).tasks
    assert tasks["size_bytes"].to_list() == [1 << 20, 1 << 21, 1 << 22]
    assert default_names(rows, tasks) == ["Tree/LL128", None, None]


def test_regret_by_size_weighs_families_alike() -> None:
    """Two sizes of one family in an octave, and one size of another."""
    first = [[20.0, 10.0], [30.0, 10.0]]  # regrets 1 and 2
    tasks = pl.DataFrame(
        {
            **{name: ["x"] * 4 for name in FAMILY_COLUMNS if name != "collective"},
            "collective": ["AllReduce", "AllReduce", "AllGather", "AllGather"],
            "bin": [80, 82, 80, 92],
        }
    )
    times = np.array([*first, [10.0, 10.0], [50.0, 10.0]])
    exact = replace(FAMILY, tasks=tasks, times_us=times, repeats=np.full((4, 2), 3))
    choices = {"nccl-default": np.zeros(4, dtype=np.int64), "oracle": np.array([1, 1, 1, 1])}
    found = regret_by_octave(exact, np.arange(4), choices)
    assert found == {
        20: {"nccl-default": pytest.approx(0.75), "oracle": 0.0},
        23: {"nccl-default": pytest.approx(4.0), "oracle": 0.0},
    }
    drawn = texts(regret_by_size(found, 0.02, {23}))
    assert {"1M", "8M *", "nccl-default", "oracle", "noise band (2.0%)"} <= set(drawn)
    assert "noise band" not in " ".join(texts(regret_by_size(found, None, ())))
    assert list(regret_by_octave(exact, np.array([2]), choices)) == [20]


def test_tables_and_figures_scroll_in_boxes_of_their_own() -> None:
    blocks: list[Block] = [
        TableBlock(
            "A table",
            ["name", "value"],
            [["a<b", "1"], ["ours", "2"]],
            "What it is",
            frozenset({"ours"}),
        ),
        FigureBlock("A figure", "figure", "<svg></svg>", "What it shows"),
    ]
    header = {"data": "d", "data_hash": "0" * 64, "policies": [("ours", "run")], "first": []}
    page = render([Section("box", blocks, simulated=True)], header)
    assert page.count('<div class="wide"') == 2
    assert re.search(r'<div class="wide"[^>]*>\s*<table', page)
    assert re.search(r'<div class="wide"[^>]*aria-label="A figure. What it shows"><svg>', page)
    assert "a&lt;b" in page
    assert page.count('<tr class="ours">') == 1
    assert "overflow-x: auto" in page
    assert 'name="viewport"' in page
