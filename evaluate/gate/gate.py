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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from typing import Any, Final

import numpy as np
import polars as pl

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.cells import run_names
from dynamiccl.datasets.features import TUNED, Observations
from dynamiccl.datasets.manifest import Manifest, Slack, Support
from dynamiccl.datasets.questions import (
    cold_questions,
    count_of,
    decide,
    table_bins,
    table_supports,
)
from dynamiccl.errors import UserError
from dynamiccl.evaluate.gate.cells import Cell, Verdict
from dynamiccl.evaluate.gate.evidence import FreshRuns, passing
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
        found = Counter(cell.verdict for cell in self.cells)
        return {verdict.value: found[verdict] for verdict in Verdict}

    def to_json(self) -> dict[str, Any]:
        """The content of `gate.json`: the bins in which the policy acts."""
        wanted = [asdict(c) for c in self.cells if c.verdict is not Verdict.ABSTAINS]
        return {"test": self.test, "q": self.q, "counts": self.counts(), "cells": wanted}


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
    manifest = policy.manifest
    _check_fresh(manifest, frame)
    fresh = FreshRuns(frame, manifest.actions(), known=known, costs=costs)
    supports = table_supports(manifest)
    wanted = [cell for support in supports for cell in wanted_cells(policy, support)]
    by_key = {_key(support): support for support in supports}
    cells = _judge(wanted, by_key, fresh, q, manifest.slack)
    gated = _by_support(cells)
    return Gated(
        q,
        cells,
        replace(
            manifest,
            supports=[
                replace(support, gated=gated.get(_key(support), {}) if support in supports else {})
                for support in manifest.supports
            ],
        ),
    )


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
        Cell(
            system=support.system,
            num_nodes=support.num_nodes,
            num_ranks=support.num_ranks,
            collective=collective.wire,
            bin=size_bin,
            action=ABSTAIN_ACTION,
            config=ABSTAIN.key,
            verdict=Verdict.ABSTAINS,
            reason="",
            runs=0,
            gain=None,
            p_value=None,
        )
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


def _judge(
    wanted: Sequence[Cell],
    supports: Mapping[tuple[str, int, int], Support],
    fresh: FreshRuns,
    q: float,
    slack: Slack | None,
) -> list[Cell]:
    acting = [cell for cell in wanted if cell.verdict is not Verdict.ABSTAINS]
    most = None if slack is None else slack.max_channels
    found = {
        cell.place: cell
        for cell in fresh.test(acting, supports, most, as_known=bool(slack and slack.job))
    }
    tested = [cell for cell in found.values() if not cell.reason]
    p_values = np.array([cell.p_value for cell in tested], dtype=np.float64)
    # The root: a gain that is far larger needs no help in being seen.
    beyond = [(cell.predicted or 0.0) + (cell.slack or 0.0) for cell in tested]
    weights = np.sqrt(np.clip(beyond, *_PREDICTED))
    for cell, ok in zip(tested, passing(p_values, q, weights), strict=True):
        verdict = Verdict.PASSED if ok else Verdict.REFUSED
        reason = "its gain is not beyond the noise band"
        reason = reason if cell.loss is None else "its loss may be as large as the slack"
        found[cell.place] = replace(cell, verdict=verdict, reason="" if ok else reason)
    cells = [found.get(cell.place, cell) for cell in wanted]
    return let_bins_between_pass(cells, supports, fresh)


def let_bins_between_pass(
    cells: Sequence[Cell], supports: Mapping[tuple[str, int, int], Support], fresh: FreshRuns
) -> list[Cell]:
    """The cells, with verdict INFERRED for those that pass with their neighbours, or the reason.

    They pass with the config of both where the policy wants it in all bins between, both are within
    an octave, and NCCL's own choice is known to be the same there as in both. By its cost model it
    then is: each cell's time is a straight line in bytes (but for Tree's correction, which the
    model is asked for), so what is cheapest at both ends is cheapest between.
    """
    found = {cell.place: cell for cell in cells}
    for cell in cells:
        support = supports[cell.place[:3]]
        unknown = cell.verdict is Verdict.REFUSED and not cell.runs
        if unknown and cell.bin not in fresh.measured_bins(support, cell.collective):
            reason = "it was not measured, and its neighbours did not both pass with this config"
            found[cell.place] = replace(cell, reason=reason)
    by_bin = sorted(cells, key=lambda cell: cell.place)
    for _, group in groupby(by_bin, key=lambda cell: (cell.place[:4], cell.action)):
        run = list(group)
        measured = [i for i, cell in enumerate(run) if cell.runs]
        for first, last in pairwise(measured):
            if run[first].verdict is run[last].verdict is Verdict.PASSED:
                borne = max(run[first].loss or 0.0, run[last].loss or 0.0)
                with_slack = run[first].loss is not None or run[last].loss is not None
                for cell in run[first + 1 : last]:
                    below, above = run[first].bin, run[last].bin
                    found[cell.place] = _between(below, cell, above, supports, fresh)
                    if with_slack and (cell.loss is None or cell.loss < borne):
                        reason = "its neighbours may lose the slack, and it may not"
                        found[cell.place] = replace(cell, reason=reason)
    return [found[cell.place] for cell in cells]


def _between(
    below: int,
    cell: Cell,
    above: int,
    supports: Mapping[tuple[str, int, int], Support],
    fresh: FreshRuns,
) -> Cell:
    """The verdict on a bin between two that passed with its config."""
    if max(cell.bin - below, above - cell.bin) > BINS_PER_OCTAVE:
        return replace(cell, reason="it was not measured, nor a bin within an octave on both sides")
    support = supports[cell.place[:3]]
    if not fresh.one_default(support, cell.collective, [below, cell.bin, above]):
        reason = "NCCL's own choice there is not known to be that of its neighbours"
        return replace(cell, reason=reason)
    return replace(cell, verdict=Verdict.INFERRED, reason="as its neighbours on both sides")


def _by_support(
    cells: Sequence[Cell],
) -> dict[tuple[str, int, int], dict[str, dict[str, list[int]]]]:
    """Support -> collective -> action -> bins that may act."""
    gated: dict[tuple[str, int, int], dict[str, dict[str, list[int]]]] = {}
    for cell in cells:
        if cell.verdict in {Verdict.PASSED, Verdict.INFERRED}:
            support = gated.setdefault(cell.place[:3], {})
            actions = support.setdefault(cell.collective, {})
            actions.setdefault(str(cell.action), []).append(cell.bin)
    return gated


def _key(support: Support) -> tuple[str, int, int]:
    return support.system, support.num_nodes, support.num_ranks
