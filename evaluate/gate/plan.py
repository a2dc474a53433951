"""Plans the sweep for a gate: the bins where the policy acts, two configs, enough repeats.

The number of repeats follows from the policy's training data: in each size bin the mean gain, less
one standard error (the policy chose what looked best), and its standard deviation between runs,
both with the variance that the gate would take (`evidence`). Its test there has the power of a
noncentral t.

Each run is new processes, whose starts are most of the cost: several repeats in each take away
noise for less than further runs. By default the proof takes no longer than the sweep that it is of:
where it would, sizes that the sweep lacked, which need processes of their own, are left to the
bins around them (`gate.let_bins_between_pass`), and then there are fewer runs, three at least.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy import stats

from dynamiccl.collect.grid import RANK_GRAIN_BYTES, Setting, Trial, octave_ladder
from dynamiccl.collect.plan import Plan, make_plan
from dynamiccl.collect.sweep import (
    Sizes,
    StrategySettings,
    Sweep,
    SweepFile,
    parse_sweep,
    sweep_text,
)
from dynamiccl.datasets.manifest import Manifest, Support
from dynamiccl.datasets.questions import REACH_BINS, table_supports
from dynamiccl.errors import NotEnoughData, UserError
from dynamiccl.evaluate.gate.evidence import MIN_RUNS, Cell, FreshRuns, Verdict, shrunk
from dynamiccl.evaluate.gate.gate import Gated, wanted_cells
from dynamiccl.nccl import ABSTAIN, Collective
from dynamiccl.sizes import bin_center_bytes, bin_first_byte, size_bin
from dynamiccl.train.policy import TorchPolicy

#: Maximum number of planned repeats, and numbers for which the plan says what would pass.
MOST_CYCLES: Final = 40
TOLD_CYCLES: Final = (3, 4, 5, 8, 12, 20)
#: Share of bins to pass, of those that can, where no other is asked for.
DEFAULT_POWER: Final = 0.8
#: Bins with a smaller probability of passing at that number are left out.
_LEAST_POWER: Final = 0.5
#: Repeats in a run, in one process, and the variances of one measurement that they take away, of a
#: config measured once and a default measured twice: the median of four normal draws has 0.298.
_REPEATS: Final = 4
_LESS_NOISE: Final = (1.0 - 0.298) + (0.5 - 0.298)


@dataclass(frozen=True, slots=True)
class _ExpectedGain:
    """Expected gain of a bin beyond the noise band, or above the loss that it may have."""

    cell: Cell
    support: Support
    #: Of ln(default / config), and in standard deviations of one run; None: unknown.
    gain: float | None = None
    effect: float = 0.0
    #: Degrees of freedom that the other bins add to the gate's test.
    prior: float = 0.0
    #: Whether the training data measured this very bin.
    is_own: bool = False

    def power(self, cycles: int, level: float) -> float:
        """Probability that the gate's test passes the bin."""
        if self.gain is None:
            return 0.0
        freedom = cycles - 1 + self.prior
        limit = stats.t.ppf(1.0 - level, freedom)
        return float(stats.nct.sf(limit, freedom, self.effect * np.sqrt(cycles)))


def plan_gate(
    policy: TorchPolicy,
    trained: FreshRuns,
    base: Sweep,
    write: Path,
    *,
    q: float,
    power: float | None = None,
) -> dict[str, Any]:
    """Write the fresh sweep for a policy into `write`, and say what the gate would make of it.

    `trained` is what the policy was trained on; `base` the sweep whose cluster it is. `power` is
    the share of bins to pass, of those that can; without it 80 %, or what the hours of `base`
    allow.

    Returns `bins_wanted`, where the policy acts, `bins_planned` and of these `expected_to_pass`
    alone; why bins are `left_out`, with their number; the number of `cycles`, and `by_runs` what
    others would let pass (`_outlook`); the `sweep` as `collect.plan` says it, and `sweep_hours` of
    the base by the same model; `is_cut`: fewer bins or runs than wanted, to take no longer than it.
    Raises UserError where the policy wants nothing there, NotEnoughData where no bin could pass,
    and InvalidSweep where the grid of `base` lacks a config.
    """
    manifest = policy.manifest
    hopes = _expected(trained, _wanted(policy, base))
    # Benjamini and Hochberg compare the last that passes with q times the share that does.
    able = [hope for hope in hopes if hope.power(MOST_CYCLES, q / 2) >= _LEAST_POWER]
    if not able:
        raise NotEnoughData(
            f"in none of the {len(hopes)} size bins in which the policy acts do the data that it "
            f"was trained on show what {MOST_CYCLES} runs would tell from noise, for a test of "
            f"{Gated(q, [], manifest).test}"
        )
    wanted = DEFAULT_POWER if power is None else power
    tried = range(MIN_RUNS, MOST_CYCLES)
    enough = (n for n in tried if np.mean([hope.power(n, q / 2) for hope in able]) >= wanted)
    cycles = next(enough, MOST_CYCLES)
    kept, left_out = _kept(hopes, able)
    name = _fresh_name(base.file.name, manifest)
    fresh, plan = _fresh_sweep(base, name, kept, manifest, cycles)
    sweep_hours = min(make_plan(base)["hours"], base.file.budget.max_hours or np.inf)
    swept = [hope for hope in kept if hope.is_own]
    is_cut = power is None and plan["hours"] > sweep_hours
    if is_cut and swept:
        reason = "sizes that the sweep lacked are left to their neighbours"
        left_out[reason] = len(kept) - len(swept)
        kept = swept
        fresh, plan = _fresh_sweep(base, name, kept, manifest, cycles)
    if is_cut and plan["hours"] > sweep_hours:
        cycles = max(MIN_RUNS, int(cycles * sweep_hours / plan["hours"]))
        fresh, plan = _fresh_sweep(base, name, kept, manifest, cycles)
    write.write_text(fresh.text, encoding="utf-8")
    return {
        "name": name,
        "bins_wanted": len(hopes),
        "bins_planned": len(kept),
        "cycles": cycles,
        "expected_to_pass": _outlook(kept, cycles, q)["bins"],
        "by_runs": [
            _outlook(kept, n, q) | {"hours": plan["hours"] * n / cycles} for n in TOLD_CYCLES
        ],
        "left_out": left_out,
        "sweep_hours": sweep_hours,
        "is_cut": is_cut,
        "sweep": plan,
        "written": str(write),
    }


def _wanted(policy: TorchPolicy, base: Sweep) -> list[_ExpectedGain]:
    """The bins in which the policy acts on the groups of a sweep; UserError where there is none."""
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
    if manifest.slack is not None and not base.file.runner.read_back:
        raise UserError(
            f"sweep '{base.file.name}' has runner.read_back = false, and with slack the gate "
            "has to see how many channels ran: leave that line out"
        )
    wanted = [
        _ExpectedGain(cell, support)
        for support in supports
        for cell in wanted_cells(policy, support)
        if cell.verdict is not Verdict.ABSTAINS
    ]
    if not wanted:
        raise UserError(
            "the policy leaves every choice to NCCL on the groups of this sweep: there is nothing "
            "to gate, and nothing to deploy"
        )
    return wanted


def _outlook(kept: Sequence[_ExpectedGain], cycles: int, q: float) -> dict[str, float]:
    """What would pass alone in so many `runs`: `bins`, and theirs in the gain of all (a share)."""
    powers = np.array([hope.power(cycles, q / 2) for hope in kept])
    gains = np.array([max(hope.gain or 0.0, 0.0) for hope in kept])
    share = float(powers @ gains / max(gains.sum(), 1e-12))
    return {"runs": cycles, "bins": float(powers.sum()), "share_of_gain": share}


def _expected(trained: FreshRuns, hopes: Sequence[_ExpectedGain]) -> list[_ExpectedGain]:
    """With the gain of each bin, or of the nearest one measured with its config."""
    found, told = list(hopes), []
    for i, hope in enumerate(hopes):
        cell, least = hope.cell, trained.least_gain(hope.support, hope.cell)
        for distance in range(REACH_BINS + 1):
            near = sorted({cell.bin - distance, cell.bin + distance})
            gains = trained.gains(hope.support, cell.collective, near, cell.action)
            if least is not None and len(gains) > 1:
                within = trained.within_runs(hope.support, cell.collective, near)
                told.append((i, gains - least, within, distance == 0))
                break
    spread = shrunk([gains for _, gains, _, _ in told])
    for each, variance, df in zip(told, *spread, strict=True):
        i, gains, within, is_own = each
        surely = float(np.mean(gains) - np.sqrt(variance / len(gains)))
        # So few runs do not tell well how much of their noise is between them.
        left = max(variance - _LESS_NOISE * within, variance / 4)
        prior = float(df) - (len(gains) - 1)
        effect = surely / float(np.sqrt(left))
        found[i] = replace(found[i], gain=surely, effect=effect, prior=prior, is_own=is_own)
    return found


def _kept(
    hopes: Sequence[_ExpectedGain], able: Sequence[_ExpectedGain]
) -> tuple[list[_ExpectedGain], dict[str, int]]:
    """The bins worth measuring: those that can pass, and those between two of them."""
    reach: dict[tuple[object, ...], list[int]] = {}
    for hope in able:
        reach.setdefault((hope.cell.key[:4], hope.cell.action), []).append(hope.cell.bin)
    kept, left_out = [], Counter[str]()
    for hope in hopes:
        bins = reach.get((hope.cell.key[:4], hope.cell.action), [])
        if bins and min(bins) <= hope.cell.bin <= max(bins):
            kept.append(hope)
        elif hope.gain is None:
            left_out["the data trained on do not tell its gain"] += 1
        else:
            left_out[f"its gain would not pass in {MOST_CYCLES} runs"] += 1
    return kept, dict(left_out)


def _fresh_sweep(
    base: Sweep, name: str, kept: Sequence[_ExpectedGain], manifest: Manifest, cycles: int
) -> tuple[Sweep, Plan]:
    """The sweep of the bins, and its plan: single trials of the base's grid, NCCL's choice too.

    All else is the base's: launcher, runner, iterations. Other launch profiles and what runs beside
    are left out, as a gate takes neither. Raises UserError where no size can be measured.
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
    plain = ("profiles", "interference", "budget")
    update = {key: SweepFile.model_fields[key].default for key in plain} | {
        "name": name,
        "sizes": Sizes(list=tuple(sorted(sizes))),
        "only": tuple(only),
        "cycles": cycles,
        "strategy": StrategySettings(repeats=_REPEATS),
        # Other noise, as other runs have.
        "simulator": file.simulator.model_copy(update={"seed": file.simulator.seed + 1}),
    }
    head = f"Fresh runs of sweep {file.name} for a gate, by dynamiccl-evaluate gate --plan."
    text = sweep_text(file.model_copy(update=update), head=head)
    fresh = parse_sweep(text, where="the fresh sweep")
    return fresh, make_plan(fresh)


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
