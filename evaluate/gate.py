"""The gate: from a policy and fresh runs to a policy that may be deployed (docs/evaluate.md).

What the policy predicts says where to look (weights), and is no evidence. How often `plan_gate`
measures follows from the training data: a bin's mean gain, less one standard error (the policy
chose what looked best), and its deviation between runs, with the variance that the gate would take;
the test has the power of a noncentral t. Repeats in a process take away noise for less than further
runs. Where the proof would take longer than the sweep, sizes that the sweep lacked, which need
processes of their own, are left to their neighbours; then there are fewer runs, three at least.
"""

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise, product
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import polars as pl
from scipy import stats

from dynamiccl.collect import sweep as sweeps
from dynamiccl.collect.grid import RANK_GRAIN_BYTES, Setting, Trial, octave_ladder
from dynamiccl.collect.plan import Plan, make_plan
from dynamiccl.collect.sweep import Sweep, SweepFile
from dynamiccl.datasets import questions
from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.cells import run_names, tuned, usable
from dynamiccl.datasets.features import TUNED, Observations
from dynamiccl.datasets.manifest import (
    GATE_NAME,
    JUDGED_NAME,
    POLICY_NAME,
    TRIGGER_NAME,
    Manifest,
    Support,
)
from dynamiccl.datasets.store import run_digests
from dynamiccl.errors import DataError, NotEnoughData, UserError
from dynamiccl.evaluate import evidence
from dynamiccl.evaluate.evidence import Cell, FreshRuns, Place, Verdict, place_of
from dynamiccl.evaluate.page import write_page
from dynamiccl.nccl import ABSTAIN, Collective
from dynamiccl.sizes import BINS_PER_OCTAVE, bin_center_bytes, bin_first_byte, size_bin
from dynamiccl.train.policy import TorchPolicy

DEFAULT_Q: Final = 0.01
#: Predicted gains are clipped to these for weights.
_PREDICTED: Final = 0.01, 1.0


@dataclass(frozen=True, slots=True)
class Gated:
    """Every bin's verdict, and the manifest for deployment."""

    q: float
    cells: list[Cell]
    manifest: Manifest
    #: Whether equal contents under other names were looked for.
    is_compared: bool = False

    @property
    def test(self) -> str:
        """What passed."""
        gain = "faster than NCCL's own choice beyond the noise band"
        slack = self.manifest.slack
        if slack is None:
            return f"gain: {gain}"
        much = "what the compute beside it gets back" if slack.job else f"{slack.share:.3g}"
        return (
            "non-inferiority: with fewer channels, read back, slower than NCCL's own choice by "
            f"less than {much} where compute hides the call; elsewhere {gain}, or no "
            "slower where that choice takes more channels than answers may"
        )

    def _head(self) -> dict[str, Any]:
        told = {"test": self.test, "q": self.q, "is_compared": self.is_compared}
        return {**told, "counts": _counts(self.cells)}

    def to_json(self) -> dict[str, Any]:
        """`gate.json`: the bins in which the policy acts."""
        return {**self._head(), "cells": [asdict(c) for c in self.cells if c.is_wanted]}

    def to_show(self) -> dict[str, Any]:
        """What page and terminal say; `refusals` are (bins, reason), the most frequent first."""
        families = []
        for key, group in groupby(self.cells, key=lambda cell: cell.key[:4]):
            cells = list(group)
            if any(cell.is_wanted for cell in cells):
                acting = [cell for cell in cells if cell.acts]
                place = zip(("system", "num_nodes", "num_ranks", "collective"), key, strict=True)
                channels = {
                    name: [n for cell in acting if (n := getattr(cell, name)) is not None]
                    for name in ("channels", "own_channels")
                }
                medians = {name: median(each) if each else None for name, each in channels.items()}
                found = {"cells": cells, "counts": _counts(cells), **medians}
                families.append(dict(place) | found)
        reasons = Counter(c.reason for c in self.cells if c.verdict is Verdict.REFUSED)
        return {
            **self._head(),
            "most": max((c.gain or 0.0 for c in self.cells if c.acts), default=0.0),
            "fewer": sum(cell.loss is not None for cell in self.cells if cell.acts),
            "families": families,
            "refusals": [(count, reason) for reason, count in reasons.most_common()],
        }


def _counts(cells: Sequence[Cell]) -> dict[str, int]:
    found = Counter(cell.verdict for cell in cells)
    return {verdict.value: found[verdict] for verdict in Verdict}


def pass_gate(
    policy: TorchPolicy,
    frame: pl.DataFrame,
    *,
    known: pl.DataFrame | None = None,
    costs: pl.DataFrame | None = None,
    q: float = DEFAULT_Q,
) -> Gated:
    """Judge a policy by the fresh runs of a measurements frame.

    In bins that these leave out, `known` may tell NCCL's own choice, else its cost model (`costs`).
    Raises UserError when runs are not fresh, or the policy does not say which are, and DataError
    when they hold what others hold.
    """
    manifest, slack = policy.manifest, policy.manifest.slack
    is_compared = _check_fresh(manifest, frame, known)
    fresh = FreshRuns(frame, manifest.actions(), known=known, costs=costs)
    supports = {place_of(support): support for support in questions.table_supports(manifest)}
    wanted = [cell for support in supports.values() for cell in wanted_cells(policy, support)]
    acting = [cell for cell in wanted if cell.is_wanted]
    most = None if slack is None else slack.max_channels
    tried = fresh.test(acting, supports, most, as_known=bool(slack and slack.job))
    judged = {cell.key: cell for cell in [*tried, *_judge(tried, q)]}
    cells = [judged.get(cell.key, cell) for cell in wanted]
    cells = let_bins_between_pass(cells, supports, fresh)
    gated: dict[Place, dict[str, dict[str, list[int]]]] = {}
    for cell in cells:
        if cell.acts:
            actions = gated.setdefault(cell.place, {}).setdefault(cell.collective, {})
            actions.setdefault(str(cell.action), []).append(cell.bin)
    held = [
        replace(each, gated=gated.get(place_of(each), {}) if each in supports.values() else {})
        for each in manifest.supports
    ]
    return Gated(q, cells, replace(manifest, supports=held), is_compared)


def _check_fresh(manifest: Manifest, frame: pl.DataFrame, known: pl.DataFrame | None) -> bool:
    """Whether what was trained on is known by its content, too."""
    if not manifest.runs:
        raise UserError(
            "the policy does not say which runs it was trained on (an older release made it): "
            "train it again, then measure runs for the gate"
        )
    if seen := sorted({*manifest.runs} & {*run_names(frame)}):
        raise UserError(
            f"{len(seen)} of the runs are not fresh, for example '{seen[0]}': the policy was "
            "trained on data that holds them; give --data runs measured for the gate alone"
        )
    told = manifest.digests
    if not told and known is not None:
        found = run_digests(usable(tuned(known)))
        told = {run: found[run] for run in found.keys() & {*manifest.runs}}
    holder = {digest: f"'{run}', which was trained on" for run, digest in told.items()}
    for run, digest in run_digests(usable(tuned(frame))).items():
        if digest in holder:
            raise DataError(
                f"run '{run}' is not fresh: it holds, to the digit, what {holder[digest]}, holds; "
                "give --data runs measured for the gate alone, each once"
            )
        holder[digest] = f"'{run}', in --data too"
    return bool(told)


def abstaining_cells(support: Support) -> list[Cell]:
    """Every bin of a support's table, abstaining."""
    return [
        Cell(*place_of(support), collective.wire, size_bin, ABSTAIN_ACTION, ABSTAIN.key)
        for collective in TUNED
        for size_bin in questions.table_bins(support)
    ]


def wanted_cells(policy: TorchPolicy, support: Support) -> list[Cell]:
    """The policy's choice in every bin of a support's table, ignoring any gate."""
    manifest = policy.manifest
    asked = questions.cold_questions(manifest, replace(support, gated=None))
    observations = Observations.cold(asked.context)
    rule, shares = asked.rule, asked.rule.shares
    actions = questions.decide(policy, observations, asked.mask, rule)
    times = -policy.values(observations, asked.mask)
    names = [config.key for config in manifest.actions().configs]
    cells = abstaining_cells(support)
    for row, action in enumerate(map(int, actions)):
        if action != ABSTAIN_ACTION:
            cells[row] = replace(
                cells[row],
                action=action,
                config=names[action],
                verdict=Verdict.REFUSED,
                predicted=float(times[row, ABSTAIN_ACTION] / times[row, action] - 1.0),
                channels=questions.count_of(rule.channels[row, action]),
                own_channels=questions.count_of(rule.channels[row, ABSTAIN_ACTION]),
                slack=float(shares[row, action]) if rule.slack and rule.counts[row] else None,
            )
    return cells


def _judge(tried: Sequence[Cell], q: float) -> list[Cell]:
    tested = [cell for cell in tried if not cell.reason]
    p_values = np.array([cell.p_value for cell in tested], dtype=np.float64)
    # The root: a far larger gain needs no help in being seen.
    beyond = [(cell.predicted or 0.0) + (cell.slack or 0.0) for cell in tested]
    weights = np.sqrt(np.clip(beyond, *_PREDICTED))
    found = []
    for cell, ok in zip(tested, evidence.passing(p_values, q, weights), strict=True):
        if ok:
            found.append(replace(cell, verdict=Verdict.PASSED))
        elif cell.loss is None:
            found.append(replace(cell, reason="its gain is not beyond the noise band"))
        else:
            found.append(replace(cell, reason="its loss may be as large as the slack"))
    return found


def let_bins_between_pass(
    cells: Sequence[Cell], supports: Mapping[Place, Support], fresh: FreshRuns
) -> list[Cell]:
    """The cells, INFERRED where they pass with their neighbours, or why not between two that do.

    They pass where the policy wants one config in all bins, within an octave of both. In NCCL's
    cost model times are straight lines in bytes (but for Tree's correction): what is cheapest at
    both ends is cheapest between.
    """
    found = {cell.key: cell for cell in cells}
    by_bin = sorted(cells, key=lambda cell: cell.key)
    for _, group in groupby(by_bin, key=lambda cell: (cell.key[:4], cell.action)):
        run = list(group)
        for first, last in pairwise(i for i, cell in enumerate(run) if cell.runs):
            if run[first].verdict is run[last].verdict is Verdict.PASSED:
                for cell in run[first + 1 : last]:
                    support = supports[cell.place]
                    reason = _why_not_between(run[first], cell, run[last], support, fresh)
                    verdict = cell.verdict if reason else Verdict.INFERRED
                    reason = reason or "as its neighbours on both sides"
                    found[cell.key] = replace(cell, verdict=verdict, reason=reason)
    return [found[cell.key] for cell in cells]


def _why_not_between(
    below: Cell, cell: Cell, above: Cell, support: Support, fresh: FreshRuns
) -> str:
    losses = [each.loss for each in (below, above) if each.loss is not None]
    if losses and (cell.loss is None or cell.loss < max(losses)):
        return "its neighbours may lose the slack, and it may not"
    if max(cell.bin - below.bin, above.bin - cell.bin) > BINS_PER_OCTAVE:
        return "it was not measured, nor a bin within an octave on both sides"
    if not fresh.one_default(support, cell.collective, [below.bin, cell.bin, above.bin]):
        return "NCCL's own choice there is not known to be that of its neighbours"
    return ""


def write_gated(gated: Gated, policy_dir: Path, out: Path) -> None:
    """Write the same policy, a manifest that restricts it, every verdict and a page."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(policy_dir / POLICY_NAME, out)
    for name in (JUDGED_NAME, TRIGGER_NAME):
        if (policy_dir / name).is_file():
            shutil.copy(policy_dir / name, out)
    write_page(out, "gate", gated.to_json(), gated.to_show())
    gated.manifest.write(out)  # which lists the files that are there


def read_gated(policy_dir: Path) -> Gated | None:
    """None if the policy was not gated; raises as `Manifest.read`."""
    path = policy_dir / GATE_NAME
    if not path.is_file():
        return None
    manifest = Manifest.read(policy_dir)  # the file's hash, too: it is what a gate wrote
    raw = json.loads(path.read_bytes())
    found = [Cell(**{**cell, "verdict": Verdict(cell["verdict"])}) for cell in raw["cells"]]
    wanted = {cell.key: cell for cell in found}
    supports = questions.table_supports(manifest)
    every = [cell for support in supports for cell in abstaining_cells(support)]
    cells = [wanted.get(cell.key, cell) for cell in every]
    return Gated(raw["q"], cells, manifest, raw.get("is_compared", False))


#: Most planned repeats, and numbers for which the plan says what would pass.
MOST_CYCLES: Final = 40
TOLD_CYCLES: Final = (3, 4, 5, 8, 12, 20)
#: Share that must pass, of the bins that can.
POWER: Final = 0.8
#: Bins less likely to pass, at MOST_CYCLES, are left out.
_LEAST_POWER: Final = 0.5
#: In one process, and the variances of one measurement that they take away, of a config measured
#: once and a default measured twice: the median of four normal draws has 0.298.
_REPEATS: Final = 4
_LESS_NOISE: Final = (1.0 - 0.298) + (0.5 - 0.298)


@dataclass(frozen=True, slots=True)
class _ExpectedGain:
    """Expected gain of a bin, beyond the noise band or above its allowed loss."""

    cell: Cell
    support: Support
    #: ln(default / config), and in standard deviations of one run; None: unknown.
    gain: float | None = None
    effect: float = 0.0
    #: Degrees of freedom that the other bins add.
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
) -> dict[str, Any]:
    """Write the fresh sweep for a policy into `write`, and say what the gate would make of it.

    `base` is the sweep whose cluster it is; `is_cut`: fewer bins or runs than wanted, to take no
    longer than it. Raises UserError where the policy wants nothing there, NotEnoughData where no
    bin could pass, InvalidSweep where `base` lacks a config.
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
    tried = range(evidence.MIN_RUNS, MOST_CYCLES)
    enough = (n for n in tried if np.mean([hope.power(n, q / 2) for hope in able]) >= POWER)
    cycles = next(enough, MOST_CYCLES)
    kept, left_out = _kept(hopes, able)
    name = _fresh_name(base.file.name, manifest)
    fresh, plan = _fresh_sweep(base, name, kept, manifest, cycles)
    sweep_hours = min(make_plan(base)["hours"], base.file.budget.max_hours or np.inf)
    swept = [hope for hope in kept if hope.is_own]
    is_cut = plan["hours"] > sweep_hours
    if is_cut and swept:
        reason = "sizes that the sweep lacked are left to their neighbours"
        left_out[reason] = len(kept) - len(swept)
        kept = swept
        fresh, plan = _fresh_sweep(base, name, kept, manifest, cycles)
    if is_cut and plan["hours"] > sweep_hours:
        cycles = max(evidence.MIN_RUNS, int(cycles * sweep_hours / plan["hours"]))
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
    manifest = policy.manifest
    groups = [group for group in base.file.groups if group.split is None]
    shapes = {(group.num_nodes, group.ranks_per_node) for group in groups}
    own = [s for s in questions.table_supports(manifest) if s.system == base.file.system]
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
        if cell.is_wanted
    ]
    if not wanted:
        raise UserError(
            "the policy leaves every choice to NCCL on the groups of this sweep: there is nothing "
            "to gate, and nothing to deploy"
        )
    return wanted


def _outlook(kept: Sequence[_ExpectedGain], cycles: int, q: float) -> dict[str, float]:
    powers = np.array([hope.power(cycles, q / 2) for hope in kept])
    gains = np.array([max(hope.gain or 0.0, 0.0) for hope in kept])
    share = float(powers @ gains / max(gains.sum(), 1e-12))
    return {"runs": cycles, "bins": float(powers.sum()), "share_of_gain": share}


def _expected(trained: FreshRuns, hopes: Sequence[_ExpectedGain]) -> list[_ExpectedGain]:
    """With the gain of each bin, or of the nearest one measured with its config."""
    found, told = list(hopes), []
    for i, hope in enumerate(hopes):
        cell, least = hope.cell, trained.least_gain(hope.support, hope.cell)
        for distance in range(questions.REACH_BINS + 1):
            near = sorted({cell.bin - distance, cell.bin + distance})
            gains = trained.gains(hope.support, cell.collective, near, cell.action)
            if least is not None and len(gains) > 1:
                within = trained.within_runs(hope.support, cell.collective, near)
                told.append((i, gains - least, within, distance == 0))
                break
    spread = evidence.shrunk([gains for _, gains, _, _ in told])
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
    """Trials of the base's grid, NCCL's choice too; raises UserError without a size."""
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
        "sizes": sweeps.Sizes(list=tuple(sorted(sizes))),
        "only": tuple(only),
        "cycles": cycles,
        "strategy": sweeps.StrategySettings(repeats=_REPEATS),
        # Other noise, as other runs have.
        "simulator": file.simulator.model_copy(update={"seed": file.simulator.seed + 1}),
    }
    head = f"Fresh runs of sweep {file.name} for a gate, by dynamiccl-evaluate gate --plan."
    text = sweeps.sweep_text(file.model_copy(update=update), head=head)
    fresh = sweeps.parse_sweep(text, where="the fresh sweep")
    return fresh, make_plan(fresh)


def _sizes_in(index: int, setting: Setting) -> list[int]:
    """A size that is in the bin after nccl-tests' rounding, if any."""
    first, end = bin_first_byte(index), bin_first_byte(index + 1)
    whole = RANK_GRAIN_BYTES * setting.num_ranks
    # They double exactly, so one process walks many of them.
    tried = (*octave_ladder(first, end - 1, 4), -(-bin_center_bytes(index) // whole) * whole)
    return [s for s in tried if size_bin(setting.benchmark_bytes(s)) == index][:1]


def _fresh_name(base: str, manifest: Manifest) -> str:
    taken = {run.split("/")[1] for run in manifest.runs}
    names = (f"{base}-fresh{number or ''}" for number in range(len(taken) + 1))
    return next(name for name in names if name not in taken)
