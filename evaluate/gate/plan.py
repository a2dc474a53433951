"""Plans the sweep for a gate: the bins where the policy acts, two configs, enough repeats.

The number of repeats follows from the policy's training data: in each size bin the mean gain, less
one standard error (the policy chose what looked best), and its standard deviation between runs. The
gate's t-test there has the power of a noncentral t.

Each repeat is new processes, whose starts are most of the cost. A process walks sizes by a factor
of 2, so sizes are of as few such ladders as will do, and bins between two that are measured pass
with them (`stretches`). By default the proof takes no longer than the sweep that it is about.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from pathlib import Path
from typing import Final

import numpy as np
from scipy import stats

from dynamiccl.collect.grid import RANK_GRAIN_BYTES, Setting, Trial, octave_ladder
from dynamiccl.collect.plan import Plan, make_plan
from dynamiccl.collect.sweep import Sizes, Sweep, SweepFile, parse_sweep, sweep_text
from dynamiccl.datasets.manifest import Manifest, Support
from dynamiccl.datasets.questions import REACH_BINS, table_supports
from dynamiccl.errors import NotEnoughData, UserError
from dynamiccl.evaluate.gate.cells import Cell, Verdict
from dynamiccl.evaluate.gate.evidence import MIN_RUNS, FreshRuns
from dynamiccl.evaluate.gate.gate import wanted_cells
from dynamiccl.nccl import ABSTAIN, Collective
from dynamiccl.sizes import BINS_PER_OCTAVE, bin_center_bytes, bin_first_byte, size_bin
from dynamiccl.train.policy import TorchPolicy

#: Maximum number of planned repeats.
MOST_CYCLES: Final = 40
#: Share of bins to pass, of those that can, where no other is asked for.
DEFAULT_POWER: Final = 0.9
#: Bins with a smaller probability of passing at that number are left out.
_LEAST_POWER: Final = 0.5


@dataclass(frozen=True, slots=True)
class GatePlan:
    """The sweep that was written, and the expected result of the gate."""

    name: str
    #: Bins in which the policy wants a config, and those of them that the sweep measures.
    bins_wanted: int
    bins_planned: int
    cycles: int
    #: Bins that the gate is expected to let pass alone, of those planned.
    expected_to_pass: float
    #: Reason -> bins that are left out.
    left_out: dict[str, int]
    #: What the sweep of the data trained on takes, by the same model.
    sweep_hours: float
    #: Whether there are fewer repeats than wanted, so that it takes no longer than that.
    is_cut: bool
    sweep: Plan
    written: str


@dataclass(frozen=True, slots=True)
class _ExpectedGain:
    """Expected gain of a bin beyond the noise band, in standard deviations of one run."""

    cell: Cell
    support: Support
    #: None: unknown from the training data.
    effect: float | None

    def power(self, cycles: int, level: float) -> float:
        """Probability that the gate's test passes the bin."""
        if self.effect is None:
            return 0.0
        limit = stats.t.ppf(1.0 - level, cycles - 1)
        return float(stats.nct.sf(limit, cycles - 1, self.effect * np.sqrt(cycles)))


def plan_gate(
    policy: TorchPolicy,
    trained: FreshRuns,
    base: Sweep,
    write: Path,
    *,
    q: float,
    power: float | None = None,
) -> GatePlan:
    """Write the fresh sweep for a policy into `write`.

    `trained` is what the policy was trained on; `base` the sweep whose cluster it is. `power` is
    the share of bins to pass, of those that can; without it 90 %, or what the hours of `base`
    allow. Raises UserError where the policy wants nothing there, NotEnoughData where no bin could
    pass, and InvalidSweep where the grid of `base` lacks a config.
    """
    manifest = policy.manifest
    groups = [group for group in base.file.groups if group.split is None]
    shapes = {(group.num_nodes, group.ranks_per_node) for group in groups}
    own = [s for s in table_supports(manifest) if s.system == base.file.system]
    supports = [s for s in own if (s.num_nodes, s.ranks_per_node) in shapes]
    if not supports:
        known = ", ".join(sorted({s.system for s in manifest.supports}))
        raise UserError(
            f"sweep '{base.file.name}' is of system '{base.file.system}' and none of its groups "
            f"has a table of this policy, which knows {known}; name its own sweep with --sweep"
        )
    hopes = [
        _ExpectedGain(cell, support, _effect(trained, support, cell))
        for support in supports
        for cell in wanted_cells(policy, support)
        if cell.verdict is not Verdict.ABSTAINS
    ]
    if not hopes:
        raise UserError(
            "the policy leaves every choice to NCCL on the groups of this sweep: there is nothing "
            "to gate, and nothing to deploy"
        )
    # Benjamini and Hochberg compare the last that passes with q times the share that does.
    able = [hope for hope in hopes if hope.power(MOST_CYCLES, q / 2) >= _LEAST_POWER]
    if not able:
        raise NotEnoughData(
            f"in none of the {len(hopes)} size bins in which the policy acts do the data that it "
            f"was trained on show a gain that {MOST_CYCLES} repeats would tell from noise"
        )
    wanted = DEFAULT_POWER if power is None else power
    kept, left_out = _kept(hopes, able, wanted)
    tested = [hope for hope in able if hope in kept]
    tried = range(MIN_RUNS, MOST_CYCLES)
    enough = (n for n in tried if np.mean([hope.power(n, q / 2) for hope in tested]) >= wanted)
    cycles = next(enough, MOST_CYCLES)
    name = _fresh_name(base.file.name, manifest)
    fresh, plan = _fresh_sweep(base, name, kept, manifest, cycles)
    sweep_hours = make_plan(base)["hours"]
    if base.file.budget.max_hours is not None:
        sweep_hours = min(sweep_hours, base.file.budget.max_hours)
    affordable = max(MIN_RUNS, int(cycles * sweep_hours / plan["hours"]))
    is_cut = power is None and affordable < cycles
    if is_cut:
        cycles = affordable
        fresh, plan = _fresh_sweep(base, name, kept, manifest, cycles)
    head = f"Fresh runs of sweep {base.file.name} for a gate, by dynamiccl-evaluate gate --plan."
    write.write_text(sweep_text(fresh, head=head), encoding="utf-8")
    passing = sum(hope.power(cycles, q / 2) for hope in kept)
    counts = (len(hopes), len(kept), cycles, passing, left_out, sweep_hours, is_cut)
    return GatePlan(name, *counts, plan, str(write))


def _effect(trained: FreshRuns, support: Support, cell: Cell) -> float | None:
    """Effect of the bin itself, or of the nearest one measured with this config; None without."""
    band = trained.band(support, cell.collective)
    for distance in range(REACH_BINS + 1):
        near = sorted({cell.bin - distance, cell.bin + distance})
        gains = trained.gains(support, cell.collective, near, cell.action)
        if band is not None and len(gains) > 1:
            spread = max(float(np.std(gains, ddof=1)), 1e-6)
            surely = float(np.mean(gains)) - spread / np.sqrt(len(gains))
            return float((surely - np.log1p(band)) / spread)
    return None


def _kept(
    hopes: Sequence[_ExpectedGain], able: Sequence[_ExpectedGain], power: float
) -> tuple[list[_ExpectedGain], dict[str, int]]:
    """The bins to measure, and why others are not: reason -> bins."""
    reach: dict[tuple[object, ...], list[int]] = {}
    for hope in able:
        reach.setdefault(_family(hope), []).append(hope.cell.bin)
    groups: dict[tuple[object, ...], list[_ExpectedGain]] = {}
    left_out = Counter[str]()
    for hope in hopes:
        bins = reach.get(_family(hope), [])
        if bins and min(bins) <= hope.cell.bin <= max(bins):
            groups.setdefault(_family(hope)[:-1], []).append(hope)
        elif hope.effect is None:
            left_out["the data trained on do not tell its gain"] += 1
        else:
            left_out[f"its gain would not pass in {MOST_CYCLES} repeats"] += 1
    kept = []
    for group in groups.values():
        ladders, between = _ladders(group, reach, power)
        measured = [hope for hope in group if hope.cell.bin % BINS_PER_OCTAVE in ladders]
        kept += measured
        left_out["it passes where its neighbours on both sides do"] += between
        left_out["it would need processes of its own"] += len(group) - len(measured) - between
    return kept, {reason: count for reason, count in left_out.items() if count}


def _ladders(
    group: Sequence[_ExpectedGain], reach: dict[tuple[object, ...], list[int]], power: float
) -> tuple[Sequence[int], int]:
    """The steps of an octave at which a collective is measured, and the bins that lie between.

    As few steps as reach the share `power` of the bins: sizes of one step double, and are measured
    in one process. A bin is reached where it is measured, or lies in a row of bins with its config
    between two that can pass.
    """
    rows: list[list[_ExpectedGain]] = []
    for hope in sorted(group, key=lambda hope: (str(_family(hope)), hope.cell.bin)):
        before = rows[-1][-1] if rows else None
        follows = before is not None and _family(before) == _family(hope)
        if before is None or not follows or hope.cell.bin != before.cell.bin + 1:
            rows.append([])
        rows[-1].append(hope)

    def reached(ladders: Sequence[int]) -> tuple[int, int]:
        measured = between = 0
        for row in rows:
            on = [hope.cell.bin for hope in row if hope.cell.bin % BINS_PER_OCTAVE in ladders]
            ends = sorted({*on} & {*reach[_family(row[0])]})
            inside = [h.cell.bin for h in row if ends and ends[0] < h.cell.bin < ends[-1]]
            measured += len(on)
            between += len({*inside} - {*on})
        return measured + between, between

    steps = range(BINS_PER_OCTAVE)
    choices = chain.from_iterable(combinations(steps, n + 1) for n in steps)
    enough = [each for each in choices if reached(each)[0] >= power * len(group)]
    chosen = min(enough, key=lambda each: (len(each), -reached(each)[0]))
    return chosen, reached(chosen)[1]


def _family(hope: _ExpectedGain) -> tuple[object, ...]:
    cell = hope.cell
    return cell.system, cell.num_nodes, cell.num_ranks, cell.collective, cell.action


def _fresh_sweep(
    base: Sweep, name: str, kept: Sequence[_ExpectedGain], manifest: Manifest, cycles: int
) -> tuple[SweepFile, Plan]:
    """The sweep of the bins: single trials of the base's grid, NCCL's default beside each.

    All else is the base's: launcher, runner, iterations. Other launch profiles and what runs beside
    are left out, as a gate takes neither. Where the many calls of small messages for all sizes take
    less than processes of their own, all get them. Raises UserError where no size can be measured.
    """
    file, configs = base.file, manifest.actions().configs
    groups = [group for group in file.groups if group.split is None]
    sizes, only = set[int](), dict[str, None]()
    for hope, group, datatype in product(kept, groups, file.datatypes):
        shape = group.num_nodes, group.ranks_per_node
        if shape != (hope.support.num_nodes, hope.support.ranks_per_node):
            continue
        collective = Collective.parse(hope.cell.collective)
        setting = Setting(collective, *shape, group.hosts, group.ranks_per_host, datatype)
        for size in _sizes_in(hope.cell.bin, setting):
            sizes.add(size)
            for config in (ABSTAIN, configs[hope.cell.action]):
                only[Trial(setting, size, config).key] = None
    if not only:
        raise UserError("none of the size bins holds a size of whole shares of a rank")
    plain = ("profiles", "interference", "strategy", "budget")
    update = {key: SweepFile.model_fields[key].default for key in plain} | {
        "name": name,
        "sizes": Sizes(list=tuple(sorted(sizes))),
        "only": tuple(only),
        "cycles": cycles,
        # Other noise, as other runs have.
        "simulator": file.simulator.model_copy(update={"seed": file.simulator.seed + 1}),
    }
    planned = []
    for small_max in (file.small_max, max(file.small_max, *sizes)):
        fresh = file.model_copy(update=update | {"small_max": small_max})
        plan = make_plan(parse_sweep(sweep_text(fresh, head=""), where="the fresh sweep"))
        planned.append((fresh, plan))
    return min(planned, key=lambda each: each[1]["hours"])


def _sizes_in(index: int, setting: Setting) -> list[int]:
    """A size that is in the bin after nccl-tests' rounding, if there is one."""
    first, end = bin_first_byte(index), bin_first_byte(index + 1)
    whole = RANK_GRAIN_BYTES * setting.num_ranks
    # The ladder's sizes double exactly, so one process walks many of them.
    tried = (*octave_ladder(first, end - 1, 4), -(-bin_center_bytes(index) // whole) * whole)
    return [s for s in tried if size_bin(setting.benchmark_bytes(s)) == index][:1]


def _fresh_name(base: str, manifest: Manifest) -> str:
    """A sweep name that no run of the policy has."""
    taken = {run.split("/")[1] for run in manifest.runs}
    names = (f"{base}-fresh{number or ''}" for number in range(len(taken) + 1))
    return next(name for name in names if name not in taken)
