"""Studies: a parent run with a child for each trial, that goes on where it stopped; as an array."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from dynamiccl.datasets.manifest import Manifest
from dynamiccl.errors import MissingPath, UnknownName, UserError
from dynamiccl.train.fanout.slurm_array import SlurmArray, array_script
from dynamiccl.train.study import (
    begin_study,
    end_study,
    plan_study,
    read_study,
    run_trial,
    summarise_study,
)
from dynamiccl.train.tracking import CANDIDATE, MODEL_NAME, policy_directory
from tests.stores import new_store

ROOT = Path(__file__).parents[2]
FEW = ["steps=20", "steps_per_epoch=10", "hidden_sizes=8", "num_members=1"]


URI = "sqlite:////shared/my store/mlflow.db"


def test_a_study_is_every_recipe_with_every_combination_and_seed() -> None:
    study = plan_study(
        Path("data"),
        experiment="x",
        recipes=["ddqn-dueling", "bc"],
        settings=["steps=20"],
        grid=["learning_rate=0.1,0.2", "hidden_sizes=8,16+16"],
        seeds=3,
    )
    assert len(study.trials) == 2 * 2 * 2 * 3
    assert len({(trial.setting, trial.seed) for trial in study.trials}) == len(study.trials)
    last = study.trials[-1]
    assert last.setting == "bc learning_rate=0.2 hidden_sizes=16+16"
    assert (last.recipe.learning_rate, last.recipe.hidden_sizes) == (0.2, (16, 16))
    assert {trial.recipe.steps for trial in study.trials} == {20}
    assert Path(study.data).is_absolute()


@pytest.mark.parametrize(
    ("recipes", "grid", "error", "words"),
    [
        (["dqm"], [], UnknownName, "ddqn-dueling"),
        (["ddqn-dueling"], ["learning_rate"], UserError, "key=value,value"),
        (["ddqn-dueling"], ["rate=1,2"], UnknownName, "learning_rate"),
        (["ddqn-dueling"], ["steps=1,x"], UserError, "=.*valid integer"),
    ],
)
def test_what_cannot_be_planned_says_why(
    recipes: list[str], grid: list[str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        plan_study(Path("d"), experiment="x", recipes=recipes, settings=[], grid=grid, seeds=1)


def test_trials_are_children_and_the_parent_tells_the_best(data_dir: Path, tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    planned = plan_study(
        data_dir, experiment="x", recipes=["ddqn-dueling", "bc"], settings=FEW, grid=[], seeds=2
    )
    run_id = begin_study(planned, uri)
    assert read_study(run_id, uri) == planned
    first = run_trial(run_id, 0, uri)
    assert run_trial(run_id, 0, uri) == first  # done: nothing runs twice
    half = summarise_study(run_id, uri)
    assert (half.done, half.trials, half.settings[0].low) == (1, 4, None)
    end_study(half, uri)
    client = MlflowClient(uri)
    assert client.get_run(run_id).info.status == "FAILED"
    for number in range(1, 4):
        run_trial(run_id, number, uri)
    summary = summarise_study(run_id, uri)
    end_study(summary, uri)
    assert [setting.seeds for setting in summary.settings] == [2, 2]
    assert summary.settings[0].mean <= summary.settings[1].mean
    for setting in summary.settings:
        assert setting.low is not None
        assert setting.high is not None
        assert setting.low <= setting.mean <= setting.high
    parent = client.get_run(run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["best_setting"] == summary.settings[0].setting
    assert parent.data.metrics["best_validation_regret"] == summary.settings[0].mean
    candidate = client.get_model_version_by_alias(MODEL_NAME, CANDIDATE)
    assert candidate.run_id == summary.settings[0].best_run
    policy = policy_directory(f"models:/{MODEL_NAME}@{CANDIDATE}", uri)
    assert Manifest.read(policy).recipe == summary.settings[0].setting
    runs = client.search_runs([parent.info.experiment_id])
    below = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == run_id]
    assert len(below) == 4
    assert {run.data.params["seed"] for run in below} == {"0", "1"}


def test_trials_that_are_not_there_say_so(data_dir: Path, tmp_path: Path) -> None:
    uri = new_store(tmp_path)
    planned = plan_study(data_dir, experiment="x", recipes=["bc"], settings=FEW, grid=[], seeds=1)
    run_id = begin_study(planned, uri)
    with pytest.raises(UserError, match="trials 0 to 0"):
        run_trial(run_id, 1, uri)
    summary = run_trial(run_id, 0, uri)
    with pytest.raises(MissingPath, match="no study"):
        run_trial(summary.run_id, 0, uri)


@pytest.mark.soak
def test_command_goes_on_with_what_failed(data_dir: Path, tmp_path: Path) -> None:
    """A trial that cannot be run fails alone; mended, the study is whole."""
    base = [sys.executable, "-P", "-m", "dynamiccl.train.cli", "study", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*base, *words, "--jobs", "2"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    settings = [word for setting in FEW for word in ("--set", setting)]
    # The data are of one system, of which none can be held out.
    grid = ["--grid", "split=size,system", "--seeds", "1"]
    broken = run("--data", str(data_dir), "--recipe", "ddqn-dueling", *settings, *grid)
    assert broken.returncode == 3, broken.stderr
    assert "1 of 2 trials failed" in broken.stderr
    assert "split=system, seed 0" in broken.stderr
    found = json.loads(broken.stdout)
    assert (found["done"], found["trials"]) == (1, 2)
    again = run("--resume", found["run_id"])
    assert again.returncode == 3
    assert json.loads(again.stdout)["settings"] == found["settings"]


def options_of(script: str) -> dict[str, str]:
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    pairs = [line.removeprefix("#SBATCH --").partition("=") for line in lines]
    assert len({name for name, _, _ in pairs}) == len(pairs), "an option stands twice"
    return {name: value for name, _, value in pairs}


def test_the_array_is_the_trials_that_are_asked_for_with_a_processor_each() -> None:
    script = array_script("r1", [0, 1, 2, 7], URI, Path("/s/100% mine"), SlurmArray(jobs=3))
    options = options_of(script)
    assert options["array"] == "0-2,7%3"
    assert (options["ntasks"], options["cpus-per-task"]) == ("1", "1")
    assert options["output"] == '"/s/100%% mine/%A_%a.out"'
    assert "export OMP_NUM_THREADS=1\n" in script
    assert options_of(array_script("r1", [4], URI, Path("/s"), SlurmArray()))["array"] == "4"


def test_the_script_runs_the_trial_of_its_element(tmp_path: Path) -> None:
    script = array_script("r1", [3], URI, tmp_path, SlurmArray())
    printing = script.replace("exec ", "exec printf '%s\\n' ")
    environment = {"SLURM_ARRAY_TASK_ID": "3"}
    said = subprocess.check_output(["bash", "-c", printing], env=environment, text=True)
    words = said.splitlines()
    assert words[1:] == [
        *shlex.split("-P -m dynamiccl.train.cli trial r1 3 --tracking-uri"),
        URI,
        "--json",
    ]


def test_the_users_options_replace_ours() -> None:
    array = SlurmArray(options=("--cpus-per-task=2", "partition=gpu", "#SBATCH -J mine"))
    script = array_script("r1", [0], URI, Path("/s"), array)
    options = options_of(script.replace("-J mine", "--job-name=mine"))
    assert options["cpus-per-task"] == "2"
    assert options["partition"] == "gpu"
    assert options["job-name"] == "mine"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--array=0-3", "--jobs N lets N"),
        ("-a 0-3", "--jobs N lets N"),
        ("--TIME", "is no option of sbatch; write one at a time"),
        ("--time=1\n--mem=2", "is no option of sbatch"),
    ],
)
def test_what_cannot_be_an_option_says_why(option: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        SlurmArray(options=(option,))
