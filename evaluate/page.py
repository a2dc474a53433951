"""Pages, tables in a terminal, sentences and figures: Jinja templates over what a command found.

A page is one self-contained HTML file: no script, no fetch. Figures (SVG) tell nothing by colour
alone. Time is told as per cent of NCCL's own that is saved.
"""

import io
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

import jinja2
import matplotlib as mpl
import polars as pl
from matplotlib.figure import Figure

from dynamiccl import cli
from dynamiccl.collect.describe import draw_tiles
from dynamiccl.datasets.splits import Split
from dynamiccl.evaluate.baselines import FAMILY
from dynamiccl.nccl import ABSTAIN
from dynamiccl.sizes import BINS_PER_OCTAVE, bin_center_bytes, size_label
from dynamiccl.train.options import wide_stdout

mpl.use("Agg")
_LINES: Final = (("-", "o"), ("--", "s"), ("-.", "^"), (":", "v"), ("-", "D"), ("--", "x"))
#: Nobody tells apart more than six lines.
_MOST_POLICIES: Final = 4
_WHITE: Final = (1.0, 1.0, 1.0, 1.0)
_MOST_ROWS: Final = 28
#: Of a job's line; more calls are averaged over windows.
_MAX_POINTS: Final = 600


def render(name: str, told: Mapping[str, Any]) -> str:
    """The text of the template NAME.jinja."""
    return _environment(is_page=name.endswith(".html")).get_template(f"{name}.jinja").render(told)


def say(name: str, sentence: str, told: object) -> str:
    """The text of a macro of the template NAME.words.jinja."""
    template = _environment(is_page=False).get_template(f"{name}.words.jinja")
    return str(getattr(template.module, sentence)(told)).strip()


def show_result(name: str, told: Mapping[str, Any], document: object, *, as_json: bool) -> None:
    """Print the template NAME.txt.jinja of `told`, or the `document` as JSON."""
    if as_json:
        cli.print_json(document)
        return
    text = render(f"{name}.txt", told).rstrip()
    wide_stdout().print(text, soft_wrap=True, highlight=False, markup=False)


def write_page(out: Path, page: str, data: Any, told: Mapping[str, Any]) -> Path:
    """Write `data` as PAGE.json and `told` as PAGE.html; returns the latter."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{page}.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    path = out / f"{page}.html"
    path.write_text(render(f"{page}.html", told), encoding="utf-8")
    return path


@cache
def _environment(*, is_page: bool) -> jinja2.Environment:
    folder = resources.files("dynamiccl.evaluate")
    environment = jinja2.Environment(
        autoescape=is_page,
        undefined=jinja2.StrictUndefined,
        trim_blocks=not is_page,
        lstrip_blocks=not is_page,
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
    )
    environment.filters |= {
        "percent": percent,
        "saved": saved_text,
        "size": size_label,
        "bin_size": lambda index: size_label(bin_center_bytes(index)),
        # NCCL's own time / another - 1 to the share that the other saves.
        "less": lambda gain: gain / (1.0 + gain),
        "commit": _commit_text,
    }
    return environment


def _commit_text(commit: str | None) -> str:
    digest, plus, changed = (commit or "not known").partition("+")
    return digest[:12] + plus + changed


def percent(fraction: float) -> str:
    """A share in words.

    >>> percent(0.404), percent(0.0123), percent(0.0)
    ('40 %', '1.2 %', '0 %')
    """
    value = 100.0 * fraction
    return f"{value:.0f} %" if value >= 9.95 or value == 0.0 else f"{value:.1f} %"


def saved_text(mean: float, interval: Sequence[float] | None = None) -> str:
    """Per cent of time saved, with its interval; below 0 is more time.

    >>> saved_text(0.1, [0.05, 0.152]), saved_text(-0.004)
    ('10.0 (5.0 to 15.2)', '-0.4')
    """
    first, *ends = (f"{round(100.0 * each, 1) + 0.0:.1f}" for each in (mean, *(interval or ())))
    return f"{first} ({' to '.join(ends)})" if ends else first


def draw_map(drawn: pl.DataFrame, names: Sequence[str]) -> str:
    """Best and chosen configs by size: a letter each, per cent saved; a dot within the noise."""
    shown = ("oracle", *names)
    families = drawn.filter(policy="oracle").group_by(FAMILY, maintain_order=True).len()
    most = max(1, _MOST_ROWS // len(shown))
    kept = families.sort("len", descending=True, maintain_order=True).head(most)
    band = pl.col("noise_band").fill_null(0.0)
    is_own = (pl.col("chosen_config") == ABSTAIN.key) | (
        (pl.col("policy") == "oracle") & (pl.col("gain") <= band / (1.0 + band))
    )
    kind = pl.col("chosen_config").str.split("/").list.head(2).list.join("/")
    cells = drawn.filter(pl.col("policy").is_in(shown)).with_columns(
        kind=pl.when(~is_own).then(kind)
    )
    cells = cells.join(kept, on=FAMILY, how="semi", nulls_equal=True, maintain_order="left")
    one_version = drawn["nccl_version"].n_unique() == 1
    rows = []
    for _, family in cells.group_by(FAMILY, maintain_order=True):
        title = _title(family.row(0, named=True), short=one_version)
        for name in shown:
            label = f"{title}: best measured" if name == "oracle" else name
            tiles = family.filter(policy=name).select("size_bytes", "kind", "gain").rows()
            rows.append((label, {size: (kind, gain) for size, kind, gain in tiles}))
    tested = set(drawn.filter(split=Split.TEST.value)["size_bytes"])
    sizes = sorted(set(cells["size_bytes"]))
    labels = {size: f"{size_label(size)}{' *' if size in tested else ''}" for size in sizes}
    return _svg(draw_tiles(rows, labels, len(shown)))


def draw_gains(drawn: pl.DataFrame, names: Sequence[str], simple: str) -> str:
    """Time saved by octave, mean over families; hatched: the noise band; asterisk: test tasks."""
    octave = pl.col("bin") // BINS_PER_OCTAVE
    means = pl.col("gain", "noise_band").mean()
    by_family = drawn.group_by("policy", *FAMILY, octave=octave).agg(means)
    by_octave = by_family.group_by("policy", "octave").agg(means).sort("octave")
    octaves = by_octave["octave"].unique().sort().to_list()
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    axes = figure.subplots()
    lines = [*names[:_MOST_POLICIES], simple, "oracle"]
    for index, (name, (dashes, marker)) in enumerate(zip(lines, _LINES, strict=False)):
        line = by_octave.filter(policy=name)
        at = [octaves.index(each) for each in line["octave"]]
        label = "best measured" if name == "oracle" else name
        look: dict[str, Any] = {"linestyle": dashes, "marker": marker, "markersize": 4.5}
        width = 2.2 if index == 0 else 1.2
        axes.plot(at, 100 * line["gain"], label=label, linewidth=width, **look)
    known = by_octave.filter(policy="oracle").drop_nulls("noise_band")
    if known.height:
        axes.set_ylim(axes.get_ylim())  # the band may be larger than all that is drawn
        slower, faster = 100 * known["noise_band"], 100 * (1 - 1 / (1 + known["noise_band"]))
        at = [octaves.index(each) for each in known["octave"]]
        look = {"facecolor": "#88888833", "edgecolor": "#999999", "hatch": "///", "linewidth": 0}
        axes.bar(at, slower + faster, 1.0, -slower, label="within the noise band", zorder=0, **look)
    tested = set(drawn.filter(split=Split.TEST.value).select(octave)["bin"])
    labels = [size_label(1 << each) + (" *" if each in tested else "") for each in octaves]
    axes.set_xticks(range(len(octaves)), labels, rotation=90, fontsize=8)
    axes.set_xlabel("message size, by octave")
    axes.set_ylabel("time saved (%)")
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return _svg(figure)


def draw_courses(courses: Mapping[str, pl.DataFrame]) -> str:
    """Measured over NCCL's true time, in strips: grey is the slowdown, | an alarm, + a change."""
    figure = Figure(figsize=(9.6, 0.9 + 1.25 * len(courses)), layout="constrained")
    strips = figure.subplots(len(courses), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, course) in zip(strips, courses.items(), strict=True):
        width = max(course.height // _MAX_POINTS, 1)
        calls = course.with_row_index("call").with_columns(window=pl.col("call") // width)
        line = calls.group_by("window", maintain_order=True).agg(
            pl.col("call").median(),
            ratio=(pl.col("measured_us") / pl.col("default_us")).log().mean().exp(),
            slowdown=pl.col("slowdown").max(),
        )
        shade = axes.twinx()
        look: dict[str, Any] = {"color": "#8a94a3", "alpha": 0.35, "step": "mid", "linewidth": 0}
        shade.fill_between(line["call"], 1.0, line["slowdown"], **look)
        shade.set(yscale="log", ylim=(1.0, 16.0))
        shade.set_yticks([])
        shade.minorticks_off()
        axes.set_zorder(shade.get_zorder() + 1)
        axes.patch.set_visible(False)
        axes.plot(line["call"], line["ratio"], color="#3b78d8", linewidth=0.9)
        axes.axhline(1.0, color="black", linewidth=0.6, linestyle=":")
        began, changed = (calls.filter(each)["call"] for each in ("alarm", "changed"))
        changed = changed[:: max(len(changed) // _MAX_POINTS, 1)]
        axes.plot(began, [0.42] * len(began), "|", color="#d9473c", markersize=7)
        axes.plot(changed, [0.34] * len(changed), "+", color="#7a7a7a", markersize=3)
        axes.set(yscale="log", ylim=(0.3, 4.0))
        axes.set_yticks([0.5, 1.0, 2.0], ["50 % less", "the same", "100 % more"])
        axes.minorticks_off()
        axes.set_title(name, fontsize=9, loc="left", pad=2)
    strips[-1].set_xlabel("call of the job")
    figure.supylabel("time, against NCCL's own choice", fontsize=9)
    return _svg(figure)


def _svg(figure: Figure) -> str:
    """Equal figures give equal text; black takes the page's ink, so ink on fills is "#111111"."""
    figure.patch.set_visible(False)
    for axes in figure.axes:
        if axes.get_facecolor() == _WHITE:
            axes.patch.set_visible(False)
    for legend in figure.legends:
        legend.get_frame().set_visible(False)
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dynamiccl"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"(stroke|fill): #000000", r"\1: currentColor", text)
    return text[text.index("<svg") :]


def _title(row: Mapping[str, object], *, short: bool) -> str:
    words = [str(row["collective"]), f"{row['num_nodes']} x {row['ranks_per_node']} ranks"]
    if row["launch_profile"] != "default":
        words.append(f"launch profile {row['launch_profile']}")
    if row["nccl_version"] and not short:
        words.append(f"NCCL {row['nccl_version']}")
    return ", ".join(words)
