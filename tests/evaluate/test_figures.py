"""Figures of a report: what they show stands in them as text, and colour alone says nothing."""

import re

import numpy as np
import polars as pl

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.evaluate.blocks import Block, FigureBlock, Section, TableBlock
from dynamiccl.evaluate.figures.drawing import line_style
from dynamiccl.evaluate.figures.families import curves, heat_map
from dynamiccl.evaluate.page import render
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from tests.evaluate.grids import NAN, grid

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
    header = {"data": "d", "data_hash": "0" * 64, "policies": [("ours", "run")]}
    page = render([Section("box", blocks, simulated=True)], header)
    assert page.count('<div class="wide"') == 2
    assert re.search(r'<div class="wide"[^>]*>\s*<table', page)
    assert re.search(r'<div class="wide"[^>]*aria-label="A figure. What it shows"><svg>', page)
    assert "a&lt;b" in page
    assert page.count('<tr class="ours">') == 1
    assert "overflow-x: auto" in page
    assert 'name="viewport"' in page
