"""A Gaussian process fitted to sweeps: how sure it must be, what it chooses and leaves to NCCL."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
import numpy as np
import polars as pl
import pytest
import torch
from typer.testing import CliRunner

from dynamiccl.belief import LEAST_CAUTION, MIN_GAIN, SLOWER
from dynamiccl.collect.cli import app
from dynamiccl.datasets.cells import task_grid
from dynamiccl.datasets.features import CONTEXT_COLUMN, Observations, cold_observations
from dynamiccl.datasets.manifest import Manifest, costs_beside, with_shape
from dynamiccl.datasets.questions import cold_questions
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.steps import with_noise
from dynamiccl.datasets.store import read
from dynamiccl.errors import UserError
from dynamiccl.evaluate.baselines import LearnedPolicy
from dynamiccl.evaluate.explain import explain
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Protocol
from dynamiccl.serve.export import export_artifact
from dynamiccl.simulator.h100 import default_model, true_us
from dynamiccl.simulator.system import Call, Group
from dynamiccl.sizes import size_bin
from dynamiccl.train.cautious import CautiousPolicy, ShapeTable, Tables
from dynamiccl.train.cautious_fit import Calibration, Tasks, best_of, fit_tables
from dynamiccl.train.data import load_data
from dynamiccl.train.fit import fit
from dynamiccl.train.policy import TorchPolicy, forward
from dynamiccl.train.recipe import make_recipe
from tests.data_sets import SWEEP, SYSTEM, make_data, sweep_text
from tests.serve.abi import TunerPlugin, loopback_environment
from tests.stores import new_store


def calibration(scores: list[float], measured: list[float]) -> Calibration:
    ones = np.ones(len(scores))
    return Calibration(np.array(scores), np.array(measured), ones, 0.0 * ones)


def test_threshold_leaves_as_many_slower_tasks_of_those_that_act_as_the_bound_allows() -> None:
    scores = [float(k) for k in range(3, 1003)]  # of n that act: (slower + 1) / (n + 1) <= alpha
    found = calibration(scores, [-0.1 if s in {90.0, 50.0, 20.0} else 0.1 for s in scores])
    assert found.raised(7.0, 0.0010) == 90.0  # drawn is less, and 912 that act are too few
    assert found.raised(7.0, 0.0011) == 90.0
    assert found.raised(7.0, 0.0022) == 50.0
    assert found.raised(7.0, 0.0031) == 20.0
    assert found.raised(7.0, 0.0040) == LEAST_CAUTION
    # Those that abstain say nothing of those that act.
    idle = calibration([0.5] * 9000 + scores, [0.1] * 9000 + found.measured.tolist())
    assert idle.raised(7.0, 0.0022) == 50.0
    # Too few tasks only raise what drawn worlds ask for.
    few = calibration([3.0] * 98, [0.1] * 98)
    assert few.raised(3.5, 0.01) == 3.5
    assert few.raised(3.5, 0.02) == LEAST_CAUTION
    assert calibration([5.0, 3.0], [-0.1, 0.1]).raised(3.5, 0.01) == 5.0
    assert Calibration.joined([]).raised(3.5, 0.5) == 3.5


def test_what_is_slower_by_noise_or_left_alone_anyway_sets_no_threshold() -> None:
    just_below, below = -0.9 * SLOWER, -1.1 * SLOWER
    scores, fine = [float(k) for k in range(1, 100)], [0.1] * 97
    assert calibration(scores, [*fine, just_below, below]).raised(2.0, 0.01) == 99.0
    assert calibration(scores, [*fine, below, just_below]).raised(2.0, 0.01) == 98.0
    unused = calibration([*scores[:98], 0.9 * MIN_GAIN], [*fine, 0.1, -1.0])
    assert unused.raised(7.0, 0.02) == LEAST_CAUTION
    noisy = replace(unused, measured=np.full(99, -0.1), noise=np.full(99, 0.1))
    assert noisy.raised(7.0, 0.02) == LEAST_CAUTION


def test_the_largest_sure_gain_is_taken_and_coverage_counts_both_spreads() -> None:
    gain = np.array([[0.3, 0.2, 0.9], [0.3, 0.2, 0.9]])
    spread = np.array([[0.2, 0.05, 0.01], [0.2, 0.15, 0.01]])
    known = np.array([True, True, False]) & np.ones((2, 1), dtype=np.bool_)
    assert best_of(gain, spread, known, 2.0).tolist() == [1, 0]  # where none is sure: the largest
    found = Calibration(
        predicted=np.array([0.1, 0.1, 0.1]),
        measured=np.array([0.1, 0.25, 0.4]),
        spread=np.full(3, 0.06),
        noise=np.full(3, 0.08),
    )  # 1.645 x 0.1
    assert found.coverage == pytest.approx(2 / 3)


@pytest.mark.parametrize("alpha", [0.02, 0.1])
def test_bound_holds_over_draws(alpha: float) -> None:
    """Of what acts, over many draws, a share of alpha is slower; predictions know something."""
    random = np.random.default_rng(0)
    wrong = acted = 0
    for _ in range(1_000):
        predicted = np.abs(random.normal(size=800))
        measured = 0.3 * predicted + 0.15 * random.normal(size=800)
        seen = slice(0, 400)
        found = Calibration(predicted[seen], measured[seen], np.full(400, 0.01), np.zeros(400))
        acts = predicted[400:] / 0.01 > found.raised(math.inf, alpha)
        wrong += int((acts & (measured[400:] < -np.log1p(SLOWER))).sum())
        acted += int(acts.sum())
    assert acted > 0.1 * 400 * 1_000
    assert 0.5 * alpha < wrong / acted <= 1.05 * alpha


_GROUPS = ", ".join(f"{{ num_nodes = {n}, ranks_per_node = 8 }}" for n in (2, 4, 8))
#: A sweep of several group shapes.
_SIZES = '{ min = "64K", max = "1G", steps_per_octave = 2 }'
WIDE = sweep_text(groups=f"[{_GROUPS}]", sizes=_SIZES)


class Run(NamedTuple):
    data: Path
    uri: str
    run_id: str
    policy: Path


def fitted_on(data: Path, uri: str, alpha: float) -> Run:
    recipe = make_recipe("gaussian-process", [f"alpha={alpha}"])
    done = fit(data, recipe, experiment="gp", tracking_uri=uri, seed=0)
    return Run(data, uri, done.run_id, Path(done.run_directory) / "policy")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("gaussian")
    return fitted_on(make_data(folder / "data", WIDE), new_store(folder), 0.02)


def test_it_gains_much_and_is_hardly_ever_slower(fitted: Run, tmp_path: Path) -> None:
    quiet = "noise_sigma = 0.0\ntail_probability = 0.0\ndrift_sigma = 0.0\n"
    truth = make_data(tmp_path, WIDE + quiet)
    policy = TorchPolicy.load(fitted.policy, judged=True)
    grid = task_grid(read(truth), policy.manifest.actions(), [Split.TEST])
    chosen = LearnedPolicy(policy, policy.manifest.actions(), "gp").choose(grid)
    default = float(grid.regret(np.zeros(len(chosen), dtype=np.int64)).mean())
    assert float(grid.regret(chosen).mean()) < default / 3
    ratio = grid.chosen_us(chosen) / grid.default_us
    assert float((ratio > 1.01).mean()) <= 1 / 36  # alpha is 0.02, and there are 36 tasks
    assert ratio.max() < 1.05
    # The run says how far it can be trusted.
    metrics = mlflow.MlflowClient(fitted.uri).get_run(fitted.run_id).data.metrics
    assert metrics["calibration_tasks"] == 174  # with the test octaves
    assert 0.8 < metrics["coverage_90"] <= 1.0
    assert min(metrics["prior_widened"], metrics["spread_stretched"]) >= 1.0
    assert json.loads((fitted.policy.parent / "recipe.json").read_text())["alpha"] == 0.02
    assert Manifest.read(fitted.policy).features[-1]["name"] == "log_cost:PAT/Simple"


def test_new_shapes_get_tables_from_costs(fitted: Run, tmp_path: Path, plugin_path: Path) -> None:
    """16 nodes: modelled costs, the policy of 2, 4 and 8, and the plugin that answers by it."""
    data = tmp_path / "data"
    shutil.copytree(fitted.data, data)
    asked = ["--system", SYSTEM, "--machine", "h100-ib", "--nccl", "2.27.5", "--out", str(data)]
    done = CliRunner().invoke(app, ["shapes", *asked, "--group", "16x8"])
    assert done.exit_code == 0, done.output
    policy = fitted_on(data, fitted.uri, 0.05).policy
    artifact = export_artifact(policy, tmp_path / "artifact", groups=[(16, 8)])
    [carried] = [s for s in artifact.manifest.supports if s.carried]
    assert (carried.num_nodes, carried.num_ranks) == (16, 128)

    _, table = artifact.pick(16, 128, SYSTEM)
    group, acted = Group(16, 8), 0
    environment = loopback_environment(artifact.directory, SYSTEM)
    with TunerPlugin(plugin_path).communicator(
        128, 16, environment=environment, all_ranks=True
    ) as communicator:
        for octave in range(16, 31):
            size = 1 << octave
            wanted = table.at(Collective.AllReduce, size_bin(size))
            call = Call(group, Collective.AllReduce, size)
            answer = communicator.ask(call.collective, size, default_model().cost_table(call))
            assert answer.acted == (wanted is not None)
            if wanted is not None:
                assert wanted.num_channels is None
                assert answer.config == wanted
                acted += 1
                own = default_model().resolve(call, ABSTAIN)
                cells: list[Any] = [(c.algorithm, c.protocol) for c in (wanted, own)]
                assert true_us(call, cells[0]) < 1.01 * true_us(call, cells[1])
    assert acted >= 2


def test_shapes_have_costs_where_these_are_known_and_measured_ones_are_refused(fitted: Run) -> None:
    manifest = Manifest.read(fitted.policy)
    with pytest.raises(UserError, match="was measured"):
        with_shape(manifest, 4, 8)
    gated = replace(manifest, supports=[replace(s, gated={}) for s in manifest.supports])
    with pytest.raises(UserError, match="gate"):
        with_shape(gated, 16, 8)
    costs = manifest.cost_table()
    assert costs is not None
    wider = costs.with_columns(num_nodes=pl.lit(16, costs.schema["num_nodes"]))
    assert costs_beside(pl.concat([costs, wider]), manifest.supports).height == 2 * costs.height
    elsewhere = costs.with_columns(launch_profile=pl.lit("tuned"))
    assert costs_beside(elsewhere, manifest.supports).is_empty()
    assert costs_beside(costs, []).is_empty()
    network = replace(manifest, knows_shapes=False)
    with pytest.raises(UserError, match="knows nothing of 16x8"):
        with_shape(network, 16, 8)


def test_other_machines_and_collectives_are_left_to_nccl(fitted: Run) -> None:
    policy = TorchPolicy.load(fitted.policy)
    manifest = policy.manifest
    asked = cold_questions(manifest, manifest.supports[0])
    everything = np.ones_like(asked.mask)
    own = policy.act(Observations.cold(asked.context), everything)
    assert (own != 0).any()
    gpu = [feature["name"] for feature in manifest.features].index("compute_capability")
    other = asked.context.copy()
    other[:, gpu] += 1.0
    assert (policy.act(Observations.cold(other), everything) == 0).all()
    action = int(own[own != 0][0])
    least, unknown = (
        policy.least_gains(Observations.cold(context[own == action]))
        for context in (asked.context, other)
    )
    assert least is not None
    assert 0.0 < least[0, action] < 1.0
    assert unknown is not None
    assert unknown[0, action] == math.inf  # nothing is known of its times there
    rows = own.reshape(5, -1)
    assert (rows[0] == 0).all()  # Broadcast was not measured
    assert (rows[4] != 0).any()


def test_where_it_knows_too_little_it_tells_no_number(fitted: Run) -> None:
    sizes = [1 << k for k in range(9, 36)]
    found = [
        explain(fitted.policy, Collective.AllReduce, s, num_nodes=2, num_ranks=16) for s in sizes
    ]
    asked = [each for one in found for each in one["predictions"]]
    unknown = {each["not_allowed"] for each in asked if each["time_over_default"] is None}
    assert unknown == {
        "it was not measured within an octave",
        "the training data lack NCCL's own choice within an octave below or above",
    }
    known = {each["not_allowed"] for each in asked if each["time_over_default"] is not None}
    assert known == {"", "no gain is sure enough at the sizes around"}
    own = [each["time_over_default"] for each in asked if each["not_allowed"].startswith("no gain")]
    assert min(abs(ratio - 1.0) for ratio in own) < 0.02  # NCCL's own choice, by its name
    assert not any("nan" in one["reason"] or "MORE" in one["reason"] for one in found)


def test_a_level_moves_it_to_what_does_not_feel_it(fitted: Run) -> None:
    data = load_data(fitted.data, 0, with_costs=True)
    shares = pl.DataFrame(
        [
            (SYSTEM, "AllReduce", algorithm, protocol, 20, float(algorithm == "Ring"))
            for algorithm in ("Ring", "Tree", "NVLSTree")
            for protocol in ("LL", "LL128", "Simple")
        ],
        schema=["system", "collective", "algorithm", "protocol", "octave", "share"],
        orient="row",
    )
    feels, *_ = fit_tables(replace(data, level_shares=shares), alpha=0.02)
    blind, *_ = fit_tables(data, alpha=0.02)
    window = torch.from_numpy(data.observations.window)
    mask = torch.from_numpy(data.validation.mask.astype(np.float32))

    def at(level: float) -> torch.Tensor:
        context = torch.from_numpy(data.observations.context.copy())
        context[:, CONTEXT_COLUMN["interference_known"]] = 1.0
        context[:, CONTEXT_COLUMN["interference"]] = level
        return context

    def predicted(level: float) -> torch.Tensor:
        return feels.predict(at(level))[0]

    def ran(policy: CautiousPolicy, level: float) -> list[str]:
        context = at(level)
        action = policy(window, context, mask)[0]
        cells = policy.rows(context)[0].gather(1, action.unsqueeze(1)).squeeze(1)
        return [Algorithm(cell // (len(Protocol) + 1)).wire for cell in cells.tolist()]

    assert "Ring" in ran(feels, 0.0)
    assert ran(feels, 0.0) == ran(blind, 0.0) == ran(blind, 5.0)
    # AllReduce has others everywhere; AllGather and ReduceScatter of this sweep are rings.
    only = data.validation.tasks["collective"].to_list()
    disturbed = ran(feels, 5.0)
    assert not any(a == "Ring" for a, c in zip(disturbed, only, strict=True) if c == "AllReduce")
    # A rule has two tables: the one for calls that take 1.5 times as long, and the quiet one.
    quiet, slow, slower = (predicted(level) for level in (0.0, 0.5, 5.0))
    feels.level_threshold = 0.15
    assert torch.equal(predicted(0.14), quiet)
    assert torch.equal(predicted(0.16), slow)
    assert torch.equal(predicted(5.0), slow)
    assert not torch.equal(slow, quiet)
    assert not torch.equal(slow, slower)


@pytest.mark.parametrize("with_costs", [True, False])
def test_a_small_sweep_is_enough_to_act(data_dir: Path, with_costs: bool) -> None:
    """Fewer tasks than 1 / alpha: drawn worlds say how sure a gain must be."""
    data = load_data(data_dir, 0, with_costs=with_costs)
    assert (data.costs is not None) == with_costs
    alpha = 0.01 if with_costs else 0.05
    policy, _, _, metrics = fit_tables(data, alpha=alpha)
    assert metrics["calibration_tasks"] < 99
    told = task_grid(data.frame, data.catalogue, [Split.TRAIN, Split.VALIDATION])
    asked = cold_observations(
        with_noise(told.tasks, data.training.noise), data.profiles, data.costs
    )
    chosen, _ = forward(policy, asked, told.mask)
    default = np.zeros(len(chosen), dtype=np.int64)
    assert told.regret(chosen).mean() < told.regret(default).mean() / 3
    if with_costs:
        assert (told.chosen_us(chosen) < 1.01 * told.default_us).all()


def test_what_a_run_does_to_all_its_times_is_no_noise(tmp_path: Path) -> None:
    spreads = []
    for drift in (0.0, 0.1):
        noise = f"noise_sigma = 0.01\ntail_probability = 0.0\ndrift_sigma = {drift}\n"
        data = load_data(make_data(tmp_path / str(drift), SWEEP + noise), 0)
        (measured, _), *_ = Tasks(data).tables()
        spreads.append(float(np.sqrt(np.median(measured.variance))))
    assert spreads[1] < 1.5 * spreads[0]


def test_at_a_new_shape_a_gain_is_over_the_cell_that_nccl_would_choose() -> None:
    """Action 1 gains 0.4 at all shapes; where NCCL's costs say that it is its own, nothing."""
    tables = [
        ShapeTable(
            shape=(nodes, 3.0),
            log2_sizes=np.array([20.0]),
            gain=np.array([[0.0, 0.4, 0.1]]),
            spread=np.full((1, 3), 0.01),
            is_near=np.ones((1, 3), dtype=np.bool_),
            may_act=np.ones((1, 3), dtype=np.bool_),
            relative_cost=np.zeros((1, 3)),
            is_cell=np.array([False, True, True]),
            caution=2.0,
        )
        for nodes in (1.0, 2.0, 4.0)
    ]
    made = Tables(tables, differences=(0.1, 1.0), elsewhere=2.5)
    place = torch.tensor([[20.0, 3.0, 3.0]], dtype=torch.float64)
    for costs, wanted in (
        ([0.0, -0.5, 0.0], [0.3, 0.0]),  # its own is action 2
        ([0.0, 0.0, -0.5], [0.0, -0.3]),  # action 1
        ([0.0, -0.001, 0.0], [0.0, -0.3]),  # either
        ([math.nan] * 3, [0.4, 0.1]),
        ([0.0, -0.5, -0.5], [0.4, 0.1]),  # none that was measured
    ):
        gain = made(place, torch.tensor([costs], dtype=torch.float64))[0]
        assert gain[0, 1:].tolist() == pytest.approx(wanted, abs=1e-9)
    # Of a shape that was measured its own gains are told.
    place[0, 1] = 2.0
    gain = made(place, torch.tensor([[0.0, 0.0, -0.5]], dtype=torch.float64))[0]
    assert gain[0, 1:].tolist() == pytest.approx([0.4, 0.1])
