"""What the belief is worth, probe by probe.

`few_shot_figures`: judge's worlds probed where the belief finds it most worth what it takes,
against random probes and against times interpolated between the same probes, which act by the same
rule; the same worlds swept by `strategy = "adaptive"`, which measures in rounds and is told NCCL's
costs after the first; and the three shipped systems, where what the belief expects, guard and
caution aside (`expected`), tells what these two take.

A probe is one noisy time (sd 2 %) of one config at one size; NCCL's own choice at that size is
probed as often, and counts as a probe. Truth is the table's. *Slower* is by over 1 %. NAME_lo and
NAME_hi are 95 % intervals, bootstraps over worlds; `share_worse` are upper ends of such.

A place is size x A + config of a table of S sizes and A configs, NCCL's own choice the first.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from harness import parallel
from judge_worlds import DISTINCT, SHIPPED, Floats, Ints, Table, judge_tables, shipped_table

from dynamiccl.belief import MIN_GAIN, SLOWER, Belief, Bools, prior_of
from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.collect.strategies import Outcome, believe, make_strategy, tasks_of
from dynamiccl.collect.sweep import GroupShape, Sizes, StrategySettings, SweepFile
from dynamiccl.drawn_worlds import CELLS, Grid

#: Numbers of probes after which a table is judged, and what one counts that is never good enough.
LOOKS: Final = (0, 5, 10, 15, 20, 25, 30, 40, 60, 80, 120, 160, 200)
NEVER: Final = 400
WITHIN: Final = 0.02
SEEDS: Final = 3
#: Spreads of a 90 % interval.
_COVERED: Final = 1.645
_BOOTSTRAPS: Final = 1000
#: Standard deviation of a measurement, ln of time.
NOISE: Final = 0.02
#: Left-out measurements of a config that tell its spread.
_ENOUGH: Final = 4
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


# --- to probe and to choose ---


def costs_of(table: Table, *_: object) -> Floats:
    """(S, 21) NCCL's log costs of its cells, whatever is asked; NaN where the table has none."""
    found = np.full((len(table.sizes_bytes), len(CELLS)), -np.inf)
    for column, cell in zip(found.T, CELLS, strict=True):
        is_it = (table.cells == cell).all(axis=-1)
        column[:] = np.where(is_it, table.log_cost_us, -np.inf).max(axis=1)
    return np.where(np.isfinite(found), found, np.nan)


def grid_of(table: Table) -> Grid:
    """What a belief is told of a table: sizes, configs, NCCL's costs and its own cells."""
    grid = Grid(tuple(np.log2(table.sizes_bytes).tolist()), table.configs)
    return grid.with_costs(costs_of(table))


class Probes:
    """What was measured of a table so far."""

    def __init__(self, table: Table, random: np.random.Generator) -> None:
        """Nothing yet; `random` draws the noise, and whatever a way to probe draws."""
        self.table, self.random = table, random
        self.prior = prior_of(grid_of(table))
        #: (S, A) configs that there are, without NCCL's own choice.
        self.can: Bools = np.isfinite(table.log_time_us)
        self.can[:, 0] = False
        self._times: dict[int, list[float]] = {}
        self._belief: Belief | None = None

    @property
    def count(self) -> int:
        """Measurements, those of NCCL's own choice among them."""
        return sum(map(len, self._times.values()))

    def beside(self) -> Ints:
        """(S, A) whether NCCL's own choice is due: a gain is no surer than the time it is over."""
        counts = np.zeros(self.can.shape, np.int64)
        for place, times in self._times.items():
            counts.flat[place] = len(times)
        return (counts[:, :1] <= counts).astype(np.int64)

    def probe(self, place: int) -> None:
        """Measure a place, and NCCL's own choice beside it as often."""
        default = place // self.can.shape[1] * self.can.shape[1]
        for each in [place, default][: 1 + self.beside().flat[place]]:
            noise = NOISE * self.random.standard_normal()
            self._times.setdefault(each, []).append(self.table.log_time_us.flat[each] + noise)
        self._belief = None

    def rows(self) -> tuple[Ints, Floats, Floats]:
        """Places, mean ln us and variances, (n,) each."""
        places = sorted(self._times)
        counts = np.array([len(self._times[place]) for place in places])
        means = np.array([np.mean(self._times[place]) for place in places])
        return np.array(places, dtype=np.int64), means, NOISE**2 / counts

    def belief(self) -> Belief:
        """The belief after these."""
        if self._belief is None:
            self._belief = Belief(self.prior, *self.rows(), allowed=self.can)
        return self._belief


def by_worth(probes: Probes) -> int:
    """Where a measurement brings most for what it takes, as the belief expects."""
    return probes.belief().most_worth(1, NOISE**2, probes.random, probes.beside())[0][0]


def at_random(probes: Probes) -> int:
    """Any place."""
    return int(probes.random.choice(np.flatnonzero(probes.can)))


#: Ways to probe: the place to measure next.
WAYS: Final[dict[str, Callable[[Probes], int]]] = {"worth": by_worth, "random": at_random}


def interpolated(
    is_near: Bools, caution: float, log_us: Floats, log2_sizes: Sequence[float]
) -> Ints:
    """(S,) each config's gain over NCCL's own choice, interpolated between sizes.

    It acts by the belief's rule: gain over `caution` spreads, at places near what was measured. The
    spread is the rms by which left-out octaves of a config are off, or those of all configs; of
    what was measured itself it is the noise. `log_us` (S, A) is NaN where nothing was measured.
    """
    sizes, gain = np.array(log2_sizes), log_us[:, :1] - log_us
    octave = np.floor(sizes + 1e-6)
    off = np.full(gain.shape, np.nan)
    for each in np.unique(octave):
        off[octave == each] = (gain - _between(sizes, gain, octave != each))[octave == each]
    counts, squares = np.isfinite(off[:, 1:]).sum(axis=0), np.nansum(np.square(off[:, 1:]), axis=0)
    pooled = squares.sum() / counts.sum() if counts.any() else math.inf
    # A config that was left out a few times speaks for itself.
    own = np.where(counts >= _ENOUGH, squares / np.maximum(counts, 1), pooled)
    spread = np.sqrt(np.concatenate([[math.inf], own]))
    found = np.where(np.isfinite(gain), gain, _between(sizes, gain, np.ones(len(sizes), bool)))
    spreads = np.where(np.isfinite(gain), math.sqrt(2.0) * NOISE, spread)
    bar = np.maximum(caution * spreads, MIN_GAIN)
    sure = np.where(is_near & (np.nan_to_num(found, nan=-np.inf) > bar), found, 0.0)
    sure[:, 0] = 0.0
    return np.asarray(sure.argmax(axis=1))


def _between(sizes: Floats, values: Floats, kept: Bools) -> Floats:
    """(S, A) values interpolated from those of kept sizes, column by column; NaN beyond them."""
    found = np.full(values.shape, np.nan)
    for column, told in enumerate(values.T):
        known = kept & np.isfinite(told)
        if known.any():
            found[:, column] = np.interp(
                sizes, sizes[known], told[known], left=np.nan, right=np.nan
            )
    return found


def spread_out(places: Ints, values: Floats, shape: tuple[int, ...]) -> Floats:
    """Values (n,) at their places of a table (S, A); NaN elsewhere."""
    found = np.full(shape, np.nan)
    found.flat[places] = values
    return found


# --- probe by probe ---


def play(table: Table, seed: int, way: str, looks: Sequence[int]) -> list[Row]:
    """Probe a table in one of WAYS; scores at each of `looks` of all ways to choose."""
    random = np.random.default_rng((seed, len(table.sizes_bytes)))
    probes = Probes(table, random)
    found: list[Row] = []
    for look in looks:
        while probes.count < look:
            probes.probe(WAYS[way](probes))
        belief, (places, log_us, _) = probes.belief(), probes.rows()
        measured = spread_out(places, log_us, probes.can.shape)
        sizes, caution = probes.prior.grid.log2_sizes, belief.caution()
        rival = interpolated(belief.is_near, caution, measured, sizes)
        chosen = belief.decide()
        about = {"world": table.name, "seed": seed, "way": way, "look": look}
        ours = judged(table.log_time_us, chosen) | covered(belief, table.log_time_us, chosen)
        found.append(about | {"choose": "belief"} | ours)
        found.append(about | {"choose": "interpolated"} | judged(table.log_time_us, rival))
        expected = np.where(probes.can, belief.gain, 0.0).argmax(axis=1)
        found.append(about | {"choose": "expected"} | judged(table.log_time_us, expected))
    return found


def swept(table: Table, seed: int, looks: Sequence[int]) -> list[Row]:
    """Sweep a table by `strategy = "adaptive"`; scores after its rounds."""
    shape = GroupShape(num_nodes=table.shape[0], ranks_per_node=table.shape[1])
    setting = Setting(table.collective, *table.shape, *table.shape)
    file = SweepFile(
        name="swept",
        system=table.name,
        collectives=(table.collective.wire,),
        groups=(shape,),
        sizes=Sizes(list=table.sizes_bytes),
        strategy=StrategySettings(kind="adaptive", seed=seed),
    )
    trials = {
        (size, action): Trial(setting, table.sizes_bytes[size], table.configs[action])
        for size, action in np.argwhere(np.isfinite(table.log_time_us)).tolist()
    }
    log_us = {trial.key: table.log_time_us[place] for place, trial in trials.items()}
    action_of = {config: action for action, config in enumerate(table.configs)}
    [tasks] = tasks_of(list(trials.values())).values()
    costs = partial(costs_of, table)
    strategy, random = make_strategy(file, [*trials.values()], costs), np.random.default_rng(seed)
    history, chosen = list[Outcome](), [(0, np.zeros(len(tasks), np.int64))]
    for number in itertools.count():
        picks = strategy.next_picks(number, history)
        if picks is None or chosen[-1][0] > max(looks):
            break
        for pick in picks:
            time_us = math.exp(log_us[pick.key] + NOISE * random.standard_normal())
            history.append(Outcome(pick.key, number, time_us, ok=True))
        found = believe(tasks, history, costs if number else None)
        decided = [found.trials[place].config for place in enumerate(found.belief.decide())]
        chosen.append((len(history), np.array([action_of[config] for config in decided])))
    about = {"world": table.name, "seed": seed, "way": "adaptive", "choose": "belief"}
    at = {look: [each for count, each in chosen if count <= look][-1] for look in looks}
    return [about | {"look": n} | judged(table.log_time_us, each) for n, each in at.items()]


def few_shot_figures(count: int) -> dict[str, Any]:
    """Curves of `count` worlds and of the shipped systems, and probes to 2 % of regret."""
    tables = judge_tables(count, 0)
    jobs = [(table, i, "worth", LOOKS) for i, table in enumerate(tables)]
    jobs += [(table, i, "random", LOOKS) for i, table in enumerate(tables[: count // 2])]
    rows = in_parallel(play, jobs)
    strategy = in_parallel(swept, [(table, i, LOOKS) for i, table in enumerate(tables)])
    rows += strategy
    ours = of(rows, way="worth", choose="belief")
    figures: dict[str, Any] = {"few_shot_worlds": count, **_probes(ours, "probes")}
    figures |= _probes(of(rows, way="random", choose="belief"), "random_probes")
    figures |= _probes(of(rows, way="worth", choose="interpolated"), "interpolated_probes")
    figures |= _probes(strategy, "adaptive_probes") | _safety(strategy, "adaptive")
    figures |= _safety(ours, "few_shot")
    figures |= _safety(of(rows, way="worth", choose="expected"), "expected")
    late = [row for row in ours if row["look"] > 0]
    by_world = [summed(each) for each in by(late, "world").values()]
    figures |= with_interval("coverage", by_world, ratio("inside", "places"))
    figures |= with_interval("coverage_chosen", by_world, ratio("chosen_inside", "acts"))
    figures["few_shot"] = {
        f"{way}, {choose}": _curve(of(rows, way=way, choose=choose))
        for way, choose in (
            ("worth", "belief"),
            ("adaptive", "belief"),
            ("random", "belief"),
            ("worth", "interpolated"),
        )
    }
    return figures | _shipped_figures()


def _shipped_figures() -> dict[str, Any]:
    """After how many probes the mean regret of a shipped system's tables stays within 2 %."""
    tables = {name: [shipped_table(name, each) for each in DISTINCT] for name in SHIPPED}
    jobs = [(t, s, "worth", LOOKS) for s in range(SEEDS) for each in tables.values() for t in each]
    rows = in_parallel(play, jobs)
    found: dict[str, Any] = {}
    heads = {"belief": "probes", "expected": "expected_probes"}
    for (name, of_system), (choose, head) in itertools.product(tables.items(), heads.items()):
        names = {table.name for table in of_system}
        mine = [row for row in of(rows, choose=choose) if row["world"] in names]
        found |= with_interval(
            f"{head}_to_2pct_{name}",
            [{"rows": part} for part in by(mine, "world", "seed").values()],
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
