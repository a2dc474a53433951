"""Whole jobs under the sanitizers, whose reports on stderr fail `play`.

Two are played with the thin tuner at each `make test`; all jobs are played so by
`DYNAMICCL_TEST_SANITIZE=thread pytest tests/serve/jobs`.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.libraries import TUNER_NAME
from tests.conftest import Soak
from tests.plugin_build import SANITIZERS, TUNER_TARGET
from tests.serve.jobs.arbiter import Arbiter
from tests.serve.jobs.conftest import Adaptive, Inits, player_of
from tests.serve.jobs.play import assert_never_split, play
from tests.serve.jobs.setting import Setting
from tests.serve.jobs.test_random_jobs import LIBRARIES, play_for_a_while
from tests.serve.jobs.thinking import ONE, OTHER, counting

#: Slow enough that ranks under a sanitizer keep up.
JOB: dict[str, Any] = {"ranks": 4, "rate": 500, "calls": 1500, "comms": 4, "threads": 2}


def test_a_plain_job_is_clean(build_dir: Callable[..., Path], four_ranks: Setting) -> None:
    """The tuner alone is sanitized: the ranks' program takes the sanitizer's runtime along."""
    plugin = build_dir("address,undefined", TUNER_TARGET) / TUNER_NAME
    find = ["c++", "-print-file-name=libasan.so"]
    runtime = subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()
    preloaded = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    environment = four_ranks.environment() | preloaded
    played = play(build_dir("") / "play_rank", plugin, environment=environment, **JOB)
    assert_never_split(played)
    assert played.acted > 0


def test_creations_at_once_are_free_of_races(
    build_dir: Callable[..., Path], four_ranks: Setting, arbiter: Callable[..., Arbiter]
) -> None:
    """Whole jobs whose communicators are made at once; ranks that are threads of one process."""
    directory = build_dir("thread", (*TUNER_TARGET, "play_rank", "init_ranks"))
    by_arbiter = four_ranks.by_arbiter(arbiter(four_ranks).address)
    for release, environment in (("2.27", by_arbiter), ("2.30", four_ranks.environment())):
        played = player_of(directory, TUNER_NAME)(
            environment=environment, release=release, create_at_once=1, **(JOB | {"comms": 8})
        )
        assert_never_split(played)
        assert played.acted > 0
        found = Inits(directory)(environment, ranks=4, processes=2, rounds=8, at_once=1)
        assert "Sanitizer" not in found["said"], found["said"]
        assert (found["tables"], found["failed"]) == (32, 0)


sanitized = pytest.mark.parametrize("sanitize", [name for name in SANITIZERS if name])


@pytest.mark.soak
@sanitized
@pytest.mark.parametrize("library", LIBRARIES)
def test_random_jobs_are_clean(
    library: str, sanitize: str, build_dir: Callable[[str], Path], tmp_path: Path, soak: Soak
) -> None:
    play_for_a_while(library, build_dir(sanitize), tmp_path, soak)


@pytest.mark.soak
@sanitized
def test_an_adaptive_job_is_clean(
    sanitize: str, build_dir: Callable[[str], Path], eight_ranks: Setting
) -> None:
    brain = counting(eight_ranks.root, ONE, OTHER, num_ranks=8)
    leader = {"DYNAMICCL_ADAPT_INTERVAL_S": "0.2", "DYNAMICCL_BRAIN": brain}
    environment = {"DYNAMICCL_SAMPLE_PERCENT": "100"}
    job = {"ranks": 8, "rate": 500, "calls": 3000}
    play_adaptive = Adaptive(build_dir(sanitize))
    played = play_adaptive(eight_ranks, leader=leader, environment=environment, **job)
    assert played.is_sound, played
    assert played.switches >= 2
