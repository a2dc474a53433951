"""Whole jobs under the sanitizers, whose reports on stderr fail `play`.

Those with the thin tuner alone; all jobs are played so by
`DYNAMICCL_TEST_SANITIZE=thread pytest tests/serve/jobs`, and random ones by the soak.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamiccl.libraries import TUNER_NAME
from tests.plugin_build import TUNER_TARGET
from tests.serve.jobs.arbiter import Arbiter
from tests.serve.jobs.conftest import Inits, player_of
from tests.serve.jobs.play import play
from tests.serve.jobs.setting import Setting

#: Slow enough that ranks under a sanitizer keep up.
JOB: dict[str, Any] = {
    "law": "alike",
    "ranks": 4,
    "rate": 500,
    "calls": 1500,
    "comms": 4,
    "threads": 2,
}


def test_a_plain_job_is_clean(build_dir: Callable[..., Path], four_ranks: Setting) -> None:
    """The tuner alone is sanitized: the ranks' program takes the sanitizer's runtime along."""
    plugin = build_dir("address,undefined", TUNER_TARGET) / TUNER_NAME
    find = ["c++", "-print-file-name=libasan.so"]
    runtime = subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()
    preloaded = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    environment = four_ranks.environment() | preloaded
    played = play(build_dir("") / "play_rank", plugin, environment=environment, **JOB)
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
        assert played.acted > 0
        found = Inits(directory)(environment, ranks=4, processes=2, rounds=8, at_once=1)
        assert "Sanitizer" not in found["said"], found["said"]
        assert (found["tables"], found["failed"]) == (32, 0)
