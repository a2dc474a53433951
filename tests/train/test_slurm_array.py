"""The batch script of a study's array; tests/cluster runs one on a real Slurm."""

import shlex
import subprocess
from pathlib import Path

import pytest

from dynamiccl.errors import UserError
from dynamiccl.train.fanout.slurm_array import SlurmArray, array_script

URI = "sqlite:////shared/my store/mlflow.db"


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
