"""The picture of `dynamiccl-collect describe` for a page: best measured config and gain by size."""

import polars as pl

from dynamiccl.collect.describe import FAMILY_COLUMNS, MOST_FAMILIES, draw_system
from dynamiccl.datasets.store import slug
from dynamiccl.evaluate.blocks import FigureBlock
from dynamiccl.evaluate.figures.drawing import column_inches, svg_text


def best_config_map(system: str, found: pl.DataFrame) -> FigureBlock | None:
    """The map of one system from `crossovers` of a data set; None when it has no quiet task."""
    part = found.filter(pl.col("system") == system)
    if part.is_empty():
        return None
    families = part.select(FAMILY_COLUMNS).n_unique()
    inches = column_inches(part["size_bytes"].n_unique())
    svg = svg_text(draw_system("", part, inches))
    note = (
        "All measured sizes. The fastest measured config, grey where NCCL's own choice is as fast "
        "within the noise; the number is its gain over NCCL's own choice, default / best - 1, in "
        "%, missing where NCCL's own choice was not measured."
    )
    if families > MOST_FAMILIES:
        note += f" The first {MOST_FAMILIES} of {families} rows."
    title = "Best measured config by size, and its gain"
    return FigureBlock(title, f"{slug(system)}-map", svg, note)
