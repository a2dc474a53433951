"""Figures of a report as SVG: what is best where and what policies choose, gains, and changes.

Nothing is told by colour alone: cells hold letters and figures, lines have dashes and markers.
Time is told as per cent of NCCL's own that is saved.
"""

import io
import re
from collections.abc import Collection, Mapping, Sequence
from string import ascii_uppercase
from typing import Any, Final

import matplotlib as mpl
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from dynamiccl.datasets.schema import TASK_COLUMNS
from dynamiccl.datasets.splits import Split
from dynamiccl.evaluate.baselines import FAMILY
from dynamiccl.nccl import ABSTAIN
from dynamiccl.sizes import BINS_PER_OCTAVE, size_label

mpl.use("Agg")
#: Lines are told apart by dashes and markers, not by colour alone.
_DASHES: Final = ("-", "--", "-.", ":")
_MARKERS: Final = ("o", "s", "^", "v", "D", "x", "+", "*", "P")
#: Policies of which a plot has a line; more lines than six nobody tells apart.
_MOST_POLICIES: Final = 4
#: Ink on a pale fill, whatever the page's colours.
DARK: Final = "#111111"
_WHITE: Final = (1.0, 1.0, 1.0, 1.0)
#: Pale fills, so that letters and figures stand out.
_FILLS: Final = ("#cfe2f3", "#fce5cd", "#d9ead3", "#f4cccc", "#d9d2e9", "#fff2cc", "#d0e0e3")
_OWN: Final = ("·", "#e6e6e6")
#: Rows of cells at most in one picture; more would not be legible.
_MOST_ROWS: Final = 28

#: A row of cells: its label, and the text and fill of each size.
Row = tuple[str, Mapping[int, tuple[str, str]]]


def draw_map(drawn: pl.DataFrame, names: Sequence[str]) -> str:
    """What is best at which size, and below it what each of `names` chooses, family by family.

    `drawn` are `metrics.result_rows` of one system, the oracle's among them. A cell has the letter
    of algorithm and protocol, and how much less time than NCCL's own choice the config takes, in
    per cent; a dot where the choice is NCCL's own, or the best is not faster beyond the noise.
    """
    families = drawn.filter(policy="oracle").group_by(FAMILY, maintain_order=True).len()
    most = max(1, _MOST_ROWS // (1 + len(names)))
    shown = families.sort("len", descending=True, maintain_order=True).head(most)
    band = pl.col("noise_band").fill_null(0.0)
    is_own = (pl.col("chosen_config") == ABSTAIN.key) | (
        (pl.col("policy") == "oracle") & (pl.col("gain") <= band / (1.0 + band))
    )
    kind = pl.col("chosen_config").str.split("/").list.head(2).list.join("/")
    cells = drawn.filter(pl.col("policy").is_in(["oracle", *names])).with_columns(
        kind=pl.when(~is_own).then(kind)
    )
    cells = cells.join(shown, on=FAMILY, how="semi", nulls_equal=True, maintain_order="left")
    kinds = sorted(cells["kind"].drop_nulls().unique())
    looks = {kind: (letter(i), _FILLS[i % len(_FILLS)]) for i, kind in enumerate(kinds)}
    rows: list[Row] = []
    for _, family in cells.group_by(FAMILY, maintain_order=True):
        title = family_title(family.row(0, named=True), short=drawn["nccl_version"].n_unique() == 1)
        for name in ("oracle", *names):
            found = {}
            for task in family.filter(policy=name).to_dicts():
                mark, fill = looks.get(task["kind"], _OWN)
                text = mark if task["kind"] is None else f"{mark} {_whole(task['gain'])}"
                found[task["size_bytes"]] = (text, fill)
            rows.append((f"{title}: best measured" if name == "oracle" else name, found))
    legend = [(f"{mark}  {kind}", fill) for kind, (mark, fill) in looks.items()]
    legend.append(("·  NCCL's own choice, or as fast within the noise", _OWN[1]))
    return _draw_cells(rows, 1 + len(names), _tested(drawn), legend)


def draw_changes(before: pl.DataFrame, after: pl.DataFrame) -> tuple[str, pl.DataFrame]:
    """Where the choices of two policies on one system differ, and what that saves.

    `before` and `after`: their `metrics.result_rows`. A cell has how much less time the second
    takes than the first, in per cent; a dot where they choose the same. With the figure come the
    tasks that differ (no figure without any): TASK_COLUMNS, `split`, `before`, `after` (configs)
    and `saved` (a fraction).
    """
    both = before.select(*TASK_COLUMNS, "split", before="chosen_config", us="chosen_us")
    saved = 1.0 - after["chosen_us"] / both["us"]
    both = both.with_columns(after=after["chosen_config"], saved=saved)
    changed = both.filter(pl.col("before") != pl.col("after")).drop("us")
    if changed.is_empty():
        return "", changed
    rows: list[Row] = []
    for _, family in both.group_by(FAMILY, maintain_order=True):
        found = {}
        for task in family.to_dicts():
            fill = _FILLS[0] if task["saved"] >= 0 else _FILLS[3]
            same = task["before"] == task["after"]
            found[task["size_bytes"]] = _OWN if same else (_whole(task["saved"]), fill)
        if set(found.values()) != {_OWN}:
            title = family_title(
                family.row(0, named=True), short=both["nccl_version"].n_unique() == 1
            )
            rows.append((title, found))
    legend = [("less time", _FILLS[0]), ("more time", _FILLS[3]), ("·  the same choice", _OWN[1])]
    return _draw_cells(rows[:_MOST_ROWS], 1, _tested(both), legend), changed


def draw_gains(drawn: pl.DataFrame, names: Sequence[str], simple: str, band: float | None) -> str:
    """Time saved by octave of the size, the mean over families that have sizes there.

    `drawn` as in `draw_map`. A line for each of `names`, the baseline `simple` and the best
    measured config; the noise band as a hatched strip, an asterisk for octaves with test tasks.
    """
    octave = pl.col("bin") // BINS_PER_OCTAVE
    by_family = drawn.group_by("policy", *FAMILY, octave=octave).agg(pl.col("gain").mean())
    by_octave = by_family.group_by("policy", "octave").agg(pl.col("gain").mean()).sort("octave")
    octaves = by_octave["octave"].unique().sort().to_list()
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    axes = figure.subplots()
    lines = [*names[:_MOST_POLICIES], simple, "oracle"]
    for index, name in enumerate(lines):
        line = by_octave.filter(policy=name)
        at = [octaves.index(each) for each in line["octave"]]
        label = "best measured" if name == "oracle" else name
        axes.plot(at, 100 * line["gain"], label=label, **line_style(index))
    if band is not None:
        axes.set_ylim(axes.get_ylim())  # the band may be larger than all that is drawn
        axes.axhspan(
            -100 * band,
            100 * band / (1 + band),
            facecolor="#88888833",
            edgecolor="#999999",
            hatch="///",
            linewidth=0,
            zorder=0,
            label=f"noise band ({100 * band:.1f} %)",
        )
    tested = set(drawn.filter(split=Split.TEST.value).select(octave)["bin"])
    labels = [size_label(1 << each) + (" *" if each in tested else "") for each in octaves]
    axes.set_xticks(range(len(octaves)), labels, rotation=90, fontsize=8)
    axes.set_xlabel("message size, by octave")
    axes.set_ylabel("time saved (%)")
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return svg_text(figure)


def _draw_cells(
    rows: Sequence[Row], together: int, tested: Collection[int], legend: Sequence[tuple[str, str]]
) -> str:
    """Rows of cells by size, so many `together`; an asterisk marks `tested` sizes."""
    sizes = sorted({size for _, cells in rows for size in cells})
    tops = [0.26 * level + 0.16 * (level // together) for level in range(len(rows))]
    width = column_inches(len(sizes))
    longest = max((len(label) for label, _ in rows), default=0)
    figure = Figure(
        figsize=(0.7 + 0.075 * longest + width * max(len(sizes), 14), 1.3 + max(tops, default=0.0)),
        layout="constrained",
    )
    axes = figure.subplots()
    for top, (_, cells) in zip(tops, rows, strict=True):
        for size, (text, fill) in cells.items():
            at = sizes.index(size)
            box = Rectangle((at, top), 1.0, 0.25, facecolor=fill, edgecolor="white", linewidth=0.8)
            axes.add_patch(box)
            write_cell(axes, at + 0.5, top + 0.125, text, fontsize=6.5)
    axes.set_xlim(0, len(sizes))
    axes.set_ylim(max(tops, default=0.0) + 0.27, -0.02)
    axes.set_yticks([top + 0.125 for top in tops], [label for label, _ in rows], fontsize=8)
    labels = [f"{size_label(size)}{' *' if size in tested else ''}" for size in sizes]
    axes.set_xticks([at + 0.5 for at in range(len(sizes))], labels, rotation=90, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    handles = [Patch(label=label, facecolor=fill) for label, fill in legend]
    figure.legend(handles=handles, loc="outside lower left", fontsize=8, ncols=4, frameon=False)
    return svg_text(figure)


def _tested(drawn: pl.DataFrame) -> set[int]:
    return set(drawn.filter(split=Split.TEST.value)["size_bytes"])


def _whole(fraction: float) -> str:
    """Per cent without decimals; never -0."""
    return f"{round(100 * fraction) + 0:d}"


def letter(index: int) -> str:
    """The mark of a config on a map.

    >>> letter(0), letter(25), letter(26)
    ('A', 'Z', 'A1')
    """
    times, rest = divmod(index, len(ascii_uppercase))
    return ascii_uppercase[rest] + (str(times) if times else "")


def line_style(index: int) -> dict[str, Any]:
    """Line style number `index`; the first is the widest."""
    return {
        "linestyle": _DASHES[index % len(_DASHES)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 4.5,
        "linewidth": 2.2 if index == 0 else 1.2,
    }


def column_inches(count: int) -> float:
    """Column width in inches, such that `count` sizes fit the page.

    >>> column_inches(12), column_inches(44)
    (0.34, 0.26)
    """
    return 0.34 if count <= 28 else 0.26


def svg_text(figure: Figure) -> str:
    """The figure as an SVG element; the same figure gives the same text.

    For light and dark pages: what is white behind a figure is left out, and what is black takes the
    page's ink. What stands on a fill of its own has to say its colour, DARK.
    """
    figure.patch.set_visible(False)
    legends = list(figure.legends)
    for axes in figure.axes:
        if axes.get_facecolor() == _WHITE:
            axes.patch.set_visible(False)
        legends += [legend] if (legend := axes.get_legend()) is not None else []
    for legend in legends:
        legend.get_frame().set_visible(False)
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dynamiccl"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"(stroke|fill): #000000", r"\1: currentColor", text)
    return text[text.index("<svg") :]


def write_cell(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write into the middle of a cell, so that its colour is not needed."""
    style = {"color": DARK, **style}
    axes.text(x, y, text, ha="center", va="center", **style)


def family_title(row: Mapping[str, object], *, short: bool = False) -> str:
    """A title for a family of tasks, without NCCL's version if `short`."""
    words = [str(row["collective"]), f"{row['num_nodes']} x {row['ranks_per_node']} ranks"]
    if row["launch_profile"] != "default":
        words.append(f"launch profile {row['launch_profile']}")
    if row["nccl_version"] and not short:
        words.append(f"NCCL {row['nccl_version']}")
    return ", ".join(words)
