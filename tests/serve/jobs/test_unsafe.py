"""Several nodes without a coordinator: only with the artifact's hash and the pre-flight's word."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serve.jobs.conftest import Player
from tests.serve.jobs.play import on_rank
from tests.serve.jobs.setting import SYSTEM, Setting

CALLS = 500


@pytest.fixture
def sure(two_nodes: Setting, build_dir: Callable[[str], Path], libnccl: Path) -> dict[str, str]:
    """What a user sets who has asked the probe on all ranks before the job."""
    chosen = two_nodes.environment()
    done = subprocess.run(
        [build_dir("") / "dynamiccl-probe", "--nccl", libnccl, two_nodes.artifact],
        env=dict(os.environ) | chosen,
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout)
    assert told["system"] == SYSTEM
    return chosen | {
        "DYNAMICCL_UNSAFE": "1",
        "DYNAMICCL_ARTIFACT_SHA256": told["artifact_sha256"],
        "DYNAMICCL_PREFLIGHT": told["preflight"],
    }


def test_with_both_all_ranks_act_from_the_first_call_on(
    play_job: Player, sure: dict[str, str]
) -> None:
    played = play_job(environment=sure, ranks=8, nodes=2, calls=CALLS)
    assert played.is_sound, played
    assert played.communicators[0].first_acted == 0
    assert played.acted == played.calls
    assert played.log.count("WITHOUT asking the other ranks") == 8


@pytest.mark.parametrize("variable", ["DYNAMICCL_ARTIFACT_SHA256", "DYNAMICCL_PREFLIGHT"])
@pytest.mark.parametrize("value", [None, "", "0123456789abcdef"])
def test_without_one_of_them_nobody_acts(
    variable: str, value: str | None, play_job: Player, sure: dict[str, str]
) -> None:
    chosen = {name: text for name, text in sure.items() if name != variable}
    if value is not None:
        chosen[variable] = value
    played = play_job(environment=chosen, ranks=8, nodes=2, calls=CALLS)
    assert played.is_sound, played
    assert played.acted == 0
    assert played.log.count(f"NCCL's own choice stands: {variable} is not") == 8


def test_another_artifact_than_was_asked_about_is_not_used(
    play_job: Player, sure: dict[str, str], two_nodes: Setting
) -> None:
    chosen = sure | {"DYNAMICCL_ARTIFACT": str(two_nodes.other_artifact)}
    played = play_job(environment=chosen, ranks=8, nodes=2, calls=CALLS)
    assert played.is_sound, played
    assert played.acted == 0


def test_it_is_unsafe_one_rank_elsewhere_is_not_noticed(
    play_job: Player, sure: dict[str, str], two_nodes: Setting
) -> None:
    """What the word does not protect from: a rank whose environment says something else."""
    other = on_rank(5, {"DYNAMICCL_ARTIFACT": str(two_nodes.other_artifact)})
    played = play_job(*other, environment=sure, ranks=8, nodes=2, calls=CALLS)
    assert played.disagreements > 0


def test_a_coordinator_makes_it_safe_again(
    play_job: Player, sure: dict[str, str], two_nodes: Setting
) -> None:
    chosen = sure | {
        name: value
        for name, value in two_nodes.environment(coordinator=True).items()
        if name == "DYNAMICCL_COORDINATOR"
    }
    other = on_rank(5, {"DYNAMICCL_ARTIFACT": str(two_nodes.other_artifact)})
    played = play_job(*other, environment=chosen, ranks=8, nodes=2, calls=2000, rate=2000)
    assert played.is_sound, played
    assert "WITHOUT" not in played.log
