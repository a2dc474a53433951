"""What the belief makes of sweeps: whole ones, a user's small one, published ones, other shapes.

* `sweep_figures`: of judge's worlds every other size is measured; or all, with the noise of nodes
  in a cloud, where a rival, `pooled`, takes one config for all sizes; or what a user measures
  (`judge_worlds.small_sweep`), of which octaves are left out in turn, too.
* `public_figures`: published sweeps, each octave left out in turn; truth is the median.
* `shape_figures`: ten group shapes of H100 nodes, two left out in each turn of a noisy sweep.
* `transferred`, `on_repeats`: a table of another machine, and one of the simulator, on this one.

Rival is `interpolated`, which acts by the same rule; scores and intervals are learning_belief's.
"""

import tempfile
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import judge_worlds
import learning_belief
import numpy as np
import polars as pl
from harness import COLLECTIVES, ROOT, parallel, simulated
from judge_worlds import DISTINCT, Floats, Ints, Table, perturbed, small_sweep, table_of
from learning_belief import Row, by, in_parallel, judged, mean_of, of, ratio, summed, with_interval

from dynamiccl.belief import Belief, Bools, prior_of
from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.datasets.cells import REPEAT_COLUMNS, task_grid, tuned, usable
from dynamiccl.datasets.schema import DEFAULT_PROFILE, QUIET, REQUESTED_COLUMNS
from dynamiccl.datasets.splits import Split, Splits
from dynamiccl.datasets.store import config_of, read
from dynamiccl.drawn_worlds import Grid
from dynamiccl.errors import OutputError
from dynamiccl.evaluate.baselines import NCCL_DEFAULT, GradientBoosting, LearnedPolicy
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol
from dynamiccl.repeats import cells_of
from dynamiccl.simulator.scenario import find_scenario
from dynamiccl.simulator.system import Call, Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import WorkCall, Workload
from dynamiccl.simulator.world import World
from dynamiccl.train.fit import fit
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipe import make_recipe

SAMPLE: Final = ROOT / "datasets" / "sample"
#: A larger collection beside the project, where there is one; else the sample.
SWEEPS: Final = ROOT.parent / "shared" / "data" / "sweeps"
#: What makes two rows of a file be of one table: all but size, config, repeat and half. In place
#: and out of place are two measurements of one task.
_CIRCUMSTANCES: Final = (
    *("file", "system", "gpu", "nccl_version", "collective", "num_nodes", "ranks_per_node"),
    *("datatype", "launch_profile", "interference_kind", "interference_level"),
)
#: Draws of a small sweep, and by how much NCCL's own choice is off where there is something to
#: gain.
SWEEPS_DRAWN: Final = 10
TO_GAIN: Final = 0.05
#: By what of a small sweep is judged: names of the gain kept, and of the share of slower sizes.
SMALL: Final = {
    "measured": ("gain_kept", "share_worse"),
    "left_out": ("left_out_kept", "left_out_share_worse"),
    "near": ("near_kept", "near_share_worse"),
}
#: Ln of time: the noise of a call on a node in a cloud; and spreads that a pooled gain must exceed.
NOISY: Final = 0.15
_POOLED: Final = 2.0
NO_NOISE: Final = "noise_sigma = 0.0\ntail_probability = 0.0\ndrift_sigma = 0.0"
#: On nodes with fewer ranks the model's best is NCCL's default, everywhere.
SHAPES: Final = [(nodes, ranks) for nodes in (2, 4, 8, 16, 32) for ranks in (4, 8)]
#: Half of the sizes are no powers of two.
SHAPE_SIZES: Final = '{ min = "1K", max = "1G", steps_per_octave = 2 }'
#: Noisy sweeps of which two of ten shapes are left out in each turn.
SHAPE_SEEDS: Final = 2
#: The recipe of the belief.
BELIEF: Final = "gaussian-process"
#: Probes after which a table from another machine is judged.
LOOKS: Final = (0, 5, 10, 20, 40)


def sweep_figures(count: int) -> dict[str, Any]:
    """Whole sweeps of every other size of `count` worlds; noisy and small ones."""
    tables = judge_worlds.judge_tables(count, 0)
    jobs = [(table, i) for i, table in enumerate(tables)]
    figures: dict[str, Any] = {"grid_worlds": count}
    grids = by(in_parallel(_whole_sweep, jobs), "choose")
    for choose, mine in grids.items():
        name = "grid" if choose == "belief" else f"grid_{choose}"
        figures |= with_interval(f"{name}_mean_regret", mine, mean_of("regret"))
        figures |= with_interval(f"{name}_gain_kept", mine, ratio("gain", "possible"))
    rival = grids["interpolated"]
    figures |= with_interval("grid_interpolated_share_worse", rival, ratio("worse", "acts"))
    figures["grid_share_worse"] = learning_belief.upper(grids["belief"], "acts")
    figures["grid_share_worse_all"] = learning_belief.upper(grids["belief"], "sizes")
    for choose, mine in by(in_parallel(_noisy_sweep, jobs), "choose").items():
        name = "noisy" if choose == "belief" else f"noisy_{choose}"
        figures |= _kept(f"{name}_gain_kept", f"{name}_share_worse", mine)
    jobs = [(table, draw) for table in _worth_it(tables) for draw in range(SWEEPS_DRAWN)]
    # `near`: of what is left out the sizes at which the belief may act.
    for (where, choose), mine in by(in_parallel(_small_sweep, jobs), "where", "choose").items():
        name = "" if choose == "belief" else f"_{choose}"
        kept, worse = SMALL[where]
        by_table = [summed(each) for each in by(mine, "world").values()]
        figures |= _kept(f"small_sweep_{kept}{name}", f"small_sweep_{worse}{name}", by_table)
    return figures


def _kept(kept: str, worse: str, rows: Sequence[Row]) -> dict[str, float]:
    """The share of the gain, and the upper end of the share of slower sizes, by these names."""
    found = with_interval(kept, rows, ratio("gain", "possible"))
    return found | {worse: learning_belief.upper(rows, "acts")}


def _worth_it(tables: Sequence[Table]) -> Iterable[Table]:
    """The first world of each kind, and the shipped tables, in which NCCL's choice is far off."""
    shipped = [
        judge_worlds.shipped_table(name, each) for name in judge_worlds.SHIPPED for each in DISTINCT
    ]
    for group in (*([t for t in tables if t.kind == kind] for kind in judge_worlds.KINDS), shipped):
        off = [judged(table.log_time_us, np.zeros(len(table.sizes_bytes), int)) for table in group]
        found = [t for t, own in zip(group, off, strict=True) if own["regret"] >= TO_GAIN]
        yield from found[:1]


def _whole_sweep(table: Table, seed: int) -> list[Row]:
    """Scores at all sizes of three noisy times of all configs at every other one."""
    num_sizes, num_configs = table.log_time_us.shape
    rows, columns = np.arange(0, num_sizes, 2), np.arange(num_configs)
    part, random = _part(table, rows, columns), np.random.default_rng((seed, num_sizes))
    log_times = np.full((num_sizes, num_configs, 3), np.nan)
    log_times[rows] = small_sweep(part, random, len(rows), num_configs)[2]
    chosen = choices(learning_belief.grid_of(table), log_times, np.isfinite(table.log_time_us))
    return _scores(table.log_time_us, chosen, world=table.name)


def _noisy_sweep(table: Table, seed: int) -> list[Row]:
    """Scores of three noisy times of all configs at all sizes."""
    random, can = np.random.default_rng((seed, len(table.sizes_bytes))), table.log_time_us < np.inf
    log_times = np.where(can, table.log_time_us, np.nan)[..., None]
    log_times = log_times + NOISY * random.standard_normal((*can.shape, 3))
    chosen = choices(learning_belief.grid_of(table), log_times, can)
    mean = log_times.mean(axis=2)
    gains = mean[:, :1] - mean[:, can.all(axis=0)]
    bar = _POOLED * gains.std(axis=0, ddof=1) / np.sqrt(len(gains))
    best = np.where(gains.mean(axis=0) > bar, gains.mean(axis=0), 0.0).argmax()
    chosen["pooled"] = np.full(len(can), np.flatnonzero(can.all(axis=0))[best])
    return _scores(table.log_time_us, chosen, world=table.name)


def _scores(log_time: Floats, chosen: Mapping[str, Ints], **about: str) -> list[Row]:
    return [about | {"choose": name} | judged(log_time, each) for name, each in chosen.items()]


def _part(table: Table, rows: Ints, columns: Ints) -> Table:
    """Some sizes and configs of a table."""
    at = np.ix_(rows, columns)
    return replace(
        table,
        sizes_bytes=tuple(table.sizes_bytes[row] for row in rows),
        configs=tuple(table.configs[column] for column in columns),
        cells=table.cells[at],
        log_cost_us=table.log_cost_us[at],
        log_time_us=table.log_time_us[at],
    )


def _small_sweep(table: Table, draw: int) -> list[Row]:
    """Scores of a user's sweep: with all of it, and of octaves that are left out of it in turn."""
    rows, columns, log_times_us = small_sweep(table, np.random.default_rng(draw))
    part = _part(table, rows, columns)
    grid, quiet = learning_belief.grid_of(part), part.log_time_us
    can = np.isfinite(quiet)
    left_out, near = _octaves_left_out(grid, log_times_us, can)
    there = {name: chosen[near] for name, chosen in left_out.items()}
    return [
        *_scores(quiet, choices(grid, log_times_us, can), world=table.name, where="measured"),
        *_scores(quiet, left_out, world=table.name, where="left_out"),
        *_scores(quiet[near], there, world=table.name, where="near"),
    ]


def choices(grid: Grid, log_times_us: Floats, allowed: Bools) -> dict[str, Ints]:
    """(S,) the belief's config of each size, and that of interpolated times at equal caution.

    `log_times_us` (S, A, R) are repeats, NaN where nothing was measured.
    """
    places, log_us, variance = cells(grid, log_times_us)
    belief = Belief(prior_of(grid), places, log_us, variance, allowed=allowed)
    known = allowed | (np.arange(len(grid.configs)) == 0)
    measured = np.where(known, learning_belief.spread_out(places, log_us, allowed.shape), np.nan)
    near, caution = belief.is_near, belief.caution()
    rival = learning_belief.interpolated(near, caution, measured, grid.log2_sizes)
    return {"belief": belief.decide(), "interpolated": rival}


def cells(grid: Grid, log_times_us: Floats) -> tuple[Ints, Floats, Floats]:
    """(n,) places that were measured, their ln us and the variance of these, by their repeats."""
    num_sizes, num_configs, _ = log_times_us.shape
    times: dict[Hashable, list[tuple[int, float]]] = {}
    for place, row in enumerate(log_times_us.reshape(num_sizes * num_configs, -1).tolist()):
        known = [(repeat, value) for repeat, value in enumerate(row) if np.isfinite(value)]
        times |= {place: known} if known else {}
    places = np.array([*times], dtype=np.int64)
    log2_size = dict(zip(times, np.array(grid.log2_sizes)[places // num_configs], strict=True))
    found = cells_of(times, log2_size, range(0, num_sizes * num_configs, num_configs))
    log_us, variance, _ = np.array([found[place] for place in times]).T
    return places, log_us, variance


def _octaves_left_out(
    grid: Grid, log_times_us: Floats, allowed: Bools
) -> tuple[dict[str, Ints], Bools]:
    """(S,) the choices at each octave by the others; where one is within an octave on both sides.

    The belief acts nowhere else, which the steps of a small sweep may be too wide for.
    """
    sizes = np.array(grid.log2_sizes)
    octave, found = np.floor(sizes + 1e-6), dict[str, Ints]()
    for each in np.unique(octave):
        is_out = octave == each
        known = np.where(is_out[:, None, None], np.nan, log_times_us)
        for name, chosen in choices(grid, known, allowed).items():
            found.setdefault(name, np.zeros(len(octave), np.int64))[is_out] = chosen[is_out]
    apart = sizes[:, None] - sizes
    near = (octave[:, None] != octave) & (np.abs(apart) <= 1.0 + 1e-6)
    return found, (near & (apart > 0)).any(axis=1) & (near & (apart < 0)).any(axis=1)


def shape_figures() -> dict[str, Any]:
    """Two of the ten shapes left out in turn: what the belief and rivals make of the others."""
    with tempfile.TemporaryDirectory() as folder:
        truth = shape_sweep(Path(folder), 1000, 1, NO_NOISE)
        jobs = [(Path(folder), seed, 3, "") for seed in range(SHAPE_SEEDS)]
        measured = [data for _, data in parallel(shape_sweep, jobs)]
        turns = [(data, truth, turn) for data in measured for turn in range(len(SHAPES))]
        rows = in_parallel(_shape_left_out, turns)
    figures: dict[str, Any] = {"shape_left_out_turns": len(turns)}
    for policy, mine in by(rows, "choose").items():
        by_turn = [summed(each) for each in by(mine, "turn").values()]
        name = "shape_left_out" if policy == BELIEF else f"shape_left_out_{policy}"
        figures |= with_interval(f"{name}_mean_regret", mine, mean_of("regret"))
        figures |= _kept(f"{name}_gain_kept", f"{name}_share_worse", by_turn)
    return figures


def shape_sweep(out: Path, seed: int, cycles: int, noise: str) -> Path:
    """A simulated sweep over all shapes."""
    groups = ", ".join(f"{{ num_nodes = {n}, ranks_per_node = {r} }}" for n, r in SHAPES)
    lines = {
        "collectives": COLLECTIVES,
        "groups": f"[{groups}]",
        "sizes": SHAPE_SIZES,
        "noise": noise,
    }
    return simulated(out / f"sweep-{seed}", seed, cycles, lines)


def _shape_left_out(data: Path, truth: Path, turn: int) -> list[Row]:
    """Scores at the shapes that are for test in a turn, by truth."""
    split, uri = f"shape:{turn}", f"sqlite:///{data}-{turn}.db"
    recipe = make_recipe(BELIEF, [f"split={split}"])
    done = fit(data, recipe, experiment="shapes", tracking_uri=uri, seed=turn)
    policy = TorchPolicy.load(Path(done.run_directory) / "policy", judged=True)
    frame, catalogue = tuned(read(data)), policy.manifest.actions()
    parts = Splits.of(frame, split)
    told = task_grid(parts.assign(frame), catalogue, [Split.TRAIN, Split.VALIDATION])
    # Of the two collectives that last equally long here one tells.
    exact = parts.assign(tuned(read(truth))).filter(pl.col("collective") != "ReduceScatter")
    asked = task_grid(exact, catalogue, [Split.TEST])
    rivals = NCCL_DEFAULT, GradientBoosting(told, catalogue)
    log_time = np.log(np.where(asked.mask, asked.times_us, np.inf))
    return [
        {"choose": each.name, "turn": turn} | judged(log_time, each.choose(asked))
        for each in (LearnedPolicy(policy, catalogue, BELIEF), *rivals)
    ]


@dataclass(frozen=True, slots=True)
class Measured:
    """A published sweep of one collective and group in one set of circumstances."""

    #: The file, and what tells the table from others of it.
    name: str
    collective: Collective
    shape: tuple[int, int]
    #: (S,), ascending.
    sizes_bytes: tuple[int, ...]
    #: (A,), ABSTAIN first, measured or not.
    configs: tuple[Config, ...]
    #: (S, A, R) ln us of independent repeats; nan where there is none.
    log_times_us: Floats

    def is_measured(self) -> Bools:
        """(S, A)."""
        return np.asarray(~np.isnan(self.log_times_us).all(axis=2))

    def is_full(self) -> Bools:
        """(S,) sizes that have NCCL's own choice and two other configs."""
        has = self.is_measured()
        return np.asarray(has[:, 0] & (has[:, 1:].sum(axis=1) >= 2))

    @property
    def has_octaves(self) -> bool:
        """Whether three octaves have sizes that are full: one can be left out."""
        return len(np.unique(np.floor(np.log2(self.sizes_bytes))[self.is_full()])) >= 3


def public_tables() -> list[Measured]:
    """Every table of the published sweeps."""
    options = ImportOptions(systems_file=SAMPLE / "systems.toml")
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted((SWEEPS if SWEEPS.is_dir() else SAMPLE).glob("*.csv")):
            with suppress(OutputError):  # one file holds targets, not measurements
                import_files([path], Path(folder), options=options)
        frame = usable(read(Path(folder)))
    frame = frame.with_columns(
        file=pl.col("source_file").str.split("/").list.last().str.strip_suffix(".csv")
    )
    groups = frame.group_by(_CIRCUMSTANCES, maintain_order=True)
    found = [_measured(dict(zip(_CIRCUMSTANCES, key, strict=True)), rows) for key, rows in groups]
    return sorted(found, key=lambda table: table.name)


def _measured(key: Mapping[str, Any], frame: pl.DataFrame) -> Measured:
    # One launch measures both halves: their mean is one repeat.
    repeats = ("size_bytes", "is_default", *REQUESTED_COLUMNS, *REPEAT_COLUMNS)
    frame = frame.group_by(repeats).agg(pl.col("time_us").log().mean())
    places: dict[tuple[int, Config], list[float]] = {}
    for row in frame.sort("size_bytes", *REPEAT_COLUMNS, "time_us").iter_rows(named=True):
        config = ABSTAIN if row["is_default"] else config_of(row)
        places.setdefault((row["size_bytes"], config), []).append(row["time_us"])
    sizes = sorted({size for size, _ in places})
    others = sorted({config for _, config in places} - {ABSTAIN}, key=lambda config: config.key)
    configs = (ABSTAIN, *others)
    log_times = np.full((len(sizes), len(configs), max(map(len, places.values()))), np.nan)
    for (size, config), told in places.items():
        log_times[sizes.index(size), configs.index(config), : len(told)] = told
    what = (key["nccl_version"], key["launch_profile"], key["interference_kind"])
    beside = [told for told in what if told not in {None, DEFAULT_PROFILE, QUIET}]
    collective = Collective.parse(key["collective"])
    shape = key["num_nodes"], key["ranks_per_node"]
    name = f"{key['file']}: {key['system']} {collective.wire} {shape[0]}x{shape[1]}"
    name = " ".join([name, *beside])
    return Measured(name, collective, shape, tuple(sizes), configs, log_times)


def public_figures() -> dict[str, Any]:
    """The regret at left-out octaves of each published sweep, and over tables; by medians."""
    if not SWEEPS.is_dir():
        return {"public_skipped": f"no {SWEEPS}"}
    tables = [table for table in public_tables() if table.has_octaves]
    rows = in_parallel(_public, [(table,) for table in tables])
    lines = {
        world: {row["choose"]: row["regret"] for row in of_table}
        for world, of_table in by(rows, "world").items()
    }
    apart = [{"less": line["belief"] - line["interpolated"]} for line in lines.values()]
    figures: dict[str, Any] = {"public_tables": lines}
    for name, choose in (("", "belief"), ("interpolated_", "interpolated"), ("nccl_", "own")):
        mine = of(rows, choose=choose)
        figures |= with_interval(f"public_{name}mean_regret", mine, mean_of("regret"))
        figures[f"public_{name}share_worse"] = learning_belief.upper(mine, "acts")
    return figures | with_interval("public_less_interpolated", apart, mean_of("less"))


def _public(table: Measured) -> list[Row]:
    grid = Grid(tuple(np.log2(table.sizes_bytes).tolist()), table.configs)
    has, full = table.is_measured(), table.is_full()
    # Median of the repeats; infinite where there is none.
    known = np.where(has[..., None], table.log_times_us, np.inf)
    found, _ = _octaves_left_out(grid, table.log_times_us, has)
    found["own"] = np.zeros(len(has), dtype=np.int64)
    chosen = {name: each[full] for name, each in found.items()}
    return _scores(np.nanmedian(known, axis=2)[full], chosen, world=table.name)


def transferred(source: str, target: str, collective: Collective, seed: int) -> dict[str, float]:
    """Time beyond that after a whole sweep of the target, after LOOKS probes; perturbed machines.

    `belief` knows drawn machines and the probes, `table` the source's times where none was made.
    """
    systems, group = (perturbed(source, seed), perturbed(target, seed + 1)), Group(1, 8)
    mine, its = (system.cells(group, collective) for system in systems)
    configs = (ABSTAIN, *(Config(*cell) for cell in sorted(its) if cell in mine))
    calls = [Call(group, collective, 1 << octave) for octave in range(16, 28)]
    here, table = (table_of("", "", system, calls, configs)[0] for system in systems)
    log_us, rows, random = table.log_time_us, np.arange(len(calls)), np.random.default_rng(seed)
    unknown = replace(table, log_cost_us=np.full(log_us.shape, np.nan))
    probes = learning_belief.Probes(unknown, random)
    direct = _swept(probes.prior.grid, log_us, np.isfinite(log_us))
    elsewhere = here.log_time_us - here.log_time_us[:, :1]
    found = {}
    for look in LOOKS:
        while probes.count < look:
            probes.probe(learning_belief.by_worth(probes))
        measured = learning_belief.spread_out(*probes.rows()[:2], log_us.shape)
        own = measured - measured[:, :1]
        mixed = np.where(np.isnan(own), elsewhere, own).argmin(axis=1)
        for name, chosen in (("belief", probes.belief().decide()), ("table", mixed)):
            more = np.exp(log_us[rows, chosen] - log_us[rows, direct]).mean() - 1.0
            found[f"{name}_{look}"] = float(more)
    return found


def on_repeats(table: Measured, system: str) -> list[dict[str, float]]:
    """Measured time over NCCL's - 1 at each size: chosen in the simulator, and by other repeats."""
    group, quiet = Group(*table.shape), find_scenario("quiet")
    calls = [WorkCall(group, table.collective, size, 0.0) for size in table.sizes_bytes]
    world = World(find_system(system), Workload("", tuple(calls)), table.configs, quiet)
    has = (np.isfinite(table.log_times_us).sum(axis=2) > 1) & world.mask
    judged_at = np.flatnonzero(has[:, 0] & has[:, 1:].any(axis=1))
    if not len(judged_at):
        return []
    own = zip(world.algorithm[:, 0].tolist(), world.protocol[:, 0].tolist(), strict=True)
    sizes, ran = np.log2(table.sizes_bytes).tolist(), [(Algorithm(a), Protocol(p)) for a, p in own]
    grid = Grid(tuple(sizes), table.configs, tuple(ran))
    chosen, found = _swept(grid, np.log(np.where(has, world.quiet_us, np.inf)), has), []
    for size in judged_at:
        told, over = table.log_times_us[size], dict[str, list[float]](simulator=[], measured=[])
        for repeat in np.flatnonzero(np.isfinite(told[0])):
            others = np.nanmean(np.delete(told, repeat, axis=1)[has[size]], axis=1)
            best = np.flatnonzero(has[size])[others.argmin()]
            for way, config in (("simulator", chosen[size]), ("measured", best)):
                over[way].append(told[config, repeat] - told[0, repeat])
        found.append({way: float(np.expm1(np.nanmean(each))) for way, each in over.items()})
    return found


def _swept(grid: Grid, log_us: Floats, allowed: Bools) -> Ints:
    """(S,) the belief's choices after three repeats of all, 2 % noisy."""
    noise = 0.02 * np.random.default_rng(0).standard_normal((*log_us.shape, 3))
    return choices(grid, np.where(allowed[..., None], log_us[..., None] + noise, np.nan), allowed)[
        "belief"
    ]
