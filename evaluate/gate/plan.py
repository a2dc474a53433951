"""Plans the sweep for a gate: the bins where the policy acts, two configs, enough repeats.

The number of repeats follows from the policy's training data: in each size bin the mean gain, less
one standard error (the policy chose what looked best), and its standard deviation between runs. The
gate's t-test there has the power of a noncentral t.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy import stats

from dynamiccl.collect.plan import FreshTask, Plan, write_fresh
from dynamiccl.collect.sweep import Sweep
from dynamiccl.datasets.manifest import Manifest, Support
from dynamiccl.datasets.questions import REACH_BINS, table_supports
from dynamiccl.errors import NotEnoughData, UserError
from dynamiccl.evaluate.gate.cells import Cell, Verdict
from dynamiccl.evaluate.gate.evidence import MIN_RUNS, FreshRuns
from dynamiccl.evaluate.gate.gate import wanted_cells
from dynamiccl.nccl import Collective
from dynamiccl.train.policy import TorchPolicy

#: Maximum number of planned repeats.
MOST_CYCLES: Final = 40
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
    sweep: Plan
    written: Path

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data for `json.dumps`."""
        return {
            "name": self.name,
            "bins_wanted": self.bins_wanted,
            "bins_planned": self.bins_planned,
            "cycles": self.cycles,
            "expected_to_pass": self.expected_to_pass,
            "left_out": self.left_out,
            "sweep": self.sweep,
            "written": str(self.written),
        }


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
    policy: TorchPolicy, trained: FreshRuns, base: Sweep, write: Path, *, q: float, power: float
) -> GatePlan:
    """Write the fresh sweep for a policy into `write`.

    `trained` is what the policy was trained on; `base` the sweep whose cluster it is. Raises
    UserError where the policy wants nothing there, and NotEnoughData where no bin could pass.
    """
    manifest = policy.manifest
    supports = [s for s in table_supports(manifest) if _is_of(s, base)]
    if not supports:
        known = ", ".join(sorted({s.system for s in manifest.supports}))
        raise UserError(
            f"sweep '{base.file.name}' is of system '{base.file.system}' and none of its groups "
            f"has a table of this policy, which knows {known}; name its own sweep with --sweep"
        )
    wanted = [
        (cell, support)
        for support in supports
        for cell in wanted_cells(policy, support)
        if cell.verdict is not Verdict.ABSTAINS
    ]
    if not wanted:
        raise UserError(
            "the policy leaves every choice to NCCL on the groups of this sweep: there is nothing "
            "to gate, and nothing to deploy"
        )
    hopes = [
        _ExpectedGain(cell, support, _effect(trained, support, cell)) for cell, support in wanted
    ]
    # Benjamini and Hochberg compare the last that passes with q times the share that does.
    able = [hope for hope in hopes if hope.power(MOST_CYCLES, q / 2) >= _LEAST_POWER]
    if not able:
        raise NotEnoughData(
            f"in none of the {len(wanted)} size bins in which the policy acts do the data that it "
            f"was trained on show a gain that {MOST_CYCLES} repeats would tell from noise"
        )
    chances = {n: float(np.mean([h.power(n, q / 2) for h in able])) for n in _CYCLES}
    cycles = next((n for n, chance in chances.items() if chance >= power), MOST_CYCLES)
    kept, left_out = _kept(hopes, able)
    name = _fresh_name(base.file.name, manifest)
    plan = write_fresh(base, name, _asked(kept, manifest), cycles, write)
    return GatePlan(
        name,
        len(wanted),
        len(kept),
        cycles,
        sum(hope.power(cycles, q / 2) for hope in kept),
        left_out,
        plan,
        write,
    )


_CYCLES: Final = range(MIN_RUNS, MOST_CYCLES + 1)


def _is_of(support: Support, base: Sweep) -> bool:
    groups = [group for group in base.file.groups if group.split is None]
    shapes = {(group.num_nodes, group.ranks_per_node) for group in groups}
    return (
        support.system == base.file.system and (support.num_nodes, support.ranks_per_node) in shapes
    )


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
    hopes: Sequence[_ExpectedGain], able: Sequence[_ExpectedGain]
) -> tuple[list[_ExpectedGain], dict[str, int]]:
    """The bins worth measuring: those that can pass, and those between two of them."""
    reach: dict[tuple[object, ...], list[int]] = {}
    for hope in able:
        reach.setdefault(_family(hope), []).append(hope.cell.bin)
    kept, left_out = [], dict[str, int]()
    for hope in hopes:
        bins = reach.get(_family(hope), [])
        if bins and min(bins) <= hope.cell.bin <= max(bins):
            kept.append(hope)
            continue
        reason = (
            "the data trained on do not tell its gain"
            if hope.effect is None
            else f"its gain would not pass in {MOST_CYCLES} repeats"
        )
        left_out[reason] = left_out.get(reason, 0) + 1
    return kept, left_out


def _family(hope: _ExpectedGain) -> tuple[object, ...]:
    cell = hope.cell
    return cell.system, cell.num_nodes, cell.num_ranks, cell.collective, cell.action


def _asked(kept: Sequence[_ExpectedGain], manifest: Manifest) -> list[FreshTask]:
    configs = manifest.actions().configs
    families: dict[tuple[object, ...], list[_ExpectedGain]] = {}
    for hope in kept:
        families.setdefault(_family(hope), []).append(hope)
    return [
        FreshTask(
            Collective.parse(hopes[0].cell.collective),
            hopes[0].support.num_nodes,
            hopes[0].support.ranks_per_node,
            configs[hopes[0].cell.action],
            [hope.cell.bin for hope in hopes],
        )
        for hopes in families.values()
    ]


def _fresh_name(base: str, manifest: Manifest) -> str:
    """A sweep name that no run of the policy has."""
    taken = {run.split("/")[1] for run in manifest.runs}
    names = (f"{base}-fresh{number or ''}" for number in range(len(taken) + 1))
    return next(name for name in names if name not in taken)
