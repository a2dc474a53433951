"""Training on parts of a data set: whole shapes held out, and sweeps of few sizes."""

from pathlib import Path

import polars as pl
import pytest

from dynamiccl.datasets.features import CONTEXT_COLUMN
from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.splits import SplitBy, Splits
from dynamiccl.errors import UserError
from dynamiccl.evaluate.report import make_report
from dynamiccl.train.data import load_data
from dynamiccl.train.fit import fit
from dynamiccl.train.recipe import make_recipe
from tests.cli.conftest import Shell
from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414
from tests.data_sets import SYSTEM, make_data, sweep_text
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


def test_turns_are_scored_one_by_one(shapes: Path, tmp_path: Path, shell: Shell) -> None:
    one, other = (
        policy_of(shapes, tmp_path, "ddqn-dueling", *FEW_STEPS, f"split=shape:{turn}")
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
    gains = [each[f"ddqn-dueling-{turn}"]["gain"] for turn, each in enumerate(of_turns, 1)]
    told = said["mean_over_turns"]["ddqn-dueling"]
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
