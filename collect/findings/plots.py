"""Plots of a data set as PNG files: the best config by size, and its gain over the default."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import polars as pl

from dynamiccl.collect.findings.crossover import FAMILY_COLUMNS, crossovers
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.datasets.store import slug
from dynamiccl.errors import MachineError, NotEnoughData

_DEFAULT_COLOUR: Final = "#d9d9d9"
#: Families drawn at most in one picture; more would not be legible.
MOST_FAMILIES: Final = 24
_INCHES_PER_ROW: Final = 0.42
_INCHES_PER_SIZE: Final = 0.36


def size_label(size_bytes: int) -> str:
    """A byte count with a binary unit.

    >>> size_label(1 << 20), size_label(1472)
    ('1M', '1.44K')
    """
    for exponent, unit in ((40, "T"), (30, "G"), (20, "M"), (10, "K")):
        if size_bytes >= 1 << exponent:
            amount = size_bytes / (1 << exponent)
            return f"{amount:.{4 if amount >= 999.5 else 3}g}{unit}"
    return str(size_bytes)


def plot_systems(frame: pl.DataFrame, folder: Path) -> list[Path]:
    """Draw one PNG for each system of a data set; return their paths.

    Raises MachineError without matplotlib, NotEnoughData when no task has a time.
    """
    kind = figure_class()
    found = crossovers(frame)
    if found.is_empty():
        raise NotEnoughData("nothing to draw: no quiet task of a tuned collective has a time")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for (system,), part in found.group_by("system", maintain_order=True):
        path = folder / f"{slug(str(system))}.png"
        title = f"{system}: best measured config by message size, and its gain"
        draw_system(title, part, kind).savefig(path, dpi=120)
        paths.append(path)
    return paths


def figure_class() -> Any:
    """Matplotlib's Figure, without a display. Raises MachineError without matplotlib."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MachineError(
            "plots need matplotlib; pip install 'dynamiccl[plot]', or leave --plots away"
        ) from error
    mpl.use("Agg")
    return Figure


def draw_system(
    title: str, part: pl.DataFrame, kind: Any, inches_per_size: float = _INCHES_PER_SIZE
) -> Any:
    """A figure of class `kind` of one system's `crossovers`: a map above the lines of its gains."""
    families = part.partition_by(FAMILY_COLUMNS, maintain_order=True)[:MOST_FAMILIES]
    sizes = sorted(part["size_bytes"].unique())
    height = 3.6 + _INCHES_PER_ROW * len(families)
    figure = kind(
        figsize=(max(8.0, 2.6 + inches_per_size * len(sizes)), height), layout="constrained"
    )
    rows, lines = figure.subplots(
        2, 1, height_ratios=[_INCHES_PER_ROW * len(families) + 0.6, 2.6], sharex=True
    )
    if title:
        figure.suptitle(title, fontsize=11)
    _crossover_map(rows, families, sizes)
    _gains(lines, families, sizes)
    ticks = range(0, len(sizes), max(1, len(sizes) // 24))
    lines.set_xticks([*ticks], [size_label(sizes[i]) for i in ticks], fontsize=8, rotation=60)
    lines.set_xlabel("message size")
    lines.set_xlim(-0.5, len(sizes) - 0.5)
    return figure


def _crossover_map(axes: Any, families: Sequence[pl.DataFrame], sizes: Sequence[int]) -> None:
    colours = _colours(families)
    for row, family in enumerate(families):
        for task in family.iter_rows(named=True):
            name = _kind(task)
            channels = task["best"].partition("ch")[0].rpartition("/")[2]
            column = sizes.index(task["size_bytes"])
            axes.barh(row, 1.0, left=column - 0.5, color=colours[name], edgecolor="white")
            if name != _DEFAULT and "ch" in task["best"]:
                axes.text(
                    column, row, channels, ha="center", va="center", fontsize=7, color="#111111"
                )
    axes.set_yticks(range(len(families)), _family_names(families), fontsize=8)
    axes.invert_yaxis()
    # Empty bars stand in the legend for the colours.
    handles = [axes.barh(0, 0, color=colour, label=name) for name, colour in colours.items()]
    axes.legend(
        handles=handles,
        fontsize=7,
        ncols=min(6, len(handles)),
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        title="number in a field = channels",
        title_fontsize=7,
    )


_DEFAULT: Final = "default, or within noise"


def _kind(task: dict[str, Any]) -> str:
    """Algorithm and protocol of a task's best config; 'default' where nothing beats it."""
    if task["best"] == "ABSTAIN" or not task["beyond_noise"]:
        return _DEFAULT if task["default_us"] is not None else _short(task["best"])
    return _short(task["best"])


def _short(key: str) -> str:
    return "/".join(key.split("/")[:2])


def _colours(families: Sequence[pl.DataFrame]) -> dict[str, Any]:
    import matplotlib as mpl

    names = sorted({_kind(t) for f in families for t in f.iter_rows(named=True)} - {_DEFAULT})
    palette = mpl.colormaps["tab20"]
    found = {name: palette(i % palette.N) for i, name in enumerate(names)}
    return {_DEFAULT: _DEFAULT_COLOUR, **found}


def _gains(axes: Any, families: Sequence[pl.DataFrame], sizes: Sequence[int]) -> None:
    bands = [b for f in families for b in f["noise_band"].drop_nulls().unique()]
    if bands:
        axes.axhspan(
            0,
            100 * max(bands),
            color="#888888",
            alpha=0.15,
            linewidth=0,
            label=f"noise band ({max(bands):.1%})",
        )
    axes.axhline(0, color="#888888", linewidth=0.8)
    for name, family in zip(_family_names(families), families, strict=True):
        known = family.drop_nulls("gain")
        places = [sizes.index(size) for size in known["size_bytes"]]
        axes.plot(places, 100 * known["gain"], marker=".", linewidth=1.2, label=name)
    axes.set_ylabel("gain over NCCL's default (%)")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _family_names(families: Sequence[pl.DataFrame]) -> list[str]:
    """A name each; those that would be equal have NCCL's version too."""
    names = [_family_name(family) for family in families]
    versions = [family["nccl_version"][0] or "?" for family in families]
    return [
        f"{name}, NCCL {version}" if names.count(name) > 1 else name
        for name, version in zip(names, versions, strict=True)
    ]


def _family_name(family: pl.DataFrame) -> str:
    task = family.row(0, named=True)
    words = [f"{task['collective']} {task['num_nodes'] or '?'}x{task['ranks_per_node'] or '?'}"]
    if task["datatype"] not in {None, "float"}:
        words.append(task["datatype"])
    if task["launch_profile"] != DEFAULT_PROFILE:
        words.append(task["launch_profile"])
    if task["in_place"]:
        words.append("in place")
    return " ".join(words)
