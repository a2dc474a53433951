"""What is trained on: parts of a data set, few sizes, and the calls of jobs beside sweeps."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from mlflow import MlflowClient

from dynamiccl.datasets.costs import NUM_CELLS
from dynamiccl.datasets.features import CONTEXT_COLUMN, TUNED
from dynamiccl.datasets.history import WINDOW_COLUMN
from dynamiccl.datasets.manifest import JUDGED_NAME, Manifest
from dynamiccl.datasets.questions import cold_questions
from dynamiccl.datasets.splits import Split, SplitBy, Splits
from dynamiccl.datasets.store import measurements_table, write_part
from dynamiccl.errors import UserError
from dynamiccl.evaluate.page import render
from dynamiccl.evaluate.report import make_report
from dynamiccl.nccl import Collective
from dynamiccl.serve.export import export_artifact
from dynamiccl.sizes import size_bin
from dynamiccl.train.data import load_data
from dynamiccl.train.fit import fit
from dynamiccl.train.policy import TorchPolicy, save_script
from dynamiccl.train.recipe import make_recipe
from dynamiccl.train.trigger import TriggerModule
from tests.calls import call, calls_table
from tests.cli.conftest import Shell
from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414
from tests.data_sets import SYSTEM, make_data, sweep_text
from tests.rows import default, forced, split_of
from tests.stores import new_store

SHAPES = ", ".join(f"{{ num_nodes = {n}, ranks_per_node = 8 }}" for n in (2, 4, 8, 16))
FEW_STEPS = ("steps=200", "steps_per_epoch=100", "num_members=1")


def policy_of(data: Path, folder: Path, recipe: str, *settings: str) -> Path:
    made = make_recipe(recipe, settings)
    done = fit(data, made, experiment="x", tracking_uri=new_store(folder), seed=0)
    return Path(done.run_directory) / "policy"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = sweep_text(groups=f"[{SHAPES}]", algorithms='["Ring", "Tree"]')
    return make_data(tmp_path_factory.mktemp("shapes"), text)


def test_a_shape_that_is_held_out_is_what_the_report_scores(shapes: Path, tmp_path: Path) -> None:
    policy = policy_of(shapes, tmp_path, "gaussian-process", "alpha=0.1", "split=shape")
    parts = Splits(SplitBy.SHAPE, ("2x8", "16x8"), ("4x8",))
    assert Manifest.read(policy).parts == parts
    report = make_report(shapes, [("mine", policy)], tmp_path / "report")
    assert list(report["systems"]) == [SYSTEM]
    page = (tmp_path / "report" / "report.html").read_text()
    assert "8 x 8" in page
    found = report["systems"][SYSTEM]["policies"]
    assert found["mine"]["tasks"] == 30  # two collectives, fifteen sizes of 8 nodes
    assert found["mine"]["mean"] <= found["nccl-default"]["mean"]


def test_what_is_held_out_is_not_seen_and_a_run_asks_every_task_again(
    shapes: Path, tmp_path: Path
) -> None:
    data = load_data(shapes, 0, split="shape")
    assert set(data.validation.tasks["num_nodes"]) == {4}
    nodes = data.training.steps.context[:, CONTEXT_COLUMN["log2_nodes"]]
    assert set(nodes.tolist()) == {1.0, 4.0}
    data_dir = make_data(tmp_path, sweep_text(cycles=4))
    data = load_data(data_dir, 0, split="run")
    assert data.parts == Splits(SplitBy.RUN, ("cycle-0", "cycle-3"), ("cycle-1",))
    every = load_data(data_dir, 0).frame.select("collective", "size_bytes").n_unique()
    assert data.validation.tasks.height == every


def test_sizes_that_only_the_default_has_are_no_part_of_the_split(tmp_path: Path) -> None:
    """The usual split would train or test on all that can be scored."""
    default_at = [default(size_bytes=1 << k) for k in range(16, 27)]
    forced_at = [
        forced(algorithm, "LL", size_bytes=1 << k)
        for algorithm in ("Ring", "Tree")
        for k in range(16, 27, 2)
    ]
    write_part(tmp_path, measurements_table(default_at + forced_at), provenance={})
    data = load_data(tmp_path, 0)
    assert data.parts == Splits(SplitBy.SIZE, ("16", "22", "24"), ("18", "26"))
    assert data.validation.tasks["size_bytes"].to_list() == [1 << 18, 1 << 26]


def test_turns_are_scored_one_by_one(shapes: Path, tmp_path: Path, shell: Shell) -> None:
    one, other = (
        policy_of(shapes, tmp_path, "gaussian-process", "alpha=0.2", f"split=shape:{turn}")
        for turn in (0, 1)
    )
    with pytest.raises(UserError, match="one by one"):
        make_report(shapes, [("one", one), ("other", other)], tmp_path / "report")
    words = ("--policy", one, "--policy", other)
    where = ("--data", shapes, "--out", tmp_path / "out", "--json")
    said = shell("dynamiccl-evaluate", "report", *where, *words).json
    scored = [pl.read_parquet(each["results"])["num_nodes"].unique() for each in said["turns"]]
    assert [each.to_list() for each in scored] == [[8], [16]]
    of_turns = [each["systems"][SYSTEM]["policies"] for each in said["turns"]]
    gains = [each[f"gaussian-process-{turn}"]["gain"] for turn, each in enumerate(of_turns, 1)]
    told = said["mean_over_turns"]["gaussian-process"]
    assert told == {"mean": pytest.approx(sum(gains) / 2), "least": min(gains)}


def test_sweeps_of_few_sizes_train_validate_and_are_scored(tmp_path: Path) -> None:
    few = '{ list = ["128K", "512K", "2M", "8M", "32M", "128M"] }'
    data = make_data(tmp_path / "data", sweep_text(sizes=few))
    policies = [
        ("network", policy_of(data, tmp_path, "ddqn-dueling", *FEW_STEPS)),
        ("process", policy_of(data, tmp_path, "gaussian-process", "alpha=0.2")),
    ]
    assert {Manifest.read(policy).parts.by for _, policy in policies} == {SplitBy.SIZE}
    report = make_report(data, policies, tmp_path / "report")
    found = report["systems"][SYSTEM]["policies"]
    for name, _ in policies:
        assert found[name]["tasks"] >= 2
        assert found[name]["mean"] <= found["nccl-default"]["mean"] + 0.02


SIZE = 1 << 24
GROUP = {"num_ranks": 32, "num_nodes": 4, "ranks_per_node": 8, "system": SYSTEM}
#: What a congested network makes of a config; NCCL's own choice is Ring/Simple as well.
TIMES_US = {"RING": 3000.0, "TREE": 1500.0}


@pytest.fixture(scope="module")
def with_calls(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweeps, and jobs on a network where one config takes twice as long as the other."""
    data = tmp_path_factory.mktemp("calls") / "data"
    shutil.copytree(data_dir, data)
    random = np.random.default_rng(0)
    rows = []
    for job, number in itertools.product(range(6), range(60)):
        algorithm = ("RING", "TREE")[random.integers(2)]
        time_us = TIMES_US[algorithm] * random.lognormal(0.0, 0.02)
        ran = {"actual_algorithm": algorithm, "actual_protocol": "SIMPLE", "size_bytes": SIZE}
        decided = algorithm == "TREE" or bool(random.integers(2))
        rows.append(call(number, time_us, run=f"job-{job}", decided=decided, **ran, **GROUP))
    write_part(data, calls_table(*rows), kind="calls", provenance={})
    return data


def test_it_learns_from_calls_what_sweeps_do_not_show(with_calls: Path, tmp_path: Path) -> None:
    """It learns with the costs that the brain asks with."""
    uri = new_store(tmp_path)
    recipe = make_recipe("ddqn-dueling", ["steps=400", "steps_per_epoch=200", "num_members=1"])
    run = fit(with_calls, recipe, experiment="x", tracking_uri=uri, seed=0)
    params = MlflowClient(uri).get_run(run.run_id).data.params
    assert (params["calls_steps"], params["calls_episodes"]) == ("360", "6")

    policy = TorchPolicy.load(Path(run.run_directory) / "policy")
    steps = load_data(with_calls, 0, with_costs=True).sequences
    assert steps is not None
    seen, mask, _ = steps.observe(np.array([20]), np.array([0]))  # the congested network
    assert seen.window[0, :, WINDOW_COLUMN["valid"]].all()
    names = [config.key for config in policy.manifest.actions().configs]
    tried = np.isin(names, ["ABSTAIN", "Tree/Simple"])[None]
    (action,) = policy.act(seen, tried & (mask > 0.5))
    assert names[action] == "Tree/Simple"
    (support,) = policy.manifest.supports
    asked = cold_questions(policy.manifest, support)
    (told,) = steps.context
    row = TUNED.index(Collective.AllReduce) * asked.num_bins + size_bin(SIZE) - asked.first_bin
    costs = slice(-NUM_CELLS, None)
    assert told[costs].any()
    np.testing.assert_array_equal(told[costs], asked.context[row, costs])


def test_calls_that_are_left_out_change_nothing(with_calls: Path, data_dir: Path) -> None:
    recipe = make_recipe("ddqn-dueling")
    assert len(load_data(with_calls, 0).sources(recipe)) == 2
    [left_out] = load_data(with_calls, 0, with_calls=False).sources(recipe)
    [none] = load_data(data_dir, 0).sources(recipe)
    for name in ("action", "reward"):
        assert np.array_equal(getattr(left_out, name), getattr(none, name))


@pytest.fixture
def trigger(tmp_path: Path) -> Path:
    """A run directory of a Trigger that was not trained: its forecast is the level."""
    folder = tmp_path / "run" / "trigger"
    folder.mkdir(parents=True)
    save_script(TriggerModule(0.02), folder / "trigger.pt")
    (folder / "trigger.json").write_text(json.dumps({"usual_scale": 0.02}))
    return folder.parent


def test_a_policy_has_its_trigger_beside_it(
    with_calls: Path, trigger: Path, tmp_path: Path
) -> None:
    uri = new_store(tmp_path)
    settings = ["steps=20", "steps_per_epoch=10", "num_members=2", "hidden_sizes=16"]
    recipe = make_recipe("ddqn-dueling", [*settings, f"trigger={trigger}"])
    run = fit(with_calls, recipe, experiment="x", tracking_uri=uri, seed=0)
    policy = Path(run.run_directory) / "policy"
    copied = policy / "trigger.pt"
    assert copied.read_bytes() == (trigger / "trigger" / "trigger.pt").read_bytes()
    assert Manifest.read(policy).trigger == {"usual_scale": 0.02}
    assert MlflowClient(uri).get_run(run.run_id).data.params["trigger"] == str(trigger)

    told, plain = (load_data(with_calls, 0, each).sequences for each in (str(trigger), ""))
    assert told is not None
    assert plain is not None
    # Sixteen calls of each config tell what is quiet.
    known = told.calls.interference >= 0.0
    assert 0.3 < known.mean() < 0.6
    assert (plain.calls.interference < 0.0).all()
    assert (told.reward == plain.reward).all()


def test_changes_and_congestion_cost_what_a_recipe_says(with_calls: Path, trigger: Path) -> None:
    data = load_data(with_calls, 0, str(trigger))
    assert data.sequences is not None
    settings = [f"trigger={trigger}", "lambda_switch=0.25", "lambda_congestion=0.5"]
    swept, charged = data.sources(make_recipe("ddqn-dueling", settings))
    assert swept is data.training.steps  # a sweep has no order: nothing changes there
    assert (charged.reward == data.sequences.charged(0.25, 0.5).reward).all()
    assert (charged.reward < data.sequences.reward).any()


#: Two an octave, and a test octave of them, where alone another config may be best.
HALF_OCTAVES = [step << n for n in range(10, 18) for step in (64, 90)]
TESTED = HALF_OCTAVES[6:8]


def fitted_on_small_sweep(folder: Path, over_default: float) -> tuple[Path, Path]:
    """Data and policy: Ring/LL always saves a fifth; so long takes Tree/LL in that octave."""
    rows = []
    for size, repeat in itertools.product(HALF_OCTAVES, range(3)):
        at: dict[str, Any] = {"size_bytes": size, "repeat": repeat, "run": f"run-{repeat}"}
        own_us = (20.0 + size / 20e3) * (1.0 + 0.002 * repeat)
        tree_us = own_us * (over_default if size in TESTED else 1.0)
        rows += [default(own_us, **at), forced("Ring", "LL", 0.8 * own_us, **at)]
        rows.append(forced("Tree", "LL", tree_us, **at))
    data = folder / "data"
    write_part(data, measurements_table(rows), provenance={})
    return data, policy_of(data, folder, "gaussian-process", "alpha=0.05")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return fitted_on_small_sweep(tmp_path_factory.mktemp("small"), 0.4)


def reported(data: Path, policy: Path, out: Path) -> dict[int, tuple[str, Any]]:
    """What a report says of each test size: the config that was chosen, and its gain."""
    told = make_report(data, [("mine", policy)], out)
    terminal, page = render("report.txt", {"reports": [told], "means": {}}), out / "report.html"
    assert ("is judged as fitted without" in terminal) == ("fitted to all" in page.read_text())
    found = pl.read_parquet(told["results"])
    mine = found.filter(policy="mine").select("size_bytes", "chosen_config", "gain")
    return {size: (config, gain) for size, config, gain in mine.iter_rows()}


def test_tables_know_the_test_octaves_and_what_a_report_judges_does_not(
    small: tuple[Path, Path], tmp_path: Path
) -> None:
    assert {split_of(size) for size in TESTED} == {Split.TEST}
    (tmp_path / "other").mkdir()
    other = fitted_on_small_sweep(tmp_path / "other", 1.5)
    chosen, said = [], []
    for turn, (data, policy) in enumerate((small, other)):
        artifact = export_artifact(policy, tmp_path / f"artifact-{turn}")
        assert not (artifact.directory / JUDGED_NAME).exists()
        _, table = artifact.pick(1, 8, "box")
        configs = [table.at(Collective.AllReduce, size_bin(size)) for size in HALF_OCTAVES]
        chosen.append([config and config.key for config in configs])
        said.append(reported(data, policy, tmp_path / f"report-{turn}"))
        page = (tmp_path / f"report-{turn}" / "report.html").read_text(encoding="utf-8")
        assert "fitted without these tasks: what is exported is fitted to all" in page
        with pytest.raises(UserError, match="give the run"):
            make_report(data, [("mine", artifact.directory)], tmp_path / "refused")
    trees = [["Tree/LL" if size in TESTED else "Ring/LL" for size in HALF_OCTAVES]]
    assert chosen == [*trees, ["Ring/LL"] * len(HALF_OCTAVES)]
    assert said[0] == said[1]
    assert said[0][TESTED[0]] == ("Ring/LL", pytest.approx(0.2))


def test_a_policy_without_a_second_one_is_judged_as_it_is(
    small: tuple[Path, Path], tmp_path: Path
) -> None:
    data, policy = small
    shutil.copytree(policy, tmp_path / "old")
    (tmp_path / "old" / JUDGED_NAME).unlink()
    manifest = tmp_path / "old" / "manifest.json"
    facts = json.loads(manifest.read_text())
    del facts["files"][JUDGED_NAME], facts["saw_test"]
    manifest.write_text(json.dumps(facts))
    said = reported(data, tmp_path / "old", tmp_path / "report")
    assert [said[size] for size in TESTED] == [("Tree/LL", pytest.approx(0.6))] * 2
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "fitted to all" not in page
