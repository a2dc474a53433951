"""A job's own profiler behind ours: whole jobs in which it hears what it hears alone."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamiccl.libraries import ADAPTIVE_NAME
from dynamiccl.serve.build import SANITIZERS
from tests.serve.jobs.conftest import Player, player_of
from tests.serve.jobs.play import Played
from tests.serve.jobs.setting import Setting

JOB = {"ranks": 4, "rate": 1000, "calls": 1500, "comms": 4, "threads": 2}
#: One group's order of calls on every rank, so that two jobs have the same events.
SAME = {"ranks": 2, "comms": 1, "threads": 1, "calls": 1000, "seed": 3}


def heard(played: Played) -> list[str]:
    """What the wilful profiler counted on each rank, communicator by communicator."""
    lines = [line for rank in played.ranks for line in rank.log]
    return [found.group() for line in lines if (found := re.search(r"profiler finalize.*", line))]


@pytest.fixture
def behind_ours(four_ranks: Setting, build_dir: Callable[[str], Path]) -> dict[str, str]:
    return four_ranks.environment() | {
        "DYNAMICCL_NEXT_PROFILER": str(build_dir("") / "libwilful.so"),
        "DYNAMICCL_SAMPLE_PERCENT": "20",
        "WILFUL_MASK": "66",
    }


@pytest.mark.parametrize("mask", ["66", "2", "0", "768"])
@pytest.mark.parametrize("release", ["2.27", "2.28", "2.30"])
def test_it_hears_what_it_hears_alone(
    release: str,
    mask: str,
    play_job: Player,
    play_wilful: Player,
    behind_ours: dict[str, str],
) -> None:
    alone = play_wilful(environment={"WILFUL_MASK": mask}, release=release, **SAME)
    # A table would have other channels used, and so other kernels reported.
    watching = behind_ours | {"WILFUL_MASK": mask, "DYNAMICCL_MODE": "observe"}
    chained = play_job(environment=watching, release=release, **SAME)
    assert chained.is_sound, chained
    assert len(heard(alone)) == 2
    assert heard(chained) == heard(alone)


def test_both_get_the_gpu_times(
    play_job: Player, behind_ours: dict[str, str], tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    calls.mkdir(mode=0o700)
    played = play_job(environment=behind_ours | {"DYNAMICCL_CALLS_DIR": str(calls)}, **JOB)
    assert played.is_sound, played
    assert any(calls.iterdir())
    assert re.search(r"is called first with every event \(v\d\)", played.log)
    for line in heard(played):
        counted = {name: int(count) for name, count in re.findall(r"(\w+) (\d+)", line)}
        assert counted["kernels_stopped"] == counted["kernel"] > counted["coll"] > 0


@pytest.mark.soak
@pytest.mark.parametrize(
    "named",
    [{}, {"lifetime": 50}, {"kernel_drop": 10, "kernel_duplicate": 10, "kernel_delay_us": 500}],
    ids=["plain", "come-and-go", "kernel-events"],
)
@pytest.mark.parametrize("sanitize", [name for name in SANITIZERS if name])
def test_jobs_are_clean_with_both(
    sanitize: str,
    named: dict[str, object],
    build_dir: Callable[[str], Path],
    behind_ours: dict[str, str],
) -> None:
    directory = build_dir(sanitize)
    theirs = {"DYNAMICCL_NEXT_PROFILER": str(directory / "libwilful.so")}
    play = player_of(directory, ADAPTIVE_NAME)
    played = play(environment=behind_ours | theirs, **(JOB | {"rate": 500} | named))
    assert played.is_sound, played
