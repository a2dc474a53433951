"""The gate: from a policy and fresh runs to a policy that may be deployed.

For every size bin of every group shape that a table would be made for:

* where the policy leaves the choice to NCCL there is nothing to judge;
* where it wants a config that was measured in that bin, the config's gain over NCCL's default has
  to exceed the noise band in fresh runs (`evidence`), at a false discovery rate of `q` over all
  bins, of which those have more in which the policy predicts more gain: it says where to look, and
  is no evidence;
* with slack, and a config that takes fewer channels than NCCL's own choice in the fresh runs, too,
  its loss has to be below the slack instead: a test of non-inferiority;
* bins that nobody measured, between two that passed with one config, pass with it where NCCL's own
  choice is the same in all of them (`let_bins_between_pass`);
* everything else abstains, and so does whatever the data set never had: other hardware, another
  minor version of NCCL, another group shape.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.cells import run_names
from dynamiccl.datasets.features import TUNED, Observations
from dynamiccl.datasets.manifest import GATE_NAME, POLICY_NAME, TRIGGER_NAME, Manifest, Support
from dynamiccl.datasets.questions import (
    cold_questions,
    count_of,
    decide,
    table_bins,
    table_supports,
)
from dynamiccl.errors import CorruptFile, UserError
from dynamiccl.evaluate.gate.evidence import Cell, FreshRuns, Place, Verdict, passing, place_of
from dynamiccl.evaluate.page import render
from dynamiccl.nccl import ABSTAIN
from dynamiccl.sizes import BINS_PER_OCTAVE
from dynamiccl.train.policy import TorchPolicy

#: False discovery rate over all tested bins.
DEFAULT_Q: Final = 0.01
#: Predicted gains outside of these have the weight of the nearest.
_PREDICTED: Final = 0.01, 1.0


@dataclass(frozen=True, slots=True)
class Gated:
    """The result: every bin's verdict, and the manifest for deployment."""

    q: float
    cells: list[Cell]
    manifest: Manifest

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

    def counts(self) -> dict[str, int]:
        """Bins by verdict."""
        return _counts(self.cells)

    def to_json(self) -> dict[str, Any]:
        """The content of `gate.json`: the bins in which the policy acts."""
        wanted = [asdict(c) for c in self.cells if c.verdict is not Verdict.ABSTAINS]
        return {"test": self.test, "q": self.q, "counts": self.counts(), "cells": wanted}

    def to_show(self) -> dict[str, Any]:
        """What page and terminal say: verdicts of each group shape and collective that is acted in.

        Shares and medians are over the bins that may act; `refusals` are (bins, reason), the most
        frequent first.
        """
        families = []
        for key, group in groupby(self.cells, key=lambda cell: cell.key[:4]):
            cells = list(group)
            if any(cell.verdict is not Verdict.ABSTAINS for cell in cells):
                acting = [cell for cell in cells if cell.acts]
                found = {
                    "system": key[0],
                    "num_nodes": key[1],
                    "num_ranks": key[2],
                    "collective": key[3],
                    "cells": cells,
                    "counts": _counts(cells),
                    "channels": _median(cell.channels for cell in acting),
                    "own_channels": _median(cell.own_channels for cell in acting),
                }
                families.append(found)
        reasons = Counter(c.reason for c in self.cells if c.verdict is Verdict.REFUSED)
        return {
            "test": self.test,
            "q": self.q,
            "counts": self.counts(),
            "most": max((c.gain or 0.0 for c in self.cells if c.acts), default=0.0),
            "fewer": sum(cell.loss is not None for cell in self.cells if cell.acts),
            "families": families,
            "refusals": [(count, reason) for reason, count in reasons.most_common()],
        }


def _counts(cells: Sequence[Cell]) -> dict[str, int]:
    found = Counter(cell.verdict for cell in cells)
    return {verdict.value: found[verdict] for verdict in Verdict}


def _median(channels: Iterable[int | None]) -> float | None:
    known = [each for each in channels if each is not None]
    return median(known) if known else None


def pass_gate(
    policy: TorchPolicy,
    frame: pl.DataFrame,
    *,
    known: pl.DataFrame | None = None,
    costs: pl.DataFrame | None = None,
    q: float = DEFAULT_Q,
) -> Gated:
    """Judge a policy by the fresh runs of a measurements frame.

    `known` may tell what NCCL's own choice was in bins that the fresh runs leave out; where neither
    does, NCCL's cost model may: `costs` as `datasets.costs.read_costs` gives them.
    Raises UserError when some of the runs are not fresh, or the policy does not say which are.
    """
    manifest, slack = policy.manifest, policy.manifest.slack
    _check_fresh(manifest, frame)
    fresh = FreshRuns(frame, manifest.actions(), known=known, costs=costs)
    supports = {place_of(support): support for support in table_supports(manifest)}
    wanted = [cell for support in supports.values() for cell in wanted_cells(policy, support)]
    acting = [cell for cell in wanted if cell.verdict is not Verdict.ABSTAINS]
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
    return Gated(q, cells, replace(manifest, supports=held))


def _check_fresh(manifest: Manifest, frame: pl.DataFrame) -> None:
    if not manifest.runs:
        raise UserError(
            "the policy does not say which runs it was trained on (an older release made it): "
            "train it again, then measure runs for the gate"
        )
    seen = sorted(set(manifest.runs) & set(run_names(frame)))
    if seen:
        raise UserError(
            f"{len(seen)} of the runs are not fresh, for example '{seen[0]}': the policy was "
            "trained on data that holds them; give --data runs measured for the gate alone"
        )


def abstaining_cells(support: Support) -> list[Cell]:
    """Every bin of a support's table, collective by collective, where nothing is wanted."""
    return [
        Cell(*place_of(support), collective.wire, size_bin, ABSTAIN_ACTION, ABSTAIN.key)
        for collective in TUNED
        for size_bin in table_bins(support)
    ]


def wanted_cells(policy: TorchPolicy, support: Support) -> list[Cell]:
    """The policy's choice in every bin of a support's table, ignoring any gate."""
    manifest = policy.manifest
    asked = cold_questions(manifest, replace(support, gated=None))
    observations = Observations.cold(asked.context)
    rule, shares = asked.rule, asked.rule.shares
    actions = decide(policy, observations, asked.mask, rule)
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
                channels=count_of(rule.channels[row, action]),
                own_channels=count_of(rule.channels[row, ABSTAIN_ACTION]),
                slack=float(shares[row, action]) if rule.slack and rule.counts[row] else None,
            )
    return cells


def _judge(tried: Sequence[Cell], q: float) -> list[Cell]:
    """Of the cells that were tested, the verdicts at the false discovery rate `q`."""
    tested = [cell for cell in tried if not cell.reason]
    p_values = np.array([cell.p_value for cell in tested], dtype=np.float64)
    # The root: a gain that is far larger needs no help in being seen.
    beyond = [(cell.predicted or 0.0) + (cell.slack or 0.0) for cell in tested]
    weights = np.sqrt(np.clip(beyond, *_PREDICTED))
    found = []
    for cell, ok in zip(tested, passing(p_values, q, weights), strict=True):
        reason = "its gain is not beyond the noise band"
        if cell.loss is not None:
            reason = "its loss may be as large as the slack"
        passed = replace(cell, verdict=Verdict.PASSED)
        found.append(passed if ok else replace(cell, reason=reason))
    return found


def let_bins_between_pass(
    cells: Sequence[Cell], supports: Mapping[Place, Support], fresh: FreshRuns
) -> list[Cell]:
    """The cells, with verdict INFERRED for those that pass with their neighbours, or the reason.

    They pass with the config of both where the policy wants it in all bins between, both are within
    an octave, and NCCL's own choice is known to be the same there as in both. By its cost model it
    then is: each cell's time is a straight line in bytes (but for Tree's correction, which the
    model is asked for), so what is cheapest at both ends is cheapest between.
    """
    found = {cell.key: cell for cell in cells}
    for cell in cells:
        unknown = cell.verdict is Verdict.REFUSED and not cell.runs
        measured = fresh.measured_bins(supports[cell.place], cell.collective) if unknown else ()
        if unknown and cell.bin not in measured:
            reason = "it was not measured, and its neighbours did not both pass with this config"
            found[cell.key] = replace(cell, reason=reason)
    by_bin = sorted(cells, key=lambda cell: cell.key)
    for _, group in groupby(by_bin, key=lambda cell: (cell.key[:4], cell.action)):
        run = list(group)
        for first, last in pairwise(i for i, cell in enumerate(run) if cell.runs):
            if run[first].verdict is run[last].verdict is Verdict.PASSED:
                for cell in run[first + 1 : last]:
                    support = supports[cell.place]
                    reason = _why_not_between(run[first], cell, run[last], support, fresh)
                    passed = replace(
                        cell, verdict=Verdict.INFERRED, reason="as its neighbours on both sides"
                    )
                    found[cell.key] = replace(cell, reason=reason) if reason else passed
    return [found[cell.key] for cell in cells]


def _why_not_between(
    below: Cell, cell: Cell, above: Cell, support: Support, fresh: FreshRuns
) -> str:
    """Why a bin does not pass with those on its sides, which passed with its config; empty: ok."""
    losses = [each.loss for each in (below, above) if each.loss is not None]
    if losses and (cell.loss is None or cell.loss < max(losses)):
        return "its neighbours may lose the slack, and it may not"
    if max(cell.bin - below.bin, above.bin - cell.bin) > BINS_PER_OCTAVE:
        return "it was not measured, nor a bin within an octave on both sides"
    if not fresh.one_default(support, cell.collective, [below.bin, cell.bin, above.bin]):
        return "NCCL's own choice there is not known to be that of its neighbours"
    return ""


def write_gated(gated: Gated, policy_dir: Path, out: Path) -> None:
    """Write the same policy, a manifest that restricts it, every verdict and a page to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(policy_dir / POLICY_NAME, out)
    if (policy_dir / TRIGGER_NAME).is_file():
        shutil.copy(policy_dir / TRIGGER_NAME, out)
    text = json.dumps(gated.to_json(), indent=1)
    (out / GATE_NAME).write_text(text + "\n", encoding="utf-8")
    (out / "gate.html").write_text(render("gate.html", gated.to_show()), encoding="utf-8")
    gated.manifest.write(out)  # which lists the files that are there


def read_gated(policy_dir: Path) -> Gated | None:
    """The gate's verdicts on the policy in a directory; None if it was not gated.

    Raises CorruptFile when its file is damaged, and what `Manifest.read` raises.
    """
    path = policy_dir / GATE_NAME
    if not path.is_file():
        return None
    manifest = Manifest.read(policy_dir)  # which also compares the file's hash
    try:
        raw = json.loads(path.read_bytes())
        found = [Cell(**{**cell, "verdict": Verdict(cell["verdict"])}) for cell in raw["cells"]]
        q = float(raw["q"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFile(f"{path} is not what a gate writes: {error}; gate again") from error
    wanted = {cell.key: cell for cell in found}
    supports = table_supports(manifest)
    every = [cell for support in supports for cell in abstaining_cells(support)]
    return Gated(q, [wanted.get(cell.key, cell) for cell in every], manifest)
