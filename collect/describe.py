"""What a data set has: a summary of each system, the best config by size, and a picture of it.

A gain counts above the noise band: by how much two measurements of NCCL's default in one sweep
(`aa_noise_band`), or else repeats of a config, differ.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import isfinite
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Final

import polars as pl

from dynamiccl.datasets import cells
from dynamiccl.datasets.cells import CONFIG_COLUMNS, NOISE_KEY, quiet, tuned, usable
from dynamiccl.datasets.schema import REQUESTED_COLUMNS, TASK_COLUMNS, Source, Status
from dynamiccl.datasets.store import config_of, part_paths, read, scan, slug
from dynamiccl.errors import NotEnoughData
from dynamiccl.sizes import size_label

FAMILY_COLUMNS: Final = tuple(name for name in TASK_COLUMNS if name != "size_bytes")
#: In a picture: families; tasks of both sides, and names on each front.
MOST_FAMILIES, MOST_PANELS, MOST_NAMES = 24, 6, 6
#: Pale, so that ink shows whatever a page's colours.
_FILLS: Final = ("#cfe2f3", "#fce5cd", "#d9ead3", "#f4cccc", "#d9d2e9", "#fff2cc", "#d0e0e3")
_OWN: Final = ("·", "#e6e6e6")
#: By size: kind of a config (None: NCCL's own, or within the noise), and its gain where known.
Tiles = Mapping[int, tuple[str | None, float | None]]


def describe(directory: Path) -> list[dict[str, Any]]:
    """The JSON document of each system with measurements, or with `recorded` calls.

    `rows_left_out` counts timed rows of unwell GPUs by column; `calls_timed` are timed by all
    ranks; PyTorch's traces name no `communicators`. Raises as `datasets.store.read`.
    """
    found: dict[str, dict[str, Any]] = {}
    others = ("calls", "costs", "steps")
    if part_paths(directory) or not any(part_paths(directory, kind) for kind in others):
        frame = read(directory)
        for (name,), part in frame.group_by("system", maintain_order=True):
            found[str(name)] = _summary(part)
    if part_paths(directory, "calls"):
        calls = scan(directory, "calls").group_by("system")
        counted = calls.agg(
            calls=pl.len(),
            calls_timed=pl.col("time_us").count(),
            communicators=pl.col("comm").drop_nulls().n_unique(),
            sources=pl.col("source").unique().sort(),
        )
        for counts in counted.sort("system").collect().to_dicts():
            name = counts.pop("system")
            found.setdefault(name, {"system": name})["recorded"] = counts
    return [*found.values()]


def _summary(part: pl.DataFrame) -> dict[str, Any]:
    timed, worked = usable(part), part.filter(pl.col("status") == Status.OK.value)
    is_forced, is_default = ~pl.col("is_default"), pl.col("is_default")
    two = pl.struct(CONFIG_COLUMNS).filter(is_forced).n_unique() >= 2
    by_task = cells.one_placement(part).group_by(TASK_COLUMNS)
    tasks = by_task.agg(two=two, default=is_default.any())
    sources = sorted(part["source"].unique())
    shapes = part.select("num_nodes", "ranks_per_node").unique().sort(pl.all())
    bands = cells.noise_bands(quiet(part)).sort("collective")
    kinds = cells.one_placement(quiet(tuned(part))).group_by(TASK_COLUMNS)
    faster = crossovers(part).filter("beyond_noise").sort("gain", descending=True)
    told = ("collective", "num_nodes", "ranks_per_node", "size_bytes", "best", "gain")
    return {
        "system": part["system"][0],
        "source": ", ".join(sources),
        "simulated": sources == [Source.SIMULATOR.value],
        "gpu": ", ".join(sorted(map(str, part["gpu"].drop_nulls().unique()))) or "unknown",
        "shapes": [f"{n or '?'}x{r or '?'}" for n, r in shapes.iter_rows()],
        "collectives": sorted(part["collective"].unique()),
        "rows": part.height,
        "rows_with_time": timed.height,
        "rows_by_status": dict(part["status"].value_counts().sort("status").iter_rows()),
        "rows_left_out": cells.left_out(part),
        "min_size_bytes": part["size_bytes"].min(),
        "max_size_bytes": part["size_bytes"].max(),
        "num_sizes": part["size_bytes"].n_unique(),
        "num_configs": timed.filter(is_forced).select(CONFIG_COLUMNS).n_unique(),
        "tasks": tasks.height,
        "tasks_with_default": int(tasks["default"].sum()),
        "tasks_with_two_forced": int(tasks["two"].sum()),
        "tasks_scorable": tasks.filter("two", "default").height,
        "cells_repeated": cells.cell_times(part).filter(pl.col("repeats") >= 2).height,
        "verified_share": int(worked["verified"].sum()) / max(worked.height, 1),
        "noise_bands": dict(bands.select("collective", "noise_band").rows()),
        # `faster`: beyond noise, or at all where noise is unknown.
        "gain": {
            "compared": kinds.agg(n=is_default.n_unique()).filter(pl.col("n") == 2).height,
            "faster": faster.height,
            "most": next(iter(faster.select(told).to_dicts()), None),
        },
    }


def _gain_text(gain: Mapping[str, Any], *, is_known: bool) -> str:
    if not gain["compared"]:
        return "cannot tell: no task has both NCCL's own choice and a forced config; sweep some"
    most, beyond = gain["most"], " beyond noise" if is_known else " (noise is not known)"
    if most is None:
        return f"nothing{beyond} in {gain['compared']} tasks that compare configs"
    shape = "x".join(str(most[name] or "?") for name in ("num_nodes", "ranks_per_node"))
    return (
        f"in {gain['faster']} of {gain['compared']} tasks a config is faster than NCCL's own choice"
        f"{beyond}; most: {most['best']}, {most['gain']:.0%}, {most['collective']} of "
        f"{size_label(most['size_bytes'])} on {shape}. A hint: fresh runs prove it"
    )


def other_lines(directory: Path, systems: Sequence[Mapping[str, Any]]) -> list[str]:
    """Text on calls of `systems`, NCCL's logged costs, and steps. Raises as `store.scan`."""
    lines = [
        f"{one['system']}: {calls['calls']} calls of {calls['communicators']} communicators, "
        f"{calls['calls_timed']} with a time from all ranks ({', '.join(calls['sources'])})"
        for one in systems
        if (calls := one.get("recorded")) is not None
    ]
    if part_paths(directory, "costs"):
        counts = scan(directory, "costs").group_by("system").len().sort("system").collect()
        lines += [f"{system}: {n} cells of NCCL's own cost model" for system, n in counts.rows()]
    if not part_paths(directory, "steps"):
        return lines
    traced = pl.col("step_us").filter(pl.col("communication_us").is_not_null()).sum()
    shares = pl.col("communication_us", "exposed_us").sum() / traced
    steps = scan(directory, "steps").group_by("system", "sweep", "run")
    jobs = steps.agg(pl.len(), pl.n_unique("rank"), pl.median("step_us") / 1e3, shares)
    for row in jobs.sort("system", "sweep", "run").collect().iter_rows():
        system, sweep, run, count, ranks, step_ms, communication, exposed = row
        parts = f"{communication:.0%} of it communication, {exposed:.0%} exposed"
        lines.append(
            f"{system}: {count} steps of {ranks} ranks in {sweep} ({run}), half of them within "
            f"{step_ms:.1f} ms; {parts if isfinite(communication) else 'its GPUs not traced'}"
        )
    return lines


def lines(one: Mapping[str, Any]) -> dict[str, str]:
    """The measurements of one system as text, by name."""
    by_status = ", ".join(f"{n} {name}" for name, n in one["rows_by_status"].items())
    bands = ", ".join(f"{name} {band:.2%}" for name, band in one["noise_bands"].items())
    return {
        "GPU": f"{one['gpu']}; nodes x ranks per node: {', '.join(one['shapes'])}",
        "source": one["source"],
        "collectives": ", ".join(one["collectives"]),
        "rows": f"{one['rows']} ({by_status}); {one['rows_with_time']} with a time, "
        f"left out: {cells.left_out_text(one['rows_left_out'])}",
        "sizes": f"{one['num_sizes']}, {one['min_size_bytes']} to {one['max_size_bytes']} bytes",
        "forced configs": str(one["num_configs"]),
        "tasks": f"{one['tasks']}; default measured in {one['tasks_with_default']}, two forced "
        f"configs in {one['tasks_with_two_forced']}, both in {one['tasks_scorable']}",
        "repeated cells": str(one["cells_repeated"]),
        "verified": f"{one['verified_share']:.0%} of the rows that worked",
        "noise band": f"{bands}: nine in ten configs repeat within it"
        if bands
        else "unknown: no cell has two independent repeats",
        "to gain": _gain_text(one["gain"], is_known=bool(bands)),
    }


def crossovers(frame: pl.DataFrame) -> pl.DataFrame:
    """The best measured config of each quiet task, sorted by family and size.

    Columns: TASK_COLUMNS, `best` (config key; 'ABSTAIN' when the default is as good), `best_us`,
    `default_us` (null when not measured), `gain` (default / best - 1), `noise_band` (null when
    unknown), `beyond_noise`.
    """
    rows = cells.comparable(usable(quiet(cells.trusted(tuned(frame)))))
    # Of equal times the default's comes first, then by name.
    times = cells.cell_times(cells.one_placement(rows))
    times = times.sort("time_us", ~pl.col("is_default"), *REQUESTED_COLUMNS)
    default = times.filter("is_default").select(*TASK_COLUMNS, default_us="time_us")
    tasks = times.group_by(TASK_COLUMNS, maintain_order=True)
    best = tasks.agg(pl.col(CONFIG_COLUMNS).first(), best_us=pl.col("time_us").first())
    pairs = rows.group_by(NOISE_KEY).agg(aa=pl.col("aa_noise_band").median())
    repeats = cells.noise_bands(rows)
    # The default under the task's own profile: the job would get it otherwise.
    for told, key in ((default, TASK_COLUMNS), (pairs, NOISE_KEY), (repeats, NOISE_KEY)):
        best = best.join(told, on=key, how="left", nulls_equal=True)
    config = pl.struct(CONFIG_COLUMNS).map_elements(lambda row: config_of(row).key, pl.String)
    gain, band = pl.col("default_us") / pl.col("best_us") - 1.0, pl.coalesce("aa", "noise_band")
    beyond = gain > band.fill_null(0.0)
    judged = best.with_columns(best=config, gain=gain, noise_band=band, beyond_noise=beyond)
    return judged.drop(*CONFIG_COLUMNS, "aa").sort(*FAMILY_COLUMNS, "size_bytes")


def plot_systems(frame: pl.DataFrame, folder: Path) -> list[Path]:
    """Draw PNGs. Raises ModuleNotFoundError without matplotlib, NotEnoughData without times."""
    figures = {}
    for (system,), part in crossovers(frame).group_by("system", maintain_order=True):
        title = f"{system}: best measured config by message size,\n"
        title += "and its gain over NCCL's own choice, %"
        figures[folder / f"{slug(str(system))}.png"] = draw_system(title, part)
    for (system,), part in both_sides(frame).group_by("system", maintain_order=True):
        figures[folder / f"{slug(str(system))}-beside.png"] = draw_both_sides(str(system), part)
    if not figures:
        raise NotEnoughData("nothing to draw: no quiet task of a tuned collective has a time")
    folder.mkdir(parents=True, exist_ok=True)
    for path, figure in figures.items():
        figure.savefig(path, dpi=120)
    return [*figures]


def both_sides(frame: pl.DataFrame) -> pl.DataFrame:
    """Medians by config beside compute; on the front, whatever is faster costs more compute."""
    rows = cells.comparable(cells.independent(tuned(frame).drop_nulls("compute_loss_us")))
    medians = pl.col("time_us", "compute_loss_us").median()
    configs = rows.group_by(*TASK_COLUMNS, *CONFIG_COLUMNS, maintain_order=True)
    found = configs.agg(medians, pl.col("actual_num_channels").drop_nulls().first())
    found = found.sort(*TASK_COLUMNS, "time_us", "compute_loss_us")
    least = pl.col("compute_loss_us").cum_min().shift(1).over(TASK_COLUMNS)
    is_less = (pl.col("compute_loss_us") < least).fill_null(value=True)
    return found.with_columns(on_front=is_less)


def draw_both_sides(system: str, part: pl.DataFrame) -> Any:
    """A matplotlib Figure of one system's `both_sides`: panels of the tasks of most configs."""
    from matplotlib.figure import Figure

    tasks = part.partition_by(TASK_COLUMNS, maintain_order=True)
    tasks = sorted(tasks, key=lambda task: -task.height)[:MOST_PANELS]
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(4.6 * columns, 0.7 + 3.8 * rows), layout="constrained")
    title = f"{system}: what calls take, and what they take from products beside them; star: NCCL"
    figure.suptitle(f"{title}, line: no config is better in both", fontsize=10)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for task, axes in zip(tasks, panels, strict=False):
        front, own = task.filter("on_front"), task.filter("is_default")
        axes.scatter("time_us", "compute_loss_us", data=task.to_dict(), s=14, color="#9aa5b1")
        axes.plot(front["time_us"], front["compute_loss_us"], "o-", color="#1b6ca8", ms=5, lw=1)
        axes.plot(own["time_us"], own["compute_loss_us"], "*", color="#c1440e", ms=13)
        named = front.filter(~pl.col("is_default"))
        named = pl.concat([named[:: -(-named.height // MOST_NAMES) or 1], own])
        for row in named.to_dicts():
            channels = row["actual_num_channels"]
            text = f"NCCL's own, {channels or '?'}ch" if row["is_default"] else config_of(row).key
            place = (row["time_us"], row["compute_loss_us"])
            axes.annotate(text, place, (4, 5), textcoords="offset points", fontsize=7)
        shape, size = _family_names([task])[0], size_label(task["size_bytes"][0])
        beside, edge = task["interference_kind"][0], task["interference_level"][0]
        axes.set_title(f"{shape}, {size}, {beside} {edge:g}", fontsize=9)
        axes.set_xscale("log")
        axes.tick_params(which="both", labelsize=7)
        axes.set_xlabel("time of the call beside compute, us", fontsize=8)
        axes.set_ylabel("compute lost a call, us", fontsize=8)
        axes.margins(x=0.15, y=0.12)
    for axes in panels:
        axes.remove()
    return figure


def draw_system(title: str, part: pl.DataFrame) -> Any:
    """A matplotlib Figure of one system's `crossovers`: families by message size."""
    families = part.partition_by(FAMILY_COLUMNS, maintain_order=True)[:MOST_FAMILIES]
    tiles = [
        {task["size_bytes"]: (_kind(task), task["gain"]) for task in family.to_dicts()}
        for family in families
    ]
    sizes = {size: size_label(size) for size in sorted(part["size_bytes"].unique())}
    figure = draw_tiles([*zip(_family_names(families), tiles, strict=True)], sizes)
    figure.suptitle(title, fontsize=11)
    figure.set_figheight(figure.get_figheight() + 0.4)
    return figure


def draw_tiles(
    rows: Sequence[tuple[str, Tiles]], sizes: Mapping[int, str], together: int = 1
) -> Any:
    """A matplotlib Figure of named rows by size: kinds of configs as letters, with gains in %.

    `sizes` have labels; so many rows stand `together`.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    kinds = sorted({kind for _, tiles in rows for kind, _ in tiles.values() if kind is not None})
    # Enough for NCCL's seven algorithms and three protocols.
    marks = zip(ascii_uppercase, cycle(_FILLS), strict=False)
    looks = dict(zip(kinds, marks, strict=False))
    tops = [0.26 * row + 0.16 * (row // together) for row in range(len(rows))]
    width = 0.34 if len(sizes) <= 28 else 0.26
    longest = max(len(name) for name, _ in rows)
    inches = (0.7 + 0.075 * longest + width * max(len(sizes), 14), 1.3 + tops[-1])
    figure = Figure(figsize=inches, layout="constrained")
    axes = figure.subplots()
    for top, (_, tiles) in zip(tops, rows, strict=True):
        for at, (kind, gain) in ((at, tiles[s]) for at, s in enumerate(sizes) if s in tiles):
            mark, fill = looks[kind] if kind else _OWN
            # Never -0.
            text = mark if not kind or gain is None else f"{mark} {round(100 * gain) + 0:d}"
            axes.add_patch(Rectangle((at, top), 1.0, 0.25, fc=fill, ec="white", lw=0.8))
            look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5}
            axes.text(at + 0.5, top + 0.125, text, color="#111111", **look)
    axes.set_xlim(0, len(sizes))
    axes.set_ylim(tops[-1] + 0.27, -0.02)
    axes.set_yticks([top + 0.125 for top in tops], [name for name, _ in rows], fontsize=8)
    places = [at + 0.5 for at in range(len(sizes))]
    axes.set_xticks(places, [*sizes.values()], rotation=90, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    legend = [(f"{mark}  {kind}", fill) for kind, (mark, fill) in looks.items()]
    legend.append(("·  NCCL's own choice, or as fast within the noise", _OWN[1]))
    handles = [Patch(label=label, facecolor=fill) for label, fill in legend]
    figure.legend(handles=handles, loc="outside lower left", fontsize=8, ncols=4, frameon=False)
    return figure


def _kind(task: Mapping[str, Any]) -> str | None:
    if task["best"] == "ABSTAIN" or (task["default_us"] is not None and not task["beyond_noise"]):
        return None
    return "/".join(task["best"].split("/")[:2])


def _family_names(families: Sequence[pl.DataFrame]) -> list[str]:
    firsts = [family.row(0, named=True) for family in families]
    tasks = [{n: "?" if value is None else value for n, value in one.items()} for one in firsts]
    shown = {"system", "collective", "num_nodes", "ranks_per_node"}
    varied = [n for n in FAMILY_COLUMNS if n not in shown and len({t[n] for t in tasks}) > 1]
    words = ["{collective} {num_nodes}x{ranks_per_node}", *(f"{n} {{{n}}}" for n in varied)]
    return [" ".join(words).format(**task) for task in tasks]
