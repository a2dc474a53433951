"""Size bins between measured ones, and the sweep that a gate needs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dynamiccl.collect.plan import make_plan
from dynamiccl.collect.simulated import simulate
from dynamiccl.collect.sweep import load_sweep, parse_sweep
from dynamiccl.datasets.features import COST_TYPES
from dynamiccl.datasets.store import read
from dynamiccl.errors import UserError
from dynamiccl.evaluate.evidence import MIN_RUNS, FreshRuns, Verdict, costs_of
from dynamiccl.evaluate.gate import pass_gate, plan_gate
from dynamiccl.sizes import bin_center_bytes, size_bin
from dynamiccl.train.policy import TorchPolicy
from tests.conftest import Trained
from tests.data_sets import SWEEP
from tests.evaluate.test_gate import always_ring, runs, verdicts
from tests.rows import default, frame

LOW = size_bin(1 << 20)
#: Five bins, an octave: the default in all is Tree/LL (`runs`).
OCTAVE = [bin_center_bytes(LOW + step) for step in range(5)]


def costs(**bandwidths: float) -> pl.DataFrame:
    """NCCL's cost model of the rows' communicator: cell -> GB/s, latency alike."""
    rows = [
        ["box", "2.27.5", 1, 8, "default", "AllReduce", *cell.split("_"), 10.0, bandwidth]
        for cell, bandwidth in bandwidths.items()
    ]
    return pl.DataFrame(rows, schema=COST_TYPES, orient="row")


def octave(gains: dict[int, float], *, noise: float, seed: int = 0) -> list[dict[str, Any]]:
    """Eight runs: step -> gain, of the bins that were measured."""
    plain = runs(0.0, sizes=[OCTAVE[step] for step in gains], noise=noise, seed=seed)
    faster = {OCTAVE[step]: 1.0 + gain for step, gain in gains.items()}
    for row in plain:
        row["time_us"] /= 1.0 if row["is_default"] else faster[row["size_bytes"]]
    return plain


def judged(gains: dict[int, float], *, noise: float = 0.01, **known: Any) -> dict[int, Verdict]:
    """Verdicts on the octave's bins: step -> gain, of the bins that were measured."""
    policy = always_ring(*runs(0.2, sizes=OCTAVE, count=1, sweep="trained"))
    found = verdicts(pass_gate(policy, frame(*octave(gains, noise=noise)), **known))
    return {step: found[LOW + step] for step in range(5)}


ENDS = {0: 0.2, 4: 0.2}


@pytest.mark.parametrize(
    ("gains", "tells", "between"),
    [
        pytest.param(ENDS, None, Verdict.REFUSED, id="no costs"),
        pytest.param(ENDS, costs(Tree_LL=40.0, Ring_LL=5.0), Verdict.INFERRED, id="one default"),
        pytest.param(
            ENDS, costs(Tree_LL=5.0, Ring_LL=10.0), Verdict.REFUSED, id="not what the log says"
        ),
        pytest.param(
            {0: 0.4, 2: 0.0, 4: 0.4},
            costs(Tree_LL=40.0, Ring_LL=5.0),
            Verdict.REFUSED,
            id="a bin that fails ends what its neighbours tell",
        ),
    ],
)
def test_costs_tell_what_nccl_does_between_two_bins(
    gains: dict[int, float], tells: pl.DataFrame | None, between: Verdict
) -> None:
    found = judged(gains, costs=tells)
    assert found[0] is found[4] is Verdict.PASSED
    assert [found[step] for step in (1, 2, 3)] == [between] * 3


def planner(trained: Trained) -> tuple[TorchPolicy, Callable[..., dict[str, Any]]]:
    """A policy, and `plan_gate` for it by the data that it was trained on."""
    policy = TorchPolicy.load(trained.policy)
    known = FreshRuns(read(trained.data), policy.manifest.actions())
    return policy, partial(plan_gate, policy, known)


def test_planned_sweep_measures_what_the_gate_asks_and_passes_it(
    trained: Trained, tmp_path: Path
) -> None:
    policy, plan = planner(trained)
    base = parse_sweep(SWEEP, where="sweep")
    write = tmp_path / "fresh.toml"
    planned = plan(base, write, q=0.01)
    sweep = load_sweep(write)
    assert planned["bins_planned"] > 0
    assert sum(planned["left_out"].values()) == planned["bins_wanted"] - planned["bins_planned"]
    assert sweep.file.cycles == planned["cycles"]
    assert sweep.file.name not in {run.split("/")[1] for run in policy.manifest.runs}
    tasks = {(t.setting, t.size_bytes) for t in sweep.trials}
    assert len(tasks) == planned["bins_planned"]
    assert len(sweep.trials) == 2 * len(tasks)  # the default and one config
    assert planned["sweep"]["hours"] <= planned["sweep_hours"] == make_plan(base)["hours"]
    bins, shares, hours = (
        [told[key] for told in planned["by_runs"]] for key in ("bins", "share_of_gain", "hours")
    )
    assert bins == sorted(bins)
    assert 0.0 < bins[0] < bins[-1] <= planned["bins_planned"]
    assert 0.0 < shares[0] < shares[-1] <= 1.0
    assert hours == sorted(hours)
    data = simulate(sweep.text, tmp_path / "fresh")
    gated = pass_gate(policy, read(data), known=read(trained.data), costs=costs_of(data))
    passed = gated.counts()["passed"]
    assert passed >= 0.7 * planned["expected_to_pass"]
    assert passed <= planned["bins_planned"]


def test_a_proof_that_would_take_longer_than_its_sweep_has_fewer_runs(
    trained: Trained, tmp_path: Path
) -> None:
    _, plan = planner(trained)
    base = parse_sweep(SWEEP + "[budget]\nmax_hours = 0.001\n", where="sweep")
    planned = plan(base, tmp_path / "fresh.toml", q=1e-6)
    free = plan(parse_sweep(SWEEP, where="sweep"), tmp_path / "free.toml", q=1e-6)
    assert planned["sweep_hours"] == 0.001 < free["sweep_hours"]
    assert planned["is_cut"]
    assert planned["cycles"] == MIN_RUNS < free["cycles"]


def test_noise_within_runs_is_told_from_that_between_them() -> None:
    random = np.random.default_rng(0)
    rows = [
        default(100.0 * drift * random.lognormal(0.0, 0.01), run=f"run-{run}", repeat=repeat)
        for run, drift in enumerate(random.lognormal(0.0, 0.2, 200))
        for repeat in range(4)
    ]
    policy = always_ring(*runs(0.2, sizes=OCTAVE, count=1, sweep="trained"))
    [support] = policy.manifest.supports
    fresh = FreshRuns(frame(*rows), policy.manifest.actions())
    assert fresh.within_runs(support, "AllReduce", [LOW]) == pytest.approx(1e-4, rel=0.15)
    assert fresh.within_runs(support, "AllGather", [LOW]) == 0.0


def test_a_sweep_of_another_system_is_told(trained: Trained, tmp_path: Path) -> None:
    _, plan = planner(trained)
    base = parse_sweep(SWEEP.replace('system = "', 'system = "other-'), where="sweep")
    with pytest.raises(UserError, match="is of system 'other-"):
        plan(base, tmp_path / "fresh.toml", q=0.01)
