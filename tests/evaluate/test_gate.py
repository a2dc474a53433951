"""The gate: what passes is better in fresh runs, its statistics, and the sweep that it needs."""

import html
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import pytest
from scipy import stats

from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.collect.plan import make_plan
from dynamiccl.collect.simulated import simulate
from dynamiccl.collect.sweep import load_sweep, parse_sweep
from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import task_grid
from dynamiccl.datasets.costs import COST_TYPES
from dynamiccl.datasets.manifest import SHAPE_COLUMNS, Support, find_supports
from dynamiccl.datasets.questions import table_supports
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read, run_digests
from dynamiccl.errors import ArtifactMismatch, DataError, UserError
from dynamiccl.evaluate.baselines import LearnedPolicy, let_through
from dynamiccl.evaluate.evidence import (
    MIN_RUNS,
    Cell,
    FreshRuns,
    Verdict,
    costs_of,
    passing,
    shrunk,
)
from dynamiccl.evaluate.gate import Gated, pass_gate, plan_gate, read_gated
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.sizes import bin_center_bytes, size_bin
from dynamiccl.train.policy import TorchPolicy
from tests.conftest import Trained
from tests.data_sets import SWEEP
from tests.policies import hand_made_manifest
from tests.rows import default, forced, frame

CATALOGUE = Catalogue((ABSTAIN, Config(Algorithm.Ring, Protocol.LL)))
NO_NOISE = pl.DataFrame(schema={"system": str, "collective": str, "noise_band": float})
SIZES = [1 << k for k in range(18, 25)]
TREE = {"actual_algorithm": "Tree", "actual_protocol": "LL"}


def runs(
    gain: float,
    *,
    sizes: Iterable[int] = SIZES,
    count: int = 8,
    noise: float = 0.01,
    seed: int = 0,
    **columns: Any,
) -> list[dict[str, Any]]:
    """Default and Ring/LL in `count` runs, each with a drift of its own."""
    random = np.random.default_rng(seed)
    rows = []
    for run in range(count):
        drift = random.lognormal(0.0, 0.2)
        for size in sizes:
            slow, fast = drift * random.lognormal(0.0, noise, 2)
            where: dict[str, Any] = {"size_bytes": size, "run": f"fresh-{run}", "repeat": run}
            where |= columns
            rows.append(default(100.0 * slow, **TREE, **where))
            rows.append(forced("Ring", "LL", 100.0 * fast / (1.0 + gain), **where))
    return rows


class AlwaysRing:
    """Wants Ring/LL wherever it may."""

    def __init__(self, supports: list[Support]) -> None:
        self.manifest = replace(
            hand_made_manifest(frame(*runs(0.1, count=1)), NO_NOISE),
            catalogue=CATALOGUE.to_json(),
            supports=supports,
            abstain_margin=0.0,
            runs=["box/trained/cycle-0"],
        )

    def act(self, _: object, mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.where(mask[:, 1], 1, 0)

    def values(self, _: object, mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.where(mask, [-1.2, -1.0], -1e9)


def always_ring(*rows: dict[str, Any]) -> Any:
    """It, trained on these rows, or on one run of all sizes."""
    trained = frame(*(rows or runs(0.2, count=1, sweep="trained")))
    return AlwaysRing(find_supports(trained, CATALOGUE, NO_NOISE))


def verdicts(gated: Gated, collective: str = "AllReduce") -> dict[int, Verdict]:
    return {cell.bin: cell.verdict for cell in gated.cells if cell.collective == collective}


def gate(fresh: list[dict[str, Any]], known: pl.DataFrame | None = None) -> dict[int, Verdict]:
    """Verdicts on a policy that wants Ring/LL at all sizes."""
    return verdicts(pass_gate(always_ring(), frame(*fresh), known=known))


def test_a_gain_beyond_the_band_passes_and_one_within_it_does_not() -> None:
    good = gate(runs(0.2))
    assert {b for b, v in good.items() if v is Verdict.PASSED} == {size_bin(s) for s in SIZES}
    for gain in (0.0, -0.1):
        assert set(gate(runs(gain)).values()) <= {Verdict.REFUSED, Verdict.ABSTAINS}


def judge_one(rows: list[dict[str, Any]]) -> Cell:
    """What the rows tell of the first size."""
    gated = pass_gate(always_ring(), frame(*rows))
    at = ("AllReduce", size_bin(SIZES[0]))
    return next(cell for cell in gated.cells if cell.key[3:] == at)


def test_what_a_run_does_to_all_its_times_cancels_and_few_runs_are_no_evidence() -> None:
    evidence = judge_one(runs(0.05, noise=0.0))
    assert evidence.runs == 8
    assert evidence.gain == pytest.approx(0.05)
    few = judge_one(runs(0.5, count=MIN_RUNS - 1))
    assert (few.runs, few.p_value, few.reason) == (2, None, "2 fresh runs of both, not 3")
    assert judge_one(runs(0.5, count=1)).reason == "1 fresh runs of both, not 3"


def reasons(rows: list[dict[str, Any]]) -> dict[int, str]:
    """What is said of each bin of AllReduce in which the policy acts."""
    cells = pass_gate(always_ring(), frame(*rows)).cells
    return {each.bin: each.reason for each in cells if each.collective == "AllReduce"}


def gone_wrong(size: int, status: str, **columns: Any) -> list[dict[str, Any]]:
    """Eight runs with a clear gain, and an attempt of Ring/LL that ended otherwise."""
    at: dict[str, Any] = {"size_bytes": size, "run": "fresh-3", "repeat": 9, "status": status}
    time_us = 80.0 if status == "wrong_values" else None
    return [*runs(0.2), {**forced("Ring", "LL", time_us, **at), **columns}]


@pytest.mark.parametrize(
    ("columns", "is_refused"),
    [
        pytest.param({}, True, id="itself"),
        pytest.param({"requested_num_channels": 4}, True, id="with channels"),
        pytest.param({"requested_protocol": None, "actual_protocol": "LL"}, True, id="what ran"),
        pytest.param({"interference_kind": "congestion"}, True, id="beside traffic"),
        pytest.param({"requested_protocol": "Simple"}, False, id="another protocol"),
        pytest.param({"collective": "AllGather"}, False, id="another collective"),
        pytest.param({"num_nodes": 2, "ranks_per_node": 4}, False, id="another group"),
    ],
)
def test_one_wrong_result_refuses_algorithm_and_protocol(
    columns: dict[str, Any], is_refused: bool
) -> None:
    found = reasons(gone_wrong(SIZES[2], "wrong_values", **columns))
    assert ({*found.values()} == {"wrong results in fresh runs"}) == is_refused
    assert [found[size_bin(size)] == "" for size in SIZES] == [not is_refused] * len(SIZES)


@pytest.mark.parametrize("status", ["failed", "timed_out", "infeasible"])
def test_one_failed_attempt_refuses_all_sizes_from_the_last_good_one_on(status: str) -> None:
    rows, last, failed = gone_wrong(SIZES[4], status), size_bin(SIZES[3]), size_bin(SIZES[4])
    reason = f"an attempt {status.replace('_', ' ')} at 4M in fresh runs"
    told = reasons(rows)
    found = {size for size in told if told[size] == reason}
    assert found == ({size for size in told if size >= failed} if status != "infeasible" else set())
    assert all(told[size] for size in range(last + 1, failed))
    assert not told[last]
    # Where no smaller size was measured well, none is taken on trust.
    alone = [row for row in rows if row["size_bytes"] >= SIZES[4]]
    assert reasons(alone)[failed] == reasons(rows)[failed]


PLACE = "    time   algbw   busbw #wrong"
HEAD = f"#       size         count      type   redop    root {PLACE} {PLACE}\n"


def process(log: Path, gain: float, run: int, settings: str = "") -> None:
    """Append to a log what a benchmark prints."""
    text = f"$ {settings} ./all_reduce_perf -b 256K -e 16M -f 2 -g 8\n{HEAD}"
    for size in SIZES:
        time_us = size / 1e4 * (1.0 + 0.001 * run) / (1.0 + gain)
        rate = size / time_us / 1e3
        numbers = f"{time_us:.2f} {rate:.2f} {rate * 1.75:.2f} 0"
        text += f"{size} {size // 4} float sum -1 {numbers} {numbers}\n"
    with log.open("a", encoding="utf-8") as file:
        file.write(text)


@pytest.mark.parametrize(
    ("own", "ring", "runs"),
    [
        pytest.param("{}.log", "{}.log", 3, id="a log for each job"),
        pytest.param("{}.log", "ring-{}.log", 0, id="a log for each process"),
        pytest.param("all.log", "all.log", 1, id="all jobs in one log"),
    ],
)
def test_what_is_in_one_log_is_one_run(own: str, ring: str, runs: int, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for job in range(MIN_RUNS):
        process(tmp_path / "logs" / own.format(job), 0.0, job)
        process(tmp_path / "logs" / ring.format(job), 0.3, job, "NCCL_ALGO=Ring NCCL_PROTO=LL")
    known: dict[str, Any] = {"num_ranks": 8, "num_nodes": 1, "gpu": "H100"}
    options = ImportOptions(system="box", nccl_version="2.27.5", **known)
    import_files([tmp_path / "logs"], tmp_path / "data", options=options)
    found = pass_gate(always_ring(), read(tmp_path / "data")).cells
    cells = [cell for cell in found if cell.is_wanted and cell.bin in map(size_bin, SIZES)]
    assert [(cell.acts, cell.runs) for cell in cells] == [(runs == MIN_RUNS, runs)] * len(SIZES)
    said = f"{runs} fresh runs of both, not 3: 3 have the config and 3 NCCL's own choice, not toge"
    assert all(cell.reason.startswith("" if cell.acts else said) for cell in cells)


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"nccl_version": "2.27.7"},
        {"nccl_version": "2.28.3"},
        {"num_nodes": 2, "ranks_per_node": 4},
        {"system": "other"},
        {"launch_profile": "tuned"},
        {"interference_kind": "congestion"},
        {"exclusive_node": False},
    ],
)
def test_runs_of_something_else_are_no_evidence(elsewhere: dict[str, Any]) -> None:
    """Another patch release is the same NCCL."""
    same = elsewhere == {"nccl_version": "2.27.7"}
    assert (Verdict.PASSED in gate(runs(0.2, **elsewhere)).values()) == same


def test_group_shapes_that_were_never_measured_get_no_table() -> None:
    """Nothing is carried over, though the fresh runs have the new one."""

    def shaped(*shapes: int, **columns: Any) -> list[dict[str, Any]]:
        where = ({"num_nodes": n, "ranks_per_node": 8, "num_ranks": 8 * n} for n in shapes)
        return [row for w in where for row in runs(0.2, sizes=SIZES[:2], **w, **columns)]

    policy = always_ring(*shaped(1, 2, 3, count=1, sweep="trained"))
    gated = pass_gate(policy, frame(*shaped(1, 2, 3, 4)))
    assert {cell.num_nodes for cell in gated.cells if cell.verdict == "passed"} == {1, 2, 3}
    assert {support.num_nodes for support in table_supports(gated.manifest)} == {1, 2, 3}


def own_choice(*sizes: int, **choice: str) -> pl.DataFrame:
    return frame(*(default(1.0, size_bytes=size, sweep="trained", **choice) for size in sizes))


def test_a_bin_between_follows_its_neighbours_only_where_the_default_is_known() -> None:
    far = runs(0.2, sizes=SIZES[::2][:2])  # 256K and 1M: two octaves apart
    assert Verdict.INFERRED not in gate(far).values()
    near = runs(0.2, sizes=SIZES[:2])
    between = size_bin(SIZES[0]) + 2
    assert gate(near)[between] is Verdict.REFUSED  # what NCCL does there is not known
    for choice, verdict in (
        (TREE, Verdict.INFERRED),
        ({**TREE, "actual_algorithm": "Ring"}, Verdict.REFUSED),
        ({"actual_algorithm": "Tree"}, Verdict.REFUSED),  # and a protocol that nobody knows
    ):
        known = own_choice(bin_center_bytes(between), **choice)
        assert gate(near, known)[between] is verdict


def test_runs_that_were_trained_on_are_refused(trained: Trained) -> None:
    policy = TorchPolicy.load(trained.policy)
    with pytest.raises(UserError, match="not fresh"):
        pass_gate(policy, read(trained.data))
    old: Any = AlwaysRing([])
    old.manifest.runs.clear()
    with pytest.raises(UserError, match="train it again"):
        pass_gate(old, frame(*runs(0.2)))


def test_runs_are_known_by_what_they_measured_under_another_name(gated_dir: Path) -> None:
    known = frame(*runs(0.2, sweep="night1"))
    same = known.with_columns(sweep=pl.lit("night2"))
    policy: Any = AlwaysRing(find_supports(known, CATALOGUE, NO_NOISE))
    policy.manifest.runs.append("box/night1/fresh-0")
    # An old policy knows names alone, and what --known tells of them.
    assert not pass_gate(policy, same).is_compared
    both = r"run 'box/night2/fresh-0' is not fresh: .* 'box/night1/fresh-0', which was trained on"
    with pytest.raises(DataError, match=both):
        pass_gate(policy, same, known=known)
    policy.manifest.digests.update(run_digests(known))
    with pytest.raises(DataError, match=both):
        pass_gate(policy, same)
    fresh = frame(*runs(0.2, seed=1), *runs(0.2, seed=1, sweep="again"))
    with pytest.raises(DataError, match=r"'box/grid/fresh-0' is not fresh: .*, in --data too"):
        pass_gate(policy, fresh)
    assert pass_gate(policy, fresh.filter(sweep="again")).is_compared
    # Few times may be equal by chance.
    assert run_digests(known.head(7)) == {}
    told = read_gated(gated_dir)
    assert told is not None
    assert told.is_compared


def test_the_page_begins_with_what_may_act_and_shows_every_bin(gated_dir: Path) -> None:
    gated = read_gated(gated_dir)
    assert gated is not None
    told = gated.to_show()
    shown = sum((Counter(family["counts"]) for family in told["families"]), Counter[str]())
    assert sum(count for count, _ in told["refusals"]) == told["counts"]["refused"]
    page = html.unescape((gated_dir / "gate.html").read_text(encoding="utf-8"))
    acting = told["counts"]["passed"] + told["counts"]["inferred"]
    most = max(cell.gain or 0.0 for cell in gated.cells if cell.acts)
    assert re.search(
        rf"<h1>The policy may act in {acting} of the {acting + told['counts']['refused']} size "
        rf"bins in which it would: up to {100 * most / (1 + most):.0f} % less time",
        page,
    )
    marks = re.findall(r'<td class="(\w+)" title="[^"]*">(.)</td>', page)
    letters = {"passed": "P", "inferred": "i", "refused": "R", "abstains": "·"}
    assert Counter(marks) == {(v, letters[v]): n for v, n in shown.items() if n}
    assert not re.search(r"<script|<link|src=|href=|url\(", page)


def test_gate_is_read_back_and_damage_found(
    trained: Trained, gated_dir: Path, tmp_path: Path
) -> None:
    assert read_gated(trained.policy) is None
    found = read_gated(gated_dir)
    assert found is not None
    said = json.loads((gated_dir / "gate.json").read_text())
    assert found.to_json() == said
    assert len(found.cells) == sum(said["counts"].values())  # with those that abstain
    assert (gated_dir / "policy.pt").read_bytes() == (trained.policy / "policy.pt").read_bytes()
    copy = Path(shutil.copytree(gated_dir, tmp_path / "gated"))
    (copy / "gate.json").write_text('{"q": 0.01, "cells": [{}]}')
    with pytest.raises(ArtifactMismatch):
        read_gated(copy)


def test_tasks_where_nothing_was_gated_abstain(gated_dir: Path, trained: Trained) -> None:
    policy = TorchPolicy.load(gated_dir)
    manifest = policy.manifest
    (support,) = manifest.supports
    (collective, actions), *_ = (support.gated or {}).items()
    (action, (size, *_)), *_ = actions.items()
    place = {name: getattr(support, name) for name in SHAPE_COLUMNS}
    place |= {"collective": collective, "bin": size}
    others = ({"system": "other"}, {"num_nodes": 5}, {"nccl_version": "2.26.0"}, {"bin": 1})
    mask, _ = let_through(manifest, pl.DataFrame([place, *({**place, **o} for o in others)]))
    assert mask[:, 0].all()
    assert mask[0, int(action)]
    assert not mask[1:, 1:].any()
    # A report lets act what passed.
    catalogue = manifest.actions()
    grid = task_grid(read(trained.data), catalogue, list(Split))
    chosen = LearnedPolicy(policy, catalogue, "gated").choose(grid)
    acting = {*grid.tasks.filter(pl.Series(chosen) > 0).select("collective", "bin").rows()}
    gated = (support.gated or {}).items()
    passed = {(c, size) for c, actions in gated for bins in actions.values() for size in bins}
    assert set() < acting <= passed


Q: Final = 0.01
GATES: Final = 400


def test_benjamini_and_hochberg_take_the_last_below_the_line() -> None:
    p_values = np.array([0.9, 0.001, 0.03, 0.02, 0.041])
    assert passing(p_values, 0.05, np.ones(5)).tolist() == [False, True, True, True, False]
    assert passing(np.array([0.01, 0.02, 0.03, 0.04, 0.05]), 0.05, np.ones(5)).all()
    assert passing(np.array([0.011, 0.5]), 0.02, np.ones(2)).tolist() == [False, False]
    assert passing(np.zeros(0), 0.05, np.ones(0)).tolist() == []
    # Weights move the rate and add none.
    for weights, passed in (((1, 1), [False] * 2), ((3, 1), [True, False]), ((1, 3), [False] * 2)):
        found = passing(np.array([0.006, 0.5]), Q, 100.0 * np.array(weights))
        assert found.tolist() == passed


def false_gates(noise: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], num_runs: int) -> int:
    """Gates of GATES that let anything through, though every gain is exactly the noise band."""
    random = np.random.default_rng(0)
    found = 0
    for _ in range(GATES):
        excess = random.permutation(noise)[:, None] * random.normal(size=(len(noise), num_runs))
        variances, df = shrunk([*excess])
        t = excess.mean(axis=1) / np.sqrt(variances / num_runs)
        found += bool(passing(stats.t.sf(t, df), Q, weights).any())
    return found


@pytest.mark.parametrize(
    ("noise", "num_runs"),
    [
        (np.full(60, 0.01), 3),
        (np.full(60, 0.01), 8),
        # Without the bounds of `shrunk` one gate in ten lets a bin with far more noise through.
        (np.where(np.arange(60) < 3, 0.08, 0.01), 3),
    ],
)
def test_noise_passes_as_seldom_as_is_said(noise: np.ndarray[Any, Any], num_runs: int) -> None:
    assert false_gates(noise, np.linspace(0.2, 2.0, 60), num_runs) <= Q * GATES + 4


def spread(*variances: float) -> list[np.ndarray[Any, Any]]:
    """Gains in three runs, of these variances."""
    return [np.sqrt(each) * np.array([-1.0, 0.0, 1.0]) for each in variances]


def test_even_bins_lend_each_other_freedom_and_no_variance_is_below_its_own() -> None:
    own = np.array([1e-4, 1.1e-4, 0.9e-4, 1e-4, 0.16])
    variances, _ = shrunk(spread(*own))
    assert (variances >= 0.999 * own).all()
    assert variances[4] == pytest.approx(own[4])
    # Two slow calls in three runs: the mean is twice its error, whatever the other bins say.
    slow = np.array([0.0, 0.4, 0.4])
    variances, df = shrunk([*spread(*[1e-6] * 60), slow])
    t = slow.mean() / np.sqrt(variances[-1] / 3)
    assert stats.t.sf(t, df[-1]) > 0.05
    random = np.random.default_rng(0)
    chance = random.chisquare(2, 40) / 2
    _, calm = shrunk(spread(*1e-4 * chance))
    assert calm == pytest.approx(4.0)
    _, wild = shrunk(spread(*1e-4 * chance * np.exp(random.normal(0.0, 5.0, 40))))
    assert (wild < 2.5).all()
    variances, lone = shrunk(spread(1e-4))
    assert (variances[0], lone[0]) == (pytest.approx(1e-4), 2.0)
    assert shrunk([np.zeros(3)] * 2)[1].max() <= 2.5


def test_three_runs_let_a_clear_gain_through_and_a_slow_call_does_not() -> None:
    policy = always_ring()
    fresh = runs(0.8, count=3, noise=0.015)
    found = verdicts(pass_gate(policy, frame(*fresh)))
    passed = [b for b, verdict in found.items() if verdict is Verdict.PASSED]
    assert len(passed) == len(SIZES)
    # No gain at the first size, but in two runs of three NCCL's own choice took four times as long.
    slow = [
        {**row, "time_us": row["time_us"] * (1.8 if not row["is_default"] else 4.0)}
        if row["size_bytes"] == SIZES[0] and (not row["is_default"] or row["run"] != "fresh-0")
        else row
        for row in fresh
    ]
    again = verdicts(pass_gate(policy, frame(*slow)))
    assert [again[b] for b in passed] == [Verdict.REFUSED] + [Verdict.PASSED] * (len(passed) - 1)


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


def test_a_planned_sweep_is_what_the_gate_asks_for(trained: Trained, tmp_path: Path) -> None:
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
    passed = gated.to_json()["counts"]["passed"]
    assert passed >= 0.7 * planned["expected_to_pass"]
    assert passed <= planned["bins_planned"]


def test_too_long_a_proof_has_fewer_runs(trained: Trained, tmp_path: Path) -> None:
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
