"""What the belief is worth, probe by probe, and whether its rivals come near.

* `few_shot_figures`: judge's worlds probed by what the belief finds worth it, against random probes
  and against times interpolated between the same probes; and the three shipped systems.
* `rival_figures`: other ways to probe and to choose, after 48 decisions (learning_rivals.py).

A probe is one noisy time (sd 2 %) of one config at one size; NCCL's own choice at that size is
probed as often, and counts as a probe. Truth is the table's. *Slower* is by over 1 %. NAME_lo and
NAME_hi are 95 % intervals, bootstraps over worlds; `share_worse` are upper ends of such.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, Final

import numpy as np
from harness import parallel
from judge_worlds import DISTINCT, SHIPPED, Floats, Ints, Table, judge_tables, shipped_table
from learning_rivals import WAYS, Probes, interpolated, nearest, spread_out

from dynamiccl.belief import SLOWER, Belief

#: Numbers of probes after which a table is judged, and what one counts that is never good enough.
LOOKS: Final = (0, 5, 10, 15, 20, 25, 30, 40, 60, 80, 120, 160, 200)
NEVER: Final = 400
WITHIN: Final = 0.02
#: Rivals' decisions to probe, each with NCCL's own choice beside it.
DECISIONS: Final = 48
#: Ways to choose from what was probed.
CHOICES: Final = ("belief", "interpolated", "measured")
SEEDS: Final = 3
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
        rivals = {
            "interpolated": interpolated(belief.is_near, caution, measured, sizes),
            "measured": nearest(measured, sizes),
        }
        about = {"world": table.name, "kind": table.kind, "seed": seed, "way": way, "look": look}
        found.append(about | {"choose": "belief"} | ours)
        for name, each in rivals.items():
            found.append(about | {"choose": name} | judged(table.log_time_us, each))
    return found


def few_shot_figures(count: int) -> dict[str, Any]:
    """Curves of `count` worlds and of the shipped systems, and probes to 2 % of regret."""
    tables = judge_tables(count, 0)
    jobs = [(table, i, "worth", LOOKS) for i, table in enumerate(tables)]
    jobs += [(table, i, "random", LOOKS) for i, table in enumerate(tables[: count // 2])]
    rows = in_parallel(play, jobs)
    ours = of(rows, way="worth", choose="belief")
    figures: dict[str, Any] = {"few_shot_worlds": count, **_probes(ours, "probes")}
    figures |= _probes(of(rows, way="random", choose="belief"), "random_probes")
    figures |= _probes(of(rows, way="worth", choose="interpolated"), "interpolated_probes")
    figures |= _safety(ours, "few_shot")
    late = [row for row in ours if row["look"] > 0]
    by_world = [summed(each) for each in by(late, "world").values()]
    figures |= with_interval("coverage", by_world, ratio("inside", "places"))
    figures |= with_interval("coverage_chosen", by_world, ratio("chosen_inside", "acts"))
    figures["few_shot"] = {
        f"{way}, {choose}": _curve(of(rows, way=way, choose=choose))
        for way, choose in (("worth", "belief"), ("random", "belief"), ("worth", "interpolated"))
    }
    return figures | _shipped_figures()


def _shipped_figures() -> dict[str, Any]:
    """After how many probes the mean regret of a shipped system's tables stays within 2 %."""
    tables = {name: [shipped_table(name, each) for each in DISTINCT] for name in SHIPPED}
    seeds = range(SEEDS)
    jobs = [(t, s, "worth", LOOKS) for s in seeds for each in tables.values() for t in each]
    rows = of(in_parallel(play, jobs), choose="belief")
    found: dict[str, Any] = {}
    for name, of_system in tables.items():
        names = {table.name for table in of_system}
        mine = [row for row in rows if row["world"] in names]
        each = list(by(mine, "world", "seed").values())
        found |= with_interval(
            f"probes_to_2pct_{name}",
            [{"rows": part} for part in each],
            lambda drawn: probes_within([row for part in drawn for row in part["rows"]]),
        )
    return found


def probes_within(rows: Sequence[Row]) -> float:
    """Probes from which on the mean regret stays within 2 %; NEVER if that takes more than 200."""
    regrets = {look: mean_of("regret")(each) for look, each in by(rows, "look").items()}
    late = [look for look, regret in regrets.items() if regret > WITHIN]
    left = [look for look in regrets if not late or look > max(late)]
    return float(min(left, default=NEVER))


def _probes(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Median and mean over worlds of the probes to 2 %."""
    counts = [{"probes": probes_within(each)} for each in by(rows, "world").values()]
    median = with_interval(
        f"{name}_median_2pct",
        counts,
        lambda drawn: float(np.median([each["probes"] for each in drawn])),
    )
    return median | with_interval(f"{name}_mean_2pct", counts, mean_of("probes"))


def _safety(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Upper ends of the share of slower sizes at the worst look."""
    looks = [each for look, each in by(rows, "look").items() if look > 0]
    return {
        f"{name}_share_worse": max(upper(each, "acts") for each in looks),
        f"{name}_share_worse_all": max(upper(each, "sizes") for each in looks),
    }


def _curve(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures at each look."""
    found: dict[str, Any] = {"looks": sorted(by(rows, "look"))}
    mine = [each for _, each in sorted(by(rows, "look").items())]
    for name, of_look in (("regret", mean_of("regret")), ("share_worse", ratio("worse", "acts"))):
        found[name] = [round(of_look(each), 5) for each in mine]
    return found


# --- rivals ---


def rival_figures(count: int) -> dict[str, Any]:
    """All ways to probe with all ways to choose, after DECISIONS, on `count` worlds."""
    tables = judge_tables(count, 0)
    jobs = [(table, i, way, (2 * DECISIONS,)) for way in WAYS for i, table in enumerate(tables)]
    groups = by(in_parallel(play, jobs), "way", "choose")
    return {
        "rival_worlds": count,
        "rivals": {
            ", ".join(each): {
                **with_interval("mean_regret", groups[each], mean_of("regret")),
                **with_interval("share_worse", groups[each], ratio("worse", "sizes")),
                **with_interval("gain_kept", groups[each], ratio("gain", "possible")),
            }
            for each in product(WAYS, CHOICES)
        },
    }


# --- rows ---


def in_parallel(work: Callable[..., list[Row]], jobs: Sequence[tuple[Any, ...]]) -> list[Row]:
    """The rows of all jobs, on all cores."""
    return [row for _, rows in parallel(work, jobs) for row in rows]


def of(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """Rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def by(rows: Iterable[Row], *names: str) -> Mapping[Any, list[Row]]:
    """Rows by the value of one column, or the values of some."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in names) if len(names) > 1 else row[names[0]]
        found.setdefault(key, []).append(row)
    return found


def summed(rows: Sequence[Row]) -> Row:
    """The first row, with the sums of what is summed over sizes."""
    counts = ("sizes", "acts", "worse", "gain", "possible", "inside", "places", "chosen_inside")
    return rows[0] | {n: sum(row[n] for row in rows) for n in counts if n in rows[0]}
