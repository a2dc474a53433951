"""`dynamiccl-collect compare`: what differs between two data sets of a machine, and what does not.

Log times of cells (tasks under a config) are compared, less what all cells of a run share. Noise is
that of cells of like size, or a cell's own where far larger; with one run each, what changes at
neighbouring sizes disagree by: then a change is *not confirmed*. Cells and ranges of sizes are
tested together (Benjamini and Hochberg 1995), and count if shuffled runs hardly give as many.
"""

import math
import statistics
import tomllib
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import polars as pl

from dynamiccl.datasets.cells import (
    CONFIG_COLUMNS,
    FAILED_WHERE,
    comparable,
    independent,
    quiet,
    tuned,
    usable,
    with_trust,
)
from dynamiccl.datasets.schema import REQUESTED_COLUMNS, TASK_COLUMNS
from dynamiccl.datasets.store import config_of, provenance_of
from dynamiccl.errors import NotEnoughData
from dynamiccl.repeats import MAD_TO_SIGMA
from dynamiccl.sizes import size_label

#: Share of false findings, and of findings by chance; the least change that counts.
LEVEL, LEAST, _SHUFFLES = 0.01, 0.01, 100
OWN_CHOICE: Final = "NCCL's own choice"
#: Without what an upgrade may change; placements are repeats here.
TASK: Final = tuple(c for c in TASK_COLUMNS if c not in {"nccl_version", "gpu"})
CELL: Final = (*TASK, *CONFIG_COLUMNS)
_BESIDE: Final = (
    *("system", "collective", "num_nodes", "ranks_per_node", "launch_profile", "nccl_version"),
    *("nccl_tests_version", "driver_version", "cuda_version", "gpu", "nvswitch", "nic_kind"),
    *("nic_gbits_per_s", "nics_per_node", "node_fingerprint", "hosts", "statistic"),
)
#: Bytes between ranges: latency-bound, intermediate, bandwidth-bound.
_BOUNDS: Final = (1 << 16, 1 << 22)
#: Cells or ranges, and rows, of like size that tell noise.
_LIKE, _LIKE_ROWS = 31, 151
#: Clip in sigmas (one launch in a hundred takes twice as long); own over usual noise where it
#: counts; least error, as nccl-tests prints three or four digits.
_CLIP, _NOISY, _LEAST_ERROR = 3.0, 2.0, 0.002
#: 95 %, and 99.8 % of a normal, beyond which what all cells share is real.
_Z_INTERVAL, _Z_COMMON = 1.96, 3.09


def compare(old: pl.DataFrame, new: pl.DataFrame) -> dict[str, Any]:
    """Changes are fractions of the old time, above 0 slower. Raises NotEnoughData."""
    sides, both = [_rows(old), _rows(new)], [*CELL, "in_place"]
    others = differing(*({c: [*side[c].drop_nulls().unique()] for c in _BESIDE} for side in sides))
    shared = sides[0].join(sides[1], on=both, how="semi", nulls_equal=True).select(both).unique()
    if shared.is_empty():
        known = [each for each in others if "not known" not in each.values()]
        apart = [f"{e['name']} is {e['old']} in one and {e['new']} in the other" for e in known]
        why = "; ".join(apart[:4]) or "no config at a size was measured alone in both"
        raise NotEnoughData(f"the two data sets share no cell: {why}")
    cells = shared.select(CELL).unique().sort(CELL, nulls_last=True).with_row_index("cell")
    line = pl.struct(pl.exclude("size_bytes", "cell")).rank("dense").cast(pl.Int64)
    above = pl.sum_horizontal((pl.col("size_bytes") > bound).cast(pl.Int64) for bound in _BOUNDS)
    cells = cells.with_columns(line=line, range=3 * line + above)
    rows = pl.concat(side.with_columns(is_new=pl.lit(i == 1)) for i, side in enumerate(sides))
    rows = rows.join(shared, on=both, nulls_equal=True).join(cells, on=CELL, nulls_equal=True)
    systems, changes = [], list[dict[str, Any]]()
    for (name,), part in rows.group_by("system", maintain_order=True):
        judged = _judged(part)
        systems.append(_system(str(name), judged))
        of_cells = judged.filter(kind="cell").drop("line", "size_bytes")
        of_ranges = judged.filter(kind="range").select(range="key", whole="sign")
        told = cells.join(of_cells, left_on="cell", right_on="key").join(of_ranges, "range", "left")
        changes += _changes(told.sort("line", "size_bytes"), systems[-1]["change"])
    sure = [e for e in (*systems, *changes) if e["is_confirmed"] and e["is_beyond_noise"]]
    failures = _failures(old, new)
    return {
        "is_slower": any(e["change"] >= LEAST for e in sure) or bool(failures),
        "is_changed": bool(sure or failures),
        "failures": failures,
        "systems": systems,
        "changes": sorted(changes, key=lambda c: (c["config"] != OWN_CHOICE, -abs(c["change"]))),
        "other_changes": others,
    }


def _failures(old: pl.DataFrame, new: pl.DataFrame) -> list[dict[str, Any]]:
    """Configs that crash, hang or compute wrong values at sizes at which they did not before."""
    key, size = [*FAILED_WHERE, *REQUESTED_COLUMNS], pl.col("size_bytes")
    before, now = (with_trust(tuned(frame)).filter(~pl.col("is_default")) for frame in (old, new))
    worked = usable(before).filter("is_trusted").group_by(key).agg(last_bytes=size.max())
    failed = now.filter(~pl.col("is_trusted")).group_by(key).agg(first_bytes=size.min())
    found = failed.join(worked, on=key, nulls_equal=True)
    found = found.filter(pl.col("first_bytes") <= pl.col("last_bytes")).sort(key)
    return [{**row, "config": config_of(row).key} for row in found.to_dicts()]


def _rows(frame: pl.DataFrame) -> pl.DataFrame:
    """Independent quiet rows with `log` (ln us), `ran`, and `unit`: what is measured at a time."""
    # A run; in tables of others, without launches, each repeat of it.
    repeat = pl.when(pl.col("launch").is_null()).then(pl.col("repeat").cast(pl.String))
    channels = pl.col("actual_num_channels").fill_null(0)  # 0: not known
    return independent(comparable(quiet(frame))).with_columns(
        log=pl.col("time_us").log(),
        unit=pl.concat_str("sweep", "run", repeat, separator="/", ignore_nulls=True),
        ran=pl.format("{}/{}/{}", "actual_algorithm", "actual_protocol", channels),
    )


def _judged(rows: pl.DataFrame) -> pl.DataFrame:
    """`_tested` on cells, ranges of sizes and all cells of one system (`kind`, `key`)."""
    side, unit, log = ["cell", "is_new"], ["is_new", "unit"], pl.col("log")
    # Placements differ by an offset that is the same on both sides.
    rows = rows.group_by("cell", *unit, "line", "range", "size_bytes").agg(log.mean(), "ran")
    rows = rows.sort("size_bytes", *side, "unit")
    middle = log.median().over(side)
    rows = rows.with_columns(log=log - (middle.min() + middle.max()).over("cell") / 2)
    # What the cells of a unit share; of a few it would be their own change.
    has_most = 2 * pl.len().over(unit) > pl.col("cell").n_unique().over("is_new")
    of_units = rows.filter(has_most).group_by(unit, maintain_order=True)
    whole = of_units.agg(log.median(), key=pl.lit(0)).filter(pl.col("is_new").n_unique() == 2)
    rows = rows.join(whole.select(*unit, drift="log"), on=unit, how="left", maintain_order="left")
    drift = pl.col("drift").fill_null(pl.col("drift").mean().over("is_new")).fill_null(0.0)
    rows = rows.with_columns(log=log - drift)
    off, count = (log - log.median().over(side)).abs(), pl.len().over(side)
    # Few repeats lie too near to their median.
    noise = pl.when(count > 1).then(off * (count / (count - 1)).sqrt())
    near = noise.rolling_median(_LIKE_ROWS, min_samples=1, center=True)
    rows = rows.with_columns(limit=_CLIP * MAD_TO_SIGMA * near)
    # A median, so that one cell alone does not change its range.
    several = rows.filter(pl.col("cell").n_unique().over("range") > 2)
    in_ranges = several.group_by("range", *unit, "line", maintain_order=True)
    ranges = in_ranges.agg(log.median(), pl.col("size_bytes").min())
    kinds = {"cell": rows.rename({"cell": "key"}), "range": ranges.rename({"range": "key"})}
    named = [part.with_columns(kind=pl.lit(kind)) for kind, part in {**kinds, "all": whole}.items()]
    rows = pl.concat(named, how="diagonal_relaxed")
    found, as_many = _tested(rows), 0
    is_sure = (pl.col("sign") != 0.0) & (pl.col("runs") > 1)
    num_sure = found.filter(is_sure).height
    for seed in range(_SHUFFLES if num_sure else 0):
        mixed = rows.with_columns(order=pl.int_range(pl.len()).shuffle(seed))
        mixed = mixed.with_columns(pl.col("is_new").sort_by("order").over("kind", "key"))
        as_many += _tested(mixed).filter(is_sure).height >= num_sure
        if as_many > LEVEL * _SHUFFLES:
            return found.with_columns(sign=pl.when(is_sure).then(0.0).otherwise("sign"))
    return found


def _tested(rows: pl.DataFrame) -> pl.DataFrame:
    """Change of each key (ln new/old); null `error`: unknown, `sign` 0: within noise."""
    key, freedom, scale = ["kind", "key"], pl.col("freedom"), pl.col("scale")
    off = pl.col("log") - pl.col("log").median().over(*key, "is_new")
    near = pl.col("log") - off + pl.min_horizontal(off.abs(), "limit") * off.sign()
    groups = rows.with_columns(near=near).group_by(*key, "line", "is_new")
    sides = groups.agg(
        pl.col("size_bytes").min(),
        pl.col("ran").list.explode().drop_nulls().unique(),
        mean=pl.col("near").mean(),
        squares=pl.col("near").var(ddof=0) * pl.len(),
        raw=pl.col("log").var(ddof=0) * pl.len(),
        runs=pl.len().cast(pl.Int64),
    )
    old, new = (sides.filter(pl.col("is_new") == is_new) for is_new in (False, True))
    found = old.join(new.drop("line", "size_bytes"), on=key, suffix="_new")
    found = found.sort("kind", "size_bytes", "key").with_columns(
        change=pl.col("mean_new") - pl.col("mean"),
        squares=pl.col("squares") + pl.col("squares_new"),
        freedom=pl.col("runs") + pl.col("runs_new") - 2,
        scale=1 / pl.col("runs") + 1 / pl.col("runs_new"),
        runs=pl.min_horizontal("runs", "runs_new"),
    )
    like = pl.col("squares", "freedom").rolling_sum(_LIKE, min_samples=1, center=True).over("kind")
    steps = pl.col("change").diff().over("kind", "line", order_by="size_bytes").abs() / math.sqrt(2)
    steps = MAD_TO_SIGMA * steps.rolling_median(_LIKE, min_samples=1, center=True).over("kind")
    found = found.with_columns(like.name.prefix("like_"), steps=steps)
    known = pl.col("like_freedom").replace(0, None)
    usual = pl.coalesce((scale * pl.col("like_squares") / known).sqrt(), "steps")
    own = ((pl.col("raw") + pl.col("raw_new")) / freedom * scale).sqrt()
    found = found.with_columns(own=own, usual=usual.clip(_LEAST_ERROR))
    is_noisy = (freedom > 0) & (pl.col("own") > _NOISY * pl.col("usual"))
    error = pl.when(is_noisy).then("own").otherwise("usual")
    f = pl.when(is_noisy).then(freedom).otherwise(known.fill_null(_LIKE))
    # Wallace 1959: Student's t as the normal deviate of the same probability.
    t = pl.col("change") / error
    z = t.sign() * (8 * f + 1) / (8 * f + 3) * (f * (t**2 / f).log1p()).sqrt()
    found = found.with_columns(error=error, z=z.fill_null(0.0))
    p = pl.Series(math.erfc(abs(z) / math.sqrt(2)) for z in found["z"])
    ranked = p.filter(found["kind"] != "all").sort()
    limit = max((x for i, x in enumerate(ranked, 1) if x <= LEVEL * i / len(ranked)), default=-1.0)
    counts = (p <= limit) & (found["change"].abs() >= LEAST)
    return found.with_columns(sign=pl.when(counts).then(pl.col("change").sign()).otherwise(0.0))


def _system(name: str, found: pl.DataFrame) -> dict[str, Any]:
    whole = found.filter(kind="all").to_dicts()
    change, error, z, runs = (whole[0][c] if whole else 0 for c in ("change", "error", "z", "runs"))
    errors = found.filter(kind="cell")["error"].drop_nulls().to_list()
    return {
        "system": name,
        "cells": found.filter(kind="cell").height,
        **_interval(change, error or None),
        "is_beyond_noise": runs > 1 and abs(z) > _Z_COMMON,
        "is_confirmed": runs > 1,
        "noise": _interval(0.0, statistics.median(errors) if errors else None)["high"],
    }


def _interval(change: float, error: float | None) -> dict[str, Any]:
    ends = [None if error is None else change + s * _Z_INTERVAL * error for s in (-1, 1)]
    low, high = (None if end is None else math.expm1(end) for end in ends)
    return {"change": math.expm1(change), "low": low, "high": high}


def _changes(cells: pl.DataFrame, common: float) -> Iterator[dict[str, Any]]:
    """Neighbouring sizes of a config that changed alike, and where NCCL chooses otherwise."""
    in_range = (pl.col("sign") == 0) & (pl.col("change") * pl.col("whole") > -pl.col("usual"))
    rows = cells.with_columns(sign=pl.when(in_range).then("whole").otherwise("sign")).to_dicts()
    for (_, sign, told), group in groupby(rows, lambda c: (c["line"], c["sign"], _why(c))):
        (is_other, why), part = told, list(group)
        first, errors = part[0], [c["usual" if len(part) > 2 else "error"] for c in part]
        change = statistics.fmean(cell["change"] for cell in part)
        error = None if None in errors else math.hypot(*errors) / len(part)
        is_confirmed = min(cell["runs"] for cell in part) > 1
        # One launch in a hundred takes twice as long: one size of one run tells nothing.
        is_beyond = sign != 0.0 and (is_confirmed or len(part) > 1 or is_other)
        is_beyond &= abs(change) > max(LEAST, _Z_INTERVAL * (error or math.inf))
        if is_beyond or (first["is_default"] and is_other):
            yield {
                **{c: first[c] for c in TASK if c != "size_bytes"},
                "config": OWN_CHOICE if first["is_default"] else config_of(first).key,
                "first_bytes": first["size_bytes"],
                "last_bytes": part[-1]["size_bytes"],
                **_interval(change + math.log1p(common), error),
                "is_beyond_noise": is_beyond,
                "is_confirmed": is_confirmed,
                "why": why,
            }


def _why(cell: dict[str, Any]) -> tuple[bool, str]:
    if len(cell["ran"]) != 1 or len(cell["ran_new"]) != 1:
        return False, "what ran is not known"
    ((old, channels), (new, now)) = (cell[c][0].rsplit("/", 1) for c in ("ran", "ran_new"))
    if old == new and (channels == now or "0" in (channels, now)):
        return False, f"the same choice: {old}" if cell["is_default"] else "the same config"
    if old == new:
        more = f"{'more' if int(now) > int(channels) else 'fewer'} channels than before"
        return True, f"{old} with {now} channels, before {channels}" if cell["is_default"] else more
    return True, f"runs {new}, before {old}"


def sweep_settings(data: Path) -> dict[str, list[Any]]:
    """The settings of the sweep files of a data set."""
    files = [tomllib.loads(e["sweep_file"]) for e in provenance_of(data) if "sweep_file" in e]
    names = sorted({name for file in files for name in file} - {"name"})
    return {f"sweep file: {name}": [file.get(name) for file in files] for name in names}


def differing(old: Mapping[str, list[Any]], new: Mapping[str, list[Any]]) -> list[dict[str, str]]:
    """What is not alike, by name."""
    told = []
    for name in {**old, **new}:
        sides = ({*map(str, side.get(name) or ["not known"])} for side in (old, new))
        before, after = (", ".join(sorted(side)) for side in sides)
        told += [{"name": name, "old": before, "new": after}] if before != after else []
    return told


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The changes, and what else is to say, as text."""
    for each in found["failures"]:
        group = f"{each['collective']} {each['num_nodes']}x{each['ranks_per_node']}"
        first = size_label(each["first_bytes"])
        how = "crashes, hangs or computes wrong values now"
        yield f"{group}  {each['config']}  from {first} on  {how}"
    for each in found["changes"]:
        group = f"{each['collective']} {each['num_nodes']}x{each['ranks_per_node']}"
        sizes = dict.fromkeys(size_label(each[end]) for end in ("first_bytes", "last_bytes"))
        told = _percent(each) + ("" if each["is_confirmed"] else " ?")
        yield "  ".join((group, each["config"], " to ".join(sizes), told, each["why"]))
    for each in found["other_changes"]:
        yield f"{each['name']}: {each['old']} -> {each['new']}"
    for each in found["systems"]:
        noise = "?" if each["noise"] is None else f"{each['noise']:.1%}"
        told = f"{each['system']}: {each['cells']} cells in both; one that changed by less than "
        runs = "more than runs" if each["is_beyond_noise"] else "no more than runs"
        runs = runs if each["is_confirmed"] else "nobody knows what runs"
        yield f"{told}{noise} means nothing; all together {_percent(each)}, {runs} differ by"
    if not all(each["is_confirmed"] for each in (*found["systems"], *found["changes"])):
        yield "? not confirmed: one run does not tell what launches differ by; measure cycles = 3"
    if not found["changes"] and not found["is_changed"]:
        yield "Nothing changed beyond noise."


def _percent(change: dict[str, Any]) -> str:
    low, high = change["low"], change["high"]
    return f"{change['change']:+.1%}" + ("" if low is None else f" ({low:+.1%} to {high:+.1%})")
