"""What the belief is worth: probe by probe, on whole and small sweeps, and on published ones.

* `few_shot_figures`: judge's worlds probed by what the belief finds worth it, against random probes
  and against times interpolated between the same probes; and the three shipped systems.
* `rival_figures`: other ways to probe and to choose, after 48 decisions.
* `sweep_figures`: whole sweeps of every other size, and a user's small sweep, whole octaves of
  which are left out.
* `public_figures`: published sweeps, each octave left out in turn.

A probe is one noisy time (sd 2 %) of one config at one size; NCCL's own choice at that size is
probed as often, and counts as a probe. Truth is the table's, except in published sweeps. *Slower*
is by over 1 %. NAME_lo and NAME_hi are 95 % intervals, bootstraps over worlds; the figures of
`share_worse` are upper ends of such.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from judge_worlds import (
    DISTINCT,
    KINDS,
    SHIPPED,
    Floats,
    Ints,
    Table,
    judge_tables,
    shipped_table,
    small_sweep,
)
from learning_figures import parallel
from learning_rivals import WAYS, Probes, grid_of, interpolated, nearest, spread_out
from sweeps import SWEEPS, Measured, public_tables

from dynamiccl.belief import SLOWER, Belief, Bools, prior_of
from dynamiccl.drawn_worlds import Grid
from dynamiccl.repeats import Task, cells_of

#: Numbers of probes after which a table is judged, and what one counts that is never good enough.
LOOKS: Final = (0, 5, 10, 15, 20, 25, 30, 40, 60, 80, 120, 160, 200)
NEVER: Final = 400
WITHIN: Final = 0.02
#: Rivals' decisions to probe, each with NCCL's own choice beside it.
DECISIONS: Final = 48
SEEDS: Final = 3
#: Draws of a small sweep, and by how much NCCL's own choice is off where there is something to
#: gain.
SWEEPS_DRAWN: Final = 10
TO_GAIN: Final = 0.05
#: Spreads of a 90 % interval.
_COVERED: Final = 1.645
_BOOTSTRAPS: Final = 1000
Row = dict[str, Any]
Statistic = Callable[[Sequence[Row]], float]


# --- scores ---


def judged(log_time: Floats, chosen: Ints) -> Row:
    """Scores of chosen configs (S,) by true ln times (S, A); counts and sums over the sizes."""
    mine, own, best = log_time[np.arange(len(chosen)), chosen], log_time[:, 0], log_time.min(axis=1)
    return {
        "sizes": len(chosen),
        "regret": float(np.expm1(mine - best).mean()),
        "acts": int(np.count_nonzero(chosen)),
        "worse": int(np.count_nonzero(mine - own > np.log1p(SLOWER))),
        "gain": float((own - mine).sum()),
        "possible": float((own - best).sum()),
    }


def covered(belief: Belief, log_time: Floats, chosen: Ints) -> Row:
    """How many true gains are in their 90 % intervals: of all places, and of the chosen configs."""
    true = log_time[:, :1] - log_time
    is_in = np.abs(true - belief.gain) <= _COVERED * belief.spread
    rows = np.flatnonzero(chosen)
    return {
        "inside": int(np.count_nonzero(is_in[:, 1:])),
        "places": is_in[:, 1:].size,
        "chosen_inside": int(np.count_nonzero(is_in[rows, chosen[rows]])),
    }


def ratio(over: str, under: str) -> Statistic:
    """Sum over sum; 0 where there is nothing."""

    def statistic(rows: Sequence[Row]) -> float:
        total = sum(row[under] for row in rows)
        return float(sum(row[over] for row in rows) / total) if total else 0.0

    return statistic


def mean_of(name: str) -> Statistic:
    """The mean."""
    return lambda rows: float(np.mean([row[name] for row in rows]))


def with_interval(name: str, rows: Sequence[Row], statistic: Statistic) -> dict[str, float]:
    """A statistic of rows, one a world, as `name`, and its 95 % interval over worlds."""
    random = np.random.default_rng(0)
    drawn = [
        statistic([rows[i] for i in random.integers(0, len(rows), len(rows))])
        for _ in range(_BOOTSTRAPS)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    return {name: statistic(rows), f"{name}_lo": low, f"{name}_hi": high}


def upper(rows: Sequence[Row], under: str) -> float:
    """Upper end of the share of slower sizes, of those at which it acts or of all."""
    return with_interval("share", rows, ratio("worse", under))["share_hi"]


# --- probe by probe ---


def play(table: Table, seed: int, way: str, looks: Sequence[int]) -> list[Row]:
    """Probe a table in one of WAYS; scores at each of `looks` of every way to choose.

    Raises KeyError for a way that is none of them.
    """
    random = np.random.default_rng((seed, len(table.sizes_bytes)))
    probes = Probes(table, random)
    player = WAYS[way](probes)
    found: list[Row] = []
    for look in looks:
        while probes.count < look:
            player.tell(probes.probe(player.pick()))
        belief, (places, log_us, _) = probes.belief(), probes.rows()
        measured = spread_out(places, log_us, probes.can.shape)
        sizes, caution = probes.prior.grid.log2_sizes, belief.caution()
        chosen = belief.decide()
        ours = judged(table.log_time_us, chosen) | covered(belief, table.log_time_us, chosen)
        doubts = {"caution": caution, "widened": belief.widened, "stretch": belief.stretch}
        rivals = {
            "interpolated": interpolated(belief.is_near, caution, measured, sizes),
            "measured": nearest(measured, sizes),
        }
        about = {"world": table.name, "kind": table.kind, "seed": seed, "way": way, "look": look}
        found.append(about | {"choose": "belief"} | ours | doubts)
        for name, each in rivals.items():
            found.append(about | {"choose": name} | judged(table.log_time_us, each))
    return found


def _played(jobs: Sequence[tuple[Any, ...]]) -> list[Row]:
    return [row for _, rows in parallel(play, jobs) for row in rows]


def few_shot_figures(count: int) -> dict[str, Any]:
    """Curves of `count` worlds and of the shipped systems, and probes to 2 % of regret."""
    tables = judge_tables(count, 0)
    jobs = [(table, i, way, LOOKS) for i, table in enumerate(tables) for way in ("worth", "random")]
    rows = _played(jobs)
    ours = _of(rows, way="worth", choose="belief")
    figures: dict[str, Any] = {"few_shot_worlds": count, **_probes(ours, "probes")}
    figures |= _probes(_of(rows, way="random", choose="belief"), "random_probes")
    figures |= _probes(_of(rows, way="worth", choose="interpolated"), "interpolated_probes")
    figures |= _safety(ours, "few_shot")
    late = [row for row in ours if row["look"] > 0]
    by_world = [_sum(each) for each in _by(late, "world").values()]
    figures |= with_interval("coverage", by_world, ratio("inside", "places"))
    figures |= with_interval("coverage_chosen", by_world, ratio("chosen_inside", "acts"))
    figures["few_shot"] = {
        f"{way}, {choose}": _curve(_of(rows, way=way, choose=choose))
        for way, choose in (("worth", "belief"), ("random", "belief"), ("worth", "interpolated"))
    }
    figures["few_shot_kinds"] = {
        kind: _curve(mine) | _probes(mine, "probes") | _safety(mine, "few_shot")
        for kind, mine in _by(ours, "kind").items()
    }
    reached = {world: probes_within(mine) for world, mine in _by(ours, "world").items()}
    figures["few_shot_never"] = sorted(world for world, at in reached.items() if at == NEVER)
    return figures | _shipped_figures()


def _shipped_figures() -> dict[str, Any]:
    """After how many probes the mean regret of a shipped system's tables stays within 2 %."""
    tables = {name: [shipped_table(name, each) for each in DISTINCT] for name in SHIPPED}
    seeds = range(SEEDS)
    jobs = [(t, s, "worth", LOOKS) for s in seeds for each in tables.values() for t in each]
    rows = _of(_played(jobs), choose="belief")
    found: dict[str, Any] = {}
    for name, of_system in tables.items():
        names = {table.name for table in of_system}
        mine = [row for row in rows if row["world"] in names]
        each = list(_by(mine, "world", "seed").values())
        found |= with_interval(
            f"probes_to_2pct_{name}",
            [{"rows": part} for part in each],
            lambda drawn: probes_within([row for part in drawn for row in part["rows"]]),
        )
        found[f"shipped_{name}"] = _curve(mine)
    return found


def probes_within(rows: Sequence[Row]) -> float:
    """Probes from which on the mean regret stays within 2 %; NEVER if that takes more than 200."""
    regrets = {look: mean_of("regret")(each) for look, each in _by(rows, "look").items()}
    late = [look for look, regret in regrets.items() if regret > WITHIN]
    left = [look for look in regrets if not late or look > max(late)]
    return float(min(left, default=NEVER))


def _probes(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Median and mean over worlds of the probes to 2 %."""
    counts = [{"probes": probes_within(each)} for each in _by(rows, "world").values()]
    median = with_interval(
        f"{name}_median_2pct",
        counts,
        lambda drawn: float(np.median([each["probes"] for each in drawn])),
    )
    return median | with_interval(f"{name}_mean_2pct", counts, mean_of("probes"))


def _safety(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Upper ends of the share of slower sizes at the worst look."""
    looks = [each for look, each in _by(rows, "look").items() if look > 0]
    return {
        f"{name}_share_worse": max(upper(each, "acts") for each in looks),
        f"{name}_share_worse_all": max(upper(each, "sizes") for each in looks),
    }


def _curve(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures at each look."""
    found: dict[str, Any] = {"looks": sorted(_by(rows, "look"))}
    mine = [each for _, each in sorted(_by(rows, "look").items())]
    for name, statistic in {
        "regret": mean_of("regret"),
        "acts": ratio("acts", "sizes"),
        "share_worse": ratio("worse", "acts"),
        "share_worse_all": ratio("worse", "sizes"),
    }.items():
        found[name] = [round(statistic(each), 5) for each in mine]
    if "inside" in rows[0]:
        found["coverage"] = [round(ratio("inside", "places")(each), 4) for each in mine]
        found["coverage_chosen"] = [round(ratio("chosen_inside", "acts")(each), 4) for each in mine]
        for name in ("caution", "widened", "stretch"):
            found[name] = [float(np.median([row[name] for row in each])) for each in mine]
    return found


# --- rivals ---


def rival_figures(count: int) -> dict[str, Any]:
    """All ways to probe with all ways to choose, after DECISIONS, on `count` worlds."""
    tables = judge_tables(count, 0)
    jobs = [(table, i, way, (2 * DECISIONS,)) for way in WAYS for i, table in enumerate(tables)]
    groups = _by(_played(jobs), "way", "choose")
    order = [(way, choose) for way in WAYS for choose in ("belief", "interpolated", "measured")]
    return {
        "rival_worlds": count,
        "data_sets": {
            f"{DECISIONS} decisions, rivals": {
                f"{way}, {choose}": {
                    **with_interval("mean_regret", groups[way, choose], mean_of("regret")),
                    **with_interval("share_worse", groups[way, choose], ratio("worse", "sizes")),
                    **with_interval("gain_kept", groups[way, choose], ratio("gain", "possible")),
                }
                for way, choose in order
            }
        },
    }


# --- sweeps ---


def sweep_figures(count: int) -> dict[str, Any]:
    """Whole sweeps of every other size of `count` worlds; and small sweeps."""
    tables = judge_tables(count, 0)
    grids = _of(_swept(_whole_sweep, [(table, i) for i, table in enumerate(tables)]))
    ours, rival = (_of(grids, choose=each) for each in ("belief", "interpolated"))
    figures: dict[str, Any] = {
        "grid_worlds": count,
        "grid_share_worse": upper(ours, "acts"),
        "grid_share_worse_all": upper(ours, "sizes"),
        **with_interval("grid_mean_regret", ours, mean_of("regret")),
        **with_interval("grid_gain_kept", ours, ratio("gain", "possible")),
        **with_interval("grid_interpolated_mean_regret", rival, mean_of("regret")),
        **with_interval("grid_interpolated_share_worse", rival, ratio("worse", "acts")),
    }
    worth_it = list(_worth_it(tables))
    small = _swept(_small_sweep, [(t, draw) for t in worth_it for draw in range(SWEEPS_DRAWN)])
    for where in ("measured", "left_out", "between"):
        for choose, name in (("belief", ""), ("interpolated", "_interpolated")):
            mine = _of(small, where=where, choose=choose)
            by_table = [_sum(each) for each in _by(mine, "world").values()]
            prefix = "small_sweep_" if where == "measured" else f"small_sweep_{where}_"
            kept = f"{prefix}{'gain_' if where == 'measured' else ''}kept{name}"
            figures |= with_interval(kept, by_table, ratio("gain", "possible"))
            figures[f"{prefix}share_worse{name}"] = upper(by_table, "acts")
    figures["small_sweep_tables"] = {
        world: {
            f"{row['where']}, {row['choose']}": round(row["gain"] / max(row["possible"], 1e-9), 3)
            for row in map(_sum, _by(each, "where", "choose").values())
        }
        for world, each in _by(small, "world").items()
    }
    return figures


def _worth_it(tables: Sequence[Table]) -> Iterable[Table]:
    """The first world of each kind, and the shipped tables, in which NCCL's choice is far off."""
    shipped = [shipped_table(name, each) for name in SHIPPED for each in DISTINCT]
    for group in (*([t for t in tables if t.kind == kind] for kind in KINDS), shipped):
        off = [judged(table.log_time_us, np.zeros(len(table.sizes_bytes), int)) for table in group]
        found = [t for t, own in zip(group, off, strict=True) if own["regret"] >= TO_GAIN]
        yield from found[:1]


def _swept(work: Callable[..., list[Row]], jobs: Sequence[tuple[Any, ...]]) -> list[Row]:
    return [row for _, rows in parallel(work, jobs) for row in rows]


def _whole_sweep(table: Table, seed: int) -> list[Row]:
    num_sizes, num_configs = table.log_time_us.shape
    random = np.random.default_rng((seed, num_sizes))
    sweep = small_sweep(table, random, sizes=(num_sizes + 1) // 2, configs=num_configs)
    grid = grid_of(table)
    log_times = np.full((num_sizes, num_configs, 3), np.nan)
    log_times[np.ix_(sweep.rows, sweep.columns)] = sweep.log_times_us
    chosen = choices(grid, log_times, np.isfinite(table.log_time_us))
    about = {"world": table.name, "kind": table.kind}
    return [
        about | {"choose": name} | judged(table.log_time_us, each) for name, each in chosen.items()
    ]


def _small_sweep(table: Table, draw: int) -> list[Row]:
    """Scores of a user's sweep: with all of it, and of octaves that are left out of it in turn."""
    sweep = small_sweep(table, np.random.default_rng(draw))
    at = np.ix_(sweep.rows, sweep.columns)
    part = replace(
        table,
        sizes_bytes=tuple(table.sizes_bytes[row] for row in sweep.rows),
        configs=tuple(table.configs[column] for column in sweep.columns),
        cells=table.cells[at],
        log_cost_us=table.log_cost_us[at],
        log_time_us=table.log_time_us[at],
    )
    grid, can = grid_of(part), np.isfinite(part.log_time_us)
    found = {"measured": choices(grid, sweep.log_times_us, can)}
    found["left_out"] = _octaves_left_out(grid, sweep.log_times_us, can)
    octave = _octaves(grid)
    inner = (octave > octave[0]) & (octave < octave[-1])
    about = {"world": table.name, "draw": draw}
    rows = []
    for where, kept in (("measured", inner | ~inner), ("left_out", inner | ~inner)):
        for name, chosen in found[where].items():
            rows.append(about | {"where": where, "choose": name} | _at(part, chosen, kept))
    # At the ends of the sizes nothing is on the other side.
    for name, chosen in found["left_out"].items():
        rows.append(about | {"where": "between", "choose": name} | _at(part, chosen, inner))
    return rows


def _at(table: Table, chosen: Ints, kept: Bools) -> Row:
    return judged(table.log_time_us[kept], chosen[kept])


def choices(grid: Grid, log_times_us: Floats, allowed: Bools) -> dict[str, Ints]:
    """(S,) the belief's config of each size, and that of interpolated times at equal caution.

    `log_times_us` (S, A, R) are repeats, NaN where nothing was measured.
    """
    places, log_us, variance = cells(grid, log_times_us)
    belief = Belief(prior_of(grid), places, log_us, variance, allowed=allowed)
    measured = np.where(allowed, spread_out(places, log_us, allowed.shape), np.nan)
    measured[:, 0] = spread_out(places, log_us, allowed.shape)[:, 0]
    caution = belief.caution()
    rival = interpolated(belief.is_near, caution, measured, grid.log2_sizes)
    return {"belief": belief.decide(), "interpolated": rival}


def cells(grid: Grid, log_times_us: Floats) -> tuple[Ints, Floats, Floats]:
    """(n,) places that were measured, their ln us and the variance of these, by their repeats."""
    num_sizes, num_configs, _ = log_times_us.shape
    somewhere = np.zeros(3)
    tasks, times = [], {}
    for size in range(num_sizes):
        start = size * num_configs
        configs = {start + action: somewhere for action in range(1, num_configs)}
        tasks.append(Task(grid.log2_sizes[size], {0: configs}, start, 0))
        for action in range(num_configs):
            told = enumerate(log_times_us[size, action].tolist())
            known = [(repeat, value) for repeat, value in told if np.isfinite(value)]
            if known:
                times[start + action] = known
    found = cells_of(tasks, times)
    places = sorted(found, key=int)  # type: ignore[call-overload]
    log_us, variance, _ = np.array([found[place] for place in places]).T
    return np.array(places, dtype=np.int64), log_us, variance


def _octaves(grid: Grid) -> Ints:
    return np.floor(np.array(grid.log2_sizes) + 1e-6).astype(np.int64)


def _octaves_left_out(grid: Grid, log_times_us: Floats, allowed: Bools) -> dict[str, Ints]:
    """(S,) the choices at each octave by the others."""
    octave = _octaves(grid)
    found: dict[str, Ints] = {}
    for each in np.unique(octave):
        is_out = octave == each
        known = np.where(is_out[:, None, None], np.nan, log_times_us)
        for name, chosen in choices(grid, known, allowed).items():
            found.setdefault(name, np.zeros(len(octave), np.int64))[is_out] = chosen[is_out]
    return found


# --- published sweeps ---


def public_figures() -> dict[str, Any]:
    """The regret at left-out octaves of each published sweep, and over tables; by medians."""
    if not SWEEPS.is_dir():
        return {"public_skipped": f"no {SWEEPS}"}
    tables = [table for table in public_tables()[0] if not table.left_out]
    rows = _swept(_public, [(table,) for table in tables])
    lines: dict[str, Any] = {}
    apart = []
    for name, both in _by(rows, "world").items():
        ours, rival, own = (_of(both, choose=each)[0] for each in ("belief", "interpolated", "own"))
        lines[name] = {
            "sizes": ours["sizes"],
            "nccl": own["regret"],
            **{f"belief_{key}": ours[key] for key in ("regret", "acts", "worse")},
            **{f"interpolated_{key}": rival[key] for key in ("regret", "acts", "worse")},
        }
        apart.append({"less": ours["regret"] - rival["regret"]})
    figures: dict[str, Any] = {"public_tables": lines}
    for name, choose in (("", "belief"), ("interpolated_", "interpolated"), ("nccl_", "own")):
        mine = _of(rows, choose=choose)
        figures |= with_interval(f"public_{name}mean_regret", mine, mean_of("regret"))
        figures[f"public_{name}share_worse"] = upper(mine, "acts")
    return figures | with_interval("public_less_interpolated", apart, mean_of("less"))


def _public(table: Measured) -> list[Row]:
    grid = Grid(tuple(np.log2(table.sizes_bytes).tolist()), table.configs)
    has, median = table.is_measured(), table.log_median_us()
    found = _octaves_left_out(grid, table.log_times_us, has)
    found["own"] = np.zeros(len(has), dtype=np.int64)
    full = has[:, 0] & (has[:, 1:].sum(axis=1) >= 2)
    told = np.where(has, median, np.inf)[full]
    return [
        {"world": table.name, "choose": name} | judged(told, chosen[full])
        for name, chosen in found.items()
    ]


# --- rows ---


def _of(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _by(rows: Iterable[Row], *names: str) -> Mapping[Any, list[Row]]:
    """Rows by the value of one column, or the values of some."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in names) if len(names) > 1 else row[names[0]]
        found.setdefault(key, []).append(row)
    return found


def _sum(rows: Sequence[Row]) -> Row:
    """The first row, with the sums of what is summed over sizes."""
    counts = ("sizes", "acts", "worse", "gain", "possible", "inside", "places", "chosen_inside")
    return rows[0] | {n: sum(row[n] for row in rows) for n in counts if n in rows[0]}
